from __future__ import annotations

from pathlib import Path

import pytest

from steptime._hardware.device import FOLDER, device_named, device_names, read_device
from steptime.errors import InputError

WHOLE = """
schema_version = 1
[limits]
sms = { value = 10, source = "a data sheet" }
memory_bytes = { value = 1e9, source = "a data sheet" }
bandwidth_bytes_per_s = { value = 1e12, source = "a data sheet" }
cache_bytes = { value = 1e6, source = "a data sheet" }
clock_hz = { value = 1e9, source = "a data sheet" }
[limits.peak_flop_per_s]
float32 = { value = 1e13, source = "a data sheet" }
"""


def test_every_shipped_device_is_readable_and_every_number_names_its_source() -> None:
    assert {"h200", "h200-half", "h200-quarter", "h200-eighth"} <= set(device_names())
    for name in device_names():
        limits = read_device(name)
        quantities = [limits.sms, limits.memory_bytes, limits.bandwidth_bytes_per_s, limits.cache_bytes, limits.clock_hz]
        assert all(one.source and one.value > 0 for one in (*quantities, *limits.peak_flop_per_s.values())), name


def test_a_part_takes_its_share_longer_than_the_whole() -> None:
    whole, quarter = read_device("h200"), read_device("h200-quarter")
    assert quarter.share == 4
    assert quarter.models == whole.models
    assert quarter.roofline_ns(1e12, 0, "float32") == pytest.approx(4 * whole.roofline_ns(1e12, 0, "float32"))


def test_parts_share_the_memory_and_the_power_cap_of_the_whole() -> None:
    whole, half = read_device("h200"), read_device("h200-half")
    assert 2 * half.rank_memory_bytes == whole.rank_memory_bytes == 150_109_880_320
    assert whole.power_w is not None
    assert half.power_w == whole.power_w
    assert all(read_device(name).power_w is not None for name in device_names())


def test_the_roofline_is_the_longer_of_computing_and_moving(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(WHOLE)
    device = read_device(str(file))
    computing_ns, moving_ns = 1e9 / device.reach.peak.value, 1e9 / device.reach.bandwidth.value
    assert device.roofline_ns(1e13, 1, "float32") == pytest.approx(computing_ns)
    assert device.roofline_ns(1, 1e12, "float32") == pytest.approx(moving_ns)
    # A precision the sheet does not have computes as single precision does.
    assert device.roofline_ns(1e13, 1, "int8") == pytest.approx(computing_ns)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema_version = 1\nlimits = 3", "limits is 3"),
        ("schema_version = 9", "version 9"),
        ("= what", "not readable as TOML"),
        (WHOLE.replace('sms = { value = 10, source = "a data sheet" }', "sms = 10"), "sms needs a value and its source"),
        (WHOLE.replace("value = 10,", "value = -1,"), "sms is -1"),
    ],
)
def test_a_device_file_that_is_wrong_says_what_and_where(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        read_device(str(file))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "near"), [("h900", "h200"), ("l40", "l40s"), ("4090", "rtx-4090"), ("A100-80GB", "a100"), ("MI300", "mi300x")]
)
def test_an_unknown_device_names_the_nearest_known_ones(asked: str, near: str) -> None:
    with pytest.raises(InputError, match=f"no device '{asked}'; the nearest known are .*{near}") as error:
        read_device(asked)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA A10G", None),
        ("NVIDIA GH200 480GB", "gh200"),
        ("", None),
    ],
)
def test_a_device_is_known_by_what_its_driver_calls_it(called: str, name: str | None) -> None:
    found = device_named(called)
    assert (None if found is None else found.name) == name


def test_a_precision_that_a_device_has_not_runs_at_the_rate_of_what_libraries_go_by() -> None:
    v100, a100 = read_device("v100"), read_device("a100")
    assert [v100.rated(one) for one in ("bfloat16", "tf32", "float16", "float8")] == [
        "float32",
        "float32",
        "float16",
        "float16",
    ]
    assert [a100.rated(one) for one in ("bfloat16", "float8", "int64")] == ["bfloat16", "bfloat16", "float32"]


TRANSFERRED = f"""
schema_version = 1
transferred_from = "h200"
{WHOLE.removeprefix(chr(10) + "schema_version = 1")}
[transfer]
basis = "much alike"
interval_factor = {{ value = 1.5, source = "a guess" }}
"""


def test_a_device_says_whose_models_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TRANSFERRED)
    limits = read_device(str(file))
    assert limits.analytic
    assert (limits.models, limits.whole) == ("h200", "mine")
    assert limits.transfer is not None
    assert {factor.value for factor in limits.transfer.interval_factor.values()} == {1.5}
    assert not read_device("h200").analytic
    assert {name for name in device_names() if not read_device(name).analytic} == {
        "h200",
        "h200-half",
        "h200-quarter",
        "h200-eighth",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TRANSFERRED.replace('basis = "much alike"', ""), "transfer.basis is missing"),
        (TRANSFERRED.replace("value = 1.5", "value = 0.5"), "interval_factor is 0.5, expected 1 to 1000"),
        (TRANSFERRED.replace("interval_factor", "factor"), "interval_factor needs a value and its source"),
        (TRANSFERRED.replace("transferred_from", 'models = "mine"\ntransferred_from'), "models of its own or another one's"),
        (TRANSFERRED.replace('"h200"', "3"), "transferred_from is 3"),
    ],
)
def test_a_transfer_that_is_wrong_says_what_and_where(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        read_device(str(file))
    assert str(file) in str(caught.value)


def test_parts_are_of_measured_devices_only(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TRANSFERRED)
    (tmp_path / "part.toml").write_text('schema_version = 1\npart_of = "mine"\nshare = 2')
    with pytest.raises(InputError, match="parts are of measured devices only"):
        read_device(str(tmp_path / "part.toml"))


@pytest.mark.parametrize("whole", ["[/]", "..", "a/b", ""])
def test_a_part_of_something_that_is_no_name_is_one_line(tmp_path: Path, whole: str) -> None:
    (tmp_path / "part.toml").write_text(f'schema_version = 1\npart_of = "{whole}"\nshare = 2')
    with pytest.raises(InputError, match="expected the name of a device whose file lies"):
        read_device(str(tmp_path / "part.toml"))


def test_a_device_on_paper_without_a_cap_has_that_of_the_shipped_one_it_is_named_after(tmp_path: Path) -> None:
    text = (FOLDER / "h100.toml").read_text(encoding="utf-8")
    without = "\n".join(line for line in text.splitlines() if not line.startswith("power_w"))
    for name, cap in (("h100-120gb", 700.0), ("mine", None)):
        file = tmp_path / f"{name}.toml"
        file.write_text(without.replace('name = "h100"', f'name = "{name}"'), encoding="utf-8")
        found = read_device(file).power_w
        assert (None if found is None else found.value) == cap
