"""Damaged traces of full size, and cut ones; small ones in every way: tests/fuzz."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from tests.program.mutations import BYTES, VALUES, Change, cut, damage, outcome
from tests.program.small_traces import EXAMPLE, RANKS, shipped, small_kineto
from tests.slow import slow_beyond

from steptime._program.load import load
from steptime.errors import SteptimeError

WHOLE_TRACES = 50
CUTS = 40


def written(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("seed", slow_beyond(4, range(WHOLE_TRACES), one_in=4))
def test_damaged_traces_of_full_size_give_step_times_or_one_clear_line(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    kind, many = rng.choice((("kineto", "traceEvents"), ("kineto", "traceEvents"), ("et", "nodes")))
    names = [f"rank{rank}.{each}.json.gz" for rank in range(2) for each in ("kineto", "et")]
    files = {name: (EXAMPLE / name).read_bytes() for name in names}
    files[f"rank0.{kind}.json.gz"] = gzip.compress(damage(rng, shipped(f"rank0.{kind}"), many), 1, mtime=0)
    outcome([written(tmp_path / "job", files)])


@pytest.mark.parametrize("seed", slow_beyond(10, range(CUTS), one_in=4))
def test_a_trace_that_lost_its_end_never_passes_for_a_whole_one(tmp_path: Path, seed: int) -> None:
    data = cut(random.Random(seed), small_kineto(seed % RANKS).rstrip().removesuffix(b"}").rstrip())
    path = written(tmp_path / "cut", {"rank0.json": data}) / "rank0.json"
    try:
        warnings = load([path]).warnings
    except SteptimeError:
        return
    assert any("breaks off" in w or "not readable" in w or "not valid JSON" in w for w in warnings), (len(data), warnings)


def test_every_kind_of_damage_changes_something() -> None:
    data = small_kineto(0)
    for mutate in BYTES:
        assert any(mutate(random.Random(seed), data) != data for seed in range(3)), mutate
    for change in VALUES:
        assert any(_changes(change, seed) for seed in range(10)), change


def _changes(change: Change, seed: int) -> bool:
    document, before = json.loads(small_kineto(0)), json.loads(small_kineto(0))
    change(random.Random(seed), document, "traceEvents")
    return bool(document != before)
