"""Steps of stages, pass by pass."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest

from steptime._build.transformer.parallelism import Parallelism
from steptime._plan.pipelines import ChunkTimes, StageTimes, pipelined_ns

TIMES = ChunkTimes(1e6, 1e6, 2e6, 2e6, 0.0, 0.0, 0.0)


def step_ns(times: ChunkTimes, parallel: Parallelism, micro_batches: int, beside: float = 1.0) -> float:
    arrays = StageTimes(*np.array([astuple(times)]).T)
    return float(pipelined_ns(parallel, micro_batches, arrays, np.array([beside]))[0])


def staged(pipeline: int, chunks: int = 1) -> Parallelism:
    return Parallelism(pipeline=pipeline, chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b")


def test_one_stage_does_one_pass_after_the_other() -> None:
    times = replace(TIMES, first_ns=3e6, last_ns=5e6, head_forward_ns=1e5, head_backward_ns=2e5)
    assert step_ns(times, Parallelism(), 4) == pytest.approx(3e6 + 3 * 1e6 + 3 * 2e6 + 5e6 + 4 * 3e5)


@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_where_sending_is_free_stages_wait_for_one_micro_batch_to_pass_the_others(pipeline: int, chunks: int) -> None:
    # Narayanan et al., arXiv 2104.04473, section 2.2: of chunks the wait is that many times shorter.
    each = TIMES.forward_ns + TIMES.backward_ns
    expected = (8 * chunks + pipeline - 1) * each
    assert step_ns(TIMES, staged(pipeline, chunks), 8) == pytest.approx(expected)
    assert TIMES.least_ns(staged(pipeline, chunks), 8) == pytest.approx(expected)


@pytest.mark.parametrize("chunks", [1, 2])
def test_nothing_that_takes_longer_makes_a_step_shorter(chunks: int) -> None:
    before = step_ns(TIMES, staged(4, chunks), 8)
    for name in ("forward_ns", "last_ns", "head_forward_ns", "head_backward_ns", "sent_ns"):
        after = step_ns(replace(TIMES, **{name: getattr(TIMES, name) + 3e5}), staged(4, chunks), 8)
        assert after > before
        assert after >= replace(TIMES, **{name: getattr(TIMES, name) + 3e5}).least_ns(staged(4, chunks), 8) * (1 - 1e-9)


def test_sends_that_wait_slow_what_is_computed_beside_them() -> None:
    parallel = staged(2, 2)
    assert step_ns(TIMES, parallel, 4, beside=1.5) > step_ns(TIMES, parallel, 4)


@pytest.mark.parametrize(
    "parallel", [replace(staged(2, 2), overlap_p2p_comm=True), replace(staged(4), batch_p2p_sync=True)], ids=["ahead", "held"]
)
def test_every_way_to_send_is_gone_through(parallel: Parallelism) -> None:
    times = replace(TIMES, sent_ns=1e5)
    assert step_ns(times, parallel, 4, beside=1.2) >= times.least_ns(parallel, 4)


def test_layouts_played_together_are_as_each_alone() -> None:
    slow = replace(TIMES, forward_ns=1.7e6, sent_ns=1e5)
    arrays = StageTimes(*np.array([astuple(TIMES), astuple(slow)]).T)
    both = pipelined_ns(staged(4, 2), 8, arrays, np.array([1.3, 1.4])).tolist()
    assert both == [step_ns(TIMES, staged(4, 2), 8, 1.3), step_ns(slow, staged(4, 2), 8, 1.4)]
