from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.mutated import mutated_text

from steptime._hardware.fabric import FabricLimits, fabric_toml, first_ranks, place, place_together, read_fabric
from steptime._models.collectives.message import Message, Messages
from steptime._platforms.fabric import Fabric
from steptime.errors import InputError


@pytest.fixture(scope="module")
def cluster() -> FabricLimits:
    return read_fabric("h100-2-nodes")


@pytest.fixture(scope="module")
def pairs() -> FabricLimits:
    return read_fabric("h100-pairwise-nvlink")


def test_a_group_uses_the_innermost_tier_that_joins_it(cluster: FabricLimits, pairs: FabricLimits) -> None:
    assert place(pairs, [0, 1]).tier.name == "pair"
    assert place(pairs, [2, 3]).tier.name == "pair"
    assert place(pairs, [1, 2]).tier.name == "node"
    assert place(cluster, [8, 15]).tier.name == "node"
    assert place(cluster, [7, 8]).tier.name == "network"


def test_a_group_over_nodes_knows_its_nodes_and_cards(cluster: FabricLimits) -> None:
    placed = place(cluster, [0, 1, 2, 8, 9, 10])
    assert (placed.nodes, placed.per_node, placed.cards, placed.even) == (2, 3, 3, True)
    assert placed.inside is not None
    assert placed.inside.name == "node"
    assert not place(cluster, [0, 1, 8]).even
    assert place(cluster, [0, 8]).inside is None
    assert place(replace(cluster, rails=2), [0, 1, 2, 8, 9, 10]).cards == 1


def test_disjoint_groups_share_cards_and_buses_but_no_switch(cluster: FabricLimits, pairs: FabricLimits) -> None:
    within = place_together(cluster, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert [one.sharing for one in within] == [1, 1]
    rails = [[local, 8 + local] for local in range(8)]
    assert {one.sharing for one in place_together(cluster, rails)} == {1}
    # Four cards for eight GPUs: two groups on each.
    assert {one.sharing for one in place_together(replace(cluster, rails=4), rails)} == {2}
    bus = place_together(pairs, [[0, 2], [1, 3]])
    assert [one.sharing for one in bus] == [2, 2]
    assert [one.sharing for one in place_together(pairs, [[0, 1], [2, 3]])] == [1, 1]


def test_a_rank_in_two_groups_divides_its_links(cluster: FabricLimits) -> None:
    assert [one.sharing for one in place_together(cluster, [[0, 1], [1, 2], [4, 5]])] == [2, 2, 1]


def test_an_oversubscribed_network_slows_groups_only_where_its_cards_are_busy(cluster: FabricLimits) -> None:
    narrow = replace(cluster, oversubscription=4.0)
    shares = [place(narrow, first_ranks(narrow, 2 * each, each)).sharing for each in (1, 2, 4, 8)]
    assert shares == [1, 1, 2, 4]
    assert all(fewer <= more for fewer, more in pairwise(shares))
    assert place(narrow, range(8)).sharing == 1
    # What others do counts as well.
    assert place_together(narrow, [[0, 8], [1, 9], [2, 10], [3, 11]])[0].sharing == 2
    assert place(narrow, range(16)).sharing_inside == 1


def test_who_shares_a_card_does_not_share_links_within_a_node(cluster: FabricLimits) -> None:
    four = replace(cluster, rails=4)
    crossing = place_together(four, [[0, 2, 8, 10], [1, 3, 9, 11]])
    assert [(one.sharing, one.sharing_inside) for one in crossing] == [(2, 1), (2, 1)]
    over, within = place_together(four, [[0, 1, 8, 9], [1, 2]])
    assert (over.sharing, over.sharing_inside) == (1, 2)
    assert (within.sharing, within.sharing_inside) == (2, 2)


@pytest.mark.parametrize(
    ("group", "said"),
    [([], "without ranks"), ([0, 16], "unknown rank 16"), ([-1, 17], "unknown ranks -1, 17"), ([3, 3], "rank 3 twice")],
)
def test_a_bad_group_is_refused_and_told_what_is_there(cluster: FabricLimits, group: list[int], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        place(cluster, group)
    assert "ranks 0 to 15" in str(caught.value)


def test_more_ranks_than_there_are_is_an_error(cluster: FabricLimits) -> None:
    assert first_ranks(cluster, 4, 2) == (0, 1, 8, 9)
    with pytest.raises(InputError, match="has 16 ranks"):
        first_ranks(cluster, 17)
    with pytest.raises(InputError, match="8 GPUs per node; 9"):
        first_ranks(cluster, 2, 9)


TWO_NETWORKS = """
schema_version = 1
gpus_per_node = 8
nodes = 64
rails = 8
analytic = true
[[tiers]]
name = "node"
kind = "nvswitch"
ranks = 8
bandwidth_bytes_per_s = { value = 4.5e11, source = "a test" }
latency_ns = { value = 5e3, source = "a test" }
[[tiers]]
name = "leaf"
kind = "network"
ranks = 256
bandwidth_bytes_per_s = { value = 5e10, source = "a test" }
latency_ns = { value = 17e3, source = "a test" }
[[tiers]]
name = "spine"
kind = "network"
ranks = 512
oversubscription = 2
bandwidth_bytes_per_s = { value = 5e10, source = "a test" }
latency_ns = { value = 18e3, source = "a test" }
"""


def test_a_network_has_leaves_and_a_spine_that_only_exchanges_crowd(tmp_path: Path) -> None:
    file = tmp_path / "pod.toml"
    file.write_text(TWO_NETWORKS, encoding="utf-8")
    pod = read_fabric(file)
    assert [tier.name for tier in pod.networks] == ["leaf", "spine"]
    inside, over = place(pod, range(256)), place(pod, range(512))
    assert (inside.tier.name, over.tier.name) == ("leaf", "spine")
    assert (inside.sharing, inside.sharing_rings) == (1.0, 1.0)
    assert (over.sharing, over.sharing_rings) == (2.0, 1.0)
    # One card of each node in use leaves room.
    assert place(pod, range(0, 512, 8)).sharing == 1.0
    file.write_text(fabric_toml(pod), encoding="utf-8")
    assert read_fabric(file) == pod
    exchange, ring = (
        [float(Fabric.load(file).times(Messages.even(kind, ranks, [float(1 << 34)])).ns[0]) for ranks in (256, 512)]
        for kind in ("all_to_all", "all_gather")
    )
    assert exchange[1] == pytest.approx(2 * exchange[0], rel=0.05)
    assert ring[1] == pytest.approx(ring[0], rel=0.05)


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ('kind = "network"\nranks = 512', 'kind = "nvswitch"\nranks = 512', "network tiers"),
        ("oversubscription = 2", "oversubscription = 0.5", "oversubscription"),
        ("ranks = 256", "ranks = 200", "multiple"),
        ("ranks = 256", 'ranks = 256\nfitted = "nothing"', "fitted is 'nothing'"),
    ],
)
def test_networks_that_cannot_be_are_one_line(was: str, now: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "pod.toml"
    file.write_text(TWO_NETWORKS.replace(was, now), encoding="utf-8")
    with pytest.raises(InputError, match=said) as caught:
        read_fabric(file)
    assert "\n" not in str(caught.value)


def test_damaged_descriptions_of_networks_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    draw, file, refused = random.Random(17), tmp_path / "pod.toml", 0
    text = TWO_NETWORKS.replace("ranks = 8\n", 'ranks = 8\nfitted = "h100-nvlink"\n', 1)
    text = text.replace("oversubscription = 2", 'oversubscription = 2\ninterval_factor = { value = 1.5, source = "a test" }')
    for _ in range(500):
        file.write_text(mutated_text(text, draw), encoding="utf-8", errors="replace")
        try:
            found = Fabric.load(str(file))
            found.estimates([Message("all_reduce", found.limits.ranks, 1 << 20)])
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 0 < refused < 500
