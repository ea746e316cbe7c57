"""Ranks that can never meet are named; ranks that can, meet."""

from __future__ import annotations

import pytest
from tests.sim.worlds import Draft, constant_timing

from steptime._program.program import CallKind, Collective, Program
from steptime._sim import Cohort
from steptime._sim.core.schedule import find_schedule
from steptime._sim.core.simulate import simulate
from steptime.errors import DeadlockError, InputError


def reduce(sequence: int, ranks: tuple[int, ...] = (0, 1), group: str = "world") -> Collective:
    return Collective("all_reduce", group, ranks, sequence)


def play(*programs: Program) -> int:
    cohorts = [Cohort(p, (p.rank,), constant_timing(p, call_ns=1, duration_ns=10)) for p in programs]
    return int(simulate(cohorts).end_ns[0])


def swapped(stream_of_second: int) -> tuple[Program, Program]:
    """Two ranks that issue two collectives in opposite order."""
    here, there = Draft(streams=2), Draft(streams=2)
    here.collective(reduce(0, group="a"))
    here.collective(reduce(0, group="b"), stream=stream_of_second)
    there.collective(reduce(0, group="b"), stream=stream_of_second)
    there.collective(reduce(0, group="a"))
    return here.program(world_size=2), there.program(rank=1, world_size=2)


def test_swapped_order_on_one_stream_is_a_deadlock_naming_both_ranks() -> None:
    with pytest.raises(DeadlockError) as caught:
        play(*swapped(0))
    message = str(caught.value)
    assert "rank 0 waits at all_reduce 0 of group 'a' for rank 1, which waits at all_reduce 0 of group 'b'" in message
    assert "rank 1 waits at all_reduce 0 of group 'b' for rank 0, which waits at all_reduce 0 of group 'a'" in message


def test_swapped_order_on_different_streams_is_no_deadlock() -> None:
    assert play(*swapped(1)) > 0


def test_missing_collective_names_who_waits_and_who_has_finished() -> None:
    drafts = [Draft() for _ in range(3)]
    for draft in drafts:
        draft.collective(reduce(0, (0, 1, 2)))
    for draft in drafts[:2]:
        draft.collective(reduce(1, (0, 1, 2)))
    with pytest.raises(DeadlockError) as caught:
        play(*(draft.program(rank=rank, world_size=3) for rank, draft in enumerate(drafts)))
    message = str(caught.value)
    assert "ranks 0, 1 wait at all_reduce 1 of group 'world' for rank 2, which has finished and never issues it" in message


def test_rank_without_a_program_is_not_waited_for() -> None:
    draft = Draft()
    draft.collective(reduce(0, (0, 1, 2)))
    assert play(draft.program(world_size=3)) == 11


def test_missing_member_of_a_large_cohort_is_summarised() -> None:
    ranks = tuple(range(101))
    with_it, without = Draft(), Draft()
    with_it.collective(reduce(0, ranks))
    without.launch()
    programs = with_it.program(world_size=101), without.program(rank=100, world_size=101)
    cohorts = [
        Cohort(programs[0], ranks[:100], constant_timing(programs[0])),
        Cohort(programs[1], (100,), constant_timing(programs[1])),
    ]
    with pytest.raises(DeadlockError, match=r"100 ranks \(0, 1, 2, \.\.\., 99\) wait at .* for rank 100, which has finished"):
        simulate(cohorts)


def test_host_that_waits_for_a_later_launch_is_named() -> None:
    draft = Draft()
    call = draft.call(CallKind.EVENT_SYNC)
    draft.calls[call]["awaits"] = draft.launch()
    with pytest.raises(DeadlockError, match="rank 0 is blocked in call 0 anything"):
        play(draft.program())


def test_equal_pipeline_stages_in_one_cohort_are_no_deadlock() -> None:
    """Ranks 1 to 3 run one program: receive from the left, work, send to the right."""

    def pair(rank: int) -> tuple[int, ...]:
        return (rank, rank + 1)

    first, middle, last = Draft(), Draft(), Draft()
    first.launch()
    first.collective(Collective("send", "pipe", pair(0), 0))
    middle.collective(Collective("recv", "pipe", pair(0), 0))
    middle.launch()
    middle.collective(Collective("send", "pipe", pair(1), 0))
    last.collective(Collective("recv", "pipe", pair(3), 0))
    ends = first.program(world_size=5), last.program(rank=4, world_size=5)
    stage = middle.program(rank=1, world_size=5)
    cohorts = [Cohort(p, (p.rank,), constant_timing(p, duration_ns=10)) for p in ends]
    members = tuple((pair(rank - 1), pair(rank)) for rank in (1, 2, 3))
    cohorts.append(Cohort(stage, (1, 2, 3), constant_timing(stage, duration_ns=10), members))
    timeline = simulate(cohorts)
    assert timeline.cohorts[2].work_end_ns[2, :, 0].tolist() == [40, 60, 80]
    assert timeline.end_ns[0] == 80


def test_copies_of_a_pipeline_advance_together() -> None:
    """Four copies of a pipeline of five stages are divided by stage, not into twenty ranks."""
    copies, stages = 4, 5

    def pair(stage: int, copy: int) -> tuple[int, ...]:
        return (stage * copies + copy, (stage + 1) * copies + copy)

    cohorts = []
    for of in ((0,), (1, 2, 3), (4,)):
        draft = Draft()
        sides = ([-1] if of[0] > 0 else []) + ([0] if of[0] < stages - 1 else [])
        for _ in sides:
            draft.collective(Collective("send", "pipe", (0, 1), 0))
            draft.launch()
        ranks = tuple(stage * copies + copy for stage in of for copy in range(copies))
        members = tuple(tuple(pair(stage + side, copy) for side in sides) for stage in of for copy in range(copies))
        program = draft.program(rank=ranks[0], world_size=stages * copies)
        cohorts.append(Cohort(program, ranks, constant_timing(program, duration_ns=10), members))
    assert len(find_schedule(cohorts, queue_depth=None).blocks) == stages
    assert simulate(cohorts).cohorts[1].work_end_ns[2, :, 0].tolist() == [30] * 4 + [50] * 4 + [70] * 4


def test_rank_outside_the_group_it_uses_is_an_input_error() -> None:
    draft = Draft()
    draft.collective(reduce(0, (0, 1)))
    with pytest.raises(InputError, match="rank 7 issues all_reduce 0 of group 'world', whose ranks are 0, 1"):
        play(draft.program(rank=7, world_size=8))
