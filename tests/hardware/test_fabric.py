from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from steptime._hardware.fabric import FOLDER, fabric_names, fabric_toml, place_together, read_fabric
from steptime.errors import InputError

SHIPPED = {
    "loopback",
    "loopback-2x2",
    "a100-nvlink",
    "h100-nvlink",
    "h200-nvlink",
    "gb200-nvlink",
    "a100-pairwise-nvlink",
    "h100-pairwise-nvlink",
    "a40-pairwise-nvlink",
    "h100-2-nodes",
}
CLUSTER = """
schema_version = 1
gpus_per_node = 4
nodes = 3
rails = 2
analytic = true
[[tiers]]
name = "node"
kind = "nvswitch"
ranks = 4
bandwidth_bytes_per_s = { value = 4e11, source = "a data sheet" }
latency_ns = { value = 5e3, source = "a guess" }
[[tiers]]
name = "network"
kind = "network"
ranks = 12
bandwidth_bytes_per_s = { value = 5e10, source = "a data sheet" }
latency_ns = { value = 2e4, source = "a guess" }
"""


def test_every_shipped_fabric_is_readable_and_every_number_names_its_source() -> None:
    assert set(fabric_names()) >= SHIPPED
    for name in fabric_names():
        limits = read_fabric(name)
        assert limits.name == name
        assert limits.title
        if limits.models is None:
            # By the curves of another fabric's links, or from a data sheet and then with an interval that says so.
            assert limits.tiers[0].fitted or all(tier.interval_factor is not None for tier in limits.tiers)
        else:
            assert limits.models.is_file()
            assert limits.published
        assert all(one.source and one.license and one.date for one in limits.published)
        for tier in limits.tiers:
            assert tier.bandwidth_bytes_per_s.source
            assert tier.latency_ns.source


def test_a_fabric_survives_being_written_and_read_back(tmp_path: Path) -> None:
    for name in ("h100-2-nodes", "a100-pairwise-nvlink", "h100-ib400"):
        limits = read_fabric(name)
        file = tmp_path / f"{name}.toml"
        file.write_text(fabric_toml(limits), encoding="utf-8")
        again = read_fabric(str(file))
        assert again.tiers == limits.tiers
        assert (again.gpus_per_node, again.nodes, again.rails) == (limits.gpus_per_node, limits.nodes, limits.rails)
        assert again.published == limits.published
        assert again.models == (None if limits.models is None else tmp_path / f"{name}.json")


@pytest.mark.parametrize("name", [name for name in fabric_names() if "-ib" in name])
def test_shipped_clusters_have_a_card_for_every_gpu(name: str) -> None:
    """As their titles say: GPUs of two nodes that talk in pairs do not wait for each other."""
    limits = read_fabric(name)
    pairs = [(local, limits.gpus_per_node + local) for local in range(limits.gpus_per_node)]
    assert "card per GPU" in limits.title
    assert {placed.sharing for placed in place_together(limits, pairs)} == {1}


def test_neighbours_share_a_card_where_there_are_fewer(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(CLUSTER)
    limits = read_fabric(str(file))
    assert limits.models is None
    assert limits.network is limits.tiers[1]
    assert [limits.card_of(rank) for rank in range(6)] == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0)]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema_version = 1", "schema_version = 9", "version 9"),
        ("gpus_per_node = 4", "gpus_per_node = 0", "gpus_per_node is 0"),
        ("rails = 2", "rails = 5", "rails is 5"),
        ("analytic = true", "", "expected models"),
        ('kind = "nvswitch"', 'kind = "string"', "kind is 'string'"),
        ("ranks = 4", "ranks = 5", "multiple of"),
        ("nodes = 3", "nodes = 2", "joins 12 ranks"),
        ('kind = "network"', 'kind = "pcie"', "network tiers"),
        ("value = 5e10", "value = -1", "bandwidth_bytes_per_s is -1"),
        ("value = 5e10", "value = inf", "bandwidth_bytes_per_s is inf"),
        ("value = 5e10", "value = 1e-291", "expected 1e+06 to 1e+15 bytes per second"),
        ("value = 2e4", "value = 1e303", "latency_ns is 1e"),
        ('value = 2e4, source = "a guess"', "value = 2e4", "latency_ns needs a value and its source"),
        ('name = "network"', 'name = "node"', "one name"),
        ("[[tiers]]", "[[tears]]", "[[tiers]]"),
    ],
)
def test_a_bad_fabric_is_refused_with_one_line_that_names_the_fault(tmp_path: Path, old: str, new: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    assert old in CLUSTER
    file.write_text(CLUSTER.replace(old, new))
    with pytest.raises(InputError) as caught:
        read_fabric(str(file))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_fabric_is_answered_with_those_that_are_there() -> None:
    with pytest.raises(InputError, match=r"nearest known are .*h100-ib400"):
        read_fabric("infiniband")


def test_a_notice_lists_whose_measurements_the_shipped_fabrics_are_fitted_to() -> None:
    notice = (Path(__file__).parents[2] / "NOTICE").read_text(encoding="utf-8")
    entries = [entry for entry in notice.split("\n\n") if "fabrics" in entry]
    for name in fabric_names():
        for item in read_fabric(name).published:
            if item.license == "as steptime":
                continue
            repository = item.source.split(",", 1)[0]
            entry = next(entry for entry in entries if entry.startswith(f"{repository} ({item.license}"))
            assert re.search(rf"[ ,]{re.escape(name)}(,|\n|$)", entry), (name, repository)
            assert item.commit in entry


def test_the_notice_lists_the_repositories_that_other_numbers_come_from() -> None:
    notice = (Path(__file__).parents[2] / "NOTICE").read_text(encoding="utf-8")
    files = [FOLDER.parent / "nccl.toml", *(FOLDER / f"{name}.toml" for name in fabric_names())]
    cited = {match for file in files for match in re.findall(r'source = "([\w-]+/[\w-]+) \(', file.read_text(encoding="utf-8"))}
    assert {"NVIDIA/nccl", "microsoft/vidur", "xxrjun/nccl-tests-cluster"} <= cited
    assert all(f"{repository} (" in notice for repository in cited)


def test_a_fabric_is_like_a_shipped_one_or_none(tmp_path: Path) -> None:
    text = fabric_toml(replace(read_fabric("h200-nvlink"), like="h300-nvlink"))
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="like is 'h300-nvlink'"):
        read_fabric(file)
    file.write_text(text.replace("h300", "h100"), encoding="utf-8")
    assert read_fabric(file).like == "h100-nvlink"
    assert read_fabric(file).published == read_fabric("h200-nvlink").published
