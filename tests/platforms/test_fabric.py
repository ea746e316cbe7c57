from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steptime._hardware.fabric import FabricLimits, fabric_names, fabric_toml, read_fabric
from steptime._measurements.nccl_tests import Point, read_nccl_tests
from steptime._models.collectives.fitting import fit_curves
from steptime._models.collectives.message import KINDS, Message, Messages
from steptime._models.collectives.tier import TierModel
from steptime._models.estimate import Source
from steptime._platforms.fabric import Fabric, read_models, write_models
from steptime._platforms.own_fabric import described, network_points, tier_points
from steptime.errors import InputError
from steptime_lab.fit.fabrics import fit_measured

MIB = 1 << 20


@pytest.mark.parametrize("name", fabric_names())
def test_every_shipped_fabric_answers_for_what_it_was_measured_with(name: str) -> None:
    fabric = Fabric.load(name)
    assert set(fabric.tiers) == {tier.name for tier in fabric.limits.tiers}
    for tier in fabric.limits.tiers:
        model = fabric.tier(tier.name)
        if not isinstance(model, TierModel):
            assert tier.kind == "network" or fabric.limits.analytic
            assert tier.kind != "network" or fabric.limits.tiers[0].fitted
            continue
        for kind, ranks in model.curves:
            found = model.times(Messages.even(kind, ranks, np.exp2(np.arange(12, 36))))
            assert np.all(np.diff(found.ns) >= 0)
            assert np.all((found.low_ns > 0) & (found.low_ns <= found.ns) & (found.ns <= found.high_ns))
            assert ranks <= tier.ranks


def test_estimates_of_a_fitted_fabric_are_near_published_times() -> None:
    # 8 H100: an all_reduce of 64 MiB takes 314 us at one site and 322 at another.
    (found,) = Fabric.load("h100-nvlink").estimates([Message("all_reduce", 8, 64 * MIB)])
    assert found.time_ns == pytest.approx(318e3, rel=0.15)
    assert found.source is Source.FITTED
    assert found.inside
    # Two nodes: 8 ranks exchange 4 GiB in 45 ms, 16 in 44 ms; neither was fitted.
    fabric = Fabric.load("h100-2-nodes")
    (few,) = fabric.estimates([Message("all_to_all", 8, 1 << 32)], ranks=(0, 1, 2, 3, 8, 9, 10, 11))
    (many,) = fabric.estimates([Message("all_to_all", 16, 1 << 32)])
    assert few.time_ns == pytest.approx(45.06e6, rel=0.15)
    assert many.time_ns == pytest.approx(43.95e6, rel=0.15)


def test_rank_counts_beyond_what_was_measured_are_labelled_and_less_sure() -> None:
    fabric = Fabric.load("gb200-nvlink")
    found = fabric.times(Messages.even("all_reduce", [2, 4, 8, 16, 72], 64.0 * MIB))
    assert found.inside.tolist() == [True, True, False, False, False]
    widths = np.log(found.high_ns / found.low_ns)
    assert np.all(np.diff(widths[1:]) > 0)
    assert np.all(np.diff(found.ns) > 0)


def test_one_rank_costs_nothing_and_no_message_nothing_at_all() -> None:
    for name in ("h100-nvlink", "h100-2-nodes"):
        fabric = Fabric.load(name)
        assert [one.time_ns for one in fabric.estimates([Message("all_reduce", 1, MIB)], ranks=[3])] == [0]
        assert fabric.estimates([Message("barrier", 1, 0)])[0].high_ns == 0
        assert fabric.estimates([]) == []
    mixed = Fabric.load("h100-2-nodes").times(Messages.even("all_reduce", [1, 2, 16], float(MIB)))
    assert mixed.ns[0] == 0
    assert 0 < mixed.ns[1] < mixed.ns[2]


def test_bad_groups_are_told_what_is_there() -> None:
    fabric = Fabric.load("h100-nvlink")
    with pytest.raises(InputError, match="unknown rank 8; fabric h100-nvlink has ranks 0 to 7"):
        fabric.estimates([Message("all_reduce", 2, MIB)], ranks=[0, 8])
    with pytest.raises(InputError, match="collective 1 is of 4 ranks, its group has 2"):
        fabric.estimates([Message("all_reduce", 2, MIB), Message("all_reduce", 4, MIB)], ranks=[0, 1])
    with pytest.raises(InputError, match="has 8 ranks"):
        fabric.estimates([Message("all_reduce", 16, MIB)])
    with pytest.raises(InputError, match=r"no tier 'network' that was measured; there are node \(nvswitch\)"):
        fabric.tier("network")
    with pytest.raises(InputError, match="send_recv"):
        Fabric.load("a40-pairwise-nvlink").estimates([Message("all_reduce", 2, MIB)])


def test_groups_beside_slow_each_other_where_they_share_links() -> None:
    fabric = Fabric.load("h100-pairwise-nvlink")
    asked = Messages.even("all_reduce", 2, [64.0 * MIB])
    alone = fabric.times(asked, [0, 2]).ns[0]
    assert fabric.times(asked, [0, 2], beside=[[1, 3]]).ns[0] > 1.5 * alone
    paired = fabric.times(asked, [0, 1]).ns[0]
    assert paired < alone
    assert fabric.times(asked, [0, 1], beside=[[2, 3]]).ns[0] == paired
    with pytest.raises(InputError, match="which ranks"):
        fabric.times(asked, beside=[[2, 3]])


def test_uneven_exchanges_cost_what_their_busiest_rank_moves() -> None:
    fabric = Fabric.load("loopback")
    even = Message("all_to_all", 2, 8 * MIB, ((4 * MIB, 4 * MIB), (4 * MIB, 4 * MIB)))
    more = Message("all_to_all", 2, 12 * MIB, ((4 * MIB, 8 * MIB), (8 * MIB, 4 * MIB)))
    plain = Message("all_to_all", 2, 8 * MIB)
    times = [one.time_ns for one in fabric.estimates([even, more, plain])]
    assert times[0] == pytest.approx(times[2], rel=0.05)
    assert times[1] > 1.5 * times[0]


def test_a_data_sheet_makes_a_labelled_fabric(tmp_path: Path) -> None:
    limits = replace(read_fabric("h100-2-nodes"), name="paper", models=None, published=())
    file = tmp_path / "paper.toml"
    file.write_text(fabric_toml(limits))
    fabric, fitted = Fabric.load(str(file)), Fabric.load("h100-2-nodes")
    asked = [Message(kind, 16, 64 * MIB) for kind in ("all_reduce", "all_to_all", "all_gather")]
    for ours, known in zip(fabric.estimates(asked), fitted.estimates(asked), strict=True):
        assert ours.source is Source.ANALYTIC
        assert not ours.inside
        assert ours.low_ns < known.time_ns < ours.high_ns


def test_a_million_estimates_take_less_than_a_second() -> None:
    random = np.random.default_rng(0)
    count = 1_000_000
    kinds = random.choice([KINDS.index(kind) for kind in ("all_reduce", "all_to_all", "all_gather", "reduce_scatter")], count)
    sizes = np.exp2(random.uniform(0, 33, count))
    asked = Messages(kinds, random.choice([2, 4, 8, 16], count), sizes, sizes, sizes)
    fabric = Fabric.load("h100-2-nodes")
    started = time.process_time()
    found = fabric.times(asked)
    assert time.process_time() - started < 1
    few = asked.take(np.arange(50))
    np.testing.assert_allclose(fabric.times(few).ns, found.ns[:50])


def points(nodes: int, per_node: int, byte_ns: float, kind: str = "all_to_all", sizes: range = range(10, 30)) -> list[Point]:
    ranks = nodes * per_node
    share = (ranks - per_node) / ranks if nodes > 1 else (ranks - 1) / ranks
    return [Point(kind, ranks, nodes, 1 << size, 1e4 + byte_ns * share * (1 << size)) for size in sizes]


def curves(limits: FabricLimits, timed: Sequence[Point]) -> dict[str, TierModel]:
    return {name: fit_curves(of_tier) for name, of_tier in tier_points(limits, timed).items()}


def test_a_users_timings_make_a_fabric_that_predicts_other_layouts(tmp_path: Path) -> None:
    limits = replace(read_fabric("h100-2-nodes"), name="mine", models=tmp_path / "mine.json")
    measured = [*points(1, 8, 0.003), *points(1, 4, 0.003), *points(2, 1, 0.03), *points(2, 2, 0.02)]
    models = curves(limits, measured)
    assert limits.models is not None
    write_models(limits.models, models)
    (tmp_path / "mine.toml").write_text(fabric_toml(limits))
    fabric = Fabric.load(str(tmp_path / "mine.toml"))
    (found,) = fabric.estimates([Message("all_to_all", 16, 256 * MIB)])
    assert found.time_ns == pytest.approx(1e4 + 0.02 * 128 * MIB, rel=0.03)
    inside = fabric.times(Messages.even("all_to_all", 8, [256.0 * MIB]))
    assert inside.ns[0] == pytest.approx(1e4 + 0.003 * 224 * MIB, rel=0.03)


def test_timings_over_nodes_count_by_what_leaves_through_a_card() -> None:
    limits = replace(read_fabric("h100-2-nodes"), rails=4)
    exchange = Point("all_to_all", 16, 2, 4 * MIB, 1.0)
    ring = Point("send_recv", 16, 2, MIB, 1.0)
    reduced = Point("all_reduce", 16, 2, MIB, 1.0)
    found = {(one.kind, one.ranks, one.bytes) for one in network_points(limits, [exchange, ring, reduced])}
    # Two ranks on each card. All_reduces of whole nodes say nothing of the network alone; small exchanges are known by pairs.
    assert found == {("all_to_all", 2, 8 * MIB), ("send_recv", 2, MIB), ("all_to_all", 2, 2 * MIB)}
    with pytest.raises(InputError, match="has no tier of kind network"):
        network_points(read_fabric("h100-nvlink"), [exchange])


def test_timings_go_to_the_tier_that_joins_their_ranks() -> None:
    limits = read_fabric("a100-pairwise-nvlink")
    found = tier_points(limits, [*points(1, 2, 1.0), *points(1, 4, 1.0), *points(2, 1, 1.0), Point("all_reduce", 1, 1, 8, 1.0)])
    assert {name: set(some.ranks.tolist()) for name, some in found.items()} == {"pair": {2}, "node": {4}, "network": {2}}
    with pytest.raises(InputError, match="tells of fabric"):
        tier_points(limits, [Point("all_reduce", 1, 1, 8, 1.0)])


def test_measured_rows_are_fitted_for_fabrics_of_one_tier_only() -> None:
    with pytest.raises(InputError, match="3 tiers"):
        fit_measured(read_fabric("a100-pairwise-nvlink"), [])
    with pytest.raises(InputError, match="measure"):
        fit_measured(read_fabric("loopback"), [])


@pytest.mark.parametrize("text", ["", "[]", '{"schema_version": 9}', '{"schema_version": 1, "tiers": {"node": {}}}', "\xff"])
def test_damaged_models_are_refused_with_their_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "models.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"models\.json"):
        read_models(file)


def test_missing_models_are_told_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="steptime fit"):
        read_models(tmp_path / "absent.json")


def test_models_survive_being_written_and_read_back(tmp_path: Path) -> None:
    before = read_models(Path(str(read_fabric("h100-nvlink").models)))
    write_models(tmp_path / "again.json", before)
    after = read_models(tmp_path / "again.json")
    asked = Messages.even("all_reduce", 8, np.exp2(np.arange(0, 34)))
    np.testing.assert_array_equal(after["node"].times(asked).ns, before["node"].times(asked).ns)
    assert json.loads((tmp_path / "again.json").read_text())["schema_version"] == 1


def test_measured_rows_of_a_one_tier_fabric_become_its_model() -> None:
    plain = {"mode": "stream", "beside": "none", "host_threads": "idle", "arrival": "together", "splits": None}
    said = {"run": "r", "process": "p", "reference_ns": None, "command": "steptime measure collectives -o DIR", "machine": "m"}
    rows = [
        {
            **plain,
            **said,
            "fabric": fabric,
            "collective": "all_reduce",
            "ranks": ranks,
            "bytes": 1 << size,
            "times_ns": [slow * time] * 3,
        }
        for fabric, slow in (("loopback", 1.0), ("loopback-2x2", 5.0))
        for ranks in (2, 4)
        for size in range(8, 26)
        for time in [2e4 * ranks + 0.5 * (1 << size)]
    ]
    models, chosen = fit_measured(read_fabric("loopback"), rows)
    found = models["loopback"].times(Messages.even("all_reduce", [2, 4], float(1 << 20))).ns
    np.testing.assert_allclose(found, [2e4 * ranks + 0.5 * (1 << 20) for ranks in (2, 4)], rtol=0.1)
    assert len(chosen.points) == 36


def log(hosts: int, per_host: int, kind: str, byte_ns: float) -> str:
    """What nccl-tests prints of links of 10 us and so many ns a byte."""
    lines = ["# nccl-tests version 2.17.9 nccl-headers=22902 nccl-library=22902"]
    lines += [f"# Collective test starting: {kind}_perf", "# Using devices"]
    lines += [
        f"#  Rank {rank} Group 0 Pid 1 on host{rank // per_host} device {rank % per_host} [0000:01:00] NVIDIA H100"
        for rank in range(hosts * per_host)
    ]
    lines.append("# size count type redop root time algbw busbw #wrong time algbw busbw #wrong")
    for size in range(10, 30):
        us = 10 + byte_ns * (1 << size) / 1e3
        lines.append(f"{1 << size} {1 << size} int8 none -1 {us:.2f} 1 1 0 {us:.2f} 1 1 0")
    return "\n".join([*lines, "4096 4096 int8"])


def test_what_nccl_tests_printed_becomes_a_fabric_of_ones_own(tmp_path: Path) -> None:
    files = [tmp_path / "inside.log", tmp_path / "across.log"]
    files[0].write_text(log(1, 4, "alltoall", 0.003) + "\n" + log(1, 4, "all_reduce", 0.008))
    files[1].write_text(log(2, 1, "sendrecv", 0.025))
    read = [read_nccl_tests(file) for file in files]
    assert sum(one.skipped for one in read) == 3
    timed = [point for one in read for point in one.points]
    limits = described("mine", timed)
    fabric = Fabric(limits, curves(limits, timed))
    (tmp_path / "mine.toml").write_text(fabric_toml(limits))
    assert read_fabric(str(tmp_path / "mine.toml")).tiers == limits.tiers
    assert (fabric.limits.gpus_per_node, fabric.limits.nodes, fabric.limits.rails) == (4, 2, 4)
    inside, across = fabric.times(Messages.even("all_to_all", [4, 8], 64.0 * MIB)).ns
    assert inside == pytest.approx(1e4 + 0.003 * 64 * MIB, rel=0.03)
    assert across == pytest.approx(1e4 + 0.025 * 32 * MIB, rel=0.03)
    assert fabric.limits.tiers[1].bandwidth_bytes_per_s.value == pytest.approx(1e9 / 0.025, rel=0.02)


def test_a_fabric_needs_timings_within_a_node_where_it_has_many_ranks() -> None:
    with pytest.raises(InputError, match="nothing timed within one"):
        described("mine", points(2, 4, 0.025))
    with pytest.raises(InputError, match="no collective of two ranks"):
        described("mine", [Point("all_reduce", 1, 1, 8, 1.0)])
