"""Groups of lookups beside the broad sweep: each varies what its name says and leaves the rest."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.lookups.caches import misses

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.conditions import recipe
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import Session
from steptime._lookups.estimated import expected_statistics
from steptime._measurements.store import read
from steptime_lab.measure.lookups import IMPLEMENTATIONS, names, work
from steptime_lab.measure.lookups.cases import LookupCase, cases_of
from steptime_lab.measure.lookups.groups import GROUPS, group_cases, small_group_cases
from steptime_lab.measure.lookups.prepared import Memory, PreparedLookup, limits_of
from steptime_lab.measurements.sets import LOOKUPS

WHOLE = limits_of(141 * 10**9, 1)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@cache
def whole(name: str, seed: int = 0) -> list[LookupCase]:
    return group_cases(name, seed, WHOLE)


def test_every_group_can_be_named() -> None:
    assert names(Options()) == (*IMPLEMENTATIONS, *GROUPS)


@pytest.mark.parametrize("name", sorted(GROUPS))
def test_a_group_fits_a_whole_device_and_has_no_case_twice(name: str) -> None:
    cases = whole(name)
    assert len(cases) > 50 and all(case.fits(WHOLE) for case in cases)
    assert len({case.key(1, "none") for case in cases}) == len(cases)
    assert name == "many_tables" or cases == group_cases(name, 0, WHOLE)
    assert not {case.generators for case in cases} & {case.generators for case in whole(name, 1)}


def test_no_group_repeats_a_case_of_the_broad_sweep() -> None:
    broad = {case.key(1, "none") for name in IMPLEMENTATIONS for case in cases_of(name, 100, 0, WHOLE)}
    assert not broad & {case.key(1, "none") for name in GROUPS for case in whole(name)}


def test_the_long_bag_is_as_long_and_where_it_is_asked_to_be() -> None:
    case = next(case for case in whole("long_bag") if case.batch == 256 and case.generators[0].long_bag_at == 1)
    lengths = np.diff(case.generators[0].bags(case.batch).offsets)
    assert lengths[-1] == case.generators[0].long_bag
    assert set(lengths[:-1]) == {8}


def test_the_hottest_rows_have_about_the_count_asked_for() -> None:
    for case in whole("hot_rows")[::37]:
        table = case.generators[0]
        found = np.sort(np.bincount(table.bags(case.batch).indices))[::-1]
        hot = int(table.shift)
        share = table.alpha / (1 + table.alpha)
        assert found[:hot].sum() == pytest.approx(share * case.lookups, rel=0.2, abs=15 * hot)


def test_orders_of_a_launch_have_the_same_tables() -> None:
    cases = whole("table_order")
    same: dict[tuple[object, ...], set[tuple[object, ...]]] = defaultdict(set)
    for case in cases:
        tables = tuple(zip(case.dims, case.generators, strict=True))
        same[case.batch, tuple(sorted(tables, key=repr))].add(tables)
    assert [len(orders) for orders in same.values()] == [5] * 40


def forward_s(case: LookupCase) -> float:
    """A lower bound of the forward pass by bytes, with rates and cache sizes fitted to the broad sweep on an H200."""
    table, tables = case.generators[0], len(case.dims)
    row_bytes = 4 * case.dims[0]
    whole = expected_statistics(table, case.batch).footprint
    on_one_sm = expected_statistics(table, case.batch // 132).footprint
    every = whole.lookups * row_bytes * tables
    beyond_first = 132 * float(misses(on_one_sm, 200e3 / row_bytes)) * row_bytes * tables
    beyond_second = float(misses(whole, 30e6 / tables / row_bytes)) * row_bytes * tables
    bags = 0.9e-6 * table.pooling  # one lookup after the other
    return bags + max(every / 14.5e12, beyond_first / 9.4e12, (beyond_second + 4 * case.outputs) / 3.8e12)


def test_wide_series_should_differ_by_far_more_than_twice() -> None:
    cases = whole("wide_series")
    assert len({case.series for case in cases}) == 52
    for first in range(0, len(cases), 6 * 5):
        series = cases[first : first + 6]
        assert len({case.series for case in series}) == 1
        assert len({(case.batch, case.dims, tuple(case.rows)) for case in series}) == 1
        times = [forward_s(case) for case in (series[0], series[-1])]
        assert times[0] / times[1] > 2.5


def test_sixteen_bit_rows_and_many_tables_are_what_they_say() -> None:
    assert {case.dtype for case in whole("half_rows")} == {"float16", "bfloat16"}
    for case in whole("many_tables"):
        assert 21 <= len(case.dims) <= 60 and 256 <= case.batch <= 1024
        assert {table.lengths for table in case.generators} == {"geometric"}


def test_dense_and_sparse_gradients_update_alike() -> None:
    case = next(c for c in small_group_cases("module_gradients", 0) if c.implementation == "embedding_dense")
    case = replace(case, optimizer="sgd", dtype="float32")
    after = []
    for name in ("embedding_dense", "embedding_sparse"):
        torch.manual_seed(0)
        memory = Memory(torch.device("cpu"), 1)
        prepared = PreparedLookup(replace(case, implementation=name), memory)
        out = prepared.forward()
        assert out.shape == (prepared.statistics[0].lookups, case.dims[0])
        prepared.backward(out)
        after.append(memory._rows[torch.float32])
    torch.testing.assert_close(*after)


def test_a_bag_with_dense_gradients_looks_up_and_updates_as_with_sparse_ones() -> None:
    table = small_group_cases("hot_rows", 0)[0].generators[0]
    after = []
    for name in ("embedding_bag", "embedding_bag_dense"):
        torch.manual_seed(0)
        memory = Memory(torch.device("cpu"), 1)
        prepared = PreparedLookup(LookupCase(name, "sgd", "float32", False, 16, (8,), (table,)), memory)
        out = prepared.forward()
        prepared.backward(out)
        after.append((out.detach(), memory._rows[torch.float32]))
    torch.testing.assert_close(*after)


@pytest.mark.slow
def test_groups_named_are_measured_and_nothing_else(tmp_path: Path) -> None:
    started = Session.start(tmp_path, recipe(["test"], smi=lambda _: "", need_gpu=False), 5.0)
    asked = ["long_bag", "module_gradients"]
    values = json.loads(json.dumps(started.to_plan(seed=0, small=True, only=asked)))
    mine = Session.from_plan(values, 0)
    work(Group(0, 1, "cpu", 1), mine, values)
    mine.store.flush()
    cold = [row for row in read(tmp_path, LOOKUPS).to_pylist() if row["cache"] == "cold"]
    assert len(cold) == 2 * sum(len(small_group_cases(name, 0)) for name in asked)
    assert {"embedding_bag_dense", "embedding_dense", "embedding_sparse"} <= {row["implementation"] for row in cold}
