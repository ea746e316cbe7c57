"""Inspection: what is there is counted, what is missing is said together with its cost."""

from __future__ import annotations

import shutil
from pathlib import Path

from steptime._program.load import load
from steptime._report.inspection import Inspection, inspect_workload
from steptime._sim.recorded.replay import step_times_ns
from steptime._sim.recorded.timing import recorded

EXAMPLE = Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm"


def inspected(*paths: Path) -> Inspection:
    return inspect_workload(load(paths))


def test_every_file_and_every_event_of_the_example_is_counted() -> None:
    workload = load([EXAMPLE])
    found = inspect_workload(workload)
    assert len(found.files) == 8
    assert found.absent == ()
    for rank, program in zip(found.ranks, workload.programs, strict=True):
        assert rank.kernels + rank.copies + rank.memsets + rank.collectives == len(program.works)
        assert rank.rank_from == "trace"
        assert rank.ops_with_shapes == rank.ops == len(program.ops)
        assert 0 <= rank.backlog < len(program.works)


def test_steps_are_those_a_replay_is_compared_with() -> None:
    workload = load([EXAMPLE])
    periods = step_times_ns(recorded(workload))
    assert {s.step: round(s.recorded_ms * 1e6) for s in inspect_workload(workload).steps} == periods


def test_collectives_are_counted_by_group_and_kind() -> None:
    groups = {g.kind: g for g in inspected(EXAMPLE).groups}
    assert set(groups) == {"all_reduce", "all_to_all", "broadcast"}
    assert all(g.ranks == (0, 1, 2, 3) and g.count % 3 == 0 and g.bytes_in > 0 for g in groups.values())


def test_a_missing_rank_is_named_with_its_cost() -> None:
    found = inspected(*(EXAMPLE / f"rank{rank}.kineto.json.gz" for rank in (0, 1, 3)))
    assert found.absent == (2,)
    costs = {f.what: f.cost for f in found.findings}
    assert "as recorded" in costs["1 of 4 ranks have no trace"]


def test_a_rank_known_from_the_file_name_is_said_to_be(tmp_path: Path) -> None:
    from tests.report.traces import without_identity

    file = without_identity(EXAMPLE / "rank2.kineto.json.gz", tmp_path / "worker7.json")
    (rank,) = inspected(file).ranks
    assert (rank.rank, rank.rank_from) == (7, "file name")


def test_execution_traces_alone_have_no_times_and_that_is_said(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "rank0.et.json.gz", tmp_path)
    found = inspected(tmp_path)
    assert found.steps == ()
    assert any(f.what == "no device times" for f in found.findings)
