"""Damage that leaves every event of a recording believable: it is named, and what it costs."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from steptime._program.checks import implausible
from steptime._program.load import load
from steptime._program.workload import Workload
from steptime._sim.prediction import predict

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORDED = EXAMPLES / "dlrm_overlap4"
Document = dict[str, Any]


@cache
def document(rank: int) -> Document:
    found = json.loads(gzip.decompress((RECORDED / f"rank{rank}.kineto.json.gz").read_bytes()))
    assert isinstance(found, dict)
    return found


def read(folder: Path, change: Callable[[Document], None], ranks: tuple[int, ...] = (0, 1, 2, 3)) -> Workload:
    """The recording with something done to some of its ranks."""
    for rank in range(4):
        changed = copy.deepcopy(document(rank))
        if rank in ranks:
            change(changed)
        (folder / f"rank{rank}.json").write_text(json.dumps(changed), encoding="utf-8")
    return load([folder])


def marks(found: Document) -> list[Document]:
    return [each for each in found["traceEvents"] if str(each.get("name", "")).startswith("ProfilerStep#")]


def lose_a_mark(found: Document) -> None:
    found["traceEvents"] = [each for each in found["traceEvents"] if each.get("name") != "ProfilerStep#5"]


def add_a_mark(found: Document) -> None:
    first = marks(found)[0]
    more = {**first, "name": "ProfilerStep#9", "ts": first["ts"] + 0.3 * first["dur"], "dur": 0.2 * first["dur"]}
    found["traceEvents"].append(more)


def lengthen_marks(found: Document) -> None:
    for mark in marks(found):
        mark["dur"] *= 10


def ten_seconds(category: str, name: str) -> Callable[[Document], None]:
    def change(found: Document) -> None:
        some = [each for each in found["traceEvents"] if each.get("cat") == category and name in each["name"]]
        some[20]["dur"] = 10e6

    return change


def in_nanoseconds(found: Document) -> None:
    for each in found["traceEvents"]:
        for key in ("ts", "dur"):
            if key in each:
                each[key] *= 1000


def twice(found: Document) -> None:
    found["traceEvents"] += copy.deepcopy(found["traceEvents"])


@pytest.mark.parametrize(
    ("change", "ranks", "words"),
    [
        (lose_a_mark, (0, 1, 2, 3), ("rank0.json", "steps are 4, 6, which do not follow each other", "divided by 2 steps")),
        (lose_a_mark, (2,), ("rank2.json", "do not follow each other")),
        (add_a_mark, (0, 1, 2, 3), ("rank3.json", "4, 9, 5, 6, which do not follow each other", "divided by 4 steps")),
        (add_a_mark, (0,), ("rank0.json", "launches 21 pieces of device work, the others about")),
        (lengthen_marks, (0, 1, 2, 3), ("rank1.json", "the mark of step 4 ends after the next one begins")),
        (ten_seconds("kernel", "elementwise"), (1,), ("rank1.json", "one kernel (", "takes 10.00 s", "3,333 ms too long")),
        (ten_seconds("cuda_runtime", "Launch"), (0,), ("rank0.json", "one call (cudaLaunchKernel) takes 10.00 s")),
        (in_nanoseconds, (1,), ("rank1.json", "its times are in another unit, or of another run")),
        (twice, (0,), ("rank0.json", "events occur twice, alike in everything; they count once")),
    ],
)
def test_damage_is_named_with_what_it_costs(
    tmp_path: Path, change: Callable[[Document], None], ranks: tuple[int, ...], words: tuple[str, ...]
) -> None:
    warnings = read(tmp_path, change, ranks).warnings
    assert [one for one in warnings if all(word in one for word in words)], warnings


def test_a_recording_whose_events_are_all_there_twice_is_the_recording(tmp_path: Path) -> None:
    assert predict(read(tmp_path, twice)).step_time_ms == pytest.approx(predict(load([RECORDED])).step_time_ms)


def test_one_file_given_as_two_ranks_is_named(tmp_path: Path) -> None:
    alone = {key: value for key, value in document(0).items() if key != "distributedInfo"}
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(alone), encoding="utf-8")
    warnings = load([tmp_path]).warnings
    assert any("b.json: has the same device work at the same times as" in one and "a.json" in one for one in warnings)


@pytest.mark.parametrize(
    "name", ["dlrm_overlap4", "h200_mps4_dlrm", "gpt_fsdp2_small", "gpt_compiled", "gpt_graph", "prefetch_sync"]
)
def test_nothing_is_doubted_in_recordings_as_they_were_made(name: str) -> None:
    assert list(implausible(load([EXAMPLES / name]).programs)) == []
