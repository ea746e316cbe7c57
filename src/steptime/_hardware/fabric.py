"""The links between ranks: a TOML file per fabric, tiers from the inside out, and where a group of ranks lies in them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import steptime
from steptime._hardware.description import Catalogue, Quantity, ValueRange, count, quantities, quantity, read_toml
from steptime.errors import InputError

SCHEMA_VERSION = 1
_OVERSUBSCRIPTION = ValueRange(1, 1e4, "times (1: none)")
_BUFFERED, _HOST_SLOWDOWN, _CORES = "buffered_bytes", "host_slowdown", "cores"
_INTERVAL_FACTOR = "interval_factor"
_TIER_QUANTITIES = ("bandwidth_bytes_per_s", "latency_ns")
_PUBLISHED, _WHERE = ("source", "license", "date"), ("repository", "commit", "path")
FOLDER = Path(steptime.__file__).parent / "data" / "fabrics"

NETWORK = "network"
KINDS = ("nvlink", "nvswitch", "pcie", "loopback", NETWORK)
"""Of tiers. A network joins nodes; every other tier lies within one."""
FABRICS = Catalogue("fabric", FOLDER)
fabric_names = FABRICS.names
# Their links are one bus that all ranks of a block share; every other tier gives each rank links of its own.
_SHARED_BUSES = ("pcie",)


@dataclass(frozen=True, slots=True)
class LinkTier:
    """Links that join blocks of consecutive ranks. Bandwidth is what one rank has in one direction."""

    name: str
    kind: str
    ranks: int  # of a block: a pair, a node, the cluster
    bandwidth_bytes_per_s: Quantity
    latency_ns: Quantity  # of the smallest message between two ranks
    fitted: str | None = None  # a shipped fabric whose tier of this name has the curves of these links
    oversubscription: float = 1.0  # of a network: all cards below one of its blocks over what it carries for them
    interval_factor: Quantity | None = None  # on paper: how many times as long or short collectives may take


@dataclass(frozen=True, slots=True)
class Published:
    """Where the rows lie that the models were fitted to, as exactly as is known."""

    source: str
    license: str
    date: str
    repository: str = ""
    commit: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class FabricLimits:
    """A node or a cluster of them as its file describes it; ranks count through a node, then through the next."""

    name: str
    title: str
    gpus_per_node: int
    nodes: int
    rails: int  # network cards of a node; 0 without a network
    oversubscription: float  # all cards of a node over what the network carries for it; 1: nothing is lacking
    tiers: tuple[LinkTier, ...]  # from the inside out
    models: Path | None  # fitted models of its tiers; None: data sheet only
    published: tuple[Published, ...] = ()
    # Of what one rank sends to another, how much lies in buffers: where ranks were seen to leave an exchange one by one.
    buffered_bytes: Quantity | None = None
    # How many times as long a rank's host takes in steps with collectives: where the wire is CPU time of the same cores.
    host_slowdown: Quantity | None = None
    # Of the box, which its ranks share evenly, where threads on them move the data.
    cores: Quantity | None = None
    # A shipped fabric with such links, which has kinds or rank counts that were not measured on this one.
    like: str | None = None

    @property
    def ranks(self) -> int:
        """As many as there are GPUs."""
        return self.gpus_per_node * self.nodes

    @property
    def network(self) -> LinkTier | None:
        """What joins all of its nodes."""
        return self.tiers[-1] if self.tiers[-1].kind == NETWORK else None

    @property
    def networks(self) -> tuple[LinkTier, ...]:
        """What joins nodes, from the leaves of a network to its spine."""
        return tuple(tier for tier in self.tiers if tier.kind == NETWORK)

    @property
    def analytic(self) -> bool:
        """Whether no tier has curves."""
        return self.models is None and not any(tier.fitted for tier in self.tiers)

    def card_of(self, rank: int) -> tuple[int, int]:
        """The node and the card of it that a rank's messages leave by: neighbours share one where there are fewer cards."""
        node, local = divmod(rank, self.gpus_per_node)
        return node, local * max(self.rails, 1) // self.gpus_per_node


def read_fabric(name: str | Path) -> FabricLimits:
    """A shipped fabric by its name, or one of the user's by the path of its TOML file."""
    file = FABRICS.file(name)
    return _shipped(file) if file.parent == FOLDER else _read(file)


def _read(file: Path) -> FabricLimits:
    content = read_toml(file, "fabric", SCHEMA_VERSION)
    limits = FabricLimits(
        name=str(content.get("name", file.stem)),
        title=str(content.get("title", "")),
        gpus_per_node=count(file, content, "gpus_per_node"),
        nodes=count(file, content, "nodes", 1),
        rails=count(file, content, "rails", 0, least=0),
        oversubscription=_OVERSUBSCRIPTION.check(f"{file}: oversubscription", content.get("oversubscription", 1.0)),
        tiers=_tiers(file, content),
        models=_models(file, content),
        published=_published(file, content),
        buffered_bytes=quantity(file, content, _BUFFERED) if _BUFFERED in content else None,
        host_slowdown=quantity(file, content, _HOST_SLOWDOWN) if _HOST_SLOWDOWN in content else None,
        cores=quantity(file, content, _CORES) if _CORES in content else None,
        like=_shipped_name(file, content, "like"),
    )
    _check_shape(file, limits)
    return limits


_shipped = cache(_read)  # files of the package stay as they are


def fabric_toml(limits: FabricLimits) -> str:
    """The text of a fabric's file; `read_fabric` reads it back."""
    lines = [f"schema_version = {SCHEMA_VERSION}", f"name = {_text(limits.name)}", f"title = {_text(limits.title)}"]
    lines += [f"gpus_per_node = {limits.gpus_per_node}", f"nodes = {limits.nodes}"]
    if limits.nodes > 1:
        lines += [f"rails = {limits.rails}", f"oversubscription = {limits.oversubscription:g}"]
    lines.append("analytic = true" if limits.models is None else f"models = {_text(limits.models.name)}")
    lines += [] if limits.like is None else [f"like = {_text(limits.like)}"]
    measured = {_BUFFERED: limits.buffered_bytes, _HOST_SLOWDOWN: limits.host_slowdown, _CORES: limits.cores}
    lines += [_quantity_line(name, value) for name, value in measured.items() if value is not None]
    for item in limits.published:
        lines += ["", "[[published]]", *(f"{name} = {_text(getattr(item, name))}" for name in _PUBLISHED)]
        lines += [f"{name} = {_text(value)}" for name in _WHERE if (value := getattr(item, name))]
    for tier in limits.tiers:
        lines += ["", "[[tiers]]", f"name = {_text(tier.name)}", f"kind = {_text(tier.kind)}", f"ranks = {tier.ranks}"]
        lines += [_quantity_line(name, getattr(tier, name)) for name in _TIER_QUANTITIES]
        lines += [] if tier.fitted is None else [f"fitted = {_text(tier.fitted)}"]
        lines += [f"oversubscription = {tier.oversubscription:g}"] if tier.oversubscription > 1 else []
        lines += [] if tier.interval_factor is None else [_quantity_line(_INTERVAL_FACTOR, tier.interval_factor)]
    return "\n".join(lines) + "\n"


def _quantity_line(name: str, quantity: Quantity) -> str:
    return f"{name} = {{ value = {quantity.value:g}, source = {_text(quantity.source)} }}"


def _text(value: str) -> str:
    """TOML's basic strings are JSON's, but for what it does not escape."""
    return json.dumps(value, ensure_ascii=False)


def _models(file: Path, content: Mapping[str, Any]) -> Path | None:
    """Beside the file that names them; a fabric without any says so."""
    result, analytic = content.get("models"), content.get("analytic", False)
    if isinstance(result, str) and result and not analytic:
        return file.parent / result
    if result is None and analytic is True:
        return None
    raise InputError(f"{file}: expected models = 'FILE.json' (fitted), or analytic = true where only a data sheet is known")


def _shipped_name(file: Path, content: Mapping[str, Any], key: str) -> str | None:
    result = content.get(key)
    if result is not None and result not in fabric_names():
        raise InputError(f"{file}: {key} is {str(result)[:60]!r}, expected one of {', '.join(fabric_names())}")
    return result


def _published(file: Path, content: Mapping[str, Any]) -> tuple[Published, ...]:
    result = content.get("published", [])
    if not isinstance(result, list) or not all(isinstance(item, dict) and all(map(item.get, _PUBLISHED)) for item in result):
        raise InputError(f"{file}: each [[published]] needs {', '.join(_PUBLISHED)}")
    return tuple(Published(*(str(item.get(name, "")) for name in (*_PUBLISHED, *_WHERE))) for item in result)


def _tiers(file: Path, content: Mapping[str, Any]) -> tuple[LinkTier, ...]:
    result = content.get("tiers")
    if not isinstance(result, list) or not result or not all(isinstance(item, dict) for item in result):
        raise InputError(f"{file}: expected one [[tiers]] or more, from the inside out")
    unknown = [item.get("kind") for item in result if item.get("kind") not in KINDS]
    if unknown:
        raise InputError(f"{file}: a tier's kind is {unknown[0]!r}, expected one of {', '.join(KINDS)}")
    return tuple(
        LinkTier(
            name=str(item.get("name", item["kind"])),
            kind=item["kind"],
            ranks=count(file, item, "ranks", least=2),
            **quantities(file, item, _TIER_QUANTITIES),
            fitted=_shipped_name(file, item, "fitted"),
            oversubscription=_OVERSUBSCRIPTION.check(f"{file}: oversubscription", item.get("oversubscription", 1.0)),
            interval_factor=quantity(file, item, _INTERVAL_FACTOR) if _INTERVAL_FACTOR in item else None,
        )
        for item in result
    )


def _check_shape(file: Path, limits: FabricLimits) -> None:
    """Tiers nest, the innermost to the outermost, and the last joins all ranks."""
    tiers, per_node, nodes = limits.tiers, limits.gpus_per_node, limits.nodes
    networks = limits.networks
    inner_ranks = [tier.ranks for tier in tiers if tier.kind != NETWORK]
    checks = [
        (len({tier.name for tier in tiers}) == len(tiers), f"two tiers have one name ({', '.join(t.name for t in tiers)})")
    ]
    for inner, outer in pairwise(tiers):
        nested = outer.ranks > inner.ranks and outer.ranks % inner.ranks == 0
        expected = f"expected a multiple of {inner.name}'s {inner.ranks}"
        checks.append((nested, f"tier {outer.name} joins {outer.ranks} ranks, {expected}"))
    expected = f"expected {nodes} nodes of {per_node} GPUs, {limits.ranks} ranks"
    checks += [
        (tiers[-1].ranks == limits.ranks, f"its outermost tier {tiers[-1].name} joins {tiers[-1].ranks} ranks, {expected}"),
        (
            (len(networks) > 0) is (nodes > 1) and tiers[len(tiers) - len(networks) :] == networks,
            f"{nodes} nodes and {len(networks)} network tiers; expected one or more, outermost, where nodes are many",
        ),
        (
            nodes == 1 or 1 <= limits.rails <= per_node,
            f"rails is {limits.rails}, expected 1 to {per_node} network cards of a node",
        ),
        (inner_ranks[-1:] == [per_node] or (not inner_ranks and per_node == 1), f"no tier joins the {per_node} GPUs of a node"),
    ]
    for holds, text in checks:
        if not holds:
            raise InputError(f"{file}: {text}")


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """A group in a fabric. `sharing`: how many times as long its bytes take because of groups that run meanwhile.

    Of a group over several nodes that is what leaves a node; `sharing_inside` is the same of what does not.
    """

    ranks: int
    tier: LinkTier  # the innermost that joins all of them
    inside: LinkTier | None  # the innermost that joins those of one node; None where no node has two
    nodes: int
    per_node: int  # the most of them on one node
    cards: int  # network cards that they use on that node
    even: bool  # as many on every node
    sharing: float = 1.0
    sharing_inside: float = 1.0
    # The same of rings through cards: they leave a block of a network once, and do not crowd what joins blocks.
    sharing_rings: float = 1.0

    @property
    def spans_nodes(self) -> bool:
        """Whether something leaves a node."""
        return self.nodes > 1


def first_ranks(limits: FabricLimits, ranks: int, per_node: int | None = None) -> tuple[int, ...]:
    """The first `ranks` of a fabric, or so many of each node."""
    chosen = limits.gpus_per_node if per_node is None else per_node
    if not 1 <= chosen <= limits.gpus_per_node:
        raise InputError(f"fabric {limits.name} has {limits.gpus_per_node} GPUs per node; {chosen} per node were asked for")
    result = tuple(node * limits.gpus_per_node + local for node in range(limits.nodes) for local in range(chosen))[:ranks]
    if len(result) < ranks:
        where = f"{limits.nodes} node{'s' * (limits.nodes > 1)} of {chosen}"
        raise InputError(f"fabric {limits.name} has {limits.ranks} ranks ({where}); a group of {ranks} was asked for")
    return result


@lru_cache(maxsize=512)
def place_first(limits: FabricLimits, ranks: int) -> GroupPlacement:
    """The first `ranks` of a fabric, by themselves; thousands of them are looked at one by one, so they are placed once."""
    return place(limits, first_ranks(limits, ranks))


def place(limits: FabricLimits, group: Sequence[int]) -> GroupPlacement:
    """A group by itself."""
    return place_together(limits, [group])[0]


def place_together(limits: FabricLimits, groups: Sequence[Sequence[int]]) -> list[GroupPlacement]:
    """Groups that run at the same time: where they share links, each has its part of them."""
    alone = [_alone(limits, group) for group in groups]
    links = [_links(limits, group, item) for group, item in zip(groups, alone, strict=True)]
    users = Counter(link for used in links for link in used)
    busy = _busy_cards(limits, links)
    results = []
    for item, used in zip(alone, links, strict=True):
        inside = max((users[link] for link in used if link[0] != NETWORK), default=1)
        if not item.spans_nodes:
            results.append(replace(item, sharing=inside, sharing_inside=inside, sharing_rings=inside))
            continue
        cards = max((users[link] for link in used if link[0] == NETWORK), default=1)
        across, rings = (cards * max(1.0, _oversubscribed(limits, tier) * busy) for tier in (item.tier, limits.networks[0]))
        results.append(replace(item, sharing=across, sharing_inside=inside, sharing_rings=rings))
    return results


def _alone(limits: FabricLimits, group: Sequence[int]) -> GroupPlacement:
    there = f"fabric {limits.name} has ranks 0 to {limits.ranks - 1}"
    unknown = sorted({rank for rank in group if not 0 <= rank < limits.ranks})
    twice = [rank for rank, times in Counter(group).items() if times > 1]
    if not group:
        raise InputError(f"a group without ranks; {there}")
    if unknown:
        raise InputError(f"a group with unknown rank{'s' * (len(unknown) > 1)} {', '.join(map(str, unknown))}; {there}")
    if twice:
        raise InputError(f"a group with rank {twice[0]} twice; {there}")
    nodes = Counter(rank // limits.gpus_per_node for rank in group)
    fullest, most = max(nodes.items(), key=lambda item: item[1])
    of_node = [rank for rank in group if rank // limits.gpus_per_node == fullest]
    return GroupPlacement(
        ranks=len(group),
        tier=_joining(limits, group),
        inside=_joining(limits, of_node) if most > 1 else None,
        nodes=len(nodes),
        per_node=most,
        cards=len({limits.card_of(rank) for rank in of_node}),
        even=len(set(nodes.values())) == 1,
    )


def _joining(limits: FabricLimits, group: Sequence[int]) -> LinkTier:
    return next(tier for tier in limits.tiers if len({rank // tier.ranks for rank in group}) == 1)


def _links(limits: FabricLimits, group: Sequence[int], placed: GroupPlacement) -> set[tuple[str, int, int]]:
    """What a group keeps busy: cards, buses, and the links of each of its ranks."""
    results: set[tuple[str, int, int]] = set()
    if len(group) == 1:
        return results
    if placed.spans_nodes:
        results |= {(NETWORK, *limits.card_of(rank)) for rank in group}
    if placed.inside is not None:
        for rank in group:
            link = rank // placed.inside.ranks if placed.inside.kind in _SHARED_BUSES else rank
            results.add((placed.inside.name, link, 0))
    return results


def _busy_cards(limits: FabricLimits, links: Sequence[set[tuple[str, int, int]]]) -> float:
    """Of a node's cards, the part that is busy on the busiest: a network that carries less than all is not crowded by few."""
    cards = {link for used in links for link in used if link[0] == NETWORK}
    return max(Counter(node for _, node, _ in cards).values(), default=0) / max(limits.rails, 1)


def _oversubscribed(limits: FabricLimits, tier: LinkTier) -> float:
    """What a network tier lacks, and all those within it."""
    inner = [item.oversubscription for item in limits.networks if item.ranks <= tier.ranks]
    return max(inner) * (limits.oversubscription if tier is limits.networks[-1] else 1.0)
