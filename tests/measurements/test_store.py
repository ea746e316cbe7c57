from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._measurements.recipe import Recipe, spread_of
from steptime._measurements.sets import COMMON_COLUMNS, HOST
from steptime._measurements.store import Store, key_of, read, write_part
from steptime.errors import InputError
from steptime_lab.measurements.sets import SETS, measured_set
from steptime_lab.measurements.shipped import merge_rows


def a_recipe(run: str = "20260101T000000-abcd") -> Recipe:
    return Recipe(
        run=run, machine="m", device="NVIDIA X", gpus=1, driver="1", cuda_of_driver="13.0", power_limit_w=700.0, cpu="c",
        cpu_cores=16, os_kernel="6.1", python="3.12", torch="2.11", cuda="13.0", cudnn="9", nccl="2.28", triton="3.6",
        date="2026-01-01", command="steptime measure host -o DIR", steptime="0.1.0",
    )  # fmt: skip


def a_row(op: str = "aten::relu", times_ns: tuple[float, ...] = (3.0, 1.0, 2.0)) -> dict[str, Any]:
    return {
        "kind": "op", "op": op, "call": "", "source": "sweep", "phase": "forward", "profiler": "off", "launches": 1.0,
        "cores": 4, "share": 1, "times_ns": times_ns,
    }  # fmt: skip


def a_store(folder: Path, process: str = "p1", run: str = "20260101T000000-abcd") -> Store:
    return Store(folder, a_recipe(run), process)


def test_a_row_comes_back_with_its_recipe_median_and_spread(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.add(HOST, a_row())
    store.flush()
    (row,) = read(tmp_path, HOST).to_pylist()
    assert row["time_ns"] == 2.0
    assert row["times_ns"] == [3.0, 1.0, 2.0]
    assert row["spread"] == pytest.approx(0.8)
    assert {name: row[name] for name in a_recipe().to_dict()} == a_recipe().to_dict()


def test_what_is_flushed_survives_and_what_is_not_is_counted_as_waiting(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.add(HOST, a_row("a"))
    store.flush()
    store.add(HOST, a_row("b"))
    assert store.waiting() == 1
    assert read(tmp_path, HOST)["op"].to_pylist() == ["a"]


def test_a_later_run_knows_which_keys_are_done_and_how_often(tmp_path: Path) -> None:
    first = a_store(tmp_path)
    for op in ("a", "b", "a"):
        first.add(HOST, a_row(op))
    first.flush()
    done = a_store(tmp_path, "p2", "20260102T000000-ffff").done(HOST)
    key = key_of(HOST, a_row("a"))
    assert done[key] == 2
    assert len(done) == 2


def test_rows_of_a_trial_do_not_count_as_done_for_the_real_run(tmp_path: Path) -> None:
    trial = replace(a_recipe(), command="steptime measure host --small -o DIR")
    store = Store(tmp_path, trial, "p1")
    store.add(HOST, a_row())
    store.flush()
    assert not a_store(tmp_path, "p2").done(HOST)
    assert sum(Store(tmp_path, trial, "p3").done(HOST).values()) == 1


def test_a_half_written_part_is_not_read(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.add(HOST, a_row())
    store.flush()
    (tmp_path / "host" / "20260101T000000-abcd-p1-0001.unfinished").write_bytes(b"PAR1 torn")
    assert read(tmp_path, HOST).num_rows == 1


def test_a_damaged_part_is_named_in_one_line(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.add(HOST, a_row())
    store.flush()
    (path,) = (tmp_path / "host").glob("*.parquet")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=path.name) as caught:
        read(tmp_path, HOST)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", a_recipe().to_dict())
def test_rows_without_a_part_of_their_recipe_are_refused(tmp_path: Path, name: str) -> None:
    store = a_store(tmp_path)
    store.add(HOST, a_row())
    store.flush()
    (part,) = (tmp_path / "host").iterdir()
    table = pq.read_table(part)
    at = table.schema.get_field_index(name)
    write_part(part, table.set_column(at, table.schema.field(at), pa.nulls(len(table), table.schema.field(at).type)))
    with pytest.raises(InputError, match=f"column '{name}' of the set host has rows without a value"):
        read(tmp_path, HOST)


def test_a_part_of_an_unknown_version_is_refused(tmp_path: Path) -> None:
    table = HOST.schema.empty_table().replace_schema_metadata({b"steptime_measurements": b"99"})
    (tmp_path / "host").mkdir()
    pq.write_table(table, tmp_path / "host" / "x.parquet")
    with pytest.raises(InputError, match="version 99"):
        read(tmp_path, HOST)


def test_a_part_of_another_set_is_refused(tmp_path: Path) -> None:
    write_part(tmp_path / "host" / "x.parquet", pa.table({"key": ["a"]}))
    with pytest.raises(InputError, match="'process' is missing"):
        read(tmp_path, HOST)


def test_a_column_that_was_added_later_is_null_in_older_parts_and_stays_in_newer_ones(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.add(HOST, a_row("old"))
    store.flush()
    (path,) = (tmp_path / "host").glob("*.parquet")
    write_part(path, pq.read_table(path).drop_columns(["reference_cpu_ns"]))
    store.add(HOST, {**a_row("new"), "reference_cpu_ns": [5.0]})
    store.flush()
    rows = {row["op"]: row["reference_cpu_ns"] for row in read(tmp_path, HOST).to_pylist()}
    assert rows == {"old": None, "new": [5.0]}


def test_a_row_with_a_missing_or_an_unknown_column_is_a_mistake_of_ours(tmp_path: Path) -> None:
    row = a_row()
    del row["op"]
    with pytest.raises((ValueError, KeyError), match="op"):
        a_store(tmp_path).add(HOST, row)
    with pytest.raises(ValueError, match="colour"):
        a_store(tmp_path).add(HOST, {**a_row(), "colour": "red"})


def test_merging_keeps_every_row_once_however_often_it_is_merged(tmp_path: Path) -> None:
    for number in range(2):
        store = a_store(tmp_path / str(number), f"p{number}")
        store.add(HOST, a_row("a"))
        store.add(HOST, a_row(f"b{number}"))
        store.flush()
    target = tmp_path / "all" / "host.parquet"
    assert merge_rows([tmp_path / "0", tmp_path / "1"], "host", target) == 4
    assert merge_rows([tmp_path / "0", tmp_path / "1"], "host", target) == 4
    assert sorted(read(tmp_path / "all", HOST)["op"].to_pylist()) == ["a", "a", "b0", "b1"]


def test_the_clock_of_a_flush_goes_into_the_rows_that_waited_for_it(tmp_path: Path) -> None:
    readings = iter([1980.0, None])
    store = Store(tmp_path, a_recipe(), "p1", clock_mhz=lambda: next(readings))
    store.add(HOST, a_row("a"))
    store.flush()
    store.add(HOST, a_row("b"))
    store.flush()
    rows = {row["op"]: row["sm_clock_mhz"] for row in read(tmp_path, HOST).to_pylist()}
    assert rows == {"a": 1980.0, "b": None}


def test_the_key_depends_on_what_was_asked_and_on_nothing_else() -> None:
    host = HOST
    assert key_of(host, a_row()) == key_of(host, {**a_row(), "times_ns": [9.0], "source": "other"})
    assert key_of(host, a_row()) != key_of(host, {**a_row(), "profiler": "cuda"})


@pytest.mark.parametrize("name", sorted(SETS))
def test_every_set_names_its_case_among_its_columns_and_repeats_no_column(name: str) -> None:
    measured = measured_set(name)
    names = measured.schema.names
    assert len(names) == len(set(names))
    assert set(measured.case) <= set(names)
    assert {field.name for field in COMMON_COLUMNS} <= set(names)


def test_an_unknown_set_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match="kernels"):
        measured_set("kernel")


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=20))
def test_the_spread_does_not_depend_on_order_or_unit(times: list[float]) -> None:
    assert spread_of(times) >= 0
    assert spread_of(sorted(times)) == pytest.approx(spread_of(times[::-1]))
    assert spread_of([1000 * time for time in times]) == pytest.approx(spread_of(times))
