"""Descriptions with a slip in them: refused with one line that says which number, and what was expected."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from steptime._hardware.device import FOLDER as DEVICES
from steptime._hardware.device import read_device
from steptime._measurements.sets import COLLECTIVES
from steptime._measurements.store import read, write_part
from steptime._platforms.own_fabric import DataSheet, from_data_sheet
from steptime.errors import InputError
from steptime_lab.measurements.shipped import shipped


def test_a_device_that_is_part_of_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('schema_version = 1\npart_of = "mine"\nshare = 2\n')
    with pytest.raises(InputError, match="itself a share"):
        read_device(tmp_path / "mine.toml")
    shutil.copy(DEVICES / "h200-half.toml", tmp_path)
    with pytest.raises(InputError, match="lies beside it"):
        read_device(tmp_path / "h200-half.toml")


@pytest.mark.parametrize(
    ("key", "slip", "said"),
    [
        ("4.8e12", "4.8", "bandwidth_bytes_per_s is 4.8, expected 1e+06 to 1e+15 bytes per second"),
        ("1.98e9", "1.98", "clock_hz is 1.98, expected 1e+07 to 1e+11 hertz"),
        ("150_109_880_320", "141", "memory_bytes is 141, expected 1e+08 to 1e+14 bytes"),
        ("67e12", "67", "float32 is 67, expected 1e+09 to 1e+18 operations per second"),
        ("50e6", "inf", "cache_bytes is inf"),
        ("value = 132", "value = 1e9", "sms is 1e+09"),
    ],
)
def test_a_slip_of_unit_names_the_key_the_value_and_the_unit(tmp_path: Path, key: str, slip: str, said: str) -> None:
    text = (DEVICES / "h200.toml").read_text()
    assert key in text
    file = tmp_path / "mine.toml"
    file.write_text(text.replace(key, slip, 1))
    with pytest.raises(InputError, match=re.escape(said)):
        read_device(file)


@pytest.mark.parametrize(
    ("sheet", "said"),
    [
        (DataSheet(8, 450e9, 5), "--bandwidth is 4.5e+11, expected 0.001 to 1e+06 GB/s"),
        (DataSheet(8, 450, 5e9), "--latency is 5e+09, expected 0.0001 to 1e+06 microseconds"),
        (DataSheet(16, 450, 5, 8, 1e-9, 5), "--network-bandwidth is 1e-09"),
    ],
)
def test_a_data_sheet_in_other_units_is_refused_before_it_is_written(sheet: DataSheet, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        from_data_sheet("mine", sheet)


def test_a_measured_set_with_holes_or_of_other_types_is_refused_by_its_column(tmp_path: Path) -> None:
    table = shipped("collectives").slice(0, 3)
    file = tmp_path / "collectives.parquet"
    names = table.schema.names
    for name, column, said in (
        ("bytes", pa.array([1, None, 3], pa.int64()), "column 'bytes'"),
        ("times_ns", pa.array([[1.0], [None], [2.0]]), "column 'times_ns'"),
        ("times_ns", pa.array([[1.0], [], [2.0]]), "column 'times_ns'"),
        ("bytes", pa.array(["a", "b", "c"]), "not a readable Parquet file"),
    ):
        write_part(file, table.set_column(names.index(name), name, column))
        with pytest.raises(InputError, match=said):
            read(tmp_path, COLLECTIVES)
