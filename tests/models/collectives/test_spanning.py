from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from steptime._hardware.description import Quantity
from steptime._hardware.fabric import FabricLimits, LinkTier, first_ranks, place, place_together
from steptime._hardware.nccl import read_nccl
from steptime._models.collectives.curve import Curve, moved_share
from steptime._models.collectives.message import KINDS, Messages
from steptime._models.collectives.paper import AnalyticTier
from steptime._models.collectives.spanning import Spanning
from steptime._models.collectives.tier import TierModel
from steptime.errors import InputError

QUANTITY = Quantity(1.0, "a test")
CLUSTER = FabricLimits(
    "cluster",
    "",
    gpus_per_node=4,
    nodes=8,
    rails=4,
    oversubscription=1.0,
    tiers=(LinkTier("node", "nvswitch", 4, QUANTITY, QUANTITY), LinkTier("network", "network", 32, QUANTITY, QUANTITY)),
    models=None,
)
KNOTS = np.arange(0.0, 41.0)
LARGE = float(1 << 32)
INNER, CARD = 1e-2, 1e-1  # ns a byte


def straight(kinds: dict[str, tuple[int, ...]], latency: float, byte_ns: float) -> TierModel:
    """Links of a latency and a bandwidth, exactly."""
    curves = {
        (kind, ranks): Curve(KNOTS, np.log(latency + moved_share(kind, ranks) * byte_ns * np.exp2(KNOTS)))
        for kind, counts in kinds.items()
        for ranks in counts
    }
    return TierModel(curves, 0.0, dict.fromkeys(kinds, (-0.05, 0.05)))


ALL = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter", "broadcast", "reduce")
INNER_TIER = straight(dict.fromkeys(ALL, (2, 4)), 10.0, INNER)
NETWORK = straight({**dict.fromkeys(ALL, (2, 4, 8)), "send_recv": (2,)}, 100.0, CARD)


def spanning(nodes: int, per_node: int, limits: FabricLimits = CLUSTER, network: TierModel = NETWORK) -> Spanning:
    return Spanning(place(limits, first_ranks(limits, nodes * per_node, per_node)), INNER_TIER, network)


def ns(model: Spanning, kind: str, size: float = LARGE) -> float:
    return float(model.times(Messages.even(kind, model.placed.ranks, [size])).ns[0])


def test_an_exchange_takes_as_long_as_what_leaves_the_busiest_card() -> None:
    for per_node in (1, 2, 4):
        assert ns(spanning(2, per_node), "all_to_all") == pytest.approx(CARD * LARGE / 2, rel=1e-3)
    assert ns(spanning(4, 4), "all_to_all") == pytest.approx(CARD * LARGE * 12 / 16, rel=1e-3)
    # Two cards for four ranks: each carries twice as much.
    two = replace(CLUSTER, rails=2)
    assert ns(spanning(2, 4, two), "all_to_all") == pytest.approx(CARD * LARGE, rel=1e-3)


def test_a_narrow_network_does_not_slow_what_stays_in_a_node() -> None:
    narrow = replace(CLUSTER, oversubscription=4.0)
    fast = straight({"all_to_all": (2,)}, 1.0, INNER / 1e4)
    assert ns(spanning(2, 4, narrow, fast), "all_to_all") == ns(spanning(2, 4, network=fast), "all_to_all")
    assert ns(spanning(2, 4, narrow), "all_to_all") == pytest.approx(4 * ns(spanning(2, 4), "all_to_all"), rel=1e-3)


def test_what_stays_in_a_node_counts_where_its_links_are_slower() -> None:
    fast = straight({"all_to_all": (2,)}, 1.0, INNER / 100)
    model = spanning(2, 4, network=fast)
    stays = LARGE / 2  # of the buffer, among the four of the node: three quarters move
    assert ns(model, "all_to_all") == pytest.approx(INNER * stays * 3 / 4, rel=1e-3)


def test_an_all_reduce_is_scattered_within_reduced_across_and_gathered_again() -> None:
    within, across = INNER * LARGE * 3 / 4, CARD * LARGE / 4
    assert ns(spanning(2, 4), "all_reduce") == pytest.approx(2 * within + across, rel=1e-3)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_what_is_gathered_or_scattered_goes_round_rings_as_long_as_the_group(kind: str) -> None:
    # Each card's ring carries its part of all bytes but the own, however few nodes there are.
    assert ns(spanning(2, 4), kind) == pytest.approx(CARD * LARGE / 4 * 7 / 8, rel=1e-3)
    assert ns(spanning(8, 4), kind) == pytest.approx(CARD * LARGE / 4 * 31 / 32, rel=1e-2)
    # Small messages pay a step for every rank that they pass within the nodes.
    small = {nodes: ns(spanning(nodes, 4), kind, 1.0) for nodes in (2, 4, 8)}
    step_ns = read_nccl().rings[0].step_ns("nvswitch")
    assert small[8] - small[2] == pytest.approx(6 * 3 * step_ns, rel=0.05)
    assert small[2] < small[4] < small[8]


def test_on_paper_every_peer_of_an_exchange_through_cards_takes_its_time_and_pairs_have_fewer_connections_with_scale() -> None:
    paper, use = AnalyticTier(50e9, 17e3, "network"), read_nccl().network
    fabrics = {
        nodes: replace(CLUSTER, nodes=nodes, tiers=(CLUSTER.tiers[0], replace(CLUSTER.tiers[1], ranks=4 * nodes)))
        for nodes in (4, 16)
    }
    models = {nodes: Spanning(place(limits, range(4 * nodes)), INNER_TIER, paper) for nodes, limits in fabrics.items()}
    small = [ns(models[nodes], "all_to_all", 64.0) for nodes in (4, 16)]
    assert small[1] - small[0] == pytest.approx(48 * use.peer_ns, rel=0.01)
    rates = [LARGE / ns(models[nodes], "send_recv") * 1e9 for nodes in (4, 16)]
    assert rates[0] > 1.5 * rates[1]
    assert rates[1] == pytest.approx(use.connection_bytes_per_s, rel=0.01)
    slow = AnalyticTier(12.5e9, 17e3, "network")  # a card that one connection fills
    assert [float(slow.times(Messages.even("send_recv", nodes, [LARGE])).ns[0]) for nodes in (4, 16)] == pytest.approx(
        [LARGE / 12.5 / use.exchange_fraction] * 2, rel=0.01
    )


def test_a_ring_is_taken_where_it_is_faster() -> None:
    # As many nodes as cards carry nearly the same either way, and a ring does not wait for its node.
    hierarchy = 2 * INNER * LARGE * 3 / 4 + CARD * LARGE / 4 * 2 * 7 / 8
    ring = CARD * LARGE / 4 * 2 * 31 / 32
    assert ring < hierarchy
    assert ns(spanning(8, 4), "all_reduce") == pytest.approx(ring, rel=1e-2)


def test_groups_at_once_on_one_card_each_have_their_part() -> None:
    one = replace(CLUSTER, rails=1)
    groups = [[0, 4], [1, 5], [2, 6]]
    alone = Spanning(place(one, groups[0]), None, NETWORK)
    beside = Spanning(place_together(one, groups)[0], None, NETWORK)
    assert ns(beside, "all_gather") == pytest.approx(3 * ns(alone, "all_gather"), rel=1e-3)
    # The latency is nobody's.
    assert ns(beside, "all_gather", 1.0) == pytest.approx(ns(alone, "all_gather", 1.0), rel=1e-2)


def test_small_messages_pay_the_latency_of_both_tiers() -> None:
    found = {kind: ns(spanning(2, 4), kind, 1.0) for kind in ("all_reduce", "broadcast", "barrier")}
    assert all(time == pytest.approx(110.0, rel=0.15) for time in found.values()), found


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_never_take_less_and_every_time_lies_in_its_interval(kind: str) -> None:
    model = spanning(4, 4)
    found = model.times(Messages.even(kind, 16, np.exp2(np.arange(0.0, 45.0, 0.5))))
    assert np.all(np.isfinite(found.high_ns))
    assert np.all(np.diff(found.ns) >= -1e-6 * found.ns[1:])
    assert np.all((found.low_ns <= found.ns) & (found.ns <= found.high_ns))
    assert np.all(found.low_ns > 0)


def test_the_interval_grows_with_nodes_and_says_when_nothing_like_it_was_measured() -> None:
    few = straight(dict.fromkeys(ALL, (2,)), 100.0, CARD)
    widths, inside = [], []
    for nodes in (2, 4, 8):
        found = spanning(nodes, 4, network=few).times(Messages.even("all_to_all", 4 * nodes, [float(1 << 20)]))
        widths.append(float(np.log(found.high_ns[0] / found.low_ns[0])))
        inside.append(bool(found.inside[0]))
    assert all(before < after for before, after in pairwise(widths))
    assert inside == [True, False, False]


def test_nodes_with_unequal_parts_of_the_group_are_labelled() -> None:
    model = Spanning(place(CLUSTER, [0, 1, 2, 4]), INNER_TIER, NETWORK)
    found = model.times(Messages.even("all_to_all", 4, [LARGE / 16]))
    assert not found.inside[0]
    # The card of the fuller node is not the bottleneck of one rank's exchange with three, but no rank sends more than that.
    assert found.ns[0] <= CARD * LARGE / 16


def test_a_kind_not_measured_between_nodes_goes_by_its_bytes_and_is_labelled() -> None:
    pairs = straight({"send_recv": (2,)}, 100.0, CARD)
    for kind in ("all_to_all", "all_reduce", "all_gather", "broadcast"):
        known, guessed = (spanning(2, 1, network=one) for one in (NETWORK, pairs))
        assert ns(guessed, kind) == pytest.approx(ns(known, kind), rel=1e-2), kind
        found = guessed.times(Messages.even(kind, 2, [LARGE / 16]))
        assert not found.inside[0]
        assert found.high_ns[0] / found.low_ns[0] > 2


def test_a_kind_not_measured_within_nodes_is_refused_with_what_is_there() -> None:
    bare = Spanning(place(CLUSTER, range(8)), straight({"send_recv": (2,)}, 10.0, INNER), NETWORK)
    with pytest.raises(InputError, match="send_recv"):
        bare.times(Messages.even("all_to_all", 8, [LARGE]))


def test_an_all_reduce_within_nodes_answers_for_its_halves() -> None:
    bare = Spanning(place(CLUSTER, range(8)), straight({"all_reduce": (4,)}, 10.0, INNER), NETWORK)
    assert ns(bare, "all_reduce") == pytest.approx(ns(spanning(2, 4), "all_reduce"), rel=1e-2)


def test_rings_on_paper_grow_with_their_ranks_and_an_all_reduce_turns_to_trees() -> None:
    for link in ("nvswitch", "network"):
        tier = AnalyticTier(5e10, 1.7e4, link)
        for kind in ("all_reduce", "all_gather", "all_to_all", "broadcast", "barrier"):
            small = [float(tier.times(Messages.even(kind, ranks, [1024.0])).ns[0]) for ranks in (2, 4, 8, 64, 128)]
            assert small == sorted(small), (link, kind)
    network = AnalyticTier(5e10, 1.7e4, "network")
    ring, trees = (float(network.times(Messages.even(kind, 128, [64.0])).ns[0]) for kind in ("all_gather", "all_reduce"))
    assert trees < 0.5 * ring


def test_numbers_of_nccl_have_their_sources() -> None:
    assert all(one.source for one in read_nccl().sources)
    assert {one.name for one in read_nccl().rings} == {"LL", "Simple"}


def test_a_data_sheet_orders_fabrics_and_kinds_as_it_should() -> None:
    slow, fast = AnalyticTier(1e10, 5e3), AnalyticTier(1e11, 5e3)
    sizes = Messages.even("all_reduce", 8, [0.0, LARGE])
    assert slow.times(sizes).ns[0] == fast.times(sizes).ns[0]
    assert slow.times(sizes).ns[1] == pytest.approx(10 * fast.times(sizes).ns[1], rel=1e-2)
    halves = sum(float(fast.times(Messages.even(kind, 8, [LARGE])).ns[0]) for kind in ("all_gather", "reduce_scatter"))
    assert fast.times(sizes).ns[1] == pytest.approx(halves, rel=1e-2)
    alone = fast.times(Messages.even("all_reduce", 1, [LARGE]))
    assert alone.ns[0] == 0
    assert not fast.times(sizes).inside.any()
