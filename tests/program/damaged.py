"""Small traces with one thing wrong, and what must be said about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.program.small_traces import RANKS, Json, small_kineto

from steptime._program.load import load
from steptime._program.workload import Workload
from steptime._sim.prediction import predict
from steptime._sim.recorded.replay import replay
from steptime.errors import InputError, SteptimeError

Change = Callable[[Json], Any]
WORKS = ("kernel", "gpu_memcpy", "gpu_memset")


def changed(change: Change, rank: int = 0) -> bytes:
    """A small trace with something done to its document."""
    document = json.loads(small_kineto(rank))
    change(document)
    return json.dumps(document).encode()


def kernel(document: Json, at: int = 0) -> Json:
    """A kernel that is no collective."""
    found: list[Json] = [e for e in document["traceEvents"] if e.get("cat") == "kernel" and "nccl" not in e["name"]]
    return found[at]


def without(*categories: str) -> Change:
    """Leaves out every event of these categories."""

    def change(document: Json) -> None:
        document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") not in categories]

    return change


def read(tmp_path: Path, data: bytes, name: str = "rank0.json") -> Workload:
    """What loading a file with these bytes gives."""
    (tmp_path / name).write_bytes(data)
    return load([tmp_path / name])


def refused(paths: list[Path], *words: str, kind: type[SteptimeError] = InputError) -> str:
    """The one line with which loading ends; it holds the words."""
    with pytest.raises(kind) as caught:
        load(paths)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert all(word in line for word in words), line
    return line


def said(workload: Workload, *words: str) -> bool:
    """Whether one warning holds all the words."""
    return any(all(word in warning for word in words) for warning in workload.warnings)


def assert_told_with_every_answer(workload: Workload, *words: str) -> None:
    """A number that rests on less than was recorded comes with the warning that says so."""
    assert said(workload, *words), workload.warnings
    assert said(replay(workload).workload, *words)
    assert any(all(word in warning for word in words) for warning in predict(workload).warnings)


def job(tmp_path: Path, **changes: bytes) -> Path:
    """A folder with the small traces of all ranks, some of them changed."""
    for rank in range(RANKS):
        (tmp_path / f"rank{rank}.json").write_bytes(changes.get(f"rank{rank}", small_kineto(rank)))
    return tmp_path
