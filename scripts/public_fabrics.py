"""Fits the shipped fabrics to published tables of NCCL timings, and says how far they lie off on rows they did not see.

    python scripts/public_fabrics.py [--data TABLES] [--rows CSV] [--write FOLDER] [--only NAMES]

TABLES holds nccl_single_node.csv.gz, nccl_tests_multi_node.csv.gz and vidur_network/; CSV is a table as `steptime validate
collectives --rows` takes it, with H200 and B200 nodes and ten nodes of H100. They are not part of the project; the fitted
curves are, each with the source of its rows. Of several NCCL versions the newest is fitted; the same message in two dtypes is
fitted together and lies on one side of the split. Without --write nothing is written.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from zlib import crc32

import numpy as np
from published_tables import read_multi_node_table, read_profiled_table, read_single_node_table

from steptime._hardware.description import Quantity
from steptime._hardware.fabric import NETWORK, FabricLimits, LinkTier, Published, fabric_toml, first_ranks
from steptime._measurements.nccl_tests import Point
from steptime._models.collectives.fitting import Points, by_kind, fit_curves, interval_ends, left_out, unseen_logs
from steptime._models.collectives.message import Messages
from steptime._models.collectives.tier import TierModel
from steptime._models.collectives.unmeasured import Curves
from steptime._models.engine.splits import FIT, TEST, VALIDATION
from steptime._models.error import gmae
from steptime._platforms.fabric import Fabric, like_curves, write_models
from steptime._platforms.own_fabric import tier_points
from steptime_lab.fit.fabrics import fit_points
from steptime_lab.measurements.timed_collectives import read_timed_collectives

SHARED = Path(os.environ.get("STEPTIME_SHARED", Path(__file__).resolve().parent.parent.parent / "shared"))
SMALL = 1 << 20  # below, sites differ by several times
BARS = {"all_reduce": 0.045, "all_to_all": 0.045, "all_gather": 0.05, "reduce_scatter": 0.05}
SPANNING_BAR, SPANNING_BYTES = 0.15, 32 << 20
RANKS_BAR = 0.12
ROWS = SHARED / "data" / "public" / "collectives.csv"
FOLDS = 7

SINGLE = Published("ai-dynamo/aiconfigurator, NCCL {nccl}, {gpu}", "Apache-2.0", "tables as of 2026-11")
COMMITTED = Published(
    "",
    "Apache-2.0",
    "2026-11",
    "ai-dynamo/aiconfigurator",
    "095f58a51c4ca8e61b66ec108d86f223f8d559ce",
    "aic-core/src/aiconfigurator_core/systems/data/{gpu}/comm/nccl/*/nccl_perf.parquet",
)
OLDEST = (2, 26)  # of NCCL: small messages of older ones take up to a fifth longer
PROFILED = Published("microsoft/vidur, data/profiling/network/{gpu}", "MIT", "tables as of 2026-11")
BENCHED = Published(
    "microsoft/superbenchmark, tests/data: A100-SXM4-40GB, NCCL version not said", "MIT", "tables as of 2026-11"
)
NVLINK3 = Quantity(300e9, "NVIDIA A100 data sheet: NVLink 600 GB/s, both directions")
NVLINK4 = Quantity(450e9, "NVIDIA H100 and H200 data sheets: NVLink 900 GB/s, both directions")
NVLINK5 = Quantity(900e9, "NVIDIA GB200 NVL72 data sheet: NVLink 1.8 TB/s per GPU, both directions")
NVLINK5_B200 = Quantity(900e9, "NVIDIA DGX B200 data sheet: NVLink 1.8 TB/s per GPU, both directions")
BRIDGE = Quantity(300e9, "NVIDIA A100 80GB PCIe and H100 PCIe data sheets: NVLink bridge 600 GB/s, both directions")
PCIE4 = Quantity(31.5e9, "PCI Express 4.0, 16 lanes")
PCIE5 = Quantity(63e9, "PCI Express 5.0, 16 lanes")


@dataclass(frozen=True)
class Tables:
    """The published rows, read once."""

    folder: Path
    single: Sequence[Point]
    multi: Sequence[Point]
    rows: Sequence[Point]  # of nodes and clusters that the other tables do not have

    @classmethod
    def read(cls, folder: Path, rows: Path) -> Tables:
        single = read_single_node_table(folder / "nccl_single_node.csv.gz")
        multi = read_multi_node_table(folder / "nccl_tests_multi_node.csv.gz")
        skipped = single.skipped + multi.skipped
        print(f"{len(single.points)} and {len(multi.points)} points; {skipped} rows of no kind that is modelled")
        return cls(folder, single.points, multi.points, read_timed_collectives(rows).points)

    def profiled(self, box: str, kind: str) -> list[Point]:
        return list(read_profiled_table(self.folder / "vidur_network" / box / f"{kind}.csv.gz").points)

    def newest(self, gpu: str) -> tuple[str, list[Point]]:
        """The rows of a GPU's newest NCCL version, and that version."""
        version = max(
            {one.nccl for one in self.single if one.device == gpu}, key=lambda one: [int(part) for part in one.split(".")]
        )
        return version, [one for one in self.single if one.device == gpu and one.nccl == version]

    def site(self, run: str) -> list[Point]:
        """Medians over pairs of nodes, or nodes, of one run of the two-node logs."""
        cells: dict[tuple[str, int, int, int], list[Point]] = defaultdict(list)
        for one in self.multi:
            if run in one.source:
                cells[one.kind, one.ranks, one.nodes, one.bytes].append(one)
        return [replace(some[0], ns=median(one.ns for one in some), source=run) for some in cells.values()]


@dataclass(frozen=True)
class Described:
    """A fabric and the rows it is fitted to; all of them where half of a table is all there is, or without those for tests."""

    limits: FabricLimits
    points: Sequence[Point]
    every: bool = False
    older: Sequence[Point] = ()  # of the same messages in other NCCL versions: not fitted, but the interval should hold them


def latency(points: Sequence[Point], *, nodes: int = 1) -> Quantity:
    """What the smallest messages of two ranks take, whichever collective is fastest."""
    found = [one for one in points if one.ranks == 2 and one.nodes == nodes]
    least = min(one.bytes for one in found)
    best = min((one for one in found if one.bytes == least), key=lambda one: one.ns)
    return Quantity(round(best.ns), f"its tables: {best.kind} of {best.bytes} bytes, 2 ranks")


def reached(points: Sequence[Point], kind: str, share: float) -> Quantity:
    """Bytes over time of the largest message through a card."""
    best = max((one for one in points if one.kind == kind), key=lambda one: one.bytes)
    value = float(f"{share * best.bytes / best.ns * 1e9:.3g}")
    return Quantity(value, f"its tables: {kind} of {best.bytes} bytes, {best.ranks} ranks")


def one_node(name: str, title: str, ranks: int, bandwidth: Quantity, rows: tuple[Published, Sequence[Point]]) -> Described:
    published, points = rows
    tier = LinkTier("node", "nvswitch", ranks, bandwidth, latency(points))
    return Described(FabricLimits(name, title, ranks, 1, 0, 1.0, (tier,), Path(f"{name}.json"), (published,)), points)


def dgx(tables: Tables, gpu: str, name: str, title: str, ranks: int, bandwidth: Quantity) -> Described:
    nccl, points = tables.newest(gpu)
    published = replace(SINGLE, source=SINGLE.source.format(nccl=nccl, gpu=gpu))
    return one_node(name, title, ranks, bandwidth, (published, points))


def whole_node(tables: Tables, gpu: str, name: str, title: str, bandwidth: Quantity, like: str) -> Described:
    """A node of 8 from both tables, each message in its newest NCCL version from `OLDEST` on."""
    _, few = tables.newest(gpu) if any(one.device == gpu for one in tables.single) else ("", [])
    every = [one for one in tables.rows if one.device == gpu and one.nodes == 1]
    rows = [one for one in every if version(one) >= OLDEST]
    newest: dict[tuple[str, int, int], tuple[int, ...]] = {}
    for one in rows:
        asked = one.kind, one.ranks, one.bytes
        newest[asked] = max(version(one), newest.get(asked, ()))
    chosen = [one for one in rows if version(one) == newest[one.kind, one.ranks, one.bytes]]
    versions = " and ".join(sorted({one.nccl for one in chosen}))
    found = one_node(
        name,
        title,
        8,
        bandwidth,
        (replace(COMMITTED, source=f"ai-dynamo/aiconfigurator, NCCL {versions}, {gpu}"), [*few, *chosen]),
    )
    published = tuple(replace(one, path=one.path.format(gpu=gpu)) for one in found.limits.published)
    if few:
        published += (replace(SINGLE, source=SINGLE.source.format(nccl=few[0].nccl, gpu=gpu) + ": 2 and 4 ranks"),)
    return Described(
        replace(found.limits, published=published, like=like),
        found.points,
        every=True,
        older=[one for one in every if one not in chosen],
    )


def version(point: Point) -> tuple[int, ...]:
    return tuple(int(part) for part in point.nccl.split("."))


def with_pairs(tables: Tables, found: Described, box: str) -> Described:
    """Send and receive of two ranks of a node from another site, for the first has none."""
    pairs = [one for one in tables.profiled(box, "send_recv") if one.nodes == 1]
    published = replace(PROFILED, source=PROFILED.source.format(gpu=box) + ": send_recv")
    return Described(replace(found.limits, published=(*found.limits.published, published)), [*found.points, *pairs])


def with_broadcasts(tables: Tables, found: Described) -> Described:
    points = [one for one in tables.multi if "superbenchmark" in one.source and one.kind in ("broadcast", "reduce")]
    limits = replace(
        found.limits, published=(*found.limits.published, replace(BENCHED, source=BENCHED.source + ": broadcast, reduce"))
    )
    return Described(limits, [*found.points, *points])


def pairwise(tables: Tables, gpu: str, title: str, bus: Quantity, *, network: bool) -> Described:
    """Boxes of four, NVLink between two and two; where a send_recv over nodes was measured, two boxes."""
    name, box = f"{gpu}-pairwise-nvlink", f"{gpu}_pairwise_nvlink"
    points = tables.profiled(box, "all_reduce")
    # The published send_recv of the H100 boxes is the A100's, row by row: it says nothing of H100.
    points += tables.profiled(box, "send_recv") if network else []
    tiers = [
        LinkTier("pair", "nvlink", 2, BRIDGE, latency(points)),
        LinkTier(
            "node",
            "pcie",
            4,
            bus,
            Quantity(
                median(one.ns for one in points if one.ranks == 4 and one.bytes < 20_000),
                "its tables: all_reduce of less than 20 kB, 4 ranks",
            ),
        ),
    ]
    if network:
        across = [one for one in points if one.nodes == 2]
        tiers.append(LinkTier(NETWORK, NETWORK, 8, reached(across, "send_recv", 1.0), latency(points, nodes=2)))
    published = replace(PROFILED, source=PROFILED.source.format(gpu=box))
    limits = FabricLimits(
        name, title, 4, 2 if network else 1, int(network), 1.0, tuple(tiers), Path(f"{name}.json"), (published,)
    )
    return Described(limits, points)


def a40(tables: Tables) -> Described:
    """Only send and receive was published."""
    name, box = "a40-pairwise-nvlink", "a40_pairwise_nvlink"
    points = tables.profiled(box, "send_recv")
    across = [one for one in points if one.nodes == 2]
    tiers = (
        LinkTier("node", "pcie", 8, PCIE4, latency(points)),
        LinkTier(NETWORK, NETWORK, 16, reached(across, "send_recv", 1.0), latency(points, nodes=2)),
    )
    title = "two nodes of 8 NVIDIA A40; send and receive only, at what PCIe through the host gives and not NVLink"
    published = replace(PROFILED, source=PROFILED.source.format(gpu=box))
    return Described(FabricLimits(name, title, 8, 2, 1, 1.0, tiers, Path(f"{name}.json"), (published,)), points)


@dataclass(frozen=True)
class Site:
    """A cluster of H100 nodes whose pairs were timed."""

    name: str
    title: str
    network: str  # the run of the two-node logs
    date: str
    most: int  # ranks of an all_to_all that the network's curve may see; those of 8 and 16 are predicted
    profiled_bytes: int  # below, send_recv over nodes comes from another site of H100 nodes: this one has none


SITES = (
    Site("h100-2-nodes", "two nodes of 8 NVIDIA H100 SXM, a card per GPU", "cluster01", "2026-01-28", 4, SPANNING_BYTES),
    Site("h100-2-nodes-2025", "two nodes of 8 NVIDIA H100 SXM, a slower network", "cluster00", "2025-11", 2, 128 << 10),
)


def two_nodes(tables: Tables, site: Site) -> Described:
    """Within a node: small messages from the single-node tables, from 32 MiB on those of the newest site where it has them."""
    nccl, small = tables.newest("h100_sxm")
    own = [one for one in tables.site("cluster01") if one.nodes == 1]
    replaced = {(one.kind, one.ranks) for one in own}
    inner = [one for one in small if one.bytes < SPANNING_BYTES or (one.kind, one.ranks) not in replaced]
    # A ring of 4 or 8 within a node is not what two ranks take: send and receive come from the profiled tables.
    inner += [one for one in own if one.kind != "send_recv"]
    pairs = tables.profiled("h100_dgx", "send_recv")
    inner += [one for one in pairs if one.nodes == 1]
    across = [one for one in tables.site(site.network) if one.nodes == 2]
    across = [one for one in across if one.kind != "all_to_all" or one.ranks <= site.most]
    across += [one for one in pairs if one.nodes == 2 and one.bytes < site.profiled_bytes]
    tiers = (
        LinkTier("node", "nvswitch", 8, NVLINK4, latency(small)),
        LinkTier(NETWORK, NETWORK, 16, reached(across, "send_recv", 1.0), latency(pairs, nodes=2)),
    )
    published = (
        replace(SINGLE, source=SINGLE.source.format(nccl=nccl, gpu="h100_sxm") + ": within a node, below 32 MiB"),
        Published(
            "xxrjun/nccl-tests-cluster, example-cluster01, NCCL 2.29.2: within a node, from 32 MiB", "Apache-2.0", "2026-01-28"
        ),
        Published(
            f"xxrjun/nccl-tests-cluster, example-{site.network}, medians over pairs of nodes: send_recv, all_reduce of 2 "
            f"ranks, all_to_all of up to {site.most} ranks",
            "Apache-2.0",
            site.date,
        ),
        replace(
            PROFILED,
            source=PROFILED.source.format(gpu="h100_dgx") + f": send_recv, between nodes below {site.profiled_bytes >> 10} KiB",
        ),
    )
    limits = FabricLimits(site.name, site.title, 8, 2, 8, 1.0, tiers, Path(f"{site.name}.json"), published)
    return Described(limits, [*inner, *across])


def alike(found: Described, like: str) -> Described:
    return Described(replace(found.limits, like=like), found.points)


def described(tables: Tables) -> list[Described]:
    a100 = dgx(tables, "a100_sxm", "a100-nvlink", "node of 8 NVIDIA A100 SXM", 8, NVLINK3)
    h100 = dgx(tables, "h100_sxm", "h100-nvlink", "node of 8 NVIDIA H100 SXM", 8, NVLINK4)
    return [
        with_broadcasts(tables, with_pairs(tables, a100, "a100_dgx")),
        with_pairs(tables, h100, "h100_dgx"),
        whole_node(tables, "h200_sxm", "h200-nvlink", "node of 8 NVIDIA H200 SXM", NVLINK4, "h100-nvlink"),
        whole_node(tables, "b200_sxm", "b200-nvlink", "node of 8 NVIDIA B200", NVLINK5_B200, "gb200-nvlink"),
        alike(dgx(tables, "gb200", "gb200-nvlink", "NVIDIA GB200 NVL72; 2 and 4 ranks measured", 72, NVLINK5), "b200-nvlink"),
        pairwise(tables, "a100", "two boxes of 4 NVIDIA A100 80GB PCIe, NVLink between pairs", PCIE4, network=True),
        pairwise(tables, "h100", "box of 4 NVIDIA H100 NVL, NVLink between pairs", PCIE5, network=False),
        a40(tables),
        *(two_nodes(tables, site) for site in SITES),
    ]


def shown(errors: Sequence[float]) -> str:
    return f"{gmae(errors):6.1%} ({len(errors):3})" if len(errors) else "      -     "


def report_tier(name: str, model: TierModel, points: Points) -> None:
    """GMAE on test rows by collective, small messages apart; beside it rows left out in turn, and what dtypes differ by."""
    test = points.of(TEST)
    known = [place for place in range(len(test)) if (test.kind[place], int(test.ranks[place])) in model.curves]
    test = test.take(np.array(known, dtype=np.intp))
    found = model.times(test.messages)
    off, large = found.ns / test.ns - 1, test.bytes >= SMALL
    held = np.mean((found.low_ns <= test.ns) & (test.ns <= found.high_ns))
    turns = left_out_in_turn(points)
    for kind in sorted(set(test.kind)):
        rows, bar = np.array([one == kind for one in test.kind]), BARS.get(kind)
        parts = [shown(off[rows & some].tolist()) for some in (np.full(len(off), True), large, ~large)]
        said = "" if bar is None else f"  bar {bar:.1%}: {'reached' if gmae(off[rows].tolist()) <= bar else 'MISSED'}"
        beside = f"in turn {shown(turns[kind])}, dtypes {shown(between_dtypes(test.take(rows)))}"
        print(f"  {name:25} {kind:15} all {parts[0]}  from 1 MiB {parts[1]}  below {parts[2]}  {beside}{said}")
    print(f"  {name:25} intervals hold {held:.0%} of {len(test)}")


def left_out_in_turn(points: Points) -> dict[str, list[float]]:
    """Errors of all rows but those for tests, each message predicted by a fit without it."""
    found: dict[str, list[float]] = defaultdict(list)
    rows = points.of(FIT, VALIDATION)
    asked = zip(rows.kind, rows.ranks.tolist(), rows.bytes.tolist(), strict=True)
    folds = np.array([crc32(f"{kind} {ranks} {size:.0f}".encode()) % FOLDS for kind, ranks, size in asked])
    for fold in range(FOLDS):
        for kind, logs in unseen_logs(fit_curves(rows.take(folds != fold)), rows.take(folds == fold)).items():
            found[kind] += np.expm1(-logs).tolist()
    return found


def between_dtypes(points: Points) -> list[float]:
    """One dtype's time of a message against the other's."""
    cells: dict[tuple[str, int, float], list[float]] = defaultdict(list)
    for kind, ranks, size, ns in zip(
        points.kind, points.ranks.tolist(), points.bytes.tolist(), points.ns.tolist(), strict=True
    ):
        cells[kind, ranks, size].append(ns)
    return [some[0] / some[1] - 1 for some in cells.values() if len(some) == 2]


def report_ranks(described_fabric: Described) -> None:
    """A rank count left out, from 1 MiB: 4 from 2 and 8, 8 from 2 and 4."""
    points = tier_points(described_fabric.limits, described_fabric.points)["node"]
    for asked in (4, 8):
        seen = points.take((points.ranks != asked) & (points.split != TEST))
        rows = points.take((points.ranks == asked) & (points.bytes >= SMALL))
        rows = rows.take(np.array([kind in BARS for kind in rows.kind]))
        off = fit_curves(seen).times(rows.messages).ns / rows.ns - 1
        kinds = np.array(rows.kind)
        each = ", ".join(f"{kind} {gmae(off[kinds == kind].tolist()):.1%}" for kind in BARS)
        others = sorted(set(points.ranks.tolist()) & {2, 4, 8} - {asked})
        verdict = "reached" if gmae(off.tolist()) <= RANKS_BAR else "MISSED"
        print(f"  {described_fabric.limits.name:18} {asked} from {others}: {shown(off.tolist())} {verdict}; {each}")


def report_sites(tables: Tables) -> None:
    """How far the boxes and NCCL versions of one GPU differ, by the size of the message."""
    print("largest over smallest time of one message between sites and NCCL versions (median over sizes and ranks, most)")
    boxes: dict[str, Callable[[Point], bool]] = {
        "A100": lambda one: "a100" in one.device.lower(),
        "H100": lambda one: "h100" in one.device.lower(),
    }
    profiled = [
        replace(one, device=box, source="vidur")
        for box in ("a100_dgx", "h100_dgx")
        for one in tables.profiled(box, "all_reduce")
    ]
    for gpu, chosen in boxes.items():
        cells: dict[tuple[str, int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for one in (*tables.single, *tables.multi, *profiled):
            if chosen(one) and one.nodes == 1 and "symmetric" not in one.source:
                cells[one.kind, one.ranks, one.bytes][f"{one.source.split(':')[0]} {one.nccl}"].append(one.ns)
        for title, least, most in (
            ("below 1 MiB", 0, SMALL),
            ("1 to 32 MiB", SMALL, SPANNING_BYTES),
            ("from 32 MiB", SPANNING_BYTES, 1 << 60),
        ):
            ratios = [
                max(times) / min(times)
                for (_, _, size), sites in cells.items()
                if least <= size < most and len(times := [median(some) for some in sites.values()]) > 1
            ]
            print(f"  {gpu} {title:12} {median(ratios):5.2f} {max(ratios):5.2f} ({len(ratios)} messages)")


def report_spanning(tables: Tables, fabrics: Mapping[str, Fabric]) -> None:
    """All_to_all of 8 and 16 ranks over two nodes, from tiers whose curves saw neither."""
    print(f"all_to_all over two nodes from its tiers, from 32 MiB (bar {SPANNING_BAR:.0%}); pairs of nodes by size")
    every: list[float] = []
    for site in SITES:
        fabric = fabrics[site.name]
        for ranks in (8, 16):
            cells: dict[int, list[float]] = defaultdict(list)
            for one in tables.multi:
                chosen = one.kind == "all_to_all" and one.ranks == ranks and one.nodes == 2 and one.bytes >= SPANNING_BYTES
                if chosen and site.network in one.source:
                    cells[one.bytes].append(one.ns)
            group = first_ranks(fabric.limits, ranks, ranks // 2)
            found = fabric.times(Messages.even("all_to_all", ranks, list(cells)), group).ns
            middle = (found / [median(some) for some in cells.values()] - 1).tolist()
            best = (found / [float(np.quantile(some, 0.1)) for some in cells.values()] - 1).tolist()
            every += middle
            ends = f"{min(middle):+.1%} to {max(middle):+.1%}"
            print(f"  {site.name:18} {ranks:2} ranks  median pair {shown(middle)} {ends}; fastest tenth {shown(best)}")
    print(f"  all of them, median pair {shown(every)}: {'reached' if gmae(every) <= SPANNING_BAR else 'MISSED'}")


def fit_tiers(described_fabric: Described) -> dict[str, TierModel]:
    """Curves within nodes see no rows of the split `test`; those of the network see all they are given."""
    models: dict[str, TierModel] = {}
    limits = described_fabric.limits
    like = like_curves(limits.like) if described_fabric.every else {}
    for name, of_tier in tier_points(limits, described_fabric.points).items():
        if described_fabric.every:
            older = tier_points(limits, described_fabric.older).get(name) if described_fabric.older else None
            models[name] = fit_all(of_tier, like.get(name, {}), older)
        elif limits.network is None or name != limits.network.name:
            models[name] = fit_points(of_tier)
        else:
            model = fit_curves(of_tier)
            models[name] = replace(model, residuals=interval_ends(unseen_logs(model, of_tier)))
    return models


def fit_all(points: Points, like: Curves, older: Points | None) -> TierModel:
    """Curves through all rows; the residuals are of curves that did not see a row's fifth, and of other versions' rows."""
    model = fit_curves(points, like=like)
    errors: dict[str, list[float]] = defaultdict(list)
    for tested, times in left_out(points, model):
        for kind, logs in by_kind(tested, np.log(tested.ns / times.ns)).items():
            errors[kind] += logs.tolist()
    for kind, logs in unseen_logs(model, older).items() if older is not None else ():
        errors[kind] += logs.tolist()
    return replace(model, residuals=interval_ends(errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "collectives", help="folder of the published tables")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the other table")
    parser.add_argument("--only", help="names of fabrics, with commas; all unless given")
    parser.add_argument("--write", type=Path, help="where to write the fabrics, such as src/steptime/data/fabrics")
    options = parser.parse_args()
    if not options.data.is_dir() or not options.rows.is_file():
        print(f"skipped: the published tables are not at {options.data} and {options.rows}")
        return
    tables = Tables.read(options.data, options.rows)
    fabrics = {}
    print("GMAE on test rows (rows)")
    every = [one for one in described(tables) if options.only is None or one.limits.name in options.only.split(",")]
    for one in every:
        models = fit_tiers(one)
        fabrics[one.limits.name] = Fabric(one.limits, models)
        for tier, points in tier_points(one.limits, one.points).items():
            if tier != NETWORK and not one.every:
                report_tier(f"{one.limits.name} {tier}", models[tier], points)
        if options.write:
            write_models(options.write / f"{one.limits.name}.json", models)
            (options.write / f"{one.limits.name}.toml").write_text(fabric_toml(one.limits), encoding="utf-8")
    if options.only:
        return
    print(f"rank counts left out, rows of 1 MiB or more (bar {RANKS_BAR:.0%})")
    for one in every:
        if one.limits.name in ("a100-nvlink", "h100-nvlink"):
            report_ranks(one)
    report_sites(tables)
    report_spanning(tables, fabrics)


if __name__ == "__main__":
    main()
