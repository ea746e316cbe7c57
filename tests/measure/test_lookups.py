from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.conditions import recipe
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import Budget, Session, Setting
from steptime._lookups.generators import Generator
from steptime._lookups.table import table_statistics
from steptime._measurements.store import read
from steptime_lab.measure.device_profile import DeviceWork
from steptime_lab.measure.lookups import run, work
from steptime_lab.measure.lookups.bench import LookupBench, row_of
from steptime_lab.measure.lookups.cases import MOST_TABLES, LookupCase, LookupLimits, cases_of, shuffled, small_cases
from steptime_lab.measure.lookups.prepared import Memory, PreparedLookup, disagreement, limits_of
from steptime_lab.measurements.sets import LOOKUPS

CPU = torch.device("cpu")
WHOLE = limits_of(141 * 10**9, 1)
# torch says so once per process when Adagrad makes a sparse gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def session(folder: Path, minutes: float = 5.0) -> Session:
    return Session.start(folder, recipe(["test"], smi=lambda _: "", need_gpu=False), minutes)


def plan(folder: Path, **more: Any) -> tuple[Session, dict[str, Any]]:
    started = session(folder)
    asked = {"seed": 0, "small": True, "only": ["embedding_bag", "table_batched"], **more}
    values = json.loads(json.dumps(started.to_plan(**asked)))
    return Session.from_plan(values, 0), values


def small(name: str) -> LookupCase:
    return next(case for case in small_cases(0) if case.implementation == name)


@pytest.mark.parametrize("name", ["table_batched", "embedding_bag"])
def test_the_same_seed_gives_the_same_lookups_and_another_seed_others(name: str) -> None:
    first = cases_of(name, 40, 0, WHOLE)
    assert cases_of(name, 40, 0, WHOLE) == first
    assert cases_of(name, 30, 0, WHOLE) == first[:30]
    assert not set(cases_of(name, 40, 1, WHOLE)) & set(first)


@pytest.mark.parametrize("limits", [WHOLE, limits_of(141 * 10**9, 8), LookupLimits(1 << 20, 5000, 1 << 20, 1 << 20, rows=100)])
def test_lookups_stay_within_the_tables_and_outputs_of_their_limits(limits: LookupLimits) -> None:
    for case in cases_of("table_batched", 60, 3, limits):
        assert case.elements <= limits.elements
        assert max(case.rows) <= limits.rows
        assert case.batch * sum(case.dims) <= limits.outputs


def test_the_sweep_covers_many_tables_all_dims_and_every_kind_of_skew() -> None:
    cases = cases_of("table_batched", 300, 0, WHOLE)
    counts = [len(case.dims) for case in cases]
    assert min(counts) == 1 and max(counts) > 0.9 * MOST_TABLES
    assert {16, 32, 64, 128, 256} <= {dim for case in cases for dim in case.dims}
    tables = [generator for case in cases for generator in case.generators]
    assert {generator.kind for generator in tables} == {"uniform", "power", "zipf"}
    assert {generator.lengths for generator in tables} == {"fixed", "uniform", "geometric"}
    assert any(generator.pooling == 0 for generator in tables) and any(generator.locality > 0 for generator in tables)
    assert {case.dtype for case in cases} == {"float32", "float16", "bfloat16"}
    assert {case.optimizer for case in cases} == {"sgd", "rowwise_adagrad"}


def test_cases_of_a_series_differ_in_nothing_but_the_rows_looked_up() -> None:
    every = [case for case in cases_of("table_batched", 200, 0, WHOLE) if case.series]
    name = every[0].series
    series = [case for case in every if case.series == name]
    assert len(series) == 6
    assert len({(case.batch, case.dims, tuple(case.rows), case.dtype, case.optimizer, case.weighted) for case in series}) == 1
    assert len({tuple((g.pooling, g.lengths, g.seed) for g in case.generators) for case in series}) == 1
    assert len({case.generators for case in series}) == 6


def test_the_order_depends_on_the_seed_and_not_on_the_order_before() -> None:
    cases = cases_of("embedding_bag", 30, 0, WHOLE)
    assert shuffled(cases, 1) == shuffled(cases[::-1], 1) != shuffled(cases, 2)


def test_statistics_of_a_prepared_lookup_are_those_of_its_generators() -> None:
    prepared = PreparedLookup(small("table_batched"), Memory(CPU, 1))
    for generator, found in zip(prepared.case.generators, prepared.statistics, strict=True):
        bags = generator.bags(prepared.case.batch)
        assert found == table_statistics(bags.indices, bags.offsets, generator.rows).counted


def test_both_implementations_look_up_and_update_the_same() -> None:
    table = Generator(rows=50, pooling=3.0, kind="zipf", alpha=1.2, seed=4)
    after = []
    for name in ("table_batched", "embedding_bag"):
        torch.manual_seed(0)
        memory = Memory(CPU, 1)
        prepared = PreparedLookup(LookupCase(name, "sgd", "float32", False, 32, (8,), (table,)), memory)
        out = prepared.forward()
        prepared.backward(out)
        after.append((out.detach(), memory._rows[torch.float32][:400]))
    torch.testing.assert_close(after[0][0], after[1][0])
    torch.testing.assert_close(after[0][1], after[1][1])


def test_a_row_has_the_median_of_every_kernel_and_the_sum_of_each_repeat() -> None:
    prepared = PreparedLookup(small("embedding_bag"), Memory(CPU, 1))
    repeats = [(DeviceWork("sort", start, 10 + start), DeviceWork("update", start + 40, 5)) for start in (0, 100, 200)]
    row = row_of(prepared, "backward", "cold", repeats, Setting())
    assert row is not None
    assert row["kernel_names"] == ["sort", "update"] and row["kernel_ns"] == [110, 5]
    assert row["times_ns"] == [15, 115, 215] and row["span_ns"] == 110
    assert row_of(prepared, "forward", "cold", [(), ()], Setting()) is None


def test_what_was_measured_is_not_asked_again(tmp_path: Path) -> None:
    for _ in range(2):
        mine, values = plan(tmp_path)
        work(Group(0, 1, "cpu", 1), mine, values)
        mine.store.flush()
    rows = read(tmp_path, LOOKUPS)
    keys = rows["key"].to_pylist()
    assert len(keys) == len(set(keys))
    cold = [row for row in rows.to_pylist() if row["cache"] == "cold"]
    assert len(cold) == 2 * len(small_cases(0))
    assert {row["implementation"] for row in cold} == {"table_batched", "embedding_bag"}
    assert {row["direction"] for row in cold} == {"forward", "backward"}
    assert {row["optimizer"] for row in cold} == {"none", "sgd", "adagrad", "rowwise_adagrad"}
    assert any(row["cache"] == "warm" for row in rows.to_pylist())
    for row in cold:
        assert all(len(row[name]) == row["tables"] for name in ("rows", "dims", "pooling", "unique", "reuse", "generators"))
        assert all(len(bins) == 17 for bins in row["reuse"])
        assert Generator.from_dict(json.loads(row["generators"][0])).rows == row["rows"][0]


def test_a_lookup_that_fails_is_counted_and_the_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = session(tmp_path)
    progress = mine.progress("lookups", 2)
    bench = LookupBench(Group(0, 1, "cpu", 1), mine, Memory(CPU, 1), progress)
    bad, good = small_cases(0)[0], small("embedding_bag")
    backward = PreparedLookup.backward

    def failing(self: PreparedLookup, out: torch.Tensor) -> None:
        if self.case == bad:
            raise RuntimeError("no memory for it")
        backward(self, out)

    monkeypatch.setattr(PreparedLookup, "backward", failing)
    rows = bench.measure([bad, good], Setting())
    assert {row["implementation"] for row in rows} == {"embedding_bag"}
    assert progress.skipped == {"failed": 1} and progress.done == 2


def test_the_proof_finds_kernels_that_forget_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(CPU, 1)
    assert disagreement(small_cases(0), memory) == ""
    from steptime_lab.workloads.table_batched.lookup import TableBatchedLookup

    monkeypatch.setattr(TableBatchedLookup, "update", lambda *_: None)
    assert disagreement(small_cases(0), memory).startswith("the updated rows of")


def test_kernels_that_do_not_run_are_left_out_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from steptime_lab.workloads.table_batched.lookup import TableBatchedLookup

    def broken(*_: object) -> None:
        raise ValueError("no compiler here")

    monkeypatch.setattr(TableBatchedLookup, "look_up", broken)
    mine, values = plan(tmp_path)
    work(Group(0, 1, "cpu", 1), mine, values)
    mine.store.flush()
    assert set(read(tmp_path, LOOKUPS)["implementation"].to_pylist()) == {"embedding_bag"}
    assert "do not run here and are not measured: no compiler here" in capsys.readouterr().err


def test_no_time_left_measures_nothing_and_says_so(tmp_path: Path) -> None:
    started = Session(tmp_path, session(tmp_path).recipe, Budget.of_minutes(0), session(tmp_path).store)
    run(started, Options(device="cpu", small=True))
    assert read(tmp_path, LOOKUPS).num_rows == 0


@pytest.mark.slow
def test_parts_of_a_device_are_measured_beside_the_others(tmp_path: Path) -> None:
    run(session(tmp_path), Options(ranks=(2,), share_gpu=True, device="cpu", small=True))
    rows = read(tmp_path, LOOKUPS).to_pylist()
    assert {row["share"] for row in rows} == {2} and {row["rank"] for row in rows} == {0}
    assert {row["others"] for row in rows} == {"same", "idle", "streaming"}
    assert not list(tmp_path.glob("*.done"))
