"""Curves of kinds and rank counts that were not measured: from another fabric of the same links, a mirror image, other counts.

A ring takes a latency per step and has a step per rank, so that what the smallest message takes goes with the ranks; what bytes
take goes with (N-1)/N of them and, the own share being copied as well, a little less. Where protocols and algorithms change is
told by neither: a fabric of like links that has the kind and rank count knows it, and differs by what the measured ones do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2

import numpy as np

from steptime._models.collectives.curve import Curve, moved_share
from steptime._models.collectives.message import Floats

Curves = Mapping[tuple[str, int], Curve]

MIRRORED = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
"""Kinds that move the same bytes by the same steps the other way round."""
# What an octave of ranks away from measured counts adds to either end of the interval, in ln of time. Curves of public A100,
# H100 and loopback tables, a count left out: 90 % of the errors lie in -.15 to .23 for 4 ranks between 2 and 8, in -.23 to .30
# for 8 beyond 4, against about .1 for measured counts.
_BETWEEN_RANKS, _BEYOND_RANKS = 0.12, 0.20
# What it adds that a curve is another fabric's, or its mirror image's: with each kind and rank count of the H200 and B200 left
# out in turn, 90 % of the errors lie in -.11 to .11.
_CARRIED, _OF_MIRROR = 0.08, 0.08
# Over which power of the ranks the part that moves bytes is interpolated: 0: their logarithm, 1: (N-1)/N. With each kind and
# rank count left out, GMAE from 1 MiB is 7.9, 7.1 and 7.6 % on loopback with .6, .8 and 1, 5.5, 4.7 and 4.2 on H100, 6.7, 5.4
# and 4.7 on A100; below 1 MiB 6.5, 7.0 and 7.6, 3.9, 3.9 and 4.1, 4.5, 4.8 and 5.1, where a latency that goes with a power of
# the ranks gives 8.5, 6.3 and 5.8.
_MOVING_POWER = 0.8
# The part that moves bytes is nowhere less than this of the latency, so that its logarithm says something.
_LEAST_MOVING = 0.01
# A latency extrapolated to fewer ranks stays above this of the least measured one.
_LEAST_LATENCY = 0.3
# Beyond twice the largest measured count these go by trees, whose steps go with the logarithm of the ranks.
_BY_TREES = ("all_reduce", "broadcast", "reduce", "barrier")
# What a kind or a rank count has for itself is kept small by as much as so many curves without it would do.
_SHRUNK = 0.5
# Over how many octaves of bytes the ratio of two fabrics' curves is averaged: switches that lie an octave apart are no ratio.
_SMOOTH = 1.5


def unmeasured(kind: str, ranks: int, own: Curves, like: Curves) -> tuple[Curve, float] | None:
    """A curve for a kind and rank count, and by how much (in ln) its interval is wider; None where no count has the kind."""
    if (kind, ranks) in like and own:
        return _carried(kind, ranks, own, like), _CARRIED
    mirrored = _from_mirror(kind, ranks, own)
    if mirrored is not None:
        return mirrored, _OF_MIRROR
    known = {count: curve for (item, count), curve in own.items() if item == kind}
    added = {count for item, count in like if item == kind and own} - set(known)
    known |= {count: _carried(kind, count, own, like) for count in added}
    if not known:
        return None
    counts = sorted(known)
    away = min(abs(log2(ranks / count)) for count in counts)
    wider = away * (_BETWEEN_RANKS if counts[0] < ranks < counts[-1] else _BEYOND_RANKS)
    return _other_ranks(kind, ranks, known), wider


def ratio_along(places: Floats, at: Floats, logs: Floats) -> Floats:
    """Of ln ratios `logs` at some log2 of bytes, the mean around each of `places`; beyond them that of the nearest."""
    distance = ((places[:, None] - at[None, :]) / _SMOOTH) ** 2 / 2.0
    weight = np.exp(distance.min(axis=1, keepdims=True) - distance)
    result: Floats = (weight * logs).sum(axis=1) / weight.sum(axis=1)
    return result


def scaled_curve(curve: Curve, logs: Floats) -> Curve:
    """A curve times a factor at each of its knots."""
    return Curve(curve.knots, np.maximum.accumulate(curve.log_ns + logs))


def extended(curve: Curve, base: Curve) -> Curve:
    """A curve that goes on beyond its sizes as another one does."""
    below, above = base.knots < curve.knots[0] - 0.5, base.knots > curve.knots[-1] + 0.5
    first, last = (float(curve.log_ns[at] - np.log(base.ns(np.exp2(curve.knots[at])))) for at in (0, -1))
    knots = np.concatenate([base.knots[below], curve.knots, base.knots[above]])
    log_ns = np.concatenate([base.log_ns[below] + first, curve.log_ns, base.log_ns[above] + last])
    return Curve(knots, np.maximum.accumulate(log_ns))


def _carried(kind: str, ranks: int, own: Curves, like: Curves) -> Curve:
    """The other fabric's curve, times what the two differ by: in all, for this kind, and at this count."""
    base = like[kind, ranks]
    ratios = {pair: _ratio(base.knots, curve, like[pair]) for pair, curve in own.items() if pair in like}
    if not ratios:
        return base
    return scaled_curve(base, _expected((kind, ranks), list(ratios), np.array(list(ratios.values()))))


def _expected(asked: tuple[str, int], pairs: Sequence[tuple[str, int]], ratios: Floats) -> Floats:
    """What two fabrics differ by for a kind and rank count: in all, for the kind and at the count, each as far as rows say."""
    effects = [*dict.fromkeys(kind for kind, _ in pairs), *dict.fromkeys(count for _, count in pairs)]

    def row(pair: tuple[str, int]) -> list[float]:
        return [1.0, *(float(effect in pair) for effect in effects)]

    design = np.array([row(pair) for pair in pairs])
    small = np.diag([0.0, *(_SHRUNK for _ in effects)])
    fitted = np.linalg.solve(design.T @ design + small, design.T @ ratios)
    result: Floats = np.array(row(asked)) @ fitted
    return result


def _ratio(places: Floats, curve: Curve, other: Curve) -> Floats:
    """ln of one curve over another around some log2 of bytes, from the sizes that both have."""
    low, high = max(curve.knots[0], other.knots[0]), min(curve.knots[-1], other.knots[-1])
    at = np.linspace(low, max(low, high), max(2, round(high - low) + 1))
    return ratio_along(places, at, np.log(curve.ns(np.exp2(at)) / other.ns(np.exp2(at))))


def _from_mirror(kind: str, ranks: int, own: Curves) -> Curve | None:
    """That of the kind which moves the same the other way round, times what the two differ by at the nearest other count."""
    other = MIRRORED.get(kind, "")
    counts = [count for item, count in own if item == kind and (other, count) in own]
    if (other, ranks) not in own or not counts:
        return None
    base, nearest = own[other, ranks], min(counts, key=lambda count: (abs(log2(ranks / count)), count))
    return scaled_curve(base, _ratio(base.knots, own[kind, nearest], own[other, nearest]))


def _other_ranks(kind: str, ranks: int, measured: Mapping[int, Curve]) -> Curve:
    counts = sorted(measured)
    if len(counts) == 1:
        return _scaled(kind, ranks, counts[0], measured[counts[0]])
    index = int(np.clip(np.searchsorted(counts, ranks), 1, len(counts) - 1))
    few, many = counts[index - 1], counts[index]
    return _mixed(kind, ranks, (few, many), (measured[few], measured[many]))


def _mixed(kind: str, ranks: int, counts: tuple[int, int], curves: tuple[Curve, Curve]) -> Curve:
    few, many = counts
    knots = np.union1d(curves[0].knots, curves[1].knots)
    # Where the two begin at other sizes, or stored knots differ in the last digit, knots lie close together.
    knots = knots[np.diff(knots, prepend=-1.0) > 0.01]
    times = [curve.ns(np.exp2(knots)) for curve in curves]
    start = [float(curve.ns(1.0)) for curve in curves]
    latency = _latency(kind, ranks, counts, start)
    share = (_moving_scale(few) - _moving_scale(ranks)) / (_moving_scale(few) - _moving_scale(many))
    moved = [np.maximum(time - item, _LEAST_MOVING * item) for time, item in zip(times, start, strict=True)]
    ratio = moved[1] / moved[0]
    if not few < ranks < many:
        # With twice the ranks, the same bytes take at most twice as long and at least half; beyond is noise to some power.
        ratio = np.clip(ratio, few / many, many / few)
    nearer, further = (moved[1], share - 1.0) if ranks > many else (moved[0], share)
    log_ns = np.log(latency + nearer * ratio**further)
    return Curve(knots, np.maximum.accumulate(log_ns))


def _latency(kind: str, ranks: int, counts: tuple[int, int], start: Sequence[float]) -> float:
    """A step per rank, along rings; by trees where they are many."""
    few, many = counts
    most = max(2 * many, few) if kind in _BY_TREES else ranks
    step = max(start[1] - start[0], 0.0) / (many - few)
    latency = max(start[0] + step * (min(ranks, most) - few), _LEAST_LATENCY * min(start))
    return latency * max(1.0, log2(ranks) / log2(most))


def _moving_scale(ranks: int) -> float:
    return float(np.power(float(ranks), -_MOVING_POWER))


def _scaled(kind: str, ranks: int, count: int, curve: Curve) -> Curve:
    """From one rank count: steps like those of a tree, and the bytes that a rank moves."""
    start = float(curve.ns(1.0))
    steps = 1.0 if kind == "send_recv" else log2(ranks) / log2(count)
    moved = np.exp(curve.log_ns) - start
    return Curve(curve.knots, np.log(start * steps + moved * moved_share(kind, ranks) / moved_share(kind, count)))
