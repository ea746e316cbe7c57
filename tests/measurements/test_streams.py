"""Statistics of measured index streams: kept whole, found by stream, drawn only where they are missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from steptime._lookups.generators import Generator
from steptime._lookups.table import WINDOWS, TableColumns, table_statistics
from steptime.errors import InputError
from steptime_lab.measurements.lookups import FILE_NAME, Streams, streams_of, summarised
from steptime_lab.measurements.shipped import FOLDER, shipped

_STREAMS = [
    (Generator(rows=5000, pooling=12.0, lengths="geometric", kind="zipf", alpha=1.1, seed=3).to_json(), 64),
    (Generator(rows=200_000, pooling=4.0, locality=0.6, window=100, seed=4).to_json(), 256),
    (Generator(rows=100, pooling=0.0).to_json(), 32),
]


def _columns(places: list[int], dims: list[int]) -> TableColumns:
    tables = []
    for place, dim in zip(places, dims, strict=True):
        text, batch = _STREAMS[place]
        generator = Generator.from_dict(json.loads(text))
        bags = generator.bags(batch)
        tables.append(table_statistics(bags.indices, bags.offsets, generator.rows, dim))
    return TableColumns.of(tables)


def test_kept_streams_are_the_statistics_of_what_the_generator_draws(tmp_path: Path) -> None:
    streams = Streams.load(tmp_path / FILE_NAME)
    assert len(streams) == 0
    assert streams.missing(_STREAMS * 2) == _STREAMS
    streams.with_more(summarised(_STREAMS)).save(tmp_path / FILE_NAME)
    again = Streams.load(tmp_path / FILE_NAME)
    assert again.missing(_STREAMS) == []
    order, dims = [1, 0, 2, 1], [8, 16, 4, 32]
    found, drawn = again.columns([_STREAMS[place] for place in order], dims), _columns(order, dims)
    for name in ("rows", "dim", "batch", "lengths", "hottest", "bin_rows", "bin_lookups"):
        np.testing.assert_array_equal(getattr(found, name), getattr(drawn, name), err_msg=name)
    np.testing.assert_allclose(found.spread, drawn.spread, rtol=1e-6)
    np.testing.assert_allclose(found.locality, drawn.locality, atol=1 / 255)


def test_the_same_streams_give_the_same_file(tmp_path: Path) -> None:
    Streams.load(tmp_path / "none").with_more(summarised(_STREAMS)).save(tmp_path / "one")
    Streams.load(tmp_path / "none").with_more(summarised(_STREAMS[::-1])).save(tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_order_shows_in_locality_alone() -> None:
    found = _columns([1], [8])
    assert found.locality[0, 0] == pytest.approx(1.0)
    assert found.locality[0, int(np.searchsorted(WINDOWS, 256))] < 0.8  # repeats of the last hundred draws lie together
    assert found.lookups[0] == pytest.approx(256 * 4)


def test_a_file_that_is_something_else_is_said(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        Streams.load(tmp_path / FILE_NAME)


@pytest.mark.slow
def test_every_shipped_lookup_has_its_streams() -> None:
    streams = Streams.load(FOLDER / FILE_NAME)
    assert streams.missing(streams_of(shipped("lookups").select(["generators", "batch"]))) == []
