"""Predictions: parts add up to wholes on any job, and simple jobs are explained as a person would."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from tests.one_answer.cases import capture_file
from tests.sim.worlds import Draft, constant_timing, jobs

import steptime
from steptime._program.load import load
from steptime._program.program import CallKind, Collective, WorkKind
from steptime._program.workload import Workload
from steptime._sim import Cohort, Timing
from steptime._sim.core.simulate import simulate
from steptime._sim.core.steady import steady
from steptime._sim.explain.activity import Activity, Window, activity
from steptime._sim.explain.bound import PowerCap, StepBound, Straggler, Waiting, waiting
from steptime._sim.explain.critical_path import short_kernel_name
from steptime._sim.prediction import PredictedStep, explain, predict
from steptime._sim.recorded.replay import step_times_ns
from steptime._sim.recorded.timing import recorded

EXAMPLE = Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm"


def settled(cohorts: list[Cohort]) -> PredictedStep:
    found = steady(cohorts)
    workload = Workload((cohorts[0].program,), 1)
    return explain(workload, found.timeline, Window(1), step_ns=float(found.period_ns[0]), interval_ms=(0.0, 0.0))


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def adds_up(seen: Activity) -> None:
    for r in seen.ranks:
        assert close(r.device_busy_ms, r.compute_ms + r.exposed_communication_ms)
        assert close(r.step_ms, r.device_busy_ms + r.idle_ms)
        assert 0 <= r.exposed_communication_ms <= r.communication_ms <= r.step_ms
        assert 0 <= r.waiting_ms <= r.communication_ms
        assert 0 <= r.host_bound_fraction * r.step_ms <= r.idle_ms + 1e-12
        assert 0 <= r.host_blocked_ms <= r.step_ms
    assert close(sum(seen.breakdown.values()), sum(r.device_busy_ms for r in seen.ranks) / len(seen.ranks))


@given(jobs(scenarios=1))
def test_a_repeating_step_adds_up(cohorts: list[Cohort]) -> None:
    adds_up(activity(steady(cohorts, iterations_at_most=8).timeline, Window(1)))


@given(jobs(scenarios=1))
def test_a_step_seen_once_adds_up(cohorts: list[Cohort]) -> None:
    timeline = simulate(cohorts)
    adds_up(activity(timeline, Window(1, 0, max(int(timeline.end_ns[0]), 1))))


@given(jobs(scenarios=1))
def test_the_same_job_gives_the_same_prediction(cohorts: list[Cohort]) -> None:
    first, second = settled(cohorts), settled(cohorts)
    assert replace(first, timeline=second.timeline) == second


def with_costs(draft: Draft, rank: int, **values: int) -> Cohort:
    program = draft.program(rank=rank, world_size=2)
    return Cohort(program, (rank,), constant_timing(program, **values))


def test_a_slow_host_is_found_to_be_the_bound() -> None:
    draft = Draft()
    for _ in range(4):
        draft.launch()
    found = settled([with_costs(draft, 0, gap_ns=90, call_ns=10, duration_ns=20)])
    assert found.step_time_ms == pytest.approx(400e-6)
    assert found.ranks[0].device_busy_ms == pytest.approx(80e-6)
    assert found.ranks[0].host_bound_fraction == pytest.approx(0.8)
    assert found.bound_by.startswith("host-bound: the device idles 80 % of the step, 100 % of that until")


def test_a_slow_device_is_found_to_be_the_bound() -> None:
    draft = Draft()
    for _ in range(4):
        draft.launch()
    found = settled([with_costs(draft, 0, gap_ns=1, call_ns=1, duration_ns=100)])
    assert found.ranks[0].idle_ms == 0
    assert found.bound_by.startswith("GPU-bound: the device is busy 100 % of the step")


def meeting_job(slow: int, duration: int = 10) -> list[Cohort]:
    """Two ranks that compute, then meet; rank `slow` computes for longer."""
    cohorts = []
    for rank in range(2):
        draft = Draft()
        draft.launch()
        draft.collective(Collective("all_reduce", "everyone", (0, 1), 0))
        draft.call(CallKind.DEVICE_SYNC)
        program = draft.program(rank=rank, world_size=2)
        timing = constant_timing(program, call_ns=1, duration_ns=duration)
        own = timing.duration_ns.copy()
        own[0] = 1000 if rank == slow else 100
        cohorts.append(Cohort(program, (rank,), replace(timing, duration_ns=own)))
    return cohorts


@pytest.mark.parametrize("slow", [0, 1])
def test_the_rank_that_computes_longest_is_the_straggler(slow: int) -> None:
    found = settled(meeting_job(slow))
    assert found.straggler is not None
    assert found.straggler.rank == slow
    assert found.straggler.caused_ms == pytest.approx(900e-6)
    assert found.straggler.share == 1.0
    waits = {r.rank: r.waiting_ms for r in found.ranks}
    assert waits[slow] == 0
    assert waits[1 - slow] == pytest.approx(900e-6)
    assert found.bound_by.startswith(f"waiting for rank {slow}: ")


def test_ranks_that_arrive_together_have_no_straggler() -> None:
    assert settled(meeting_job(slow=5)).straggler is None


def test_waiting_for_ranks_without_a_program_is_nobodys_fault() -> None:
    cohorts = []
    for cohort in meeting_job(slow=1):
        absent = np.where(cohort.program.works.kind[:, None, None] == WorkKind.COLLECTIVE, 5000, cohort.timing.absent_ns)
        cohorts.append(replace(cohort, timing=replace(cohort.timing, absent_ns=absent.astype(np.int64))))
    timeline = simulate(cohorts)
    found = waiting(timeline, steps=1, step_ns=float(timeline.end_ns[0]))
    assert found.straggler is None
    assert found.absent_share == 1.0


def test_long_collectives_make_a_step_wire_bound() -> None:
    assert settled(meeting_job(slow=5, duration=5000)).bound_by.startswith("wire-bound: 98 % of the step")


def test_communication_behind_computation_is_not_exposed() -> None:
    draft = Draft(streams=2)
    draft.collective(Collective("all_reduce", "me", (0,), 0), stream=1)
    draft.launch()
    draft.call(CallKind.DEVICE_SYNC)
    program = draft.program(rank=0)
    duration = np.array([80, 100], dtype=np.int64).reshape(2, 1, 1)
    timing: Timing = replace(constant_timing(program), duration_ns=duration)
    rank = settled([Cohort(program, (0,), timing)]).ranks[0]
    assert rank.communication_ms == pytest.approx(80e-6)
    assert rank.exposed_communication_ms == 0


def test_a_blocked_host_is_not_a_slow_host() -> None:
    draft = Draft()
    draft.launch()
    draft.call(CallKind.DEVICE_SYNC)
    rank = settled([with_costs(draft, 0, call_ns=10, duration_ns=1000)]).ranks[0]
    assert rank.host_blocked_ms == pytest.approx(1000e-6 - 10e-6)


def test_renaming_ranks_permutes_the_summaries() -> None:
    one, two = settled(meeting_job(0)), settled(meeting_job(1))
    assert replace(one.ranks[0], rank=1) == two.ranks[1]
    assert replace(one.ranks[1], rank=0) == two.ranks[0]


def test_steps_of_a_run_add_up_to_its_window() -> None:
    inputs = recorded(load([EXAMPLE]))
    spans = [(c.program.calls, c.program.works, offset) for c, offset in zip(inputs.cohorts, inputs.offsets_ns, strict=True)]
    begin = min(int(calls.start_ns[calls.kind == CallKind.STEP_BEGIN].min()) + offset for calls, _, offset in spans)
    end = max(int(works.end_ns[works.step >= 0].max()) + offset for _, works, offset in spans)
    assert sum(step_times_ns(inputs).values()) == end - begin


def test_the_example_is_predicted_within_its_recorded_steps() -> None:
    found = predict(load([EXAMPLE]))
    low, high = found.interval_ms
    assert low <= found.step_time_ms <= high
    assert [r.rank for r in found.ranks] == [0, 1, 2, 3]
    assert found.coverage == {"measured": 1.0}
    assert math.isclose(sum(k.share for k in found.critical_path.kinds), 1.0)
    assert math.isclose(sum(r.share for r in found.critical_path.ranks), 1.0)


@pytest.mark.parametrize("name", ["h200_mps4_dlrm", "dlrm_overlap4", "gpt_fsdp2_small"])
def test_one_rank_predicts_the_run_of_all(name: str) -> None:
    files = sorted((EXAMPLE.parent / name).glob("*.kineto.json.gz"))
    full = predict(load(files)).step_time_ms
    for file in files:
        alone = predict(load([file]))
        assert alone.step_time_ms == pytest.approx(full, rel=0.05)
        assert any(f"ranks without a trace ({len(files) - 1} of {len(files)})" in warning for warning in alone.warnings)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, int>(float*)", "CatArrayBatchedCopy"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_SendRecv"),
        ("volta_sgemm_128x32_nt", "volta_sgemm_128x32_nt"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
    ],
)
def test_kernel_names_are_shortened_to_what_tells_them_apart(name: str, short: str) -> None:
    assert short_kernel_name(name) == short


@pytest.mark.parametrize(
    ("busy", "exposed", "path", "said"),
    [
        (
            1.0,
            0.5,
            {"on the GPU": 0.59, "on the wire": 0.41},
            "so faster kernels and faster or hidden collectives both shorten",
        ),
        (
            1.0,
            0.5,
            {"on the GPU": 0.98, "on the wire": 0.02},
            "98 % of the critical path is on the GPU, so faster kernels would",
        ),
        (
            0.7,
            0.1,
            {"on the host": 1.0},
            "100 % of the critical path is on the host, so less work on the host would shorten the step",
        ),
        (1.0, 0.0, {"on the GPU": 0.9, "on the host": 0.1}, "; 90 % of the critical path is on the GPU"),
    ],
)
def test_what_binds_and_what_to_do_agree(busy: float, exposed: float, path: dict[str, float], said: str) -> None:
    text = bound_of(busy, exposed, path=path).text
    assert said in text
    assert "but" not in text


def bound_of(busy: float, exposed: float, waiting: float = 0.0, **more: Any) -> StepBound:
    return StepBound(
        **{
            "busy": busy, "exposed": exposed, "waiting": waiting, "launches": 0.0, "family": "matmul", "family_share": 1.0,
            "path": {"on the GPU": 1.0}, "waited": Waiting(None, 0.0), **more,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bound", "kind", "regime"),
    [
        (bound_of(0.5, 0.1), "host", "host-bound"),
        (bound_of(1.0, 0.1), "GPU", "GPU-bound"),
        (bound_of(1.0, 0.5), "wire", "wire-bound"),
        (bound_of(0.8, 0.1), "mixed", "mixed"),
        (bound_of(1.0, 0.5, 0.4), "peers", "waiting for each other"),
        (bound_of(1.0, 0.5, 0.4, waited=Waiting(Straggler(3, 1.0, 1.0), 0.0)), "peers", "waiting for rank 3"),
        (bound_of(1.0, 0.5, 0.4, waited=Waiting(None, 0.9)), "peers", "waiting for ranks without a trace"),
        (bound_of(1.0, 0.1, cap=PowerCap(700.0, 1.6e9, 2e9)), "power", "power-bound"),
        (bound_of(0.8, 0.1, cap=PowerCap(700.0, 1.6e9, 2e9)), "power", "power-bound"),
        (bound_of(0.5, 0.1, cap=PowerCap(700.0, 1.6e9, 2e9)), "host", "host-bound"),
        (bound_of(1.0, 0.5, cap=PowerCap(700.0, 1.6e9, 2e9)), "wire", "wire-bound"),
    ],
)
def test_what_binds_is_one_word_and_begins_its_sentence(bound: StepBound, kind: str, regime: str) -> None:
    assert (bound.kind, bound.regime) == (kind, regime)
    assert bound.text.startswith(f"{regime}: ")
    assert ("holds its cap of 700 W" in bound.text) == (kind == "power")


def test_a_first_step_is_said_only_where_it_is_not_the_step() -> None:
    """A script that reads its loss in every iteration begins each of them with empty queues."""
    synchronised = steptime.predict(capture_file("mnist_convnet"), "1xh200")
    assert synchronised.first_step_ms is None
    running_ahead = steptime.predict(EXAMPLE.parent / "configs" / "bert.toml", "1xh200")
    assert running_ahead.first_step_ms is not None
    assert running_ahead.first_step_ms > running_ahead.step_time_ms
