"""Recorded CUDA graphs: many works of one launch, which may start while the host still hands the rest over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from steptime._program.load import load
from steptime._program.program import Program
from steptime._sim.recorded.replay import replay
from steptime._sim.recorded.timing import inside_graphs, recorded

RECORDINGS = Path(__file__).parents[1] / "support" / "recordings"
GRAPHED = ("h200_gpt_reduce", "h200_dlrm_reduce_item")


def program_of(name: str) -> Program:
    return load([RECORDINGS / name]).programs[0]


@pytest.mark.parametrize("name", sorted(folder.name for folder in RECORDINGS.iterdir()))
def test_compiled_and_graphed_steps_replay_as_recorded(name: str) -> None:
    steps = replay(load([RECORDINGS / name])).steps
    assert len(steps) == 3
    for step in steps:
        assert abs(step.error) < 1e-3


@pytest.mark.parametrize("name", GRAPHED)
def test_works_of_a_graph_share_their_launch(name: str) -> None:
    program = program_of(name)
    inside = inside_graphs(program)
    calls = set(program.works.call[inside].tolist())
    assert {program.names[program.calls.api[call]] for call in calls} == {"cudaGraphLaunch"}
    assert inside.sum() > 20 * len(calls)


@pytest.mark.parametrize("name", GRAPHED)
def test_what_starts_while_its_graph_is_launched_is_not_held_up_and_no_host_time_is_lost(name: str) -> None:
    program = program_of(name)
    timing = recorded(load([RECORDINGS / name])).cohorts[0].timing
    works, calls = program.works, program.calls
    graphs = np.unique(works.call[inside_graphs(program)])
    first_ns = np.array([works.start_ns[works.call == call].min() for call in graphs])
    early = first_ns < calls.end_ns[graphs]
    assert early.any()
    left_ns = calls.start_ns[graphs] + timing.call_ns[graphs, 0, 0]
    assert (left_ns[early] < first_ns[early]).all()
    # What a call and the gap after it take together is the distance from its start to the next call of its thread.
    for thread in range(len(program.threads)):
        rows = np.flatnonzero(calls.thread == thread)
        before, after = rows[:-1], rows[1:]
        chosen = np.isin(before, graphs[early]) & (calls.after[after] < 0)
        before, after = before[chosen], after[chosen]
        together = timing.call_ns[before, 0, 0] + timing.gap_ns[after, 0, 0]
        assert (together == calls.start_ns[after] - calls.start_ns[before]).all()
