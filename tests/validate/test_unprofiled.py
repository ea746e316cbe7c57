"""Laws of taking the profiler out: only host time shrinks, never below zero, and no case is predicted from itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.scripts import script

from steptime._program.program import CallKind, Calls, Ops, Phase, Program, Stream, Thread, Works
from steptime._program.workload import Workload
from steptime._sim.recorded.replay import NO_INFLATION, PUBLISHED, Inflation, read_measured, replay, without_profiler
from steptime.errors import InputError

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
comparison = script(ROOT / "benchmarks" / "unprofiled_replay.py")
LAUNCHES = 20
BETWEEN_NS, LAUNCH_NS, KERNEL_NS = 10_000, 5_000, 1_000


def host_bound(steps: int = 3) -> Program:
    """Steps of launches at equal distance, each behind an op that begins halfway, each with a kernel far shorter than that."""
    every = BETWEEN_NS + LAUNCH_NS
    calls, step = [], 0
    for step in range(steps):
        begin = step * LAUNCHES * every
        calls.append((CallKind.STEP_BEGIN, -1, step, begin, begin))
        for i in range(LAUNCHES):
            start = begin + i * every + BETWEEN_NS
            calls.append((CallKind.LAUNCH, step * LAUNCHES + i, step, start, start + LAUNCH_NS))
        calls.append((CallKind.STEP_END, -1, step, begin + LAUNCHES * every, begin + LAUNCHES * every))
    kind, op, of, start_ns, end_ns = (np.array(column) for column in zip(*calls, strict=True))
    launches = np.flatnonzero(kind == CallKind.LAUNCH)
    ops, works, count = len(launches), len(launches), len(calls)
    return Program(
        rank=0, world_size=1, names=("op", "cudaLaunchKernel", "kernel"), threads=(Thread(1, "main"),), streams=(Stream(7),),
        ops=Ops.from_columns({
            "name": np.zeros(ops), "thread": np.zeros(ops), "start_ns": start_ns[launches] - BETWEEN_NS // 2,
            "end_ns": end_ns[launches], "parent": np.full(ops, -1), "step": of[launches],
            "phase": np.full(ops, Phase.FORWARD), "sequence": np.full(ops, -1), "signature": np.full(ops, -1),
            "node": np.full(ops, -1),
        }),
        calls=Calls.from_columns({
            "kind": kind, "api": np.ones(count), "thread": np.zeros(count), "op": op, "step": of, "start_ns": start_ns,
            "end_ns": end_ns, "stream": np.full(count, -1), "awaits": np.full(count, -1), "after": np.full(count, -1),
        }),
        works=Works.from_columns({
            "kind": np.zeros(works), "name": np.full(works, 2), "stream": np.zeros(works), "call": launches,
            "step": of[launches], "start_ns": end_ns[launches] + 1_000, "end_ns": end_ns[launches] + 1_000 + KERNEL_NS,
            "bytes": np.zeros(works), "collective": np.full(works, -1),
        }),
        steps=tuple(range(steps)),
    )  # fmt: skip


def case(name: str, unprofiled_ms: float) -> Any:
    return comparison.Case(name, replay(Workload((host_bound(),), 1)), (unprofiled_ms,))


PROFILED_MS = LAUNCHES * (BETWEEN_NS + LAUNCH_NS) / 1e6


def test_no_inflation_changes_nothing() -> None:
    inputs = replay(Workload((host_bound(),), 1)).recorded
    same = without_profiler(inputs, NO_INFLATION)
    assert (same.cohorts[0].timing.gap_ns == inputs.cohorts[0].timing.gap_ns).all()
    assert (same.cohorts[0].timing.call_ns == inputs.cohorts[0].timing.call_ns).all()


def test_every_op_call_and_launch_gives_back_its_part() -> None:
    one = case("one", 0.2)
    taken = Inflation(per_op_ns=3_000, per_call_ns=500, per_launch_ns=1_500)
    assert one.period_ms() == pytest.approx(PROFILED_MS)
    assert one.period_ms(taken) == pytest.approx(PROFILED_MS - LAUNCHES * 5_000 / 1e6)


@given(st.floats(0, 50_000), st.floats(0, 50_000), st.floats(0, 50_000), st.floats(0, 1))
def test_only_host_time_shrinks_and_never_below_zero(op: float, call: float, launch: float, share: float) -> None:
    inputs = replay(Workload((host_bound(1),), 1)).recorded
    before = inputs.cohorts[0].timing
    after = without_profiler(inputs, Inflation(op, call, launch, share)).cohorts[0].timing
    for name in ("gap_ns", "call_ns"):
        shrunk = getattr(after, name)
        assert (shrunk >= 0).all()
        assert (shrunk <= getattr(before, name)).all()
    for name in ("return_ns", "latency_ns", "spacing_ns", "duration_ns", "absent_ns", "thread_start_ns", "stream_start_ns"):
        assert (getattr(after, name) == getattr(before, name)).all()


@pytest.mark.parametrize("form", ["events", "share"])
def test_a_stronger_inflation_never_predicts_a_longer_step(form: str) -> None:
    if not (EXAMPLES / "h200_mps4_dlrm").is_dir():
        pytest.skip("the example run is not there")
    real = comparison.read_case(EXAMPLES / "h200_mps4_dlrm")
    strengths = (0.0, 0.2, 0.5, 1.0)
    periods = [real.period_ms(comparison.inflation(form, strength)) for strength in strengths]
    assert periods == sorted(periods, reverse=True)
    assert real.measured_ms > 1


def test_a_case_tells_the_share_that_was_put_into_it() -> None:
    assert case("half", PROFILED_MS / 2).strengths["share"] == pytest.approx(0.5, abs=1e-3)


def test_a_case_that_the_profiler_does_not_slow_down_tells_nothing() -> None:
    assert not case("same", PROFILED_MS).strengths
    assert not case("noise", 0.95 * PROFILED_MS).strengths


def test_no_case_is_predicted_with_a_strength_estimated_on_itself() -> None:
    (alone,) = comparison.compare([case("alone", PROFILED_MS / 2)])
    assert set(alone.predictions) == {"as_recorded", "published"}
    half, third = comparison.compare([case("half", PROFILED_MS / 2), case("third", PROFILED_MS / 3)])
    assert half.predictions["share"].predicted_ms == pytest.approx(PROFILED_MS / 3, rel=1e-2)
    assert third.predictions["share"].predicted_ms == pytest.approx(PROFILED_MS / 2, rel=1e-2)
    assert third.predictions["share"].error == pytest.approx(0.5, rel=2e-2)


def test_the_published_constants_are_once_their_own_strength() -> None:
    once = comparison.inflation("events", 1.0)
    assert (once.per_op_ns, once.per_call_ns, once.per_launch_ns) == (
        PUBLISHED.per_op_ns,
        PUBLISHED.per_call_ns,
        PUBLISHED.per_launch_ns,
    )


@pytest.mark.parametrize(
    "text", [None, "", "[1]", "{}", '{"measured_step_ms_unprofiled": []}', '{"measured_step_ms_unprofiled": [0]}']
)
def test_a_folder_without_unprofiled_times_is_refused_in_one_line(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "measured.json").write_text(text)
    with pytest.raises(InputError, match="measured_step_ms_unprofiled") as refusal:
        read_measured(tmp_path / "measured.json")
    assert "\n" not in str(refusal.value)
