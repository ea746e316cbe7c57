"""Laws of waiting in collectives: clocks are set by common ends, waits and wait-free time add up, and real steps show it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from steptime._models.collectives.message import Message
from steptime._models.collectives.overlap import Overlap
from steptime._platforms.fabric import Fabric
from steptime._program.program import Collective
from steptime.errors import InputError
from steptime_lab.fit.overlap import measured_pairs, overlap_rows
from steptime_lab.fit.waiting import (
    ProfiledStep,
    StepCollective,
    Waited,
    beside_share,
    collectives_of,
    covered_share,
    kernels_beside,
    message_of,
    profiled_steps,
    slowed_beside,
    waits,
    waits_of,
)
from steptime_lab.measurements.shipped import FOLDER
from steptime_lab.validate.collectives_in_steps import case_factors, validate_overlap, validate_waiting, waiting_share

CASES = ("dlrm-t00-b2048-r4", "dlrm-t00-b4096-r2")


def step(arrivals: Sequence[Sequence[float]], free_ns: Sequence[float], clocks: Sequence[float]) -> list[StepCollective]:
    """A step as ranks with these clocks see it, from when each arrives at each collective."""
    found = []
    for arrived, free in zip(np.array(arrivals, dtype=np.float64), free_ns, strict=True):
        message = Message("all_reduce", len(clocks), 4 << 20)
        found.append(StepCollective("case", "dlrm", message, arrived + np.array(clocks), arrived.max() + free - arrived))
    return found


ARRIVALS = [[0, 5e5, 2e5], [4e6, 3e6, 3.5e6], [9e6, 9.1e6, 1.2e7]]
FREE = [1e6, 2e6, 3e6]


@pytest.mark.parametrize("clocks", [(0, 0, 0), (3e5, -7e8, 12.0)])
def test_waits_are_found_whatever_the_clocks_say(clocks: tuple[float, ...]) -> None:
    found = waits_of(step(ARRIVALS, FREE, clocks), [1.0] * 3)
    for one, arrived, free in zip(found, np.array(ARRIVALS), FREE, strict=True):
        assert one.waited_ns == pytest.approx(arrived.max() - arrived, abs=1)
        assert one.free_ns == pytest.approx(free, abs=1)
        assert one.apart_ns == pytest.approx(0, abs=1)


def test_a_collective_does_not_set_the_clocks_it_is_judged_by() -> None:
    collectives = step(ARRIVALS, FREE, (0, 0, 0))
    late = collectives[1]
    collectives[1] = StepCollective(late.case, late.workload, late.message, late.start_ns, late.ran_ns + np.array([0, 0, 8e5]))
    assert waits_of(collectives, [1.0] * 3)[1].apart_ns == pytest.approx(8e5, abs=1)


def test_ranks_do_not_leave_a_broadcast_together_and_one_collective_tells_no_clock() -> None:
    collectives = step(ARRIVALS, FREE, (0, 0, 0))
    first = collectives[0]
    other = StepCollective(first.case, first.workload, Message("broadcast", 3, 8), first.start_ns, first.ran_ns * 0.1)
    assert len(waits_of([other, *collectives[1:]], [1.0] * 3)) == 2
    assert waits_of([other, collectives[1]], [1.0] * 2) == []


def test_with_exact_estimates_waiting_explains_every_rank_and_nothing_else_does() -> None:
    waited = waits_of(step(ARRIVALS, FREE, (1e6, 0, -2e6)), FREE)
    assert case_factors(waited) == {("case", "all_reduce"): pytest.approx(1.0)}
    found = validate_waiting(waited)
    assert found.whole.summary.max < 1e-6
    assert found.whole.baselines["no wait, estimate x factor"].max > 0.3
    assert found.whole.summary.rows == 9
    total = sum(float(one.collective.ran_ns.sum()) for one in waited)
    assert waiting_share(waited) == pytest.approx((total - 3 * sum(FREE)) / total, rel=1e-5)
    assert found.facts["waiting, all_reduce, 3 ranks"] == pytest.approx(waiting_share(waited))
    assert found.groups["ranks that waited 10% of the time or more"].summary.rows == 6  # all but the last to arrive
    with pytest.raises(InputError, match="no step"):
        validate_waiting([])


def test_an_exchange_has_what_each_rank_sends() -> None:
    calls = [
        Collective("all_to_all", "0", (0, 1), 0, bytes_in=40, bytes_out=30, in_splits=(3, 1)),
        Collective("all_to_all", "0", (0, 1), 0, bytes_in=20, bytes_out=30),
    ]
    assert message_of(calls) == Message("all_to_all", 2, 40, ((30, 10), (10, 10)))
    assert message_of([Collective("all_reduce", "0", (0, 1), 0, bytes_in=8, bytes_out=8)] * 2) == Message("all_reduce", 2, 8)
    with pytest.raises(InputError, match="unknown"):
        message_of([Collective("unknown", "0", (0, 1), 0)] * 2)


def row(*kernels: tuple[str, int, int]) -> dict[str, Any]:
    return {
        "kernel": [name for name, _, _ in kernels],
        "start_ns": [start for _, start, _ in kernels],
        "kernel_ns": [[1, ran] for _, _, ran in kernels],
    }


def test_time_in_common_counts_each_moment_once() -> None:
    found = row(
        ("ncclDevKernel", 100, 100), ("a", 0, 50), ("b", 90, 20), ("c", 95, 55), ("d", 150, 100), ("ncclDevKernel", 300, 10)
    )
    assert beside_share(found).tolist() == pytest.approx([1.0, 0.0, 0.5, 50 / 55, 0.5, 1.0])
    assert covered_share(found).tolist() == pytest.approx([1.0, 0.0])
    assert covered_share(row(("ncclDevKernel", 100, 100), ("b", 120, 20), ("c", 130, 20))).tolist() == pytest.approx([0.3])


def test_what_runs_beside_slows_within_a_case_whatever_its_day() -> None:
    waited = []
    for case, day in (("one", 1.0), ("two", 1.7)):
        for covered in (0.0, 0.5, 1.0):
            message = Message("all_reduce", 2, 4 << 20)
            collective = StepCollective(case, "dlrm", message, np.zeros(2), np.ones(2), covered)
            waited.append(Waited(collective, np.zeros(2), 1e6 * day * float(np.exp(0.1 * covered)), 0.0, 1e6))
    assert slowed_beside(waited) == pytest.approx((0.1, 0.0), abs=1e-6)
    assert slowed_beside(waited[:1])[0] == 0.0


@cache
def cases() -> tuple[ProfiledStep, ...]:
    return tuple(profiled_steps(FOLDER, CASES))


def test_in_real_steps_waiting_explains_what_each_rank_saw() -> None:
    found = validate_waiting(waits(cases(), Fabric.load("loopback")))
    waiting, without = found.whole.summary, found.whole.baselines["no wait, estimate x factor"]
    assert waiting.mape < 0.8 * without.mape
    assert 0.02 < found.facts["waiting"] < 0.6
    assert found.whole.baselines["wait, shortest of the ranks"].mape < 0.1


def test_every_collective_of_a_real_step_is_found_on_every_rank() -> None:
    for case in cases():
        collectives = collectives_of(case)
        assert {one.message.kind for one in collectives} == {"all_reduce", "all_to_all"}
        assert all(one.ran_ns.shape == (len(case.owners),) and (one.ran_ns > 0).all() for one in collectives)


def test_kernels_of_real_steps_are_compared_with_themselves() -> None:
    pairs = kernels_beside(cases())
    assert len(pairs.text) == len(pairs.alone_ns) > 10
    assert set(pairs.share.tolist()) == {2.0, 4.0}
    assert (pairs.beside_ns > 0).all()


def test_pairs_of_the_test_split_are_told_better_than_by_what_each_takes_alone() -> None:
    rows = overlap_rows(FOLDER)
    found = validate_overlap(Overlap.load("loopback"), "loopback", rows, measured_pairs(rows, "loopback")[0])
    assert found.whole.summary.gmae < found.whole.baselines["as if alone"].gmae
    assert {"a product beside", "the collective beside busy cores"} <= set(found.groups)
    with pytest.raises(InputError, match="no pairs"):
        validate_overlap(Overlap.load("h100-nvlink"), "h100-nvlink", rows, measured_pairs(rows, "loopback")[0])
