"""`Fabric`: the links between ranks, on paper and fitted, and how long collectives of any group over them take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path

import numpy as np

from steptime._files import write_whole
from steptime._hardware.description import is_file, read_json
from steptime._hardware.fabric import (
    FabricLimits,
    GroupPlacement,
    LinkTier,
    place,
    place_first,
    place_together,
    read_fabric,
)
from steptime._models.collectives.message import KINDS, Message, Messages
from steptime._models.collectives.paper import FACTOR, AnalyticTier
from steptime._models.collectives.spanning import Spanning, Tier
from steptime._models.collectives.tier import CollectiveTimes, TierModel
from steptime._models.collectives.unmeasured import Curves
from steptime._models.estimate import Estimate, Source
from steptime.errors import InputError

MODELS_VERSION = 1
_ASKED_BYTES = 1 << 20


@dataclass(frozen=True)
class Fabric:
    """Answers how long a collective takes by itself, from the last rank's arrival to the end."""

    limits: FabricLimits
    tiers: Mapping[str, Tier]  # by the tier's name

    @classmethod
    def load(cls, name: str | Path) -> Fabric:
        """A shipped fabric by its name, or one of the user's by the path of its TOML file."""
        limits = read_fabric(name)
        own = {} if limits.models is None else read_models(limits.models)
        like = like_curves(limits.like)
        tiers: dict[str, Tier] = {}
        for tier in limits.tiers:
            if tier.fitted is not None:
                tiers[tier.name] = cls.load(tier.fitted).tier(tier.name)
            elif limits.models is None:
                # A network that carries less than its cards is crowded by the groups on it (`place_together`), not slower.
                tiers[tier.name] = on_paper(tier)
            elif tier.name in own:
                tiers[tier.name] = replace(own[tier.name], like=like.get(tier.name, {}))
        return cls(limits, tiers)

    @property
    def source(self) -> Source:
        """Of its estimates: fitted where all its tiers are."""
        return Source.FITTED if all(isinstance(tier, TierModel) for tier in self.tiers.values()) else Source.ANALYTIC

    def _source(self, placed: GroupPlacement) -> Source:
        """Of what is said of one group: by the tiers that it uses."""
        used = [self.tiers.get(tier.name) for tier in (placed.tier, placed.inside) if tier is not None]
        return Source.ANALYTIC if any(isinstance(tier, AnalyticTier) for tier in used) else Source.FITTED

    def tier(self, name: str) -> Tier:
        """What answers for one of its tiers."""
        if name not in self.tiers:
            there = ", ".join(f"{tier.name} ({tier.kind})" for tier in self.limits.tiers if tier.name in self.tiers) or "none"
            raise InputError(f"fabric {self.limits.name} has no tier {name!r} that was measured; there are {there}")
        return self.tiers[name]

    def knows(self, kind: str) -> bool:
        """Whether every tier answers for this kind; one from a data sheet answers for all."""
        return all(tier.knows(kind) for tier in self.tiers.values())

    def estimates(
        self, messages: Sequence[Message], ranks: Sequence[int] | None = None, beside: Sequence[Sequence[int]] = ()
    ) -> list[Estimate]:
        """What each takes, among these ranks of the fabric, or among its first ones; `beside` as in `times`."""
        result = self.times(Messages.of(messages), ranks, beside)
        counts = {message.ranks for message in messages}
        placed = {count: place(self.limits, ranks) if ranks else place_first(self.limits, count) for count in counts}
        sources = {count: self._source(item) for count, item in placed.items()}
        columns = (result.ns.tolist(), result.low_ns.tolist(), result.high_ns.tolist(), result.inside.tolist())
        return [
            Estimate(ns, low, high, sources[message.ranks], inside)
            for message, ns, low, high, inside in zip(messages, *columns, strict=True)
        ]

    def times(
        self, messages: Messages, ranks: Sequence[int] | None = None, beside: Sequence[Sequence[int]] = ()
    ) -> CollectiveTimes:
        """The same as columns; `beside` are groups that run their own meanwhile and share links with this one."""
        if ranks is not None:
            _check_count(messages, len(ranks))
            return self.times_at(messages, self.placed(ranks, beside))
        if beside:
            raise InputError("groups beside need to know which ranks this one has")
        counts: list[int] = np.flatnonzero(np.bincount(messages.ranks)).tolist()
        return self._many(messages, {count: place_first(self.limits, count) for count in counts})

    def placed(self, ranks: Sequence[int], beside: Sequence[Sequence[int]] = ()) -> GroupPlacement:
        """Where a group lies, for whoever asks often about it."""
        return place_together(self.limits, [ranks, *beside])[0]

    def _many(self, messages: Messages, placed: Mapping[int, GroupPlacement]) -> CollectiveTimes:
        """Groups of several sizes. Where one tier answers for all of them it is asked once."""
        tiers = {item.tier.name for item in placed.values()}
        if len(tiers) == 1 and not any(item.spans_nodes for item in placed.values()):
            return self.tier(tiers.pop()).times(messages)
        rows = {count: np.flatnonzero(messages.ranks == count) for count in placed}
        parts = ((rows[count], self.times_at(messages.take(rows[count]), item)) for count, item in placed.items())
        return CollectiveTimes.joined(len(messages), parts)

    def times_at(self, messages: Messages, placed: GroupPlacement) -> CollectiveTimes:
        """Of messages of a group that lies there."""
        if placed.ranks == 1:
            return CollectiveTimes.joined(len(messages))
        if not placed.spans_nodes:
            slowed = messages if placed.sharing == 1 else messages.scaled(placed.sharing)
            return self.tier(placed.tier.name).times(slowed)
        inner = None if placed.inside is None else self.tier(placed.inside.name)
        return Spanning(placed, inner, self.tier(placed.tier.name)).times(messages)


def on_paper(tier: LinkTier) -> AnalyticTier:
    """What its data sheet says of it."""
    factor = FACTOR if tier.interval_factor is None else tier.interval_factor.value
    return AnalyticTier(tier.bandwidth_bytes_per_s.value, tier.latency_ns.value, tier.kind, factor)


def _check_count(messages: Messages, ranks: int) -> None:
    other = np.flatnonzero(messages.ranks != ranks)
    if len(other):
        raise InputError(f"collective {other[0]} is of {messages.ranks[other[0]]} ranks, its group has {ranks}")


def write_models(file: Path, tiers: Mapping[str, TierModel]) -> None:
    """The fitted models of a fabric's tiers, beside its TOML file."""
    content = {"schema_version": MODELS_VERSION, "tiers": {name: model.to_dict() for name, model in tiers.items()}}
    write_whole(file, json.dumps(content, separators=(",", ":")) + "\n")


@cache
def read_models(file: Path) -> Mapping[str, TierModel]:
    """What `write_models` wrote."""
    if not is_file(file):
        raise InputError(f"{file}: the fitted models of this fabric are not there; `steptime fit` writes them")
    content = read_json(file, "the fitted models of a fabric")
    if content.get("schema_version") != MODELS_VERSION or not isinstance(content.get("tiers"), dict):
        raise InputError(f"{file}: no fitted models of a fabric of version {MODELS_VERSION}")
    return {str(name): TierModel.from_dict(values, f"{file}, tier {name}") for name, values in content["tiers"].items()}


def like_curves(name: str | None) -> Mapping[str, Curves]:
    """The curves of a fabric that another one is like, by tier; none of one that is known from a data sheet."""
    file = None if name is None else read_fabric(name).models
    return {} if file is None else {tier: model.curves for tier, model in read_models(file).items()}


class Origin(Enum):
    """Of what a fabric says about one kind and rank count, best first."""

    FITTED = "fitted"
    INTERPOLATED = "interpolated"  # between rank counts that were fitted
    EXTRAPOLATED = "extrapolated"  # beyond them
    TIERS = "from its tiers"  # a group over several nodes
    CARRIED = "from a fabric like it"
    STAND_IN = "from another kind"
    ANALYTIC = "analytic"
    NONE = "not known"


@dataclass(frozen=True, slots=True)
class Fitted:
    """What was measured of one kind on one tier."""

    tier: str
    kind: str
    ranks: tuple[int, ...]
    bytes: tuple[float, float]  # the smallest and the largest that all of these counts have
    off: tuple[float, float] | None  # 5th and 95th percentile of measured over fitted - 1


def fitted(fabric: Fabric) -> list[Fitted]:
    """Every kind of every tier with a curve."""
    results = []
    for tier in fabric.limits.tiers:
        model = fabric.tiers.get(tier.name)
        if not isinstance(model, TierModel):
            continue
        for kind in filter(model.measured_ranks, KINDS):
            ranks, ends = model.measured_ranks(kind), model.residuals.get(kind)
            curves = [model.curves[kind, count] for count in ranks]
            sizes = max(curve.smallest_bytes for curve in curves), min(curve.largest_bytes for curve in curves)
            off = None if ends is None else (float(np.expm1(ends[0])), float(np.expm1(ends[1])))
            results.append(Fitted(tier.name, kind, ranks, sizes, off))
    return results


def origin(fabric: Fabric, kind: str, ranks: int) -> Origin:
    """Of one kind among the first so many ranks."""
    try:
        fabric.times(Messages.even(kind, [ranks], [_ASKED_BYTES]))
    except InputError:
        return Origin.NONE
    placed = place_first(fabric.limits, ranks)
    model = fabric.tiers.get(placed.tier.name)
    if not isinstance(model, TierModel):
        return Origin.ANALYTIC
    if placed.spans_nodes and placed.per_node > 1:
        return Origin.TIERS
    counts = model.measured_ranks(kind)
    if ranks in counts:
        return Origin.FITTED
    if (kind, ranks) in model.like or (not counts and model.knows(kind)):
        return Origin.CARRIED
    if not counts:
        return Origin.STAND_IN
    return Origin.INTERPOLATED if counts[0] < ranks < counts[-1] else Origin.EXTRAPOLATED


def origins(fabric: Fabric, ranks: int) -> dict[str, Origin]:
    """Of every kind; a group of one rank asks nothing of a fabric."""
    return {kind: origin(fabric, kind, ranks) for kind in KINDS}
