"""A fabric of the user's: from what nccl-tests printed, from rows of `steptime measure collectives`, or from a data sheet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from steptime._files import check_file_name, write_output
from steptime._hardware.description import MOST_RANKS, RANGES, Quantity, ValueRange
from steptime._hardware.fabric import NETWORK, FabricLimits, LinkTier, Published, fabric_toml, first_ranks, place
from steptime._measurements.nccl_tests import Point, read_nccl_tests
from steptime._measurements.sets import COLLECTIVES
from steptime._measurements.store import read
from steptime._models.collectives.curve import moved_share
from steptime._models.collectives.fitting import Points, best_points, fit_curves, interval_ends, left_out, swept
from steptime._models.collectives.message import Floats, Message
from steptime._models.collectives.tier import TierModel
from steptime._platforms.fabric import like_curves, write_models
from steptime.errors import InputError

# Rows of ranks that share a GPU went over sockets of one box, and so did those without any GPU (gloo).
_SOCKETS, _SWITCH = "loopback", "nvswitch"
# What a command line says in words of its trade: GB/s and us.
_GB_PER_S, _US = 1e9, 1e3
_GB = ValueRange(RANGES["bandwidth_bytes_per_s"].least / _GB_PER_S, RANGES["bandwidth_bytes_per_s"].most / _GB_PER_S, "GB/s")
_MICROSECONDS = ValueRange(RANGES["latency_ns"].least / _US, RANGES["latency_ns"].most / _US, "microseconds")
EXCHANGE, PAIR = "all_to_all", "send_recv"


@dataclass(frozen=True)
class LeftOut:
    """Rows of one kind on one tier, each predicted by curves through the other four fifths of the messages, if between them."""

    tier: str
    kind: str
    ranks: tuple[int, ...]
    errors: Floats  # relative, signed


@dataclass(frozen=True)
class OwnFabric:
    """A fabric that is ready to be written, how far its curves lie off, and what could not be used."""

    limits: FabricLimits
    models: Mapping[str, TierModel] = field(default_factory=dict)  # none of a data sheet
    left_out: Sequence[LeftOut] = ()
    rows: int = 0
    warnings: Sequence[str] = ()

    def write(self, folder: Path) -> Path:
        """Its TOML file, with its models beside it; `Fabric.load` takes the path."""
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: is a file; expected a folder for the fabric")
        folder.mkdir(parents=True, exist_ok=True)
        if self.limits.models is not None:
            write_models(folder / self.limits.models.name, self.models)
        file = folder / f"{self.limits.name}.toml"
        write_output(file, fabric_toml(self.limits))
        return file


@dataclass(frozen=True, slots=True)
class DataSheet:
    """What one rank has in one direction, and what the smallest message takes between two; beyond a node, through its card."""

    ranks: int
    bandwidth_gb_per_s: float
    latency_us: float
    gpus_per_node: int | None = None
    network_gb_per_s: float | None = None
    network_us: float | None = None


def from_nccl_tests(
    name: str, files: Sequence[Path], *, links: str | None = None, gpus_per_node: int | None = None, like: str | None = None
) -> OwnFabric:
    """From text or JSON. `gpus_per_node`: where the output names too few hosts, or ran on fewer GPUs than there are.

    `like` is a shipped fabric with such links, which helps where few sizes, kinds or rank counts were timed.
    """
    check_file_name("--name", name)
    results = [read_nccl_tests(file) for file in files]
    points = [_on_nodes(point, gpus_per_node) for item in results for point in item.points]
    limits = replace(_grown(described(name, points, links or _SWITCH), gpus_per_node), like=like)
    damaged = sum(item.skipped for item in results)
    warnings = [f"{damaged} rows were damaged or of no collective that is modelled, and left out"] if damaged else []
    return _fitted(limits, tier_points(limits, points), warnings)


def from_measured(
    name: str,
    folder: Path,
    *,
    of: str | None = None,
    links: str | None = None,
    gpus_per_node: int | None = None,
    like: str | None = None,
) -> OwnFabric:
    """From the rows of one of the fabrics in a folder; `of` says which where there are several."""
    check_file_name("--name", name)
    rows = read(folder, COLLECTIVES).to_pylist() if folder.is_dir() else []
    there = sorted({str(row["fabric"]) for row in rows})
    if not there:
        raise InputError(f"{folder}: no rows of `steptime measure collectives` are in it; of nccl-tests, give the files")
    if of is None and len(there) > 1:
        raise InputError(f"{folder}: rows of the fabrics {', '.join(there)}; say which one with --of")
    if of is not None and of not in there:
        raise InputError(f"{folder}: no rows of fabric {of!r}; there are {', '.join(there)}")
    chosen = [row for row in rows if row["fabric"] == (of or there[0])]
    points, _ = best_points(swept(chosen, of or there[0]))
    usual = _SOCKETS if any(row["share"] > 1 or not row["device"] for row in chosen) else _SWITCH
    limits = _grown(described(name, _as_timed(points, chosen), links or usual), gpus_per_node)
    limits = replace(limits, published=(_recipe(chosen),), like=like)
    return _fitted(limits, {limits.tiers[0].name: points}, [])


def from_data_sheet(name: str, sheet: DataSheet, *, links: str | None = None) -> OwnFabric:
    """Labelled analytic: its estimates have wide intervals."""
    check_file_name("--name", name)
    per_node = sheet.ranks if sheet.gpus_per_node is None else sheet.gpus_per_node
    checks = (
        (2 <= sheet.ranks <= MOST_RANKS, f"--ranks {sheet.ranks}: a fabric joins 2 to {MOST_RANKS:,}"),
        (1 <= per_node <= sheet.ranks, f"--gpus-per-node {per_node}: expected 1 to the {sheet.ranks} ranks"),
        (per_node < 1 or sheet.ranks % per_node == 0, f"--ranks {sheet.ranks}: expected whole nodes of {per_node} GPUs"),
    )
    for holds, item in checks:
        if not holds:
            raise InputError(item)
    nodes = sheet.ranks // per_node
    tiers = []
    if per_node > 1:
        tiers.append(_on_paper("node", links or _SWITCH, per_node, sheet.bandwidth_gb_per_s, sheet.latency_us))
    if nodes > 1:
        if sheet.network_gb_per_s is None or sheet.network_us is None:
            raise InputError(
                f"{nodes} nodes of {per_node}: give --network-bandwidth (GB/s of a card) and --network-latency (us)"
            )
        tiers.append(_on_paper(NETWORK, NETWORK, sheet.ranks, sheet.network_gb_per_s, sheet.network_us, "network-"))
    title = f"{nodes} node{'s' * (nodes > 1)} of {per_node}, from a data sheet; nothing was measured"
    rails = per_node if nodes > 1 else 0
    return OwnFabric(FabricLimits(name, title, per_node, nodes, rails, 1.0, tuple(tiers), None))


def _on_paper(name: str, kind: str, ranks: int, gb_per_s: float, us: float, prefix: str = "") -> LinkTier:
    """`prefix` is what the options of its numbers begin with."""
    text = f"data sheet, as given to `steptime fabric`, {date.today().isoformat()}"
    bandwidth, latency = _GB.check(f"--{prefix}bandwidth", gb_per_s), _MICROSECONDS.check(f"--{prefix}latency", us)
    return LinkTier(name, kind, ranks, Quantity(bandwidth * _GB_PER_S, text), Quantity(latency * _US, text))


def _on_nodes(point: Point, gpus_per_node: int | None) -> Point:
    """At least as many nodes as so many GPUs each take."""
    if gpus_per_node is None:
        return point
    if gpus_per_node < 1:
        raise InputError(f"--gpus-per-node {gpus_per_node}: expected 1 or more")
    return replace(point, nodes=max(point.nodes, -(-point.ranks // gpus_per_node)))


def _grown(limits: FabricLimits, gpus_per_node: int | None) -> FabricLimits:
    """With all GPUs of its nodes, where fewer were timed; each with a card."""
    if gpus_per_node is None or gpus_per_node == limits.gpus_per_node:
        return limits
    if gpus_per_node < limits.gpus_per_node:
        raise InputError(f"--gpus-per-node {gpus_per_node}: {limits.gpus_per_node} ranks of one node were timed")
    if limits.gpus_per_node == 1:
        raise InputError(f"--gpus-per-node {gpus_per_node}: nothing was timed within a node; add a run on a single one")
    ranks = {tier.name: gpus_per_node * (limits.nodes if tier.kind == NETWORK else 1) for tier in limits.tiers}
    return replace(
        limits,
        title=limits.title.replace(f"of {limits.gpus_per_node}", f"of {gpus_per_node} ({limits.gpus_per_node} timed)", 1),
        gpus_per_node=gpus_per_node,
        rails=gpus_per_node if limits.nodes > 1 else 0,
        tiers=tuple(replace(tier, ranks=ranks[tier.name]) for tier in limits.tiers),
    )


def _as_timed(points: Points, rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Even ones, as `described` takes them."""
    device, nccl = str(rows[0]["device"]), str(rows[0]["nccl"])
    even = [(row, ns) for row, ns in zip(points.rows, points.ns.tolist(), strict=True) if row.splits is None]
    return [Point(row.kind, row.ranks, 1, row.bytes, ns, nccl, device) for row, ns in even]


def _recipe(rows: Sequence[Mapping[str, Any]]) -> Published:
    versions = ", ".join(sorted({str(row["nccl"]) for row in rows if row["nccl"]})) or "unknown"
    dates = sorted({str(row["date"])[:10] for row in rows})
    period = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return Published(f"`steptime measure collectives`, NCCL {versions}", "your own", period)


def _fitted(limits: FabricLimits, points: Mapping[str, Points], warnings: Sequence[str]) -> OwnFabric:
    """Curves through all rows; intervals and errors from curves that did not see a row's fifth of the messages."""
    models, tested, text = {}, [], list(warnings)
    like = like_curves(limits.like)
    for tier, of_tier in points.items():
        model = fit_curves(of_tier, like=like.get(tier))
        errors = _tested(tier, of_tier, model)
        models[tier] = replace(model, residuals=interval_ends({item.kind: -np.log1p(item.errors) for item in errors}))
        tested += errors
        without = {f"{row.kind} of {row.ranks} ranks" for row in of_tier.rows if (row.kind, row.ranks) not in model.curves}
        if without:
            text.append(f"tier {tier}: too few sizes for a curve of {', '.join(sorted(without))}")
    missing = [tier.name for tier in limits.tiers if tier.name not in models]
    if missing:
        raise InputError(f"fabric {limits.name}: nothing timed tells of its tier {missing[0]}")
    tiers = tuple(_as_fitted(tier, models[tier.name]) for tier in limits.tiers)
    return OwnFabric(replace(limits, tiers=tiers), models, tested, sum(map(len, points.values())), text)


def _as_fitted(tier: LinkTier, model: TierModel) -> LinkTier:
    """Its numbers from the curves, which a row far off does not move: the most that a kind's largest message reaches, and the
    least that a smallest one of the fewest ranks takes.
    """
    rates = {
        pair: curve.largest_bytes * moved_share(*pair) / float(curve.ns(curve.largest_bytes))
        for pair, curve in model.curves.items()
    }
    best = max(rates, key=lambda pair: rates[pair])
    fewest = min(ranks for _, ranks in model.curves)
    starts = {pair: float(curve.ns(curve.smallest_bytes)) for pair, curve in model.curves.items() if pair[1] == fewest}
    first = min(starts, key=lambda pair: starts[pair])
    largest, smallest = model.curves[best].largest_bytes, model.curves[first].smallest_bytes
    bandwidth = _rounded(1e9 * rates[best], f"fitted: {best[0]} of {largest:.0f} bytes, {best[1]} ranks")
    latency = _rounded(starts[first], f"fitted: {first[0]} of {smallest:.0f} bytes, {first[1]} ranks")
    return replace(tier, bandwidth_bytes_per_s=bandwidth, latency_ns=latency)


def _tested(tier: str, points: Points, model: TierModel) -> list[LeftOut]:
    rows: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for tested, times in left_out(points, model):
        errors = times.ns / tested.ns - 1
        for row, error, inside in zip(tested.rows, errors.tolist(), times.inside.tolist(), strict=True):
            if inside:  # and not the largest or smallest of all, of which the others know little
                rows[row.kind].append((row.ranks, error))
    return [
        LeftOut(tier, kind, tuple(sorted({ranks for ranks, _ in of_kind})), np.array([error for _, error in of_kind]))
        for kind, of_kind in rows.items()
    ]


def described(name: str, points: Sequence[Point], kind: str = "nvswitch") -> FabricLimits:
    """A fabric as timed collectives show it: its nodes, a card per GPU, and what the fastest of them reached.

    `kind` is that of the links within a node, which timings do not say.
    """
    within, across = ([item for item in points if item.ranks > 1 and (item.nodes > 1) is over] for over in (False, True))
    if not within and not across:
        raise InputError(f"fabric {name}: no collective of two ranks or more among {len(points)} timed ones")
    nodes = max((item.nodes for item in across), default=1)
    per_node = max([item.ranks for item in within] + [item.ranks // item.nodes for item in across])
    tiers = [_tier("node", kind, per_node, within)] if per_node > 1 and within else []
    if across:
        tiers.append(_tier(NETWORK, NETWORK, per_node * nodes, across))
    if per_node > 1 and not within:
        raise InputError(f"fabric {name}: {per_node} ranks per node and nothing timed within one; add a run on a single node")
    versions = ", ".join(sorted({item.nccl for item in points if item.nccl})) or "unknown"
    devices = ", ".join(sorted({item.device for item in points if item.device})) or "unknown device"
    title = f"{nodes} node{'s' * (nodes > 1)} of {per_node}, {devices}"
    published = Published(f"nccl-tests, NCCL {versions}", "your own", date.today().isoformat())
    rails = per_node if nodes > 1 else 0
    return FabricLimits(name, title, per_node, nodes, rails, 1.0, tuple(tiers), Path(f"{name}.json"), (published,))


def _tier(name: str, kind: str, ranks: int, points: Sequence[Point]) -> LinkTier:
    """What its largest bus bandwidth was, and its shortest time of the fewest ranks."""
    rates = [point.bytes * moved_share(point.kind, point.ranks) / point.ns for point in points]
    best = int(np.argmax(rates))
    fastest = min(points, key=lambda point: (point.ranks, point.ns))
    bandwidth = _rounded(1e9 * rates[best], f"timed: {points[best].kind} of {points[best].bytes} bytes")
    latency = _rounded(fastest.ns, f"timed: {fastest.kind} of {fastest.bytes} bytes, {fastest.ranks} ranks")
    return LinkTier(name, kind, ranks, bandwidth, latency)


def _rounded(value: float, source: str) -> Quantity:
    return Quantity(float(f"{value:.3g}"), source)


def tier_points(limits: FabricLimits, points: Sequence[Point]) -> dict[str, Points]:
    """Which tier each point tells of; groups of one rank tell of none."""
    by_tier: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        if point.ranks > 1:
            per_node = -(-point.ranks // max(point.nodes, 1))
            placed = place(limits, first_ranks(limits, point.ranks, per_node if point.nodes > 1 else None))
            by_tier[placed.tier.name].append(point)
    if limits.network is not None and limits.network.name in by_tier:
        by_tier[limits.network.name] = network_points(limits, by_tier[limits.network.name])
    if not by_tier:
        raise InputError(f"no collective of two ranks or more tells of fabric {limits.name}")
    return {
        name: Points([Message(timed.kind, timed.ranks, timed.bytes) for timed in item], np.array([timed.ns for timed in item]))
        for name, item in by_tier.items()
        if item
    }


def network_points(limits: FabricLimits, points: Sequence[Point]) -> list[Point]:
    """Collectives over nodes as those of one rank per node, by what leaves through a card.

    Where several layouts were measured, that with most ranks per node says most: only then all cards are busy. All_to_all over
    whole nodes counts by the bytes that leave; a ring of send and receive crosses each card once. Of two nodes, sizes below a
    kind's smallest come from send and receive, for a card does not know what it carries.
    """
    if limits.network is None:
        raise InputError(
            f"fabric {limits.name} has no tier of kind {NETWORK}; there are {', '.join(t.name for t in limits.tiers)}"
        )
    result: dict[str, list[Point]] = defaultdict(list)
    layouts: dict[tuple[str, int], int] = {}
    for point in points:
        per_node = point.ranks // point.nodes
        if per_node == 1 or point.kind in (EXCHANGE, PAIR):
            layouts[point.kind, point.bytes] = max(per_node, layouts.get((point.kind, point.bytes), 1))
    for point in points:
        if layouts.get((point.kind, point.bytes)) == point.ranks // point.nodes:
            result[point.kind].append(_through_a_card(limits, point))
    pairs = result.pop(PAIR, [])
    for kind, item in result.items():
        smallest, of_pair = min(point.bytes for point in item), moved_share(kind, 2)
        smaller = [replace(point, kind=kind, bytes=round(point.bytes / of_pair)) for point in pairs]
        item += [point for point in smaller if point.bytes < smallest and item[0].ranks == point.ranks]
    result[PAIR] = pairs
    return [point for item in result.values() for point in item]


def _through_a_card(limits: FabricLimits, point: Point) -> Point:
    """The collective of one rank per node that sends as much through each card."""
    per_node, nodes = point.ranks // point.nodes, point.nodes
    if point.kind == PAIR:
        return replace(point, ranks=2)
    cards = place(limits, first_ranks(limits, point.ranks, per_node)).cards
    return replace(point, ranks=nodes, bytes=point.bytes * per_node // cards)
