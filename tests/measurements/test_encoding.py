"""What measurements are written with takes less, and gives back the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steptime._measurements.store import small_encoding
from steptime_lab.measurements.shipped import FOLDER

_DRAWS = np.random.default_rng(20)
_DOUBLES = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 5e-324, *_DRAWS.normal(size=58)])
_FLOATS = _DOUBLES.astype(np.float32)
_COUNTS = np.array([0, -1, 2**63 - 1, -(2**63), *_DRAWS.integers(0, 1 << 40, 60)])
_BYTES = [bytes(each) for each in _DRAWS.integers(0, 256, (64, 8), dtype=np.uint8)]


def _listed(values: pa.Array, sizes: tuple[int, ...] = (0, 3, 61)) -> pa.Array:
    return pa.ListArray.from_arrays(np.cumsum([0, *sizes]), values)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(_DOUBLES),
        pa.array(_FLOATS),
        pa.array(_COUNTS),
        pa.array(_COUNTS.astype(np.int16)),
        pa.array(_BYTES, pa.binary(8)),
        pa.array(["", "a", "a", None] * 16),
        pa.array(["", "a", "a", None] * 16).dictionary_encode(),
        pa.array([True, None] * 32),
        _listed(pa.array(_DOUBLES)),
        _listed(pa.array(_FLOATS)),
        _listed(pa.array(_COUNTS)),
        _listed(_listed(pa.array(_COUNTS.astype(np.int32))), (1, 0, 2)),
        pa.FixedSizeListArray.from_arrays(pa.array(_COUNTS.astype(np.uint8)), 4),
    ],
    ids=lambda column: str(column.type),
)
def test_every_kind_of_column_comes_back_bit_by_bit(tmp_path: Path, column: pa.Array) -> None:
    table = pa.table({"x": column})
    pq.write_table(table, tmp_path / "x.parquet", **small_encoding(table.schema, 9))
    again = pq.read_table(tmp_path / "x.parquet").column("x").combine_chunks()
    assert again.type == column.type
    assert _bits(again) == _bits(column)


def _bits(column: pa.Array) -> tuple[object, bytes]:
    """Lengths and what is missing, and the values as they lie in memory: NaN is no number that equals itself."""
    while pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    if pa.types.is_floating(column.type):
        return len(column), column.to_numpy(zero_copy_only=False).tobytes()
    return column.to_pylist(), b""


@pytest.mark.parametrize("name", ["lookups", "lookup_streams", "step_kernels"])
def test_shipped_rows_are_written_so(name: str, tmp_path: Path) -> None:
    file = FOLDER / f"{name}.parquet"
    table = pq.read_table(file)
    plain = tmp_path / file.name
    pq.write_table(table, plain, compression="zstd")
    assert file.stat().st_size < 0.85 * plain.stat().st_size
