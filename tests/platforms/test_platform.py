"""Platforms: names follow from devices and fabrics, parts can be swapped, and what is none is told what there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steptime._hardware.device import device_names, read_device
from steptime._hardware.fabric import fabric_names
from steptime._models.collectives.message import KINDS, Message
from steptime._models.collectives.paper import AnalyticTier
from steptime._models.collectives.tier import TierModel
from steptime._models.estimate import Source
from steptime._platforms import names as platform_names
from steptime._platforms import platform as platforms
from steptime._platforms.fabric import Fabric, Origin, fitted, origin, origins
from steptime._platforms.own_fabric import DataSheet, from_data_sheet
from steptime._platforms.platform import (
    Platform,
    PlatformParts,
    fabrics_without_device,
    is_fabric,
    platform_parts,
    shipped_platforms,
)
from steptime.errors import InputError


@pytest.mark.parametrize("parts", shipped_platforms(), ids=lambda parts: parts.name)
def test_every_shipped_platform_is_made_of_shipped_parts_and_found_by_its_name(parts: PlatformParts) -> None:
    assert platform_parts(parts.name) == parts
    assert parts.device in device_names()
    assert (parts.fabric is None) == (parts.ranks == 1)
    assert parts.fabric is None or parts.fabric in fabric_names()
    found = Platform.load(parts.name)
    assert (found.name, found.ranks) == (parts.name, parts.ranks)
    if found.fabric is not None:
        (estimate,) = found.fabric.estimates([Message("all_reduce", found.ranks, 1 << 20)])
        assert estimate.time_ns > 0


def test_names_of_the_design_are_shipped() -> None:
    names = {parts.name for parts in shipped_platforms()}
    assert {"1xh200", "2xh200-half-loopback", "4xh200-quarter-loopback", "8xh200-eighth-loopback", "8xh200-nvlink"} <= names


def test_a_shipped_fabric_is_on_a_platform_or_said_to_have_no_device() -> None:
    joined = {parts.fabric for parts in shipped_platforms()} - {None}
    assert joined | set(fabrics_without_device()) == set(fabric_names())
    assert not joined & set(fabrics_without_device())


def test_a_device_that_appears_brings_its_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = read_device("h200")
    known = {"h200": h200, "gb200": replace(h200, name="gb200", whole="gb200", models="gb200")}
    for module in (platforms, platform_names):
        monkeypatch.setattr(module, "device_names", lambda: list(known))
        monkeypatch.setattr(module, "read_device", known.__getitem__)
    names = {parts.name for parts in shipped_platforms()}
    assert {"1xgb200", "4xgb200-nvlink", "1xh200"} <= names
    assert platform_parts("4xgb200-nvlink").fabric == "gb200-nvlink"


def test_devices_that_nobody_ran_have_platforms_on_their_own_fabrics() -> None:
    names = {parts.name for parts in shipped_platforms()}
    assert {"1xa100", "8xa100-nvlink", "1xh100", "8xh100-nvlink", "16xh100-2-nodes", "4xh100-pairwise-nvlink"} <= names
    assert "8xh100-2-nodes" not in names  # one node has as many
    assert platform_parts("16xh100-2-nodes").fabric == "h100-2-nodes"
    assert platform_parts("8xa100-nvlink") == PlatformParts("8xa100-nvlink", 8, "a100", "xeon-h200", "a100-nvlink")


def test_rank_counts_that_are_not_listed_are_named_alike() -> None:
    assert platform_parts("6xh200-nvlink") == PlatformParts("6xh200-nvlink", 6, "h200", "xeon-h200", "h200-nvlink")
    assert platform_parts("1xh200-quarter").fabric is None
    smaller = platform_parts("8xa100-40gb-nvlink")
    assert (smaller.name, smaller.device, smaller.fabric) == ("8xa100-40gb-nvlink", "a100-40gb", "a100-nvlink")
    assert platform_parts("1xh200-nvlink").name == "1xh200"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("4xa40-pairwise-nvlink", "no models of device a40 come with the package yet, only its fabrics a40-pairwise-nvlink"),
        ("8xh200-nvlnk", "did you mean 8xh200-nvlink?"),
        ("4xh200", "4 ranks need a fabric, as in 4xh200-FABRIC; did you mean 4xh200-nvlink?"),
        ("h200", "names read <ranks>x<device>-<fabric>; did you mean 1xh200?"),
        ("8xb900-nvlink", "no device is called b900"),
        ("16xh200-nvlink", "16 ranks, fabric h200-nvlink joins 8"),
        ("8xh200-quarter-loopback", "h200-quarter is one of 4 shares of a GPU"),
        ("0xh200", "0 ranks, expected 1 or more"),
        ("9" * 5000 + "xh200-nvlink", "names read"),
        ("", "There are 1xh200"),
        ("nowhere.toml", "cannot be read"),
    ],
)
def test_what_is_no_platform_is_told_what_there_is(name: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        platform_parts(name)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_each_part_can_be_swapped_alone(tmp_path: Path) -> None:
    own = from_data_sheet("mine", DataSheet(8, 100.0, 5.0)).write(tmp_path)
    plain = platform_parts("8xh200-nvlink")
    assert plain.swapped() == plain
    swapped = Platform.load("8xh200-nvlink", fabric=str(own))
    assert swapped.name == "8xh200-mine"
    assert swapped.fabric is not None
    assert swapped.fabric.limits.models is None
    assert swapped.parts.device == plain.device
    assert swapped.parts.host == plain.host
    assert plain.swapped(device="h200-eighth").name == "8xh200-eighth-nvlink"
    assert plain.swapped(host="other.json") == PlatformParts(plain.name, 8, "h200", "other.json", "h200-nvlink")
    assert plain.swapped(ranks=2).name == "2xh200-nvlink"
    assert Platform.load("8xh200-nvlink", ranks=1).fabric is None
    with pytest.raises(InputError, match="no fabric between them"):
        Platform.load("1xh200", ranks=2)
    with pytest.raises(InputError, match="0 ranks"):
        Platform.load("1xh200", ranks=0)
    with pytest.raises(InputError, match=r"other\.json"):
        Platform.load("1xh200", host="other.json")


def test_a_platform_in_a_file_has_its_parts_beside_it(tmp_path: Path) -> None:
    from_data_sheet("mine", DataSheet(8, 100.0, 5.0)).write(tmp_path)
    file = tmp_path / "box.toml"
    file.write_text('schema_version = 1\nname = "box"\nranks = 4\ndevice = "h200"\nhost = "xeon-h200"\nfabric = "mine.toml"\n')
    found = Platform.load(str(file))
    assert (found.name, found.ranks) == ("box", 4)
    assert found.fabric is not None
    assert found.fabric.limits.name == "mine"
    assert is_fabric(str(tmp_path / "mine.toml"))
    assert not is_fabric(str(file))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "not readable as TOML"),
        ("schema_version = 9", "version 9"),
        ("schema_version = 1\nranks = 0", "ranks is 0"),
        ("schema_version = 1\nranks = 1", "device is None"),
        ('schema_version = 1\nranks = 1\ndevice = "h200"\nfabric = 3', "fabric is 3"),
        ('schema_version = 1\nranks = 1\ndevice = "nothing"', "no device 'nothing'"),
    ],
)
def test_damaged_platform_files_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "box.toml"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        Platform.load(str(file))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_where_answers_come_from_is_said_of_every_kind() -> None:
    nvlink = Fabric.load("h200-nvlink")
    assert origin(nvlink, "all_reduce", 2) is Origin.FITTED
    assert origin(nvlink, "all_reduce", 3) is Origin.INTERPOLATED
    assert origin(nvlink, "all_reduce", 8) is Origin.FITTED
    assert origin(nvlink, "barrier", 2) is Origin.STAND_IN
    assert origin(nvlink, "send_recv", 2) is Origin.CARRIED
    assert origin(nvlink, "broadcast", 2) is Origin.NONE
    assert origin(Fabric.load("gb200-nvlink"), "all_reduce", 16) is Origin.EXTRAPOLATED
    nodes = Fabric.load("h100-2-nodes")
    assert origin(nodes, "all_to_all", 16) is Origin.TIERS
    assert origin(nodes, "all_to_all", 8) is Origin.FITTED
    paper = Fabric(from_data_sheet("paper", DataSheet(8, 450.0, 8.0)).limits, {})
    assert set(origins(paper, 8)) == set(KINDS)


def test_what_was_fitted_lies_within_what_is_said() -> None:
    for name in fabric_names():
        fabric = Fabric.load(name)
        for one in fitted(fabric):
            tier = next(tier for tier in fabric.limits.tiers if tier.name == one.tier)
            assert max(one.ranks) <= tier.ranks
            assert 0 < one.bytes[0] < one.bytes[1]
            assert one.off is None or np.all(np.abs(one.off) < 1)


@pytest.mark.parametrize(
    "name", ["8xh100-nvlink", "64xh100-ib400", "256xh100-ib400", "64xa100-ib200", "16xb200-ib400", "1024xh200-ib400"]
)
def test_clusters_have_names_a_fitted_node_and_a_network_on_paper(name: str) -> None:
    platform = Platform.load(name)
    assert platform.ranks == int(name.split("x", maxsplit=1)[0])
    assert platform.fabric is not None
    node, *networks = (platform.fabric.tiers[tier.name] for tier in platform.fabric.limits.tiers)
    assert isinstance(node, TierModel)
    assert all(isinstance(tier, AnalyticTier) for tier in networks)
    inside, over = platform.fabric.estimates(
        [Message("all_reduce", 8, 1 << 26), Message("all_reduce", platform.ranks, 1 << 26)]
    )
    assert inside.source is Source.FITTED
    assert over.source is (Source.ANALYTIC if networks else Source.FITTED)
    assert over.low_ns < over.time_ns < over.high_ns
