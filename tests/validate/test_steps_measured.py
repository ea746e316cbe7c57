"""Laws of explaining an error: measured parts are those of the profile, and the parts of an error add up to it."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from steptime._sim.core.steady import Steady
from steptime._sim.modelled.step import ModelledStep, modelled
from steptime_lab.validate.steps.cases import StepCase, inflation_of, platform_of, shipped_steps
from steptime_lab.validate.steps.measured import ops_seen, with_measured_device, with_measured_host, with_measured_wire
from steptime_lab.validate.steps.predict import Split, mean_splits, predict_case, split
from steptime_lab.validate.steps.sources import from_config, from_trace

NAME = "dlrm-t01-b1024-r2"
PAUSE_NS = 20_000_000
COLLECTIVES = ("nccl", "void nccl")


@pytest.fixture(name="case", scope="module")
def one_case() -> StepCase:
    (found,) = shipped_steps([NAME])
    return replace(found, inflation=1.5)


@pytest.fixture(name="step", scope="module")
def one_step(case: StepCase) -> ModelledStep:
    return modelled(from_trace(case), platform_of(case.ranks))


@pytest.fixture(name="steady", scope="module")
def one_steady(step: ModelledStep, case: StepCase) -> Steady:
    return step.play(case.visits[0].calibration).steady


def test_how_much_longer_a_profiled_host_takes_is_told_by_other_cases_of_its_kind(case: StepCase) -> None:
    assert case.telling
    twice = replace(case, name="other", visits=tuple(replace(one, measured_ns=one.measured_ns / 2) for one in case.visits))
    dense = replace(case, name="dense", workload="bert")
    assert inflation_of(case, [case, twice, dense]) == pytest.approx(median(twice.inflations))
    assert inflation_of(case, [case, dense]) == 1.0


def test_with_measured_kernels_every_rank_computes_as_long_as_in_its_profile(
    step: ModelledStep, steady: Steady, case: StepCase
) -> None:
    for cohort in with_measured_device(step, [played.cohort for played in steady.timeline.cohorts], case):
        compute = cohort.timing.duration_ns[cohort.program.works.collective < 0]
        for place, rank in enumerate(cohort.ranks):
            row = case.profile[rank]
            times = zip(row["kernel"], row["kernel_ns"], strict=True)
            seen = sum(float(np.median(each)) for kernel, each in times if not kernel.startswith(COLLECTIVES))
            assert compute[:, place, 0].sum() == pytest.approx(seen, rel=1e-3)


def test_with_measured_collectives_only_collectives_change_and_none_waits_longer_than_it_ran(
    step: ModelledStep, steady: Steady, case: StepCase
) -> None:
    base = [played.cohort for played in steady.timeline.cohorts]
    calibration = case.reference
    longest = max(max(times) for row in case.profile for times in row["kernel_ns"])
    for before, after in zip(base, with_measured_wire(step, base, case, calibration), strict=True):
        compute = before.program.works.collective < 0
        assert np.array_equal(before.timing.duration_ns[compute], after.timing.duration_ns[compute])
        wire = after.timing.duration_ns[~compute]
        assert (wire > 0).all()
        assert (wire <= longest).all()


def test_a_recorded_host_takes_what_the_profile_shows_less_its_inflation(step: ModelledStep, case: StepCase) -> None:
    for one, program in zip(with_measured_host(step, case).programs, step.workload.programs, strict=True):
        total = (one.gap_cpu_ns.sum() + one.call_cpu_ns.sum()) * case.reference.speed.cpu
        seen = ops_seen(program, one, case.profile[one.program.rank], case.ranks)
        assert not seen.held_back
        assert total == pytest.approx(seen.quickest_ns / case.inflation, rel=0.15)
        assert (one.gap_cpu_ns >= 0).all()


def test_a_pause_of_the_profiled_host_is_no_part_of_the_step(step: ModelledStep, case: StepCase) -> None:
    before = with_measured_host(step, case).programs[0]
    rows = []
    for row in case.profile:
        middle = len(row["launch_ns"]) // 2
        later = [at + PAUSE_NS * (place >= middle) for place, at in enumerate(row["launch_ns"])]
        rows.append({**row, "launch_ns": later, "host_ns": [*row["host_ns"][:-1], row["host_ns"][-1] + PAUSE_NS]})
    after = with_measured_host(step, replace(case, profile=tuple(rows))).programs[0]
    assert after.gap_cpu_ns.sum() == pytest.approx(before.gap_cpu_ns.sum(), rel=0.05)


def test_the_parts_of_an_error_add_up_to_it(step: ModelledStep, steady: Steady, case: StepCase) -> None:
    found = split(step, with_measured_host(step, case), steady, case, case.visits[0])
    assert found.error == pytest.approx(found.device + found.host + found.communication + found.synchronisation)
    assert found.error == pytest.approx(steady.period_ns[0] / case.visits[0].measured_ns - 1, abs=2e-3)


def test_means_of_splits_tell_bias_and_size_apart() -> None:
    up, down = Split(0.1, 0.1, 0.0, 0.0, 0.0, 0.0), Split(-0.1, -0.1, 0.0, 0.0, 0.0, 0.0)
    found = mean_splits({"some": [up, down]})["some"]
    assert found["error"] == pytest.approx(0.0)
    assert found["absolute_device"] == pytest.approx(0.1)


def test_a_config_that_never_ran_is_predicted_as_its_trace_is(case: StepCase) -> None:
    built, recorded = from_config(case), from_trace(case)
    assert built.world_size == recorded.world_size
    traced, configured = (predict_case(case, build) for build in (from_trace, from_config))
    assert configured.predicted_ns == pytest.approx(traced.predicted_ns, rel=0.02)
    assert predict_case(case, from_trace, recorded=True).predicted_ns != traced.predicted_ns
