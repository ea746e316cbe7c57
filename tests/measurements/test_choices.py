from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.measurements.test_store import a_recipe

from steptime._calibrate.collectives.cases import CollectiveCase, Place
from steptime._measurements.sets import COLLECTIVES
from steptime._measurements.store import Store, read
from steptime.errors import InputError
from steptime_lab.measure.tables import merge
from steptime_lab.measurements.collectives import (
    FOLDER_NAME,
    Asked,
    Choice,
    choices_in,
    choices_of,
    with_choices,
    write_choices,
)

RING, TREE = Choice("RING", "SIMPLE", 2), Choice("TREE", "LL", None)
UNKNOWN = ("", "", None)


def measured(folder: Path, *cases: CollectiveCase, place: Place | None = None, **more: Any) -> Path:
    """A folder with a row of each case."""
    store = Store(folder, a_recipe(), "p1")
    for case in cases:
        row = {
            "waiting_ns": None,
            "beside_ns": None,
            "beside_alone_ns": None,
            "algorithm": "",
            "protocol": "",
            "channels": None,
        }
        where = (place or Place(4, "loopback", 4)).columns()
        store.add(COLLECTIVES, {**where, **case.columns(), "calls": 1, "times_ns": [1.0], **row, **more})
    store.flush()
    return folder


def asked(size: int, collective: str = "all_reduce", ranks: int = 4, fabric: str = "loopback", nccl: str = "2.28") -> Asked:
    return Asked(nccl, ranks, fabric, collective, size)


def chosen(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(table[name].to_pylist() for name in Choice._fields), strict=True))


def test_a_choice_is_joined_where_all_that_was_asked_is_the_same(tmp_path: Path) -> None:
    folder = measured(
        tmp_path, CollectiveCase("all_reduce", 64), CollectiveCase("all_reduce", 128), CollectiveCase("broadcast", 64)
    )
    table = read(folder, COLLECTIVES)
    assert chosen(with_choices(table, {asked(64): RING, asked(64, "broadcast"): TREE})) == [RING, UNKNOWN, TREE]
    for other in (asked(64, ranks=2), asked(64, fabric="default"), asked(64, nccl="2.30"), asked(65)):
        assert chosen(with_choices(table, {other: RING})) == [UNKNOWN] * 3
    assert with_choices(table, {asked(64): RING}).schema == table.schema


def test_uneven_splits_get_no_choice_and_known_ones_stay(tmp_path: Path) -> None:
    measured(tmp_path / "a", CollectiveCase("all_to_all", 64, splits=(1, 2, 3, 4)))
    assert chosen(with_choices(read(tmp_path / "a", COLLECTIVES), {asked(64, "all_to_all"): RING})) == [UNKNOWN]
    measured(tmp_path / "b", CollectiveCase("all_reduce", 64), algorithm="TREE", protocol="LL")
    assert chosen(with_choices(read(tmp_path / "b", COLLECTIVES), {asked(64): RING})) == [TREE]


def test_what_is_written_is_read_back_and_what_is_not_a_list_of_choices_is_named(tmp_path: Path) -> None:
    file = tmp_path / FOLDER_NAME / "x.json"
    write_choices(file, {asked(64): RING, asked(8): TREE}, nccl="2.28", ranks=4, fabric="loopback")
    assert choices_in(file) == choices_of([tmp_path, tmp_path / "none"]) == {asked(64): RING, asked(8): TREE}
    file.write_text('{"choices": 3}')
    with pytest.raises(InputError, match=r"x\.json"):
        choices_in(file)


def test_merging_joins_choices_onto_rows_that_were_merged_before(tmp_path: Path) -> None:
    rows, later, out = measured(tmp_path / "rows", CollectiveCase("all_reduce", 64)), tmp_path / "later", tmp_path / "out"
    merge([str(rows), "-o", str(out)])
    assert chosen(read(out, COLLECTIVES)) == [UNKNOWN]
    write_choices(later / FOLDER_NAME / "x.json", {asked(64): RING}, nccl="2.28", ranks=4, fabric="loopback")
    merge([str(later), "-o", str(out)])
    merge([str(rows), "-o", str(out)])
    assert chosen(read(out, COLLECTIVES)) == [RING]
