"""The table-batched forward pass: programs counted as bags are drawn, physics that behaves, a fit that is told the answer."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from steptime._hardware.device import reference_device
from steptime._lookups.generators import Generator
from steptime._lookups.table import TableColumns, TableStatistics, table_statistics
from steptime._models.engine.stored import pack, unpack
from steptime._models.lookups.caches import reference_lookups
from steptime._models.lookups.forms.batched_forward import BatchedForward, Residual
from steptime._models.lookups.forms.forward_physics import (
    Constants,
    ForwardLaunch,
    ForwardTables,
    Programs,
    SharePowers,
    launched,
)
from steptime._models.lookups.question import Lookup, Lookups
from steptime_lab.fit.lookups import batched_forward
from steptime_lab.fit.lookups.batched_forward import START, START_POWERS
from steptime_lab.measurements.lookups import MeasuredLookups


def lengths_of(pooling: float, lengths: str, batch: int) -> np.ndarray[Any, Any]:
    return np.diff(Generator(rows=5_000, pooling=pooling, lengths=lengths).bags(batch).offsets)


@cache
def table(
    pooling: float = 20, rows: int = 5_000, batch: int = 512, dim: int = 64, lengths: str = "geometric"
) -> TableStatistics:
    bags = Generator(rows=rows, pooling=pooling, lengths=lengths).bags(batch)
    return table_statistics(bags.indices, bags.offsets, rows, dim, "users")


@cache
def empty(batch: int = 512) -> TableStatistics:
    return table_statistics(np.zeros(0, dtype=np.int64), np.zeros(batch + 1, dtype=np.int64), 1_000, 64, "nobody")


def lookup(*tables: TableStatistics, **more: Any) -> Lookup:
    return Lookup("table_batched", "forward", tables, **more)


def by_physics(*questions: Lookup, constants: Constants | None = None) -> ForwardLaunch:
    lookups = Lookups.of(questions)
    tables = ForwardTables.of(lookups.pool, reference_lookups())
    return launched(constants or START, SharePowers.of(START_POWERS), tables, lookups)


# Programs


@pytest.mark.parametrize("lengths", ["geometric", "uniform"])
@pytest.mark.parametrize("dim", [16, 48, 256, 512, 1024])
def test_programs_run_as_long_as_drawn_bags_do(lengths: str, dim: int) -> None:
    batch, pooling = 8_192, 40.0
    found = Programs.of(TableColumns.of([table(pooling, batch=batch, dim=dim, lengths=lengths)]))
    bags, parts = max(512 // dim, 1), -(-dim // 512)
    drawn = lengths_of(pooling, lengths, batch)
    steps = -np.sort(-np.resize(-(-drawn // 4), (batch // bags, bags)), axis=1)
    running = [np.log2(np.maximum((steps > step).sum(axis=1), 1)).sum() for step in range(steps.max())]
    assert found.number[0] == -(-batch // bags) * parts
    assert found.steps[0] == pytest.approx(steps[:, 0].mean(), rel=0.03)
    assert found.log_steps[0] == pytest.approx(sum(running) / len(steps), rel=0.03, abs=1e-9)
    assert found.bag_steps[0] == pytest.approx(steps.sum() / len(steps), rel=0.03)
    assert found.longest[0] == steps.max()
    assert found.spread[0] == pytest.approx(steps[:, 0].std(), rel=0.15, abs=0.2)


def test_programs_of_equal_bags_are_exact() -> None:
    found = Programs.of(TableColumns.of([table(61, batch=1_000, dim=64, lengths="fixed")]))
    assert [getattr(found, field.name)[0] for field in fields(found)] == pytest.approx(
        [8, 125, 16, 48, 128, 0, 16, 48, 128], abs=1e-6
    )


def test_a_batch_smaller_than_a_program_is_one_program() -> None:
    found = Programs.of(TableColumns.of([table(8, batch=3, dim=16, lengths="fixed")]))
    assert (found.bags[0], found.number[0], found.bag_steps[0]) == (3, 1, 6)


# Physics


def test_physics_waits_for_the_longest_bag() -> None:
    even, one_long = np.full(2_048, 8), np.full(2_048, 8)
    one_long[7] = 1_000
    statistics = []
    for lengths in (even, one_long):
        indices = np.random.default_rng(0).integers(0, 5_000, lengths.sum())
        statistics.append(table_statistics(indices, np.concatenate([[0], np.cumsum(lengths)]), 5_000, 64, "users"))
    short, long = by_physics(*(lookup(one) for one in statistics)).time
    assert long > 10 * short


def test_a_launch_of_one_more_than_a_wave_takes_much_of_a_second() -> None:
    resident = 12 * 132 * 8
    first, second, more = by_physics(
        *(lookup(table(64, batch=batch, lengths="fixed")) for batch in (resident, resident + 8, 2 * resident))
    ).time
    assert second > 1.2 * first
    assert first < 0.75 * more < 1.2 * second < 1.2 * more


def test_bags_that_do_not_begin_with_a_sector_take_longer() -> None:
    aligned, unaligned = by_physics(*(lookup(table(each, dim=16, lengths="fixed")) for each in (64, 63))).time
    assert unaligned > 1.1 * aligned


def test_what_does_not_fit_the_cache_is_cold_though_it_was_in_use_before() -> None:
    small, large = table(64, lengths="fixed"), table(64, rows=2_000_000, batch=16_384, lengths="fixed")
    cold = by_physics(*(lookup(one, warm=True) for one in (small, large))).cold
    assert cold[0] < 0.01
    assert cold[1] > 0.99


def test_part_of_a_gpu_takes_longer_and_other_work_adds_to_it() -> None:
    one = table(64, batch=16_384, rows=500_000)
    kinds: list[dict[str, Any]] = [{}, {"share": 4, "others": "idle"}, {"share": 4, "others": "same"}]
    whole, idle, same = by_physics(*(lookup(one, **kind) for kind in kinds)).time
    assert whole * 1.5 < idle < same


# Fit


@cache
def questions() -> tuple[Lookup, ...]:
    draw = np.random.default_rng(5)
    found = []
    for _ in range(160):
        batch = int(draw.choice([64, 512, 4_096]))
        tables = tuple(
            table(float(draw.choice([2, 8, 30])), int(draw.choice([300, 20_000])), batch, int(draw.choice([16, 64, 256])))
            for _ in range(draw.integers(1, 6))
        )
        found.append(lookup(*tables, warm=bool(draw.random() < 0.5)))
    parts = [replace(one, share=2, others="same") for one in found[::4]]
    return (*found, *parts)


@cache
def measured() -> MeasuredLookups:
    """Times by physics with other constants; steps of rows in caches are twice as long as a fit expects at first."""
    asked = questions()
    truth = by_physics(*asked, constants=replace(START, step=900.0, program=2_000.0)).time
    count = len(asked)
    values: dict[str, Any] = {
        "lookups": Lookups.of(asked),
        "time_ns": truth,
        "spread": np.zeros(count),
        "split": np.array(["validation" if place % 5 == 4 else "fit" for place in range(count)]),
        "series": np.full(count, ""),
        "kernel_names": [("table_batched_forward",)] * count,
        "kernel_ns": [(float(time),) for time in truth],
        "times_ns": [(float(time),) for time in truth],
    }
    return MeasuredLookups(**{field.name: values[field.name] for field in fields(MeasuredLookups)})


@cache
def form() -> BatchedForward:
    return batched_forward.fit(measured(), 0, reference_device())


def times(*asked: Lookup) -> np.ndarray[Any, Any]:
    return form().times(Lookups.of(asked)).time_ns


def test_a_fit_finds_what_times_were_made_with() -> None:
    held = measured().of("validation")
    whole = held.take(held.lookups.share == 1)
    off = form().times(whole.lookups).time_ns / whole.time_ns - 1
    assert np.median(np.abs(off)) < 0.02
    assert np.abs(off).max() < 0.2


def test_only_rows_of_the_fit_split_are_fitted() -> None:
    rows = measured()
    changed = replace(rows, time_ns=np.where(rows.split == "fit", rows.time_ns, 1.0))
    assert (batched_forward.fit(changed, 0, reference_device()).constants == form().constants).all()


def test_parts_change_nothing_for_whole_gpus() -> None:
    rows = measured().take(measured().lookups.share == 1)
    without = batched_forward.fit(rows, 0, reference_device())
    assert without.shares.trees.values(np.zeros((1, 60))).tolist() == [0.0]
    assert without.times(rows.lookups).time_ns.tolist() == form().times(rows.lookups).time_ns.tolist()


def test_a_form_is_the_same_from_its_arrays() -> None:
    lookups = measured().lookups
    again = unpack(BatchedForward, pack(form()))
    assert again.times(lookups).time_ns.tolist() == form().times(lookups).time_ns.tolist()
    plain = unpack(Residual, pack(Residual.none()))
    assert plain.values(np.ones((2, 3))).tolist() == [0.0, 0.0]


def test_order_of_tables_does_not_matter() -> None:
    tables = [table(each, dim=dim) for each in (2, 8, 30) for dim in (16, 64, 256)] + [empty()]
    expected = times(lookup(*tables))[0]
    for seed in range(5):
        mixed = [tables[place] for place in np.random.default_rng(seed).permutation(len(tables))]
        assert times(lookup(*mixed))[0] == pytest.approx(expected, rel=1e-12)


def test_tables_without_lookups_take_little_but_something() -> None:
    nothing, one, with_nothing = times(lookup(empty()), lookup(table()), lookup(table(), empty()))
    assert 0 < nothing < one
    assert with_nothing == pytest.approx(one, rel=0.2)


def test_more_lookups_are_not_cheaper() -> None:
    found = times(*(lookup(table(each, batch=4_096, lengths="fixed")) for each in (1, 4, 16, 64, 256)))
    assert (found[1:] > 0.9 * found[:-1]).all()


def test_launches_unlike_fitted_ones_are_finite_and_said_to_be() -> None:
    huge = table(30, batch=4_096)
    asked = Lookups.of([lookup(huge, huge), lookup(table(8, batch=64))])
    pool = replace(asked.pool, tables=replace(asked.pool.tables, batch=asked.pool.tables.batch * [1e9, 1]))
    found = form().times(replace(asked, pool=pool))
    assert found.inside.tolist() == [False, True]
    assert np.isfinite(found.time_ns).all()
    assert found.time_ns[0] > 1e3 * found.time_ns[1] > 0


def test_one_kernel_is_launched() -> None:
    found = form().times(measured().lookups)
    assert list(found.parts) == ["table_batched_forward"]
    assert (found.number == 1).all()
