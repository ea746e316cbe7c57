"""The table-batched backward pass: its kernels counted as they are launched, its runs as they are walked, its times fitted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from steptime._hardware.device import reference_device
from steptime._lookups.generators import Generator
from steptime._lookups.table import TableStatistics, table_statistics
from steptime._models.engine.stored import pack, unpack
from steptime._models.lookups.caches import reference_lookups
from steptime._models.lookups.forms.backward_sizes import COUNTED, BackwardSizes
from steptime._models.lookups.forms.backward_sizes import sizes_of as sizes_on
from steptime._models.lookups.forms.batched_backward import STAGES, BatchedBackward, numbers, terms_of
from steptime._models.lookups.question import Lookup, Lookups
from steptime.errors import InputError
from steptime_lab.fit.lookups import batched_backward
from steptime_lab.fit.lookups.batched_backward import measured_stages, stage_of
from steptime_lab.measurements.lookups import MeasuredLookups

SORT = "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSort"
ONESWEEP, HISTOGRAM, SUMS = (f"{SORT}{name}<Policy>" for name in ("OnesweepKernel", "HistogramKernel", "ExclusiveSumKernel"))
COPY, SET = "Memcpy DtoD (Device -> Device)", "Memset (Device)"
FILL = "at::native::(anonymous namespace)::fill_reverse_indices_kernel(long*, int)"
ARANGE = "void (anonymous namespace)::elementwise_kernel_with_index<int, arange>"
SMALL = "void at::native::radixSortKVInPlace<-2, -1, 32, 128>"
GATHER = "void at::native::_scatter_gather_elementwise_kernel<128, 8>"
UPDATE = "table_batched_update"


def sizes_of(lookups: Lookups) -> BackwardSizes:
    return sizes_on(lookups, reference_lookups())


def skewed(alpha: float) -> dict[str, Any]:
    return {"kind": "zipf", "alpha": alpha} if alpha else {}


@cache
def table(pooling: float = 20, rows: int = 5_000, batch: int = 300, dim: int = 64, alpha: float = 0.0) -> TableStatistics:
    bags = Generator(rows=rows, pooling=pooling, lengths="geometric", **skewed(alpha)).bags(batch)
    return table_statistics(bags.indices, bags.offsets, rows, dim, "users")


@cache
def empty(batch: int = 300, dim: int = 64) -> TableStatistics:
    return table_statistics(np.zeros(0, dtype=np.int64), np.zeros(batch + 1, dtype=np.int64), 1_000, dim, "nobody")


def lookup(*tables: TableStatistics, **more: Any) -> Lookup:
    return Lookup("table_batched", "backward", tables, **{"optimizer": "sgd", **more})


def launched(count: int, weighted: bool) -> list[str]:
    """Names of kernels as `steptime_lab.workloads.table_batched.launch` and the library's sort launch them."""
    small = [COPY, ARANGE, COPY, COPY, SMALL]
    large = [COPY, FILL, SET, SET, HISTOGRAM, SUMS, *[SET, ONESWEEP] * 4]
    names = ["table_batched_linearize", *(small if count <= 4096 else large), *[GATHER] * (1 + weighted)]
    while True:
        names.append(UPDATE)
        chunks = -(-count // 32)
        if chunks == 1:
            return names
        count = 2 * chunks


def count_of(question: Lookup) -> int:
    return sum(one.counted.lookups for one in question.tables)


QUESTIONS = [
    lookup(table(1, batch=20)),
    lookup(table(1, batch=33)),
    lookup(table(10), weighted=True),
    lookup(table(20), table(5, dim=128), empty()),
    lookup(*[table(200, rows=900 + 10 * place) for place in range(12)], optimizer="rowwise_adagrad"),
]


@pytest.mark.parametrize("question", QUESTIONS)
def test_there_are_as_many_kernels_of_each_part_as_are_launched(question: Lookup) -> None:
    names = launched(count_of(question), question.weighted)
    parts = [stage_of(name) for name in names]
    expected = [float(parts.count(name)) for name in STAGES]
    expected[-1] = expected[-2] - 1  # the update's first launch is a part, all others are the next one
    expected[-2] = 1.0
    assert numbers(sizes_of(Lookups.of([question])))[0].tolist() == expected


def test_keys_of_many_rows_are_sorted_in_twice_the_passes() -> None:
    sizes = sizes_of(Lookups.of([lookup(table(30))]))
    more = numbers(replace(sizes, quads=np.array([2.0**31]))) - numbers(sizes)
    assert more[0].tolist() == [0, 4, 4, 0, 0, 0]


def test_measured_kernels_add_up_by_part() -> None:
    names = launched(6_000, weighted=True)
    times = [float(2**place) for place in range(len(names))]
    measured = with_kernels([lookup(table(20), weighted=True)], [names], [times])
    found = dict(zip(STAGES, measured_stages(measured)[0].tolist(), strict=True))
    assert sum(found.values()) == sum(times)
    assert found["linearize"] == times[0]
    assert found["update"] == times[names.index(UPDATE)]
    assert found["update_levels"] == sum(times[names.index(UPDATE) + 1 :])
    assert found["sort_passes"] == sum(time for name, time in zip(names, times, strict=True) if name == ONESWEEP)


def walked(keys: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Of sorted keys, by level: entries that hold something and runs that end there, walked chunk by chunk."""
    found = []
    entries, holding = [int(key) for key in keys], len(keys)
    for _ in range(COUNTED):
        above: list[int] = []
        ended = above_holding = 0
        for start in range(0, len(entries), 32):
            chunk = entries[start : start + 32]
            before = entries[start - 1] if start else -1
            after = entries[start + 32] if start + 32 < len(entries) else -1
            runs = list(dict.fromkeys(key for key in chunk if key >= 0))
            enters, leaves = chunk[0] == before and chunk[0] >= 0, chunk[-1] == after and chunk[-1] >= 0
            ended += len([key for key in runs if not ((enters and key == chunk[0]) or (leaves and key == chunk[-1]))])
            through = enters and leaves and len(runs) == 1
            above += [chunk[0] if enters else -1, chunk[-1] if leaves else -1]
            above_holding += int(enters) + int(leaves and not through)
        found.append((holding, ended))
        entries, holding = above, above_holding
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.9, 1.3])
def test_runs_that_end_and_go_on_are_those_of_the_walk(alpha: float) -> None:
    bags = Generator(rows=3_000, pooling=40, **skewed(alpha)).bags(500)
    sizes = sizes_of(Lookups.of([lookup(table_statistics(bags.indices, bags.offsets, 3_000, 64, "users"))]))
    for level, (entries, ended) in enumerate(walked(np.sort(bags.indices))):
        assert sizes.entries[0, level] == pytest.approx(entries, rel=0.15, abs=12)
        assert sizes.ended[0, level] == pytest.approx(ended, rel=0.1, abs=12)


def test_steps_of_the_first_kernel_are_those_of_the_longest_of_each_32_bags() -> None:
    bags = Generator(rows=1_000, pooling=40, lengths="geometric").bags(32 * 100)
    sizes = sizes_of(Lookups.of([lookup(table_statistics(bags.indices, bags.offsets, 1_000, 64, "users"))]))
    steps = np.ceil(np.diff(bags.offsets) / 16).reshape(-1, 32).max(axis=1)
    assert sizes.steps[0] == pytest.approx(steps.sum(), rel=0.1)
    assert sizes.longest[0] == steps.max()


def with_kernels(questions: list[Lookup], names: list[list[str]], times: list[list[float]]) -> MeasuredLookups:
    total = np.array([sum(one) for one in times])
    text = np.full(len(questions), "fit")
    return MeasuredLookups(
        Lookups.of(questions),
        total,
        np.full(len(questions), 0.01),
        text,
        np.full(len(questions), ""),
        [tuple(one) for one in names],
        [tuple(one) for one in times],
        [(one, one) for one in total.tolist()],
    )


def toy(question: Lookup) -> tuple[list[str], list[float]]:
    """Kernels with times of a device that one can write down: so much for a launch, so much for each lookup and element."""
    count = count_of(question)
    names = launched(count, question.weighted)
    elements = sum(one.counted.lookups * one.dim for one in question.tables)
    slower = 1 + (question.share - 1) * (1.2 if question.others == "same" else 0.9)
    work = {UPDATE: elements / 40, ONESWEEP: count / 50, GATHER: count / 80}
    times, first = [], True
    for name in names:
        own = work.get(name, count / 300 if name != SET else 0.0) * (1.0 if name != UPDATE or first else 0.0)
        times.append((900.0 + 9_000 * (name == UPDATE)) + own * slower)
        first = first and name != UPDATE
    return names, times


def drawn(number: int, seed: int) -> list[Lookup]:
    random = np.random.default_rng(seed)
    pool = [
        table(pooling, rows, 300, dim, alpha)
        for pooling in (1, 4, 20, 90)
        for rows, alpha in ((300, 0.0), (20_000, 0.0), (20_000, 1.2))
        for dim in (16, 64, 128)
    ]
    questions = []
    for place in range(number):
        tables = [pool[int(one)] for one in random.integers(0, len(pool), random.integers(1, 24))]
        share = int(random.choice([1, 1, 2, 4]))
        others = "none" if share == 1 else str(random.choice(["idle", "same"]))
        optimizer = ("sgd", "rowwise_adagrad")[place % 2]
        questions.append(
            lookup(*tables, optimizer=optimizer, weighted=place % 5 == 0, warm=place % 3 == 0, share=share, others=others)
        )
    return questions


def measured_of(questions: list[Lookup]) -> MeasuredLookups:
    kernels = [toy(one) for one in questions]
    return with_kernels(questions, [names for names, _ in kernels], [times for _, times in kernels])


@pytest.fixture(scope="module")
def form() -> BatchedBackward:
    return batched_backward.fit(measured_of(drawn(500, seed=1)), 0, reference_device())


def test_what_was_not_fitted_is_predicted_by_part_and_in_all(form: BatchedBackward) -> None:
    other = measured_of(drawn(100, seed=2))
    found = form.times(other.lookups)
    off = np.abs(found.time_ns / other.time_ns - 1)
    whole = other.lookups.share == 1
    assert np.median(off[whole]) < 0.01
    assert np.quantile(off[whole], 0.9) < 0.03
    assert np.median(off[~whole]) < 0.03
    parts = np.abs(found.ns / np.maximum(measured_stages(other), 1.0) - 1)[whole]
    assert np.all(np.median(parts, axis=0) < 0.02)
    assert found.number.sum(axis=1).tolist() == [len(names) for names in other.kernel_names]
    assert found.inside.all()


def test_the_order_of_tables_does_not_matter(form: BatchedBackward) -> None:
    questions = drawn(30, seed=3)
    turned = [replace(one, tables=one.tables[::-1]) for one in questions]
    assert form.times(Lookups.of(turned)).ns == pytest.approx(form.times(Lookups.of(questions)).ns, rel=1e-9)


def test_what_is_kept_answers_the_same(form: BatchedBackward) -> None:
    lookups = Lookups.of(drawn(30, seed=4))
    kept = unpack(BatchedBackward, pack(form))
    assert kept.times(lookups).ns.tolist() == form.times(lookups).ns.tolist()


def test_tables_that_nobody_looks_up_cost_little_and_nothing_at_all_is_no_launch(
    form: BatchedBackward,
) -> None:
    questions = [lookup(table(20)), lookup(table(20), empty()), lookup(empty(), empty())]
    found = form.times(Lookups.of(questions))
    assert found.time_ns[1] == pytest.approx(found.time_ns[0], rel=0.2)
    assert found.number[2].tolist() == [0.0] * len(STAGES)
    assert 0 < found.time_ns[2] < found.time_ns[0]
    assert not found.inside[2]


def test_more_lookups_are_never_much_cheaper_and_absurdly_many_still_have_a_time(
    form: BatchedBackward,
) -> None:
    lookups = Lookups.of([one for one in drawn(40, seed=5) if one.share == 1])
    tables = lookups.pool.tables
    found = form.times(lookups)
    for factor in (1.5, 3.0, 10.0, 1e3, 1e6, 1e12):
        more = replace(
            tables, batch=tables.batch * factor, bin_rows=tables.bin_rows * factor, bin_lookups=tables.bin_lookups * factor
        )
        before, found = found, form.times(replace(lookups, pool=replace(lookups.pool, tables=more)))
        assert np.isfinite(found.ns).all()
        assert np.all(found.time_ns > 0.95 * before.time_ns)
    assert not found.inside.any()


def test_a_part_of_a_gpu_takes_longer_also_where_no_such_row_was_fitted(form: BatchedBackward) -> None:
    whole = [one for one in drawn(300, seed=6) if one.share == 1]
    alone = batched_backward.fit(measured_of(whole), 0, reference_device())
    for model in (form, unpack(BatchedBackward, pack(alone))):
        times = [
            model.times(Lookups.of([replace(one, share=share, others="idle") for one in whole[:20]])).time_ns
            for share in (2, 4, 8)
        ]
        assert np.all(times[0] < times[1])
        assert np.all(times[1] < times[2])
        assert np.all(model.times(Lookups.of(whole[:20])).time_ns < times[0])


def test_fewer_multiprocessors_make_waves_of_what_ran_at_once() -> None:
    sizes = sizes_of(Lookups.of([lookup(table(90, batch=1_500, dim=64))]))
    assert 132 * 12 / 4 < sizes.programs[0, 0] < 132 * 12
    update = terms_of(sizes, np.array([4.0]))[STAGES.index("update")]
    assert np.all(update.reduced >= 4 * update.divided)
    assert np.any(update.reduced > 4 * update.divided)
    whole = terms_of(sizes, np.array([1.0]))[STAGES.index("update")]
    assert whole.reduced.tolist() == whole.divided.tolist() == update.divided.tolist()


def test_an_optimizer_and_a_sort_that_were_not_fitted_still_have_a_time() -> None:
    seen = [one for one in drawn(200, seed=8) if one.optimizer == "sgd" and count_of(one) > 4096]
    model = batched_backward.fit(measured_of(seen), 0, reference_device())
    plain = model.times(Lookups.of(seen[:20])).ns
    other = model.times(Lookups.of([replace(one, optimizer="rowwise_adagrad") for one in seen[:20]])).ns
    assert np.all(other.sum(axis=1) > 0.8 * plain.sum(axis=1))
    assert np.all(model.times(Lookups.of([lookup(table(4))])).ns > 0)


def test_rows_of_other_splits_are_not_fitted() -> None:
    measured = measured_of(drawn(120, seed=7))
    hidden = np.arange(120) % 4 == 0
    split = np.where(hidden, "validation", "fit")
    wrong = [tuple(1e9 for _ in times) if mask else times for mask, times in zip(hidden, measured.kernel_ns, strict=True)]
    first = pack(batched_backward.fit(replace(measured, split=split), 3, reference_device()))
    second = pack(batched_backward.fit(replace(measured, split=split, kernel_ns=wrong), 3, reference_device()))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_bad_input_is_one_line(form: BatchedBackward) -> None:
    with pytest.raises(InputError, match="optimizer is 'adagrad'; expected sgd or rowwise_adagrad"):
        form.times(Lookups.of([lookup(table(20)), lookup(table(20), optimizer="adagrad")]))
    with pytest.raises(InputError, match="no row of the split fit"):
        batched_backward.fit(measured_of([lookup(table(20), share=2, others="idle")]), 0, reference_device())
