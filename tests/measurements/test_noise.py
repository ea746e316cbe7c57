from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from tests.measurements.test_store import a_recipe, a_row

from steptime._measurements.recipe import Recipe
from steptime._measurements.sets import HOST
from steptime._measurements.store import Store, read
from steptime_lab.measurements.noise import noise_by, noise_of


def measured(folder: Path, rows: list[tuple[str, str, str, tuple[float, ...]]]) -> pa.Table:
    """Rows of (machine, process, op, times)."""
    for number, (machine, process, op, times) in enumerate(rows):
        recipe = Recipe.from_dict({**a_recipe(run=f"run{number:02d}").to_dict(), "machine": machine})
        store = Store(folder, recipe, process)
        store.add(HOST, a_row(op, times))
        store.flush()
    return read(folder, HOST)


def test_the_three_distances_are_kept_apart(tmp_path: Path) -> None:
    noise = noise_of(HOST, measured(tmp_path, [
        ("a", "p1", "x", (100.0, 100.0, 100.0)),
        ("a", "p2", "x", (110.0, 110.0, 110.0)),
        ("b", "p1", "x", (210.0, 210.0, 210.0)),
    ]))  # fmt: skip
    assert noise.rows == 3
    assert noise.keys == 1
    assert noise.within is not None
    assert noise.within.median == 0
    assert noise.between_processes is not None
    assert noise.between_processes.keys == 1
    assert noise.between_processes.median == pytest.approx(10 / 105)
    assert noise.between_machines is not None
    # The medians of the machines, 105 and 210.
    assert noise.between_machines.median == pytest.approx(105 / 157.5)


def test_what_was_never_repeated_has_no_floor(tmp_path: Path) -> None:
    noise = noise_of(HOST, measured(tmp_path, [("a", "p1", "x", (100.0,)), ("a", "p1", "y", (5.0,))]))
    assert (noise.within, noise.between_processes, noise.between_machines) == (None, None, None)


def test_two_runs_in_processes_of_one_number_are_two_processes(tmp_path: Path) -> None:
    noise = noise_of(HOST, measured(tmp_path, [("a", "p1", "x", (100.0,)), ("a", "p1", "x", (120.0,))]))
    assert noise.between_processes is not None
    assert noise.between_processes.median == pytest.approx(20 / 110)


def test_a_part_of_a_set_has_a_floor_of_its_own(tmp_path: Path) -> None:
    table = measured(tmp_path, [("a", "p1", "x", (100.0, 200.0)), ("a", "p1", "y", (5.0, 5.0))])
    quiet, loud = (floor.within for floor in sorted(noise_by(HOST, table, "op"), key=lambda floor: floor.name, reverse=True))
    assert quiet is not None
    assert loud is not None
    assert quiet.median == 0 < loud.median


def test_rows_that_are_repeats_by_their_columns_are_compared_as_repeats(tmp_path: Path) -> None:
    table = measured(tmp_path, [("a", "p1", "x", (100.0,)), ("a", "p1", "y", (120.0,))])
    same_run = table.set_column(table.schema.get_field_index("run"), "run", pa.array(["r", "r"]))
    noise = noise_of(replace(HOST, repeats=("op",)), same_run)
    assert noise.keys == 1
    assert noise.within is not None
    assert noise.within.median == pytest.approx(16 / 110)
