"""One step cut out of a recording: the same ops, collectives counted anew, kernels with their times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from steptime._ops.waits import tensor_waits
from steptime._program.load import load
from steptime._program.one_step import one_step
from steptime._program.program import CallKind, WorkKind

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["h200_mps4_dlrm", "gpt_fsdp2_small", "gpt_compiled", "gpt_graph"])
def test_one_step_is_whole_and_points_into_itself(name: str) -> None:
    whole = load([EXAMPLES / name]).programs[0]
    found = one_step(whole)
    program = found.program
    middle = whole.steps[len(whole.steps) // 2]
    assert len(program.ops) == (whole.ops.step == middle).sum()
    assert not program.recorded
    for table, columns in ((program.ops, ("parent",)), (program.calls, ("after",)), (program.works, ("call",))):
        limit = len(program.calls) if columns == ("call",) else len(table)
        for column in columns:
            assert (getattr(table, column) < limit).all()
    assert (program.calls.op < len(program.ops)).all()
    in_step = (whole.works.step == middle) & (whole.works.call >= 0)
    collective = whole.works.kind == WorkKind.COLLECTIVE
    assert len(program.collectives) == len(program.works) == (in_step & collective).sum()
    assert len(found.kernels) == len(np.unique(whole.works.call[in_step & ~collective]))
    assert all(0 <= kernel.op < len(program.ops) and kernel.time_ns >= 0 for kernel in found.kernels)


def test_collectives_count_from_zero_per_group() -> None:
    program = one_step(load([EXAMPLES / "gpt_fsdp2_small"]).programs[1]).program
    for group in {(each.group, each.ranks) for each in program.collectives}:
        numbers = [each.sequence for each in program.collectives if (each.group, each.ranks) == group]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("name", ["h200_mps4_dlrm", "dlrm_overlap4", "gpt_fsdp2_small"])
def test_every_collective_of_the_step_is_waited_for(name: str) -> None:
    program = one_step(load([EXAMPLES / name]).programs[0]).program
    waits = program.calls.kind == CallKind.STREAM_WAIT
    assert (program.works.kind[program.calls.awaits[waits]] == WorkKind.COLLECTIVE).all()
    # Whatever stream a collective ran on, somebody waits for it, and does so after it was launched.
    assert {each.collective for each in tensor_waits(program) if each.needed_by > each.launched_by} == set(
        range(len(program.collectives))
    )


def test_a_graph_is_one_launch_from_its_first_start_to_its_last_end() -> None:
    whole = load([EXAMPLES / "gpt_graph"]).programs[0]
    kernels = one_step(whole).kernels
    assert len(kernels) < 100 < len(whole.works) / len(whole.steps)
    assert any(kernel.outside for kernel in kernels)


def test_a_step_that_never_ran_is_itself() -> None:
    program = load([EXAMPLES / "h200_mps4_dlrm" / "rank0.et.json.gz"]).programs[0]
    assert one_step(program).program is program
