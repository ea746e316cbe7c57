"""What models of collectives are compared with: a line, and the published curve (Lin et al., TPDS), by kind and rank count.

The line is a latency and a bandwidth. The curve is latency, a sigmoid of bus bandwidth and saturation, in eight parameters. Its
turning points come from the sweep as published; between its regions it jumps. An uneven exchange is fed to it by the most that
a rank sends to or receives from others, without correcting for the chunk that ranks keep in the sweeps it was fitted to.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from steptime._models.collectives.curve import moved_share
from steptime._models.collectives.fitting import Points
from steptime._models.collectives.message import KINDS, Floats, Messages, load_bytes, moved_by_ranks
from steptime._models.collectives.tier import CollectiveTimes, groups
from steptime.errors import InputError
from steptime_lab.fit.engine import fitting_library

# As published: a slope of latency above this ends the latency region, looked for from this sample on; a bus bandwidth below
# this share of the best begins the saturated region so many samples further.
_SLOPE, _FIRST, _DEFAULT = 0.1, 5, 4
_SATURATED, _FURTHER = 0.95, 2
_LEAST_SAMPLES = 4
_EVALUATIONS = 5_000  # of the second solver


def _most_either_way(sent: Floats) -> Floats:
    result: Floats = np.maximum(*moved_by_ranks(sent)).max(axis=1)
    return result


# Bytes of the even exchange that takes as long, from matrices [cases, senders, receivers]. As published, the most that a rank
# moves is fed to a curve over whole buffers, of which ranks keep a chunk.
RULES: Mapping[str, Callable[[Floats], Floats]] = {
    "sum": lambda sent: sent.sum(axis=(1, 2)) / sent.shape[1],
    "max of max": _most_either_way,
    "max of max, own chunk corrected": lambda sent: _most_either_way(sent) * (sent.shape[1] / max(sent.shape[1] - 1, 1)),
    "max of sum": lambda sent: np.add(*moved_by_ranks(sent)).max(axis=1),
    "busiest rank": load_bytes,
}


class TimeOfBytes(Protocol):
    """The time of one kind of collective among so many ranks."""

    def ns(self, sizes: Floats) -> Floats:
        """Of messages of so many bytes."""
        ...


@dataclass(frozen=True)
class CollectiveBaseline:
    """Curves by kind and rank count, asked like the model they are compared with. They say nothing of intervals."""

    name: str
    curves: Mapping[tuple[str, int], TimeOfBytes]
    sizes: Callable[[Messages], Floats]  # that curves go by

    def times(self, messages: Messages) -> CollectiveTimes:
        """Of every message by its size alone."""
        result, sizes = np.zeros(len(messages)), self.sizes(messages)
        for kind, ranks, places in groups(messages):
            if ranks > 1:
                if (kind, ranks) not in self.curves:
                    there = ", ".join(f"{name} of {count}" for name, count in sorted(self.curves)) or "none"
                    raise InputError(f"no {self.name} for {kind} of {ranks} ranks; there are {there}")
                result[places] = self.curves[kind, ranks].ns(sizes[places])
        return CollectiveTimes(result, result, result, np.ones(len(messages), dtype=np.bool_))


@dataclass(frozen=True, slots=True)
class Line:
    """A latency and a bandwidth."""

    latency_ns: float
    ns_per_byte: float

    def ns(self, sizes: Floats) -> Floats:
        """Of messages of so many bytes."""
        return self.latency_ns + self.ns_per_byte * sizes


def _loads(messages: Messages) -> Floats:
    """Bytes, and of an uneven exchange those of an even one of its load."""
    return np.where(messages.kind == KINDS.index("all_to_all"), messages.load, messages.bytes)


def fit_line(points: Points) -> CollectiveBaseline:
    """The least squares of relative errors, neither part below nothing."""
    sizes = _loads(points.messages)
    lines = {
        (kind, ranks): _least(sizes[places], points.ns[places])
        for kind, ranks, places in groups(points.messages)
        if ranks > 1 and len(np.unique(sizes[places])) > 1
    }
    return CollectiveBaseline("line", lines, _loads)


def _least(sizes: Floats, times: Floats) -> Line:
    terms = np.stack([1.0 / times, sizes / times], axis=1)
    both = np.linalg.lstsq(terms, np.ones(len(times)), rcond=None)[0]
    if (both >= 0).all():
        return Line(float(both[0]), float(both[1]))
    alone = (terms.sum(axis=0) / (terms**2).sum(axis=0)).tolist()
    return Line(alone[0], 0.0) if both[1] < 0 else Line(0.0, alone[1])


@dataclass(frozen=True, slots=True)
class PublishedCurve:
    """t0 up to x1, a sigmoid of log10 bus bandwidth up to x2 (both log2 of bytes), then the best bandwidth and t0 again."""

    x1: float
    x2: float
    t0_ns: float
    best: float  # bytes per nanosecond
    sigmoid: tuple[float, float, float, float]  # A, x0, k, c
    share: float  # of the bytes that cross a link

    def ns(self, sizes: Floats) -> Floats:
        """Of messages of so many bytes."""
        places, moved = np.log2(np.maximum(sizes, 1.0)), sizes * self.share
        beyond = np.where(places <= self.x2, moved / 10 ** _sigmoid(places, *self.sigmoid), moved / self.best + self.t0_ns)
        return np.where(places <= self.x1, self.t0_ns, beyond)


def _sigmoid(places: Floats, height: float, middle: float, steep: float, base: float) -> Floats:
    """Of log2 bytes."""
    result: Floats = height / (1 + np.exp(-np.clip(steep * (places - middle), -50.0, 50.0))) + base
    return result


def as_published(points: Points) -> Messages:
    """The questions with the bytes of uneven exchanges by the published rule."""
    sizes = points.messages.bytes.copy()
    for index in np.flatnonzero(points.uneven).tolist():
        sizes[index] = RULES["max of max"](points.sent(index))[0]
    return replace(points.messages, bytes=sizes)


def fit_published(points: Points) -> CollectiveBaseline:
    """From the even rows, put together by octaves as the doubling sweep that the published rules expect."""
    even = points.take(~points.uneven)
    curves = {}
    for kind, ranks, places in groups(even.messages):
        sizes, times = _doubling(even.messages.bytes[places], even.ns[places])
        if ranks > 1 and len(sizes) >= _LEAST_SAMPLES:
            curves[kind, ranks] = _fit(sizes, times, moved_share(kind, ranks))
    return CollectiveBaseline("published curve", curves, lambda messages: messages.bytes)


def _doubling(sizes: Floats, times: Floats) -> tuple[Floats, Floats]:
    """The geometric middle of each octave's sizes and the one of its times per byte."""
    octaves = np.rint(np.log2(np.maximum(sizes, 1.0)))
    middles = []
    for octave in np.unique(octaves):
        here = octaves == octave
        middles.append(np.exp([np.log(np.maximum(sizes[here], 1.0)).mean(), np.log(times[here]).mean()]))
    both = np.array(middles)
    return both[:, 0], both[:, 1]


def _fit(sizes: Floats, times: Floats, share: float) -> PublishedCurve:
    last = len(sizes) - 1
    speed = sizes * share / times
    slopes = np.abs((times[2:] - times[:-2]) / (2 * times[1:-1]))
    rising = [index for index in range(_FIRST, last) if slopes[index - 1] > _SLOPE]
    first = min((rising[0] if rising else _DEFAULT + 1) - 1, last - 1)
    slow = [index for index in range(last, -1, -1) if speed[index] < _SATURATED * speed.max()]
    second = min(max((slow[0] if slow else 0) + _FURTHER, first + 1), last)
    places = np.log2(sizes)
    return PublishedCurve(
        x1=float(places[first]),
        x2=float(places[second]),
        t0_ns=float(times[max(first - 1, 0)]),
        best=float(speed.max()),
        sigmoid=_fit_sigmoid(places[first : second + 1], np.log10(speed[first : second + 1])),
        share=share,
    )


def _fit_sigmoid(places: Floats, speeds: Floats) -> tuple[float, float, float, float]:
    """By the published solver and start, then by another one; where both find nothing, the region's middle."""
    optimize = fitting_library("scipy.optimize")
    start = [float(places.max()), float(np.median(places)), 1.0, float(speeds.min())]
    flat = (0.0, 0.0, 1.0, float(speeds.mean()))
    if len(places) < len(start):
        return flat
    for settings in ({"method": "dogbox"}, {"method": "lm", "maxfev": _EVALUATIONS}):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optimize.OptimizeWarning)
                result, _ = optimize.curve_fit(_sigmoid, places, speeds, p0=start, **settings)
        except RuntimeError:
            continue
        height, middle, steep, base = (float(value) for value in result)
        return height, middle, steep, base
    return flat
