"""Laws of taking the profiler out: only host time shrinks, never below zero, and no case is predicted from itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.scripts import script

from steptime._program.program import CallKind, Calls, Ops, Phase, Program, Stream, Thread, Works
from steptime._program.workload import Workload
from steptime._sim.recorded.profiler import profiler_costs, unprofiled
from steptime._sim.recorded.replay import read_measured
from steptime._sim.recorded.timing import recorded
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


def case(name: str, unprofiled_ms: float, visit: str = "") -> Any:
    return comparison.Case(name, visit or name, recorded(Workload((host_bound(),), 1)), (unprofiled_ms,))


PROFILED_MS = LAUNCHES * (BETWEEN_NS + LAUNCH_NS) / 1e6


@given(st.floats(0.05, 20))
def test_only_host_time_shrinks_and_never_below_zero(times: float) -> None:
    inputs = recorded(Workload((host_bound(1),), 1))
    before, after = inputs.cohorts[0].timing, unprofiled(inputs, times).cohorts[0].timing
    for name in ("gap_ns", "call_ns"):
        shrunk = getattr(after, name)
        assert (shrunk >= 0).all()
        assert (shrunk <= getattr(before, name)).all()
    for name in ("return_ns", "latency_ns", "spacing_ns", "duration_ns", "absent_ns", "thread_start_ns", "stream_start_ns"):
        assert (getattr(after, name) == getattr(before, name)).all()


def test_the_slower_recorded_ops_are_the_more_is_the_profilers() -> None:
    costs = profiler_costs()
    shares = [costs.left_at(pace) for pace in (0.1, 0.3, 0.6, 1.0, 2.0, 50.0)]
    assert shares == sorted(shares, reverse=True)
    assert costs.left_at_least == shares[-1] < shares[0] == costs.left_at_most < 1


def test_time_without_any_op_is_no_profilers() -> None:
    costs = replace(profiler_costs(), per_event_ns=100.0)
    inputs = recorded(Workload((host_bound(),), 1))
    kept = unprofiled(inputs, costs=costs).cohorts[0].timing.gap_ns
    assert (inputs.cohorts[0].timing.gap_ns - kept <= 200).all()


def test_more_that_is_left_never_predicts_a_shorter_step() -> None:
    if not (EXAMPLES / "h200_mps4_dlrm").is_dir():
        pytest.skip("the example run is not there")
    real = comparison.read_case(EXAMPLES / "h200_mps4_dlrm")
    periods = [real.with_left(left) for left in (0.1, 0.4, 0.7, 1.0)]
    assert periods == sorted(periods)
    assert real.measured_ms > 1


def test_a_case_tells_what_was_left_in_it() -> None:
    assert case("half", PROFILED_MS / 2).left == pytest.approx(0.5, abs=1e-3)
    assert case("same", 1.2 * PROFILED_MS).left is None


def test_no_case_is_predicted_by_its_own_visit() -> None:
    half, third, other = (
        case("half", PROFILED_MS / 2, "a"),
        case("third", PROFILED_MS / 3, "a"),
        case("more", PROFILED_MS / 1.5),
    )
    assert comparison.fitted([half]) is None
    costs = comparison.fitted([half, third])
    assert other.predicted_ms(costs) == pytest.approx(PROFILED_MS * (1 / 2 * 1 / 3) ** 0.5, rel=1e-2)


@pytest.mark.parametrize("name", ["gpt_compiled", "gpt_graph", "prefetch_sync", "dlrm_overlap4", "gpt_fsdp2_small"])
def test_recorded_examples_are_predicted_as_they_run_without_a_profiler(name: str) -> None:
    one = comparison.read_case(EXAMPLES / name)
    assert one.predicted_ms() == pytest.approx(one.measured_ms, rel=0.1)


@pytest.mark.parametrize(
    "text", [None, "", "[1]", "{}", '{"measured_step_ms_unprofiled": []}', '{"measured_step_ms_unprofiled": [0]}']
)
def test_a_folder_without_unprofiled_times_is_refused_in_one_line(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "measured.json").write_text(text)
    with pytest.raises(InputError, match="measured_step_ms_unprofiled") as refusal:
        read_measured(tmp_path / "measured.json")
    assert "\n" not in str(refusal.value)
