"""Descriptions with anything in them: read, or refused with one line; never a traceback, never a time that is no number."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.support.mutated import mutated_text, mutated_tree

from steptime._hardware.device import FOLDER as DEVICES
from steptime._hardware.device import read_device
from steptime._hardware.fabric import FOLDER as FABRICS
from steptime._measurements.nccl_tests import read_nccl_tests
from steptime._measurements.sets import COLLECTIVES
from steptime._measurements.store import read, write_part
from steptime._models.collectives.message import Messages
from steptime._models.host.model import HostModel, read_host
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.question import Question
from steptime._platforms.calibration import Calibration
from steptime._platforms.device import Device
from steptime._platforms.fabric import Fabric
from steptime._platforms.own_fabric import DataSheet, from_data_sheet
from steptime._platforms.platform import Platform, platform_parts
from steptime.errors import InputError
from steptime_lab.measurements.shipped import shipped

CASES = 50  # of each kind of file


def refused_or(read: Callable[[], object]) -> bool:
    """Whether it was refused, in one line."""
    try:
        read()
    except InputError as error:
        assert "\n" not in str(error), str(error)
        assert len(str(error)) < 2000
        return True
    return False


def test_mutated_devices_are_read_or_refused(tmp_path: Path) -> None:
    draw, text = random.Random(1), (DEVICES / "h200.toml").read_text()
    part = 'schema_version = 1\npart_of = "h200"\nshare = 2\n'
    file, half = tmp_path / "h200.toml", tmp_path / "half.toml"
    refused = 0
    for _ in range(CASES):
        file.write_text(mutated_text(text, draw))
        half.write_text(part if draw.random() < 0.7 else mutated_text(part, draw))

        def read() -> None:
            for name in (file, half):
                limits = read_device(name)
                assert 0 < limits.roofline_ns(1e12, 1e9, "bfloat16") < 1e15
                assert 0 <= limits.dispatch.spacing_of(limits.share) < 1e10

        refused += refused_or(read)
    assert 0 < refused < CASES


def test_mutated_devices_on_paper_are_read_or_refused_and_answer(tmp_path: Path) -> None:
    draw, file, refused = random.Random(11), tmp_path / "mine.toml", 0
    half = TensorArg((512, 512), "bfloat16")
    asked = [Question(Call("aten::mm.default", (half, half))), Question(Call("aten::add.Tensor", (half, half)))]
    texts = [(DEVICES / f"{name}.toml").read_text() for name in ("l4", "v100", "mi300x")]
    for case in range(500):
        file.write_text(mutated_text(texts[case % 3], draw))

        def read() -> None:
            device = Device.load(file)
            for one in device.estimates(asked):
                times = (one.estimate.low_ns, one.estimate.time_ns, one.estimate.high_ns)
                assert 0 < times[0] <= times[1] <= times[2] < math.inf

        refused += refused_or(read)
    assert 100 < refused < 500


def answers(fabric: Fabric) -> None:
    times = fabric.times(Messages.even("all_reduce", [2, 8, 16], [1.0, 1e6, 1e9]))
    for column in (times.ns, times.low_ns, times.high_ns):
        assert np.isfinite(column).all()
        assert (column >= 0).all()


def test_mutated_fabrics_are_read_or_refused(tmp_path: Path) -> None:
    draw, refused = random.Random(2), 0
    toml, models = (FABRICS / "h100-2-nodes.toml").read_text(), json.loads((FABRICS / "h100-2-nodes.json").read_text())
    for case in range(CASES):
        folder = tmp_path / str(case)  # models are remembered by their path
        folder.mkdir()
        file = folder / "mine.toml"
        file.write_text(mutated_text(toml, draw) if case % 2 else toml)
        (folder / "h100-2-nodes.json").write_text(json.dumps(models if case % 2 else mutated_tree(models, draw)))
        refused += refused_or(lambda file=file: answers(Fabric.load(str(file))))  # type: ignore[misc]
    assert 0 < refused < CASES


def test_mutated_hosts_and_platforms_are_read_or_refused(tmp_path: Path) -> None:
    draw, refused = random.Random(3), 0
    read_host("xeon-h200").save(tmp_path / "host.json")
    host = json.loads((tmp_path / "host.json").read_text())
    platform = 'schema_version = 1\nname = "mine"\nranks = 2\ndevice = "h200"\nhost = "host.json"\nfabric = "h200-nvlink"\n'
    for _ in range(CASES):
        (tmp_path / "host.json").write_text(json.dumps(mutated_tree(host, draw)))
        refused += refused_or(lambda: HostModel.load(tmp_path / "host.json").check("here"))
        (tmp_path / "mine.toml").write_text(mutated_text(platform, draw))
        refused_or(lambda: platform_parts(str(tmp_path / "mine.toml")).check())
    assert 0 < refused < CASES


def test_mutated_calibrations_are_read_or_refused(tmp_path: Path) -> None:
    draw, refused, platform = random.Random(4), 0, Platform.load("2xh200-nvlink")
    names = [name.split(" ", 1) for name in platform.host.usual_bursts][:4]
    tree = {
        "schema_version": 1,
        "host": [{"kind": kind, "op": op, "time_ns": 9e3, "spread": 0.1} for kind, op in names],
        "fabric": [
            {"collective": "all_reduce", "ranks": 2, "bytes": size, "mode": "stream", "time_ns": 5e4}
            for size in (1 << 20, 1 << 24)
        ],
    }
    file = tmp_path / "calibration.json"

    def read() -> None:
        found = Calibration.read(file, platform)
        assert 0 < found.speed.cpu < 1e9
        assert all(0 < factor < 1e9 for factor in found.wire.values())

    for _ in range(CASES):
        file.write_text(json.dumps(mutated_tree(tree, draw)))
        refused += refused_or(read)
    assert 0 < refused < CASES


def test_mutated_nccl_tests_output_is_read_or_refused(tmp_path: Path) -> None:
    draw = random.Random(5)
    tree = {
        "nccl_version": 22902,
        "args": ["all_reduce_perf"],
        "config": {"devices": [{"hostname": "a", "device_info": "H100"}] * 2, "nthreads": 1, "ngpus": 1},
        "results": [{"size": 1 << size, "out_of_place": {"time": 10.0 + size}} for size in range(10, 14)],
    }
    lines = ["# nccl-library=22902", "# Collective test starting: all_reduce_perf", "# Using devices"]
    lines += [f"#  Rank {rank} Group 0 Pid 1 on host device {rank} [0000:01:00] NVIDIA H100" for rank in range(2)]
    lines += [f"{1 << size} 1 int8 none -1 {10 + size}.5 1 1 0 12 1 1 0" for size in range(10, 14)]
    file = tmp_path / "all_reduce.log"

    def read() -> None:
        for point in read_nccl_tests(file).points:
            assert 0 < point.ns <= 1e14
            assert point.ranks >= 1

    for case in range(CASES):
        file.write_text(json.dumps(mutated_tree(tree, draw)) if case % 2 else mutated_text("\n".join(lines), draw))
        refused_or(read)


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
