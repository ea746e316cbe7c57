"""Laws of predictions from models: nothing is lost between ops and the timeline, and what is slower is never faster."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.workload import dlrm_workload
from steptime._lookups.generators import Generator
from steptime._models.host.columns import host_columns
from steptime._models.host.model import STEP, Speed
from steptime._ops.waits import tensor_waits
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._platforms.situation import KindError, Situation
from steptime._program.load import load
from steptime._program.one_step import OneStep
from steptime._program.program import CallKind, Program, WorkKind
from steptime._program.workload import Workload
from steptime._shard.configs import configured_in
from steptime._sim.modelled import step as modelled_step
from steptime._sim.modelled.device_work import device_work
from steptime._sim.modelled.prediction import box_factors, memory_of, predict_on
from steptime._sim.modelled.step import ModelledStep, modelled
from steptime.errors import InputError

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def dlrm(ranks: int = 2, lookup: str = "table_batched", optimizer: str = "sgd") -> Workload:
    tables = tuple(
        Table(f"t{place}", dim, Generator(rows=rows, pooling=pooling, kind="zipf", alpha=1.1))
        for place, (rows, dim, pooling) in enumerate(((50_000, 64, 20.0), (4_000, 32, 3.0), (900_000, 64, 8.0)))
    )
    model = Dlrm("small", 512, 16, (64, 64), (128, 1), tables, lookup=lookup, optimizer=optimizer, interaction="cat")
    return dlrm_workload(model, ranks, {"t0": 0, "t1": 1 % ranks, "t2": ranks - 1})


@cache
def platform(name: str = "2xh200-half-loopback") -> Platform:
    return Platform.load(name)


@cache
def step(lookup: str = "table_batched", optimizer: str = "sgd") -> ModelledStep:
    given = dlrm(2, lookup, optimizer)
    return modelled(given, platform())


def period_ns(found: ModelledStep, calibration: Calibration = UNCALIBRATED) -> float:
    return found.play(calibration).step_ns


@pytest.mark.parametrize("lookup", ["table_batched", "embedding_bag"])
def test_every_estimate_is_on_the_timeline_once(lookup: str) -> None:
    for one in step(lookup).programs:
        timing = one.timing(STEP, platform().device.limits)
        estimated = sum(estimate.time_ns for estimate in one.estimates)
        assert timing.duration_ns.sum() == pytest.approx(estimated, rel=1e-3)
        assert len(one.program.works) == len(one.estimate)


@pytest.mark.parametrize("lookup", ["table_batched", "embedding_bag"])
@pytest.mark.parametrize("speed", [Speed(), STEP])
def test_the_host_spends_what_its_model_says(lookup: str, speed: Speed) -> None:
    given = dlrm(2, lookup)
    assert given.lookups is not None
    devices = device_work([OneStep(program) for program in given.programs], platform().device, given.lookups)
    for one, program, device in zip(step(lookup).programs, given.programs, devices, strict=True):
        pieces = host_columns(program, platform().host, device.launches(len(program.ops))).time_ns(speed)
        timing = one.timing(speed, platform().device.limits)
        assert timing.gap_ns.sum() + timing.call_ns.sum() == pytest.approx(pieces.sum(), abs=2 * len(one.program.calls))


def test_compute_waits_for_the_collective_it_needs() -> None:
    found = step().play()
    for played in found.timeline.cohorts:
        program = played.cohort.program
        waits = np.flatnonzero((program.calls.kind == CallKind.STREAM_WAIT) & (program.calls.stream == 0))
        assert len(waits) == len(program.collectives)
        for call in waits.tolist():
            end = played.work_end_ns[program.calls.awaits[call]]
            later = np.flatnonzero((program.works.stream == 0) & (program.works.call > call))
            assert (played.work_start_ns[later] >= end).all()


def test_what_needs_a_collective_is_launched_after_the_wait_for_it() -> None:
    given = configured_in(EXAMPLES / "configs" / "llama-8b.toml", batch=8)
    (one,) = modelled(given, Platform.load("8xh200-nvlink")).programs
    calls, works = one.program.calls, one.program.works
    waits = np.flatnonzero((calls.kind == CallKind.STREAM_WAIT) & (calls.stream == 0))
    awaited = dict(zip(works.collective[calls.awaits[waits]].tolist(), waits.tolist(), strict=True))
    needs = [each for each in tensor_waits(given.programs[0]) if each.needed_by >= 0]
    assert needs
    for each in needs:
        users = works.call[(works.stream == 0) & (calls.op[works.call] >= each.needed_by)]
        assert (users > awaited[each.collective]).all()


def test_ranks_with_tables_of_other_sizes_have_programs_of_their_own() -> None:
    tables = tuple(Table(name, 64, Generator(rows=rows, pooling=8.0)) for name, rows in (("big", 9_000_000), ("small", 900)))
    model = Dlrm("two", 512, 16, (64, 64), (128, 1), tables, interaction="cat")
    here, there = (dlrm_workload(model, 2, {"big": rank, "small": 1 - rank}) for rank in (0, 1))
    peaks = [memory_of(each, platform())["peak_bytes"] for each in (here, there)]
    assert len(here.programs) == 2
    assert peaks[0] == peaks[1]


def test_a_collective_starts_after_the_compute_before_it() -> None:
    found = step().play()
    for played in found.timeline.cohorts:
        works = played.cohort.program.works
        for row in np.flatnonzero(works.kind == WorkKind.COLLECTIVE).tolist():
            before = np.flatnonzero((works.stream == 0) & (works.call < works.call[row]))
            assert (played.work_start_ns[row] >= played.work_end_ns[before].max(initial=0)).all()


def test_a_slower_host_or_wire_never_makes_a_step_shorter() -> None:
    base = period_ns(step())
    assert period_ns(step(), Calibration(Speed.of_cpu(3.0))) >= base
    assert period_ns(step(), Calibration(wire={"all_reduce": 60.0, "all_to_all": 60.0})) > base


def test_coalescing_a_gradient_makes_the_host_wait() -> None:
    for one in step("embedding_bag", "rowwise_adagrad").programs:
        blocking = one.program.calls.kind == CallKind.BLOCKING_COPY
        tables = sum(one.program.names[name] == "aten::coalesce" for name in one.program.ops.name.tolist())
        assert blocking.sum() == tables > 0
    assert not any((one.program.calls.kind == CallKind.BLOCKING_COPY).any() for one in step().programs)


def test_a_prediction_lies_in_its_interval_and_is_the_same_again() -> None:
    given = dlrm()
    one, two = (predict_on(given, platform()) for _ in range(2))
    assert one.interval_ms[0] < one.step_time_ms < one.interval_ms[1]
    assert (one.step_time_ms, one.interval_ms, one.warnings) == (two.step_time_ms, two.interval_ms, two.warnings)
    assert one.platform == "2xh200-half-loopback"


def test_more_doubt_about_the_host_widens_the_interval() -> None:
    given = dlrm()
    spans = []
    for error in (0.0, 0.3):
        found = predict_on(given, platform(), calibration=Calibration(host_error=error))
        spans.append(found.interval_ms[1] - found.interval_ms[0])
    assert spans[1] > 1.5 * spans[0]


def test_coverage_counts_all_device_time() -> None:
    shares = step().coverage
    assert sum(share for source, share in shares.items() if source != "out_of_range") == pytest.approx(1.0)
    assert shares["fitted"] == pytest.approx(1.0)


def test_one_rank_stands_for_all_that_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = configured_in(EXAMPLES / "configs" / "gpt2-ddp.toml", ranks=4, batch=8)
    there = Platform.load("8xh200-nvlink", ranks=4)
    alone = modelled(given, there)
    assert [len(cohort.ranks) for cohort in alone.cohorts()] == [1]
    of_one = predict_on(given, there)
    monkeypatch.setattr(modelled_step, "alike", lambda _: False)
    every = modelled(given, there)
    assert [len(cohort.ranks) for cohort in every.cohorts()] == [4]
    assert period_ns(alone) == period_ns(every)
    of_each = predict_on(given, there)
    assert of_one.ranks == of_each.ranks
    assert (of_one.step_time_ms, of_one.interval_ms) == (of_each.step_time_ms, of_each.interval_ms)
    assert (of_one.breakdown, of_one.bound_by) == (of_each.breakdown, of_each.bound_by)
    for one, each in zip(of_one.timeline.cohorts, of_each.timeline.cohorts, strict=True):
        assert one.cohort.ranks == each.cohort.ranks
        assert one.cohort.members == each.cohort.members
        np.testing.assert_array_equal(one.work_end_ns, each.work_end_ns)


def test_many_ranks_that_do_the_same_are_listed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given = configured_in(EXAMPLES / "configs" / "gpt2-ddp.toml", ranks=4, batch=8)
    monkeypatch.setattr(modelled_step, "MOST_LISTED", 2)
    assert [rank.rank for rank in predict_on(given, Platform.load("8xh200-nvlink", ranks=4)).ranks] == [0]


def test_ranks_that_meet_others_are_played_each() -> None:
    given = dlrm(2)
    assert not modelled_step.alike(given)
    uneven = Workload(
        (renamed(given.programs[0], 0), renamed(given.programs[1], 1)), 4, owners=(0, 0, 1, 1),
        groups={given.programs[0].collectives[0].group: ((0, 1), (2, 3))},
    )  # fmt: skip
    assert modelled_step.alike(uneven)
    crossed = replace(uneven, owners=(0, 0, 0, 1))
    assert not modelled_step.alike(crossed)


def renamed(program: Program, rank: int) -> Program:
    return replace(program, rank=rank)


def test_ranks_without_a_program_are_taken_to_do_the_same() -> None:
    one = load([EXAMPLES / "h200_mps4_dlrm" / "rank0.et.json.gz"])
    found = predict_on(one, platform("4xh200-quarter-loopback"))
    assert [rank.rank for rank in found.ranks] == [0, 1, 2, 3]
    assert any("are taken to do what rank 0 does" in warning for warning in found.warnings)


def test_lookups_without_statistics_are_said_to_be_guessed() -> None:
    given = dlrm(2, "embedding_bag")
    found = predict_on(replace(given, lookups=None), platform())
    assert any("taken as rows drawn evenly" in warning for warning in found.warnings)
    counted, assumed = (modelled(each, platform()).programs[0].groups for each in (given, replace(given, lookups=None)))
    assert {"lookup forward", "lookup backward"} <= set(counted)
    assert {"assumed lookup forward", "assumed lookup backward"} <= set(assumed)
    unknown = predict_on(replace(dlrm(2), lookups=None), platform())
    assert any("are not recorded; give what is looked up" in warning for warning in unknown.warnings)
    assert unknown.coverage["fallback"] > 0


def test_draws_lean_to_no_side() -> None:
    one, two = box_factors(Situation("", {"matmul": KindError(0.1, 0.1), "copy": KindError(0.1, 0.1)})).values()
    for factors in (one, two):
        low, middle, high = np.quantile(np.log(factors), (0.05, 0.5, 0.95))
        assert (low, middle, high) == pytest.approx((-0.16, 0.0, 0.16), abs=0.005)
    assert not np.array_equal(one, two)


def test_strict_refuses_what_has_no_model() -> None:
    given = configured_in(EXAMPLES / "configs" / "gpt2.toml", batch=1)
    program = given.programs[0]
    names = tuple("made::up" if name == "aten::native_layer_norm" else name for name in program.names)
    odd = replace(given, programs=(replace(program, names=names),))
    assert "aten::native_layer_norm" in program.names
    found = predict_on(odd, platform("1xh200"))
    assert any("made::up" in text for texts in found.notices for text in texts)
    with pytest.raises(InputError, match="made::up has no model"):
        predict_on(odd, platform("1xh200"), strict=True)


def test_more_ranks_than_a_platform_has_are_refused() -> None:
    with pytest.raises(InputError, match="2 ranks, platform 1xh200 1; choose one with 2 or more"):
        modelled(dlrm(), platform("1xh200"))


def test_statistics_of_other_tables_are_refused() -> None:
    given, other = dlrm(2, "embedding_bag"), dlrm(1, "embedding_bag")
    with pytest.raises(InputError, match="give those of the same tables"):
        modelled(replace(given, lookups=other.lookups), platform())


def test_a_kind_that_a_fabric_was_never_measured_on_has_a_stand_in() -> None:
    given = dlrm(2)
    program = given.programs[0]
    kinds = tuple(replace(one, kind="broadcast") if one.kind == "all_reduce" else one for one in program.collectives)
    programs = tuple(replace(each, collectives=kinds if each is program else each.collectives) for each in given.programs)
    odd = replace(given, programs=programs)
    found = modelled(odd, Platform.load("2xh200-nvlink"))
    assert any("broadcast as all_gather, since" in text for text in found.warnings)
    assert found.coverage["fallback"] > 0


def test_times_beyond_64_bits_of_nanoseconds_are_refused_by_name() -> None:
    one, limits = step("table_batched").programs[0], platform().device.limits
    with pytest.raises(InputError, match="the host's cudaLaunchKernel would take"):
        one.timing(Speed(1.0, 1e15), limits)
    slow = np.full((len(one.estimates), 1), 1e15)
    with pytest.raises(InputError, match="check their units") as caught:
        one.timing(STEP, limits, slow)
    assert any(name in str(caught.value) for name in one.program.names)
