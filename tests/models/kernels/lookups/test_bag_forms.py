"""Forms of one-table lookups: bags on warps as walked, kernels as launched, laws of made-up rows found again, edges finite."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from steptime._hardware.device import reference_device
from steptime._lookups.table import TableColumns, TableStatistics, table_statistics
from steptime._models.engine.stored import pack
from steptime._models.lookups.caches import reference_lookups
from steptime._models.lookups.forms import FORMS, LookupForm, load_form
from steptime._models.lookups.forms.bag_backward import BagBackward
from steptime._models.lookups.forms.bag_forward import BagLengths, balance_of
from steptime._models.lookups.forms.dense_backward import DenseBackward
from steptime._models.lookups.forms.kernel_sum import RowsForward
from steptime._models.lookups.forms.one_table import OneTable, traffic_of
from steptime._models.lookups.question import Lookup, Lookups
from steptime.errors import InputError
from steptime_lab.fit.lookups import fit_form
from steptime_lab.fit.lookups.kernel_sum import kinds_of
from steptime_lab.measurements.lookups import MeasuredLookups

pytest.importorskip("lightgbm")

Floats = npt.NDArray[np.float64]

MINE = [
    kind for kind, (module, _) in FORMS.items() if module in {"bag_forward", "bag_backward", "kernel_sum", "dense_backward"}
]
BAGS, SPARSE = ("embedding_bag", "backward"), ("embedding_sparse", "backward")


def _of_lengths(lengths: npt.NDArray[np.int64], rows: int, dim: int, hot: float = 0.0, seed: int = 0) -> TableStatistics:
    """A table with bags of these lengths, a share of whose lookups go to one row."""
    random = np.random.default_rng(seed)
    total = int(lengths.sum())
    indices = random.integers(0, rows, total)
    indices[random.random(total) < hot] = 0
    return table_statistics(indices, np.concatenate([[0], np.cumsum(lengths)]), rows, dim)


@cache
def _table(batch: int = 64, pooling: int = 4, rows: int = 5_000, dim: int = 32, hot: float = 0.0) -> TableStatistics:
    return _of_lengths(np.full(batch, pooling), rows, dim, hot)


def _lookup(table: TableStatistics, kind: tuple[str, str], **more: Any) -> Lookup:
    optimizer = "none" if kind[1] == "forward" else "sgd"
    return Lookup(*kind, (table,), **{"optimizer": optimizer, **more})


def _one(*tables: TableStatistics, **more: Any) -> OneTable:
    return OneTable.of(
        Lookups.of([_lookup(table, ("embedding_bag", "forward"), **more) for table in tables]), reference_lookups()
    )


def _measured(asked: Sequence[Lookup], names: Sequence[str], kernel_ns: Floats) -> MeasuredLookups:
    """Rows of the split `fit`, whose kernels of these names take so long: [rows, kernels]."""
    count = len(asked)
    each = [tuple(times) for times in kernel_ns.tolist()]
    return MeasuredLookups(
        lookups=Lookups.of(asked),
        time_ns=kernel_ns.sum(axis=1),
        spread=np.zeros(count),
        split=np.full(count, "fit"),
        series=np.full(count, ""),
        kernel_names=[tuple(names)] * count,
        kernel_ns=each,
        times_ns=[(sum(times),) for times in each],
    )


@cache
def _questions(kind: tuple[str, str], parts: bool = False) -> tuple[Lookup, ...]:
    random = np.random.default_rng(1)
    found = []
    # Dense gradients of more than 3,072 lookups without bags take other kernels than these rows have.
    poolings = [1, 2, 3, 5] if kind == ("embedding_dense", "backward") else [1, 3, 12, 40]
    for place in range(150):
        table = _table(int(random.integers(8, 600)), int(random.choice(poolings)), dim=int(random.choice([16, 64, 128])))
        own = {"share": 2 + 2 * (place % 2), "others": "same"} if parts and place % 2 else {}
        found.append(_lookup(table, kind, warm=bool(place % 3), **own))
    return tuple(found)


_KERNELS = {
    ("embedding_bag", "forward"): ("EmbeddingBag_updateOutputKernel",),
    ("embedding_bag_dense", "forward"): ("EmbeddingBag_updateOutputKernel",),
    ("embedding_dense", "forward"): ("vectorized_gather_kernel",),
    ("embedding_sparse", "forward"): ("vectorized_gather_kernel",),
    BAGS: ("vectorized_gather_kernel", "indexFuncLargeIndex"),
    SPARSE: ("indexFuncLargeIndex",),
    ("embedding_bag_dense", "backward"): ("arange", "radix_sort", "FillFunctor", "unique_by_key", "krn_partial_segment_offset",
                                          "compute_grad_weight_bags", "sum_and_scatter", "multi_tensor_apply"),
    ("embedding_dense", "backward"): ("FillFunctor", "embedding_backward_feature_kernel", "multi_tensor_apply"),
}  # fmt: skip


def _law(kind: tuple[str, str], one: Lookup) -> list[float]:
    """Each kernel takes 2 us, and 2 ns for every lookup unless it goes over the table; on a part of the GPU as much longer."""
    lookups = one.tables[0].lookups
    return [(2e3 + 2.0 * lookups * (name not in {"FillFunctor", "multi_tensor_apply"})) * one.share for name in _KERNELS[kind]]


@cache
def _rows(kind: tuple[str, str], parts: bool = False) -> MeasuredLookups:
    asked = _questions(kind, parts)
    return _measured(asked, _KERNELS[kind], np.array([_law(kind, one) for one in asked]))


@cache
def _form(kind: tuple[str, str], parts: bool = False) -> LookupForm:
    return fit_form(kind, _rows(kind, parts), 0, reference_device())


# Bags on warps.


def test_a_bag_for_each_warp_waits_for_the_longest() -> None:
    lengths = np.arange(1, 201)
    found = balance_of(_one(_of_lengths(lengths, 1_000, 32)))
    assert found.rounds.tolist() == [1.0]
    assert found.busiest.tolist() == [200.0]
    assert found.active.tolist() == [200.0]


def test_equal_bags_are_walked_in_rounds() -> None:
    found = balance_of(_one(_table(8192 * 2 + 1, 3, dim=32), _table(8192, 3, dim=64)))
    assert found.rounds.tolist() == [3.0, 2.0]
    assert found.busiest == pytest.approx([9.0, 6.0], rel=0.02)
    assert found.sm_mean == pytest.approx([3 * 16_385 / 132, 3 * 8192 * 2 / 132])


def test_one_long_bag_lies_on_top_of_a_warps_others() -> None:
    lengths = np.full(16_384, 8)
    lengths[77] = 500
    found = balance_of(_one(_of_lengths(lengths, 1_000, 128)))
    assert found.rounds.tolist() == [8.0]
    assert found.busiest == pytest.approx([500 + 7 * 8], rel=0.01)


@pytest.mark.parametrize(("batch", "dim"), [(20_000, 16), (60_000, 64), (9_000, 128)])
def test_the_busiest_warp_is_that_of_bags_dealt_at_random(batch: int, dim: int) -> None:
    random = np.random.default_rng(3)
    lengths = random.geometric(1 / 20, batch)
    table = _of_lengths(lengths, 50_000, dim)
    parts = -(-dim // 32)
    busiest, busiest_sm = [], []
    for _ in range(5):
        chunks = np.repeat(random.permutation(lengths), parts)
        warps = np.pad(chunks, (0, -len(chunks) % 8192)).reshape(-1, 8192).sum(axis=0)
        blocks = warps.reshape(1024, 8).sum(axis=1)
        busiest.append(warps.max())
        busiest_sm.append(np.bincount(np.arange(1024) % 132, blocks).max())
    found = balance_of(_one(table))
    assert found.busiest[0] == pytest.approx(np.mean(busiest), rel=0.12)
    assert found.sm[0] == pytest.approx(np.mean(busiest_sm), rel=0.08)


def test_half_the_sms_have_twice_the_work_and_more_waves() -> None:
    table = _table(8192, 4)
    whole, half = balance_of(_one(table)), balance_of(_one(table, share=2, others="idle"))
    assert half.sm_mean == pytest.approx(2 * whole.sm_mean)
    assert (whole.waves.tolist(), half.waves.tolist()) == ([1.0], [2.0])
    assert half.busiest.tolist() == whole.busiest.tolist()


def test_lengths_keep_the_mean_and_the_longest() -> None:
    lengths = np.random.default_rng(0).geometric(1 / 9, 5_000)
    found = BagLengths.of(TableColumns.of([_of_lengths(lengths, 100, 16)]))
    assert found.weights.sum() == pytest.approx(1.0)
    assert (found.values * found.weights).sum() == pytest.approx(lengths.mean(), rel=0.02)
    assert found.values.max() == lengths.max()


def test_what_stays_in_the_cache_is_not_missed_when_warm_and_parts_share_it() -> None:
    table = _table(4_000, 20, rows=200_000, dim=64)
    cold, warm, beside = (traffic_of(_one(table, **more)) for more in ({}, {"warm": True}, {"share": 8, "others": "same"}))
    assert warm.met[0] < 0.2 * cold.met[0]
    assert beside.second[0] > cold.second[0]
    assert beside.first[0] >= beside.second[0]


# Kernels as launched; the numbers are of measured rows.


@pytest.mark.parametrize(
    ("kind", "more", "sizes", "kernels"),
    [
        (BAGS, {}, {"batch": 100, "pooling": 10}, 2),
        (BAGS, {"weighted": True}, {"batch": 100, "pooling": 10}, 3),
        (BAGS, {"optimizer": "adagrad"}, {"batch": 1024, "pooling": 2}, 19),
        (BAGS, {"optimizer": "adagrad"}, {"batch": 1026, "pooling": 2}, 21),
        (BAGS, {"optimizer": "adagrad", "weighted": True}, {"batch": 2000, "pooling": 2}, 22),
        (BAGS, {"optimizer": "adagrad"}, {"batch": 2000, "pooling": 30}, 29),
        (SPARSE, {}, {"batch": 100, "pooling": 10}, 1),
        (SPARSE, {"optimizer": "adagrad"}, {"batch": 1024, "pooling": 2}, 18),
        (("embedding_bag_dense", "backward"), {}, {"batch": 199, "pooling": 10}, 13),
        (("embedding_bag_dense", "backward"), {}, {"batch": 276, "pooling": 10}, 32),
        (("embedding_bag_dense", "backward"), {"optimizer": "adagrad"}, {"batch": 39, "pooling": 10}, 17),
        (("embedding_bag_dense", "backward"), {}, {"batch": 51, "pooling": 10, "rows": 1_753_890, "dim": 24}, 15),
        (("embedding_dense", "backward"), {}, {"batch": 153, "pooling": 10}, 3),
        (("embedding_dense", "backward"), {"optimizer": "adagrad"}, {"batch": 25, "pooling": 10}, 7),
        (("embedding_dense", "backward"), {}, {"batch": 3086, "pooling": 1}, 32),
        (
            ("embedding_dense", "backward"),
            {"optimizer": "adagrad"},
            {"batch": 3668, "pooling": 1, "rows": 975_235, "dim": 64},
            46,
        ),
        (("embedding_dense", "forward"), {}, {"batch": 100, "pooling": 10}, 1),
    ],
)
def test_kernels_are_as_many_as_were_measured(
    kind: tuple[str, str], more: dict[str, Any], sizes: dict[str, int], kernels: int
) -> None:
    form = _form(kind)
    found = form.times(Lookups.of([_lookup(_table(**sizes), kind, **more)]))
    assert found.number.sum() == kernels
    assert ((found.ns > 0) == (found.number > 0)).all()


def test_a_gather_of_more_than_two_gigabytes_is_two_kernels() -> None:
    lookups = Lookups.of([_lookup(_table(), BAGS)])
    large = replace(lookups.pool.tables, bin_lookups=lookups.pool.tables.bin_lookups * 5_000_000 / 256, dim=np.array([128.0]))
    form = _form(BAGS)
    found = form.times(replace(lookups, pool=replace(lookups.pool, tables=large)))
    assert found.number[0].tolist()[:3] == [2.0, 0.0, 1.0]


def test_kernels_are_told_apart_and_an_unknown_one_is_said() -> None:
    adagrad = (
        "vectorized_gather",
        "Memcpy DtoD",
        "merge_sort",
        "CompactInit",
        "coalesceValuesKernel",
        "vectorized_gather",
        "x",
    )
    assert kinds_of(BagBackward, adagrad) == ["gather", "sort", "sort", "unique", "coalesce", "update", "update"]
    dense = ("Memset (Device)", "at::native::krn_partial_segment_offset<long>", "krn_partials_per_segment", "sum_and_scatter")
    assert kinds_of(DenseBackward, dense) == ["sort", "offsets", "unique", "scatter"]
    for form in (BagBackward, DenseBackward, RowsForward):
        with pytest.raises(InputError, match="'surprise' is of no kind"):
            kinds_of(form, ["surprise"])


@pytest.mark.parametrize("kind", MINE)
def test_no_rows_to_fit_are_said(kind: tuple[str, str]) -> None:
    rows = _rows(kind)
    with pytest.raises(InputError, match=f"no row of {kind[0]} {kind[1]} is of the split fit"):
        fit_form(kind, replace(rows, split=np.full(len(rows), "validation")), 0, reference_device())


# Fits.


@pytest.mark.parametrize("kind", MINE)
def test_a_law_of_made_up_rows_is_found_again(kind: tuple[str, str]) -> None:
    rows = _rows(kind)
    form = fit_form(kind, rows, 0, reference_device())
    fresh = [_lookup(_table(333, pooling, rows=7_000, dim=64), kind) for pooling in (2, 3, 6)]
    expected = [sum(_law(kind, one)) for one in fresh]
    assert form.times(Lookups.of(fresh)).time_ns == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("kind", MINE)
def test_a_saved_form_is_the_same_and_the_order_of_lookups_does_not_matter(kind: tuple[str, str]) -> None:
    rows, form = _rows(kind, parts=True), _form(kind, parts=True)
    again = load_form(kind, pack(form))
    found = form.times(rows.lookups)
    assert again.times(rows.lookups).ns.tolist() == found.ns.tolist()
    assert pickle.dumps(form)  # Fits run side by side in processes, which hand forms over.
    assert fit_form(kind, rows, 0, reference_device()).times(rows.lookups).ns.tolist() == found.ns.tolist()
    backwards = form.times(rows.lookups.take(np.arange(len(rows))[::-1]))
    assert backwards.time_ns[::-1] == pytest.approx(found.time_ns, rel=1e-12)
    assert found.inside.all()


@pytest.mark.parametrize("kind", MINE)
def test_parts_of_a_gpu_do_not_change_the_whole(kind: tuple[str, str]) -> None:
    rows = _rows(kind, parts=True)
    whole = rows.lookups.share == 1
    both, alone = _form(kind, parts=True), fit_form(kind, rows.take(whole), 0, reference_device())
    asked = rows.lookups.take(whole)
    assert both.times(asked).ns.tolist() == alone.times(asked).ns.tolist()
    parts = rows.take(~whole)
    assert np.median(np.abs(both.times(parts.lookups).time_ns / parts.time_ns - 1)) < 0.25


@pytest.mark.parametrize("kind", [kind for kind in MINE if FORMS[kind][0] != "bag_forward"])
def test_a_part_of_a_gpu_that_was_never_measured_takes_longer_but_not_more_than_its_share(kind: tuple[str, str]) -> None:
    form = _form(kind)
    table = _table(500, 5, dim=64)
    asked = [_lookup(table, kind), _lookup(table, kind, share=4, others="same")]
    whole, quarter = form.times(Lookups.of(asked)).time_ns
    assert 1.02 * whole < quarter < 4.4 * whole


@pytest.mark.parametrize("kind", MINE)
@pytest.mark.parametrize("count", [1, 5, 70])
def test_few_rows_and_odd_lookups_give_finite_times(kind: tuple[str, str], count: int) -> None:
    form = fit_form(kind, _rows(kind).take(np.arange(count)), 0, reference_device())
    empty = table_statistics(np.zeros(0, dtype=np.int64), np.zeros(65, dtype=np.int64), 1_000, 32)
    optimizers = ("none",) if kind[1] == "forward" else ("sgd", "adagrad")
    asked = Lookups.of(
        [
            _lookup(table, kind, optimizer=optimizer, dtype=dtype, share=share, others=others)
            for table in (empty, _table(1, 1, dim=4), _table(200, 9, hot=0.9))
            for optimizer in optimizers
            for dtype in ("float32", "bfloat16")
            for share, others in ((1, "none"), (8, "streaming"))
        ]
    )
    tables = asked.pool.tables
    absurd = replace(tables, bin_lookups=tables.bin_lookups * 1e6, bin_rows=tables.bin_rows * 1e4, dim=tables.dim * 64)
    for found in (form.times(asked), form.times(replace(asked, pool=replace(asked.pool, tables=absurd)))):
        assert np.isfinite(found.ns).all()
        assert (found.time_ns > 0).all()
    assert not form.times(replace(asked, pool=replace(asked.pool, tables=absurd))).inside[-1]


@pytest.mark.parametrize("kind", MINE)
def test_more_lookups_are_never_much_cheaper(kind: tuple[str, str]) -> None:
    form = _form(kind)
    asked = Lookups.of([_lookup(_table(256, pooling), kind) for pooling in (1, 2, 4, 8, 16, 32, 64, 128)])
    times = form.times(asked).time_ns
    assert (times[1:] > 0.9 * times[:-1]).all()
    assert times[-1] > 2 * times[0]


def test_updates_of_a_hot_row_wait_for_each_other_beyond_any_skew_that_was_fitted() -> None:
    form = _form(SPARSE)
    cool, hot = (
        form.times(Lookups.of([_lookup(_table(4_000, 20, dim=64, hot=share), SPARSE)])).time_ns[0] for share in (0.0, 0.9)
    )
    additions = 0.9 * 4_000 * 20
    assert hot > cool + 2.0 * additions
    assert hot < 10.0 * additions


def test_summing_a_hot_row_for_adagrad_is_a_walk() -> None:
    """Rows whose sum takes 140 ns for each lookup of the hottest row."""
    names = ("vectorized_gather", "merge_sort", "CompactInit", "coalesceValuesKernel", "indexFunc")
    tables = [_table(200, pooling, hot=hot) for pooling in (2, 5, 9, 20) for hot in (0.0, 0.02, 0.1, 0.3)]
    asked = [_lookup(table, BAGS, optimizer="adagrad") for table in tables]
    times = np.array([[3e3, 3e3, 3e3, 2e3 + 140.0 * table.hottest[0], 9e3] for table in tables])
    rows = _measured(asked, names, times)
    hotter = _table(300, 20, hot=0.8)
    found = fit_form(BAGS, rows, 0, reference_device()).times(Lookups.of([_lookup(hotter, BAGS, optimizer="adagrad")]))
    assert found.ns[0, list(found.parts).index("coalesce")] == pytest.approx(140.0 * hotter.hottest[0], rel=0.1)


def test_forward_of_uneven_bags_takes_longer_than_of_equal_ones() -> None:
    """Rows that take 100 ns for each lookup of the longest bag, at equal lookups."""
    random = np.random.default_rng(5)
    asked, times = [], []
    for place in range(120):
        lengths = random.integers(1, 60, 200) if place % 2 else np.full(200, int(random.integers(1, 60)))
        asked.append(_lookup(_of_lengths(lengths, 2_000, 32, seed=place), ("embedding_bag", "forward")))
        times.append(2e3 + 100.0 * lengths.max())
    form = fit_form(("embedding_bag", "forward"), _measured(asked, ("bag",), np.array(times)[:, None]), 0, reference_device())
    even, uneven = np.full(300, 20), np.full(300, 20)
    uneven[::3], uneven[1::3] = 1, 39
    fresh = [_lookup(_of_lengths(some, 2_000, 32), ("embedding_bag", "forward")) for some in (even, uneven)]
    assert form.times(Lookups.of(fresh)).time_ns == pytest.approx([4_000, 5_900], rel=0.15)
