"""Statistics on disk, one table or every table in every iteration: what is written comes back, what is broken is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steptime._lookups.estimated import scaled
from steptime._lookups.generators import Generator
from steptime._lookups.saved import from_dict, load, save, to_dict
from steptime._lookups.table import TableStatistics, table_statistics
from steptime._lookups.workload import StepLookups, WorkloadLookups, drawn_steps
from steptime.errors import InputError

STREAMS = (
    Generator(rows=100_000, pooling=20, lengths="geometric", kind="zipf", alpha=1.1, locality=0.5, window=300),
    Generator(rows=500, pooling=1.0),
    Generator(rows=10, pooling=0.0),
)


def of(stream: Generator, batch: int = 500) -> TableStatistics:
    bags = stream.bags(batch)
    return table_statistics(bags.indices, bags.offsets, stream.rows, 64, "users")


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", ["users.json", "users.json.gz"])
def test_a_saved_table_comes_back_whole(tmp_path: Path, stream: Generator, name: str) -> None:
    found = of(stream)
    save(tmp_path / name, found)
    assert load(tmp_path / name) == found
    assert (tmp_path / name).stat().st_size < 6000


def test_a_scaled_table_comes_back_whole() -> None:
    found = scaled(of(STREAMS[0]), 4096)
    assert from_dict(json.loads(json.dumps(to_dict(found)))) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version is 2; this release reads 1"),
        ({"extra": 1}, "'extra' is unknown"),
        ({"table": 3}, "table is 3"),
        ({"rows": 0}, "rows 0"),
        ({"lookups": -1}, "lookups is -1"),
        ({"lookups": 2.5}, "lookups is 2.5"),
        ({"unique": 10**9}, "unique 1000000000"),
        ({"pooling_spread": float("nan")}, "pooling_spread is nan"),
        ({"reuse": [0.0] * 16}, "reuse is not a list of 17"),
        ({"hottest": [1, 1, 1, "x", 0]}, r"hottest\[3\] is 'x'"),
        ({"footprint": [1.0]}, "1 footprint entries"),
        ({"spectrum_rows": [1.0]}, "two lists of one length"),
        ({"lengths": {}}, "lengths is not a list of 18"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "users.json"
    path.write_text(json.dumps({**to_dict(of(STREAMS[0])), **change}))
    with pytest.raises(InputError, match=message) as caught:
        load(path)
    assert "users.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_field_is_named() -> None:
    values = to_dict(of(STREAMS[1]))
    del values["dim"]
    with pytest.raises(InputError, match="'dim' is missing"):
        from_dict(values)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b"null", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff"]
)
def test_files_that_are_something_else_are_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("users.json", "users.json.gz"):
        (tmp_path / name).write_bytes(content)
        for reader in (load, WorkloadLookups.load):
            with pytest.raises(InputError, match=r"users\.json"):
                reader(tmp_path / name)
    with pytest.raises(InputError, match=r"nothing\.json: cannot be read"):
        load(tmp_path / "nothing.json")


def test_iterations_of_a_workload_come_back_whole() -> None:
    found = drawn_steps(STREAMS, (64, 16, 8), batch=100, iterations=3)
    assert (found.iterations, found.tables) == (3, ("t0", "t1", "t2"))
    assert StepLookups.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_iterations_differ_and_each_is_what_its_generator_draws() -> None:
    found = drawn_steps(STREAMS[:1], (64,), batch=200, iterations=3)
    assert len({step[0].unique for step in found.steps}) == 3
    bags = STREAMS[0].bags(200, 2)
    assert found.steps[2][0].unique == len(np.unique(bags.indices))


def test_iterations_that_do_not_belong_together_are_refused() -> None:
    one = of(STREAMS[1])
    with pytest.raises(InputError, match="no iteration"):
        StepLookups(())
    with pytest.raises(InputError, match=r"iteration 1 has the table \('items', 500, 64\)"):
        StepLookups(((one,), (replace(one, table="items"),)))
    with pytest.raises(InputError, match="iteration 1 has the table 2 where iteration 0 has 1"):
        StepLookups(((one,), (one, replace(one, table="items"))))
    with pytest.raises(InputError, match="tables of batch 500 and 600"):
        StepLookups(((one, replace(of(STREAMS[1], 600), table="items")),))
    with pytest.raises(InputError, match="users is there twice"):
        StepLookups(((one, one),))
    with pytest.raises(InputError, match="1 generators and 2 dims"):
        drawn_steps(STREAMS[:1], (1, 2), 4, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "schema_version and steps"),
        ({"schema_version": 7, "steps": []}, "schema_version is 7"),
        ({"schema_version": 1, "steps": [1]}, "steps are not lists"),
        ({"schema_version": 1, "steps": [[1]]}, "iteration 0, table 0: int found"),
    ],
)
def test_broken_iterations_are_said_with_their_place(values: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        StepLookups.from_dict(values)
