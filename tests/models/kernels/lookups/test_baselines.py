"""What lookup models are compared with: bytes and hit rates counted by hand, constants found again, nothing hidden seen."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from steptime._lookups.generators import Generator
from steptime._lookups.table import TableStatistics, table_statistics
from steptime._models.engine.stored import pack, unpack
from steptime._models.lookups.forms import LookupForm
from steptime._models.lookups.question import Lookup, Lookups
from steptime.errors import InputError
from steptime_lab.baselines.lookups import BASELINES, LookupBaseline, learned, rules
from steptime_lab.baselines.lookups.learned import PublishedLookupNetwork
from steptime_lab.baselines.lookups.rules import BytesOverBandwidth, Factors, HitRateOfBags, HitRateOfRows
from steptime_lab.measurements.lookups import MeasuredLookups

Floats = npt.NDArray[np.float64]

BATCH = 64
# They know sizes alone, so that which rows are looked up cannot matter.
BLIND = [name for name in BASELINES if name != "published network"]


@cache
def table(rows: int = 1_000, pooling: float = 8, dim: int = 32, alpha: float = 0.0, batch: int = BATCH) -> TableStatistics:
    skew: dict[str, Any] = {"kind": "zipf", "alpha": alpha} if alpha else {}
    bags = Generator(rows=rows, pooling=pooling, **skew).bags(batch)
    return table_statistics(bags.indices, bags.offsets, rows, dim)


@cache
def empty(dim: int = 32) -> TableStatistics:
    return table_statistics(np.zeros(0, dtype=np.int64), np.zeros(BATCH + 1, dtype=np.int64), 1_000, dim)


def lookup(*tables: TableStatistics, direction: str = "forward", **more: Any) -> Lookup:
    optimizer = "none" if direction == "forward" else "sgd"
    return Lookup("table_batched", direction, tables, **{"optimizer": optimizer, **more})


@cache
def questions(direction: str = "forward") -> tuple[Lookup, ...]:
    """Forty sets of one to four tables, cold and warm."""
    random = np.random.default_rng(0)
    sets = [
        [
            table(int(rows), float(pooling), int(dim), float(alpha))
            for rows, pooling, dim, alpha in zip(
                random.choice([500, 20_000], count),
                random.choice([1, 4, 16, 40], count),
                random.choice([16, 64, 128], count),
                random.choice([0.0, 1.2], count),
                strict=True,
            )
        ]
        for count in random.integers(1, 5, 40)
    ]
    return tuple(lookup(*tables, direction=direction, warm=warm) for tables in sets for warm in (False, True))


def measured(
    lookups: Sequence[Lookup], time_ns: npt.ArrayLike, splits: Sequence[str] | None = None, kernels: int = 1
) -> MeasuredLookups:
    times = np.asarray(time_ns, dtype=np.float64)
    return MeasuredLookups(
        lookups=Lookups.of(lookups),
        time_ns=times,
        times_ns=[(one,) * 3 for one in times.tolist()],
        spread=np.zeros(len(times)),
        split=np.array(splits or ["fit"] * len(times)),
        series=np.array([""] * len(times)),
        kernel_names=[("kernel",) * kernels] * len(times),
        kernel_ns=[(one / kernels,) * kernels for one in times.tolist()],
    )


def work_ns(lookups: Sequence[Lookup]) -> Floats:
    """A time that every form can follow: 5 us and 20 ps a byte of all rows; warm ones take three quarters."""
    moved = [sum(one.counted.lookups * one.dim * 4 for one in each.tables) for each in lookups]
    return (5e3 + 0.02 * np.array(moved)) * np.where([each.warm for each in lookups], 0.75, 1.0)


@cache
def fitted(name: str, direction: str = "forward") -> LookupBaseline:
    asked = questions(direction)
    return BASELINES[name].fit(measured(asked, work_ns(asked), kernels=3), 0)


@pytest.fixture(autouse=True, scope="module")
def few_epochs() -> Iterator[None]:
    """What is asked of the network here is easy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learned, "_EPOCHS", 15)
        patch.setattr(learned, "_WIDTH", 32)
        yield


def times(form: LookupForm, *lookups: Lookup) -> Floats:
    return form.times(Lookups.of(lookups)).time_ns


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", BASELINES)
def test_times_that_follow_bytes_are_learned(name: str, direction: str) -> None:
    asked = questions(direction)
    off = np.abs(fitted(name, direction).times(Lookups.of(asked)).time_ns / work_ns(asked) - 1)
    assert np.median(off) < 0.15


@pytest.mark.parametrize("name", BASELINES)
def test_what_is_kept_gives_the_same_form(name: str) -> None:
    form = fitted(name)
    stream = io.BytesIO()
    np.savez(stream, **pack(form))  # type: ignore[arg-type]
    stream.seek(0)
    with np.load(stream, allow_pickle=False) as kept:
        again = unpack(BASELINES[name], dict(kept))
    found, expected = (one.times(Lookups.of(questions())) for one in (again, form))
    np.testing.assert_array_equal(found.time_ns, expected.time_ns)
    np.testing.assert_array_equal(found.inside, expected.inside)
    assert found.inside.all()
    assert (found.number == 3).all()


@pytest.mark.parametrize("name", BASELINES)
def test_the_order_of_tables_does_not_matter(name: str) -> None:
    tables = [table(), table(500, 16, 64), table(20_000, 4, 128, 1.2), empty()]
    there, back = times(fitted(name), lookup(*tables), lookup(*tables[::-1]))
    assert there == pytest.approx(back, rel=1e-12)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", BASELINES)
def test_lookups_of_nothing_and_of_very_much_take_finite_time(name: str, direction: str) -> None:
    huge = table(2**31, 300, 1024)
    form = fitted(name, direction)
    asked = [lookup(*tables, direction=direction) for tables in ((empty(),), (empty(), table()), (huge,), (huge,) * 500)]
    answer = form.times(Lookups.of(asked))
    assert np.isfinite(answer.time_ns).all()
    assert (answer.time_ns > 0).all()
    assert not answer.inside[2:].any()


@pytest.mark.parametrize("name", BASELINES)
def test_rows_of_other_splits_are_not_fitted_to(name: str) -> None:
    asked = questions()
    splits = ["fit", "fit", "fit", "validation"] * (len(asked) // 4)
    changed = np.where(np.array(splits) == "fit", work_ns(asked), 1e9)
    one, other = (BASELINES[name].fit(measured(asked, time_ns, splits), 0) for time_ns in (work_ns(asked), changed))
    for key, values in pack(one).items():
        np.testing.assert_array_equal(values, pack(other)[key])


@pytest.mark.parametrize("name", BLIND)
def test_rules_and_sizes_do_not_see_which_rows_are_looked_up(name: str) -> None:
    uniform, skewed = times(fitted(name), lookup(table(alpha=0.0)), lookup(table(alpha=1.2)))
    assert uniform == skewed


def test_the_published_network_sees_which_rows_are_looked_up() -> None:
    """Rows that are looked up again take half the time here."""
    asked = questions()
    again = [sum(one.unique for one in each.tables) / sum(one.counted.lookups for one in each.tables) for each in asked]
    form = PublishedLookupNetwork.fit(measured(asked, work_ns(asked) * (0.5 + 0.5 * np.array(again))), 0)
    uniform, skewed = times(form, lookup(table(20_000, 40, 64)), lookup(table(20_000, 40, 64, 1.2)))
    assert skewed < 0.85 * uniform


def test_the_published_network_needs_torch_to_be_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"steptime\[fit\]"):
        PublishedLookupNetwork.fit(measured(questions(), work_ns(questions())), 0)


def test_the_published_network_is_told_shares_of_rows_by_how_often_they_are_looked_up() -> None:
    """Batch, rows, pooling and dim as logarithms, 17 bins of rows as shares, and two flags of the rows' type."""
    indices, offsets = np.array([7, 7, 7, 8, 9, 9]), np.array([0, 2, 6])
    told = learned._features(Lookups.of([lookup(table_statistics(indices, offsets, 100, 16), dtype="bfloat16")]))
    expected = [*np.log([2, 100, 3, 16]), 1 / 3, 1 / 3, 1 / 3, *[0.0] * 14, 0.0, 1.0]
    np.testing.assert_allclose(told, [expected])


def test_bytes_are_those_of_the_published_rule() -> None:
    """64 samples: 32 + 64 bytes, 8 indices in 2 sectors, 8 rows of 40 fp16 elements in 3 sectors each, 40 floats in 5."""
    one = table(pooling=8, dim=40)
    assert one.counted.lookups == 8 * BATCH
    asked = [lookup(one, dtype="float16"), lookup(one, one, dtype="float16"), lookup(empty(dim=40), dtype="float16")]
    each = 32 + 64 + 64 + 8 * 96 + 160
    moved = BytesOverBandwidth.moved(Lookups.of(asked))[:, 0]
    assert moved.tolist() == [BATCH * each, 2 * BATCH * each, BATCH * (32 + 64 + 160)]
    backward = [
        lookup(one, direction="backward", dtype="float16", optimizer=name) for name in ("sgd", "adagrad", "rowwise_adagrad")
    ]
    moved = BytesOverBandwidth.moved(Lookups.of(backward))[:, 0]
    sgd = BATCH * (each + 8 * 96)
    assert moved.tolist() == [sgd, sgd + 2 * 512 * 160, sgd + 2 * 512 * 32]


def test_constant_and_bandwidth_are_found_again() -> None:
    asked = [one for one in questions() if not one.warm]
    moved = BytesOverBandwidth.moved(Lookups.of(asked))[:, 0]
    form = BytesOverBandwidth.fit(measured(asked, 2e3 + moved / 50))
    assert np.exp(form.constants) == pytest.approx([2e3, 50], rel=1e-3)


def test_conditions_are_factors_and_an_unmeasured_part_is_as_slow_as_it_is_small() -> None:
    whole = questions()
    asked = [*whole, *(replace(one, share=4, others="same") for one in whole)]
    slower = [(0.5 if one.warm else 1.0) * (3.0 if one.share == 4 else 1.0) for one in asked]
    factors = Factors.fit(Lookups.of(asked), np.log(slower))
    np.testing.assert_allclose(np.exp(factors.logs(Lookups.of(asked))), slower)
    assert np.exp(factors.logs(Lookups.of([replace(whole[0], share=2, others="same")]))) == pytest.approx([2.0])


def test_ln_gamma() -> None:
    numbers = np.array([1.0, 1.5, 2.0, 7.3, 40.0, 1e4, 1e8])
    expected = [math.lgamma(number) for number in numbers.tolist()]
    np.testing.assert_allclose(rules._ln_gamma(numbers), expected, rtol=1e-9, atol=1e-8)


def test_a_bag_hits_where_all_of_its_rows_are_resident() -> None:
    """Tables that are in cache, that are read less than the cache holds, and of which the cache holds 195,312 rows."""
    small, little, large = table(1_000, 40, 64), table(250_000, 4, 64), table(250_000, 4, 64, batch=65_536)
    memory, cache = HitRateOfBags.moved(Lookups.of([lookup(one) for one in (small, little, large)])).T
    assert memory[:2].tolist() == [BATCH * (320 + 256) + 1_000 * 256, BATCH * (32 + 256) + BATCH * 4 * 256]
    assert cache[:2] == pytest.approx([BATCH * 96 + (BATCH * 40 - 1_000) * 256, BATCH * 96])
    hits = math.prod((50e6 / 256 - place) / (250_000 - place) for place in range(4))
    again = 65_536 * 4 * 256 - 50e6
    assert cache[2] == pytest.approx(65_536 * 96 + hits * again)
    assert memory[2] == pytest.approx(65_536 * (32 + 256) + 50e6 + (1 - hits) * again)


def test_a_row_hits_by_its_chance_of_being_resident() -> None:
    """132 SMs of 45 warps in 4096 samples: 2 tables at once. All of 1,000 rows stay; of 200,000, those in 22.5 MB."""
    small, large = (table(rows, 40, 64, batch=4096) for rows in (1_000, 200_000))
    memory, cache, width = HitRateOfRows.moved(Lookups.of([lookup(small), lookup(large)])).T
    looked_up, fixed = 4096 * 40, 4096 * (32 + 64 + 320 + 256)
    distinct = 1_000 * (1 - (1 - 1 / 1_000) ** looked_up)
    assert memory[0] == pytest.approx(fixed + distinct * 256)
    assert cache[0] == pytest.approx((looked_up - distinct) * 256)
    resident = 0.9 * 50e6 / 2 / 256
    missed = resident + (looked_up - resident) * (1 - resident / 200_000)
    assert memory[1] == pytest.approx(fixed + missed * 256)
    assert width.tolist() == [64, 64]
