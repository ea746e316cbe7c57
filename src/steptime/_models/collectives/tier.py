"""`TierModel`: collectives within one tier of links (NVLink of a node, a network, loopback sockets), per kind and rank count.

Kinds and rank counts that were not measured are answered from those that were, with wider intervals (`unmeasured`).
Of links of which only a data sheet is known, a `paper.AnalyticTier` answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._hardware.description import MOST_RANKS
from steptime._models.collectives.curve import Curve
from steptime._models.collectives.message import KINDS, Floats, Messages, Places
from steptime._models.collectives.unmeasured import Curves, unmeasured
from steptime.errors import InputError

SCHEMA_VERSION = 1
# What an octave of bytes away from what was measured adds to either end of the interval, in ln of time: without the last four
# octaves of public and loopback curves 90 % of the errors lie in -.20 to .24, without the first four in -.25 to .08.
_BEYOND_BYTES = 0.05
# Of kinds without rows to tell, the ends of the interval: the widest seen for 2 and 4 ranks of loopback.
_UNKNOWN = (-0.3, 0.3)
_BARRIER_BYTES = 4.0
_MOST_LOG = 10.0  # of factors, in a file
# Splits are added up and divided again, and even ones may come out that far from their buffer.
_EVEN = 1e-12
# Parts of an exchange that end within so many bytes are copied more slowly: on loopback by 6, 11 and 5 % for 2, 4 and 8 ranks.
PART_BYTES = 32
_STAND_INS: dict[str, tuple[str, float]] = {
    "barrier": ("all_reduce", 0.1),
    "all_gather": ("reduce_scatter", 0.1),
    "reduce_scatter": ("all_gather", 0.1),
    "reduce": ("broadcast", 0.4),
    "broadcast": ("reduce", 0.4),
}
"""What answers for a kind that was not measured, and what that adds to the interval.

A barrier is an all_reduce of four bytes. The others move the same bytes the other way round: on loopback, 90 % of all_gathers
take -.14 to .16 (in ln) more than reduce_scatters, and of reduces -.13 to .55 more than broadcasts. Nothing stands in for an
all_reduce (-.9 to .4 against a reduce_scatter and an all_gather), an all_to_all, or send and receive.
"""


@dataclass(frozen=True)
class CollectiveTimes:
    """Nanoseconds of each message, the ends of a 90 % interval, and whether it lies within what was measured."""

    ns: Floats
    low_ns: Floats
    high_ns: Floats
    inside: npt.NDArray[np.bool_]

    @classmethod
    def joined(cls, count: int, parts: Iterable[tuple[Places, CollectiveTimes]] = ()) -> CollectiveTimes:
        """So many messages, some of them at their places; all others take no time, as groups of one rank do."""
        result = cls(np.zeros(count), np.zeros(count), np.zeros(count), np.ones(count, dtype=np.bool_))
        for places, part in parts:
            result.ns[places], result.low_ns[places], result.high_ns[places] = part.ns, part.low_ns, part.high_ns
            result.inside[places] = part.inside
        return result

    def plus(self, ns: Floats) -> CollectiveTimes:
        """So much later, and the interval with it."""
        later = 1.0 + np.divide(ns, self.ns, out=np.zeros(len(self.ns)), where=self.ns > 0)
        return CollectiveTimes(self.ns + ns, self.low_ns * later, self.high_ns * later, self.inside)

    def widened(self, by: float, inside: npt.NDArray[np.bool_]) -> CollectiveTimes:
        """With an interval that is wider at either end, in ln of time."""
        factor = np.exp(by)
        return CollectiveTimes(self.ns, self.low_ns / factor, self.high_ns * factor, inside)


@dataclass(frozen=True)
class _Law:
    """What answers for one kind and rank count."""

    curve: Curve
    kind: str  # whose curve it is
    measured: bool  # and not put together from other rank counts or kinds
    wider: float  # of either end of the interval, in ln of time


@dataclass(frozen=True)
class TierModel:
    """Fitted curves by kind and rank count, and how far they were off on rows they were not fitted to."""

    curves: Mapping[tuple[str, int], Curve]
    idle_power: float  # an uneven exchange takes (pairs / load) ** this of an even one of its load
    residuals: Mapping[str, tuple[float, float]]  # kind -> 5th and 95th percentile of ln(measured / fitted)
    ragged: float = 0.0  # ln of what an even exchange takes more whose parts are no multiples of `PART_BYTES`
    like: Curves = field(default_factory=dict)  # of another fabric's tier with such links, for what was not measured here

    def times(self, messages: Messages) -> CollectiveTimes:
        """How long each takes by itself; a group of one rank takes no time."""
        many = ((places, self._alike(kind, ranks, messages, places)) for kind, ranks, places in groups(messages) if ranks > 1)
        return CollectiveTimes.joined(len(messages), many)

    def _alike(self, kind: str, ranks: int, messages: Messages, places: Places) -> CollectiveTimes:
        """Of one kind and rank count."""
        law = self._law(kind, ranks)
        sizes = (messages.load if kind == "all_to_all" else messages.bytes)[places]
        if kind == "barrier" and law.kind != kind:
            sizes = np.full(len(sizes), _BARRIER_BYTES)
        times = law.curve.ns(sizes)
        if kind == "all_to_all":
            times = times * self._exchange(messages.take(places), ranks)
        away = _octaves_outside(law.curve, sizes)
        low, high = self.residuals.get(law.kind, _UNKNOWN)
        wider = np.exp(law.wider + _BEYOND_BYTES * away)
        low_ns, high_ns = times * (np.exp(min(low, 0.0)) / wider), times * (np.exp(max(high, 0.0)) * wider)
        return CollectiveTimes(times, low_ns, high_ns, law.measured & (away == 0))

    def _exchange(self, messages: Messages, ranks: int) -> Floats:
        """What exchanges take of even ones of their load whose parts are whole."""
        result = saved(messages) ** self.idle_power
        return result * np.exp(self.ragged * ragged_parts(messages, ranks)) if self.ragged else result

    def measured_ranks(self, kind: str) -> tuple[int, ...]:
        """Which rank counts a kind has curves for, ascending."""
        return tuple(sorted(ranks for item, ranks in self.curves if item == kind))

    def knows(self, kind: str) -> bool:
        """Whether a kind was measured at any rank count, here or on links like these."""
        return bool(self.measured_ranks(kind)) or (bool(self.curves) and any(kind == item for item, _ in self.like))

    @cached_property
    def _laws(self) -> dict[tuple[str, int], _Law]:
        """Those asked for so far."""
        return {}

    def _law(self, kind: str, ranks: int) -> _Law:
        if (kind, ranks) not in self._laws:
            self._laws[kind, ranks] = self._new_law(kind, ranks)
        return self._laws[kind, ranks]

    def _new_law(self, kind: str, ranks: int) -> _Law:
        if (kind, ranks) in self.curves:
            return _Law(self.curves[kind, ranks], kind, True, 0.0)
        made = unmeasured(kind, ranks, self.curves, self.like)
        if made is not None:
            return _Law(made[0], kind, False, made[1])
        if kind in _STAND_INS and self.knows(_STAND_INS[kind][0]):
            other, wider = _STAND_INS[kind]
            law = self._law(other, ranks)
            return _Law(law.curve, other, False, law.wider + wider)
        ranks_of = {item: ", ".join(map(str, self.measured_ranks(item))) for item in KINDS if self.knows(item)}
        there = ", ".join(f"{item} ({counts_of} ranks)" for item, counts_of in ranks_of.items()) or "none"
        raise InputError(f"no {kind} was measured on these links; there are {there}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "idle_power": self.idle_power,
            "ragged": round(self.ragged, 4),
            "residuals": {kind: [round(end, 4) for end in ends] for kind, ends in sorted(self.residuals.items())},
            "curves": [
                {"kind": kind, "ranks": ranks, **curve.to_dict()} for (kind, ranks), curve in sorted(self.curves.items())
            ],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> TierModel:
        """What `to_dict` gave; `where` is said in errors."""
        if not isinstance(values, Mapping):
            raise InputError(f"{where}: no fitted collectives, but {str(values)[:40]!r}")
        version = values.get("schema_version")
        if version != SCHEMA_VERSION:
            raise InputError(f"{where}: collectives of schema version {version!r}, expected {SCHEMA_VERSION}; fit them again")
        try:
            curves = {_key(item): Curve.from_dict(item) for item in values["curves"]}
            if not curves:
                raise ValueError("it has no curves; fit them again")
            residuals = {str(kind): (float(low), float(high)) for kind, (low, high) in values["residuals"].items()}
            power, ragged = float(values["idle_power"]), float(values["ragged"])
        except KeyError as error:
            raise InputError(f"{where}: no {error.args[0]!r} in the fitted collectives") from error
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{where}: no fitted collectives ({error})") from error
        logs = (power, ragged, *(end for ends in residuals.values() for end in ends))
        if not all(abs(item) <= _MOST_LOG for item in logs):
            raise InputError(
                f"{where}: idle_power, ragged or a residual is beyond {_MOST_LOG:g}, expected logarithms of factors"
            )
        return cls(curves, power, residuals, ragged)


def _key(values: Mapping[str, Any]) -> tuple[str, int]:
    kind, ranks = values["kind"], values["ranks"]
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}, expected one of {', '.join(KINDS)}")
    if not isinstance(ranks, int) or not 2 <= ranks <= MOST_RANKS:
        raise ValueError(f"ranks {repr(ranks)[:20]} of {kind}, expected a count of 2 to {MOST_RANKS}")
    return kind, ranks


def groups(messages: Messages) -> Iterator[tuple[str, int, Places]]:
    """Kind, ranks and places of the messages that have them in common."""
    if not len(messages):
        return
    codes = messages.ranks * len(KINDS) + messages.kind
    # NumPy sorts short integers in one pass.
    order = np.argsort(codes.astype(np.uint16) if codes.max() < 1 << 16 else codes, kind="stable")
    ends = np.flatnonzero(np.diff(codes[order], append=-1)) + 1
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        ranks, kind = divmod(int(codes[order[start]]), len(KINDS))
        yield KINDS[kind], ranks, order[start:end]


def saved(messages: Messages) -> Floats:
    """What pairs exchange over the load of the busiest rank: one is faster where its peers are idle. 1 where nothing moves."""
    load, pairs = messages.load, messages.pairs
    return np.divide(pairs, load, out=np.ones(len(messages)), where=(load > 0) & (pairs > 0))


def ragged_parts(messages: Messages, ranks: int) -> npt.NDArray[np.bool_]:
    """Which even exchanges of whole bytes have parts that end within `PART_BYTES`."""
    sizes = messages.bytes
    even = np.maximum(np.abs(messages.load - sizes), np.abs(messages.pairs - sizes)) <= _EVEN * sizes
    result: npt.NDArray[np.bool_] = even & (sizes % 1 == 0) & (sizes % (PART_BYTES * ranks) != 0)
    return result


def _octaves_outside(curve: Curve, sizes: Floats) -> Floats:
    """Of bytes, from the smallest or the largest that was measured; 0 between them."""
    # Knots are rounded when stored, and a measured end must stay inside.
    low, high = curve.smallest_bytes * 0.9999, curve.largest_bytes * 1.0001
    if not sizes.size or (sizes.min() >= low and sizes.max() <= high):
        return np.zeros(len(sizes))
    result: Floats = np.abs(np.log2(np.maximum(sizes, 1.0) / np.clip(sizes, low, high)))
    return result
