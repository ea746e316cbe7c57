"""A step between its lookups and its collectives, composed once: how long many plans take, without playing every kernel.

Of all device work, a plan changes the lookups and the exchanges alone. So the rest of a played step is reduced to the longest
ways from where a rank can be held up (the ends of collectives, and its streams at the begin of the step) to where it arrives
at collectives and ends the step: a max-plus recurrence with a few terms. The host never waits for the device in such a step,
so that the period is the host's own or the device's, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._sim.core import edges
from steptime._sim.core.timeline import CohortTimeline
from steptime._sim.modelled.issue import Issued

Floats = npt.NDArray[np.float64]

FORWARD, BACKWARD = "lookup forward", "lookup backward"
EXCHANGE = "collective all_to_all"
# Steps that are played: the first begins with empty streams, the second as the first ended. In every step the gradients of the
# dense layers are summed over all ranks, which nobody leaves before the others: the second takes as long as any after it.
_STEPS = 2

Ends = Callable[[int, Floats], Floats]
"""Of the first or second exchange, reached then: when each rank is done, from the last one's arrival on; [plans, ranks]."""

Stretched = Callable[[Floats], tuple[Floats, Floats]]
"""Lookups forward and backward, [plans, ranks], of ranks that begin backward then; forward is that of the next step."""

Way = tuple[int, int, int]
"""From where: a stream's front or, behind all streams, a collective's end; and over how many forward and backward lookups."""


@dataclass(frozen=True, slots=True)
class Term:
    """One way: it takes this long besides the lookups on it."""

    source: int
    forward: int
    backward: int
    time_ns: float


@dataclass(frozen=True, eq=False)
class Played:
    """Steps of many plans."""

    device_ns: Floats  # [plans] from step to step, as fast as the device can
    forward_ns: Floats  # [plans, ranks]
    backward_ns: Floats  # [plans, ranks]
    exchange_ns: Floats  # [plans, ranks] of all exchanges, from the last arrival
    waiting_ns: Floats  # [plans, ranks] in collectives


@dataclass(frozen=True, eq=False)
class Stages:
    """One rank's step, the same on all ranks but for its lookups."""

    streams: int
    arrivals: tuple[tuple[Term, ...], ...]  # of every collective, in order
    fronts: tuple[tuple[Term, ...], ...]  # of every stream at the end
    moving_ns: tuple[float, ...]  # of every collective, from the last arrival
    exchanges: tuple[int, ...]  # which collectives are exchanges
    slower: tuple[float, ...]  # per exchange: how many times as long as alone it took beside kernels
    host_ns: float  # of a step
    between_ns: float  # from the lookups backward to those forward of the next step

    @classmethod
    def of(cls, issued: Issued, played: CohortTimeline, alone_ns: Sequence[float], period_ns: float) -> Stages:
        """From the first rank of a played cohort; `alone_ns` are what its exchanges take with nothing beside them."""
        program, timing = issued.program, played.cohort.timing
        took = (played.work_end_ns - played.moving_ns)[:, 0, 0].astype(np.float64)
        groups = [issued.groups[number] for number in issued.estimate]
        arrivals, fronts, order = _ways(issued, played, groups, took)
        exchanges = [place for place, work in enumerate(order) if groups[work] == EXCHANGE]
        factors = [took[order[at]] / alone if alone else 1.0 for at, alone in zip(exchanges, alone_ns, strict=True)]
        return cls(
            len(program.streams),
            tuple(arrivals),
            tuple(fronts),
            tuple(float(took[work]) for work in order),
            tuple(exchanges),
            tuple(factors),
            float((timing.gap_ns + timing.call_ns)[:, 0, 0].sum()),
            _between(groups, played, period_ns),
        )

    def play(self, forward: Floats, backward: Floats, ends: Ends, stretched: Stretched | None = None) -> Played:
        """Plans with lookups that take so long by themselves, [plans, ranks], ns."""
        fronts = [np.zeros_like(forward) for _ in range(self.streams)]
        period, ended = np.zeros(len(forward)), np.zeros(len(forward))
        exchanged, waiting = np.zeros_like(forward), np.zeros_like(forward)
        way = {place: (number, slower) for number, (place, slower) in enumerate(zip(self.exchanges, self.slower, strict=True))}
        for _ in range(_STEPS):
            sources, waiting, exchanged = list(fronts), np.zeros_like(forward), np.zeros_like(forward)
            for place, (terms, moving) in enumerate(zip(self.arrivals, self.moving_ns, strict=True)):
                arrival = _latest(terms, sources, forward, backward)
                last = arrival.max(axis=1, keepdims=True)
                time = np.full_like(forward, moving)
                if place in way:
                    number, slower = way[place]
                    time = ends(number, arrival) * slower
                    exchanged = exchanged + time
                waiting = waiting + (last - arrival)
                sources.append(last + time)
            this = forward
            if stretched is not None:
                forward, backward = stretched(_latest(self._to_backward, sources, forward, np.zeros_like(forward)))
            fronts = [_latest(terms, sources, this, backward) for terms in self.fronts]
            before, ended = ended, np.max([front.max(axis=1) for front in fronts], axis=0)
            period = ended - before
        return Played(period, forward, backward, exchanged, waiting)

    @property
    def _to_backward(self) -> tuple[Term, ...]:
        """Ways over the lookups backward to the end of their stream: how ranks differ there, they differ where those begin."""
        found = (tuple(term for term in terms if term.backward) for terms in self.fronts)
        return next((some for some in found if some), self.fronts[0])


def _between(groups: Sequence[str], played: CohortTimeline, period_ns: float) -> float:
    """From the end of the lookups backward to the begin of those forward, a step later."""
    begin, end = played.work_start_ns[:, 0, 0], played.work_end_ns[:, 0, 0]
    ahead = [float(begin[work]) for work, group in enumerate(groups) if group == FORWARD]
    back = [float(end[work]) for work, group in enumerate(groups) if group == BACKWARD]
    return max(period_ns - (max(back) - min(ahead)), 0.0) if ahead and back else 0.0


def _latest(terms: Sequence[Term], sources: Sequence[Floats], forward: Floats, backward: Floats) -> Floats:
    found: Floats | None = None
    for term in terms:
        time = sources[term.source] + term.time_ns
        if term.forward:
            time = time + forward
        if term.backward:
            time = time + backward
        found = time if found is None else np.maximum(found, time)
    assert found is not None
    return found


def _ways(
    issued: Issued, played: CohortTimeline, groups: Sequence[str], took: Floats
) -> tuple[list[tuple[Term, ...]], list[tuple[Term, ...]], list[int]]:
    """Longest ways to the arrival at each collective and to the end of each stream, and the collectives' works in order."""
    program, timing = issued.program, played.cohort.timing
    streams = len(program.streams)
    spacing, release = timing.spacing_ns[:, 0, 0], timing.release_ns[:, 0, 0]
    awaited: dict[int, list[int]] = {}
    for work, before, next_window in edges.stream_waits(program, edges.Order.of(program)):
        assert not next_window, "a DLRM's step awaits all its collectives"
        awaited.setdefault(int(work), []).append(int(before))
    front: list[dict[Way, float]] = [{(stream, 0, 0): 0.0} for stream in range(streams)]
    ends: dict[int, dict[Way, float]] = {}
    arrivals: list[tuple[Term, ...]] = []
    order: list[int] = []
    counted = {FORWARD: False, BACKWARD: False}
    for work, stream in enumerate(program.works.stream.tolist()):
        after = [(ends[at], float(release[work])) for at in awaited.get(work, ())]
        start = _longest([(front[stream], float(spacing[work])), *after])
        if groups[work].startswith("collective"):
            arrivals.append(_terms(start))
            order.append(work)
            ends[work] = {(streams + len(order) - 1, 0, 0): 0.0}
        elif groups[work] in counted:
            ends[work] = start if counted[groups[work]] else _over_lookup(start, groups[work])
            counted[groups[work]] = True
        else:
            ends[work] = {way: time + took[work] for way, time in start.items()}
        front[stream] = ends[work]
    return arrivals, [_terms(one) for one in front], order


def _longest(ways: Sequence[tuple[Mapping[Way, float], float]]) -> dict[Way, float]:
    found: dict[Way, float] = {}
    for some, more in ways:
        for way, time in some.items():
            found[way] = max(found.get(way, -np.inf), time + more)
    return found


def _over_lookup(ways: Mapping[Way, float], group: str) -> dict[Way, float]:
    """Over all kernels of one lookup: its first stands for their durations, the others only for the pauses between them."""
    ahead, back = int(group == FORWARD), int(group == BACKWARD)
    return {(source, forward + ahead, backward + back): time for (source, forward, backward), time in ways.items()}


def _terms(ways: Mapping[Way, float]) -> tuple[Term, ...]:
    """Without those that another one from the same place makes needless."""
    kept = []
    for (source, forward, backward), time in sorted(ways.items()):
        others = [way for way, own in ways.items() if own >= time and way != (source, forward, backward)]
        if not any(way[0] == source and way[1] >= forward and way[2] >= backward for way in others):
            kept.append(Term(source, forward, backward, float(time)))
    return tuple(kept)
