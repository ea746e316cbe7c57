"""A step between its lookups and its collectives, composed once: how long many plans take, without playing every kernel.

Of all device work, a plan changes the lookups and the exchanges alone. So the rest of a played step is reduced to the longest
ways from where a rank can be held up (the ends of collectives, and its streams at the begin of the step) to where it arrives
at collectives, begins its lookups and ends the step: the simulator's max-plus recurrence with a few terms, under the same laws.
The host never waits for the device in such a step, so that the period is the host's own or the device's, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from steptime._models.collectives.overlap import Overlap
from steptime._models.lookups.contention import LookupsTogether
from steptime._sim.core.graph import Order, stream_waits
from steptime._sim.core.timing import CohortTimeline, Timeline
from steptime._sim.modelled.issue import Issued

Floats = npt.NDArray[np.float64]

FORWARD, BACKWARD = "lookup forward", "lookup backward"
EXCHANGE = "collective all_to_all"
_OTHER_LOOKUP = "lookup of a table that every rank has a part of"
# Steps that are played: the first begins with empty streams, those after it as the one before ended. In every step the
# gradients of the dense layers are summed over all ranks, which nobody leaves before the others: without laws the second takes
# as long as any after it. What lookups do to each other settles within two more.
_STEPS, _SETTLING_STEPS = 2, 4

Ends = Callable[[int, Floats], Floats]
"""Of the first or second exchange, reached then: when each rank is done, from the last one's arrival on; [plans, ranks]."""

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
class Evaluation:
    """Plans with what they cost, nanoseconds of one step; [plans] or [plans, ranks]."""

    step_ns: Floats  # [plans] the steady-state period
    device_ns: Floats  # [plans] the same as fast as the device can, whatever the host takes; the step where it was played
    forward_ns: Floats  # [plans, ranks] lookups forward
    backward_ns: Floats  # [plans, ranks] lookups backward, with the update of the rows
    exchange_ns: Floats  # [plans, ranks] both exchanges of rows, from the last rank's arrival
    waiting_ns: Floats  # [plans, ranks] in collectives for ranks that arrive later
    host_bound: npt.NDArray[np.bool_]  # [plans]

    def __len__(self) -> int:
        """How many plans there are."""
        return len(self.step_ns)

    @property
    def lookups_ns(self) -> Floats:
        """Both directions, [plans, ranks]."""
        return self.forward_ns + self.backward_ns

    def take(self, rows: npt.NDArray[np.integer] | list[int] | slice) -> Evaluation:
        """Some of the plans."""
        return Evaluation(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """The plans of all parts, one behind the other."""
        return cls(**{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class BesideCollectives:
    """What collectives do to the lookups backward beside them: kernels lose more, the shorter they are."""

    law: Overlap
    share: int  # of the GPU
    kernels: tuple[float, ...]  # of the lookups' time
    slower: float = 1.0  # how many times as long as its models say all kernels of this device take

    def factors(self, alone_ns: Floats) -> Floats:
        """How many times as long the lookups take with collectives beside all of them."""
        kernels = np.array(self.kernels)[:, None, None]
        result: Floats = (kernels * self.law.compute_factor(kernels * alone_ns, self.share)).sum(axis=0)
        return result


@dataclass(frozen=True, eq=False)
class ComposedStep:
    """One rank's step, the same on all ranks but for its lookups."""

    streams: int
    arrivals: tuple[tuple[Term, ...], ...]  # of every collective, in order
    fronts: tuple[tuple[Term, ...], ...]  # of every stream at the end
    to_forward: tuple[Term, ...]  # to where lookups forward begin
    to_backward: tuple[Term, ...]
    moving_ns: tuple[float, ...]  # of every collective, from the last arrival
    exchanges: tuple[int, ...]  # which collectives are exchanges
    slower: tuple[float, ...]  # per exchange: how many times as long as alone it took beside kernels
    host_ns: float  # of a step, on the rank whose host has most to do
    pauses_ns: float  # between the kernels of the lookups backward
    beside: BesideCollectives

    @classmethod
    def of(
        cls, issued: Issued, timeline: Timeline, index: int, slower: Sequence[float], beside: BesideCollectives
    ) -> ComposedStep:
        """From the first rank of a cohort; its exchanges took so many times as long as with nothing beside them."""
        played = timeline.cohorts[index]
        program, timing = issued.program, played.cohort.timing
        took = (played.work_end_ns - played.moving_ns)[:, 0, 0].astype(np.float64)
        groups = _groups(issued)
        ways = _ways(issued, played, groups, took)
        exchanges = [index for index, work in enumerate(ways.order) if groups[work] == EXCHANGE]
        backward = np.array([took[work] for work, group in enumerate(groups) if group == BACKWARD])
        return cls(
            len(program.streams),
            tuple(ways.arrivals),
            tuple(ways.fronts),
            ways.begins.get(FORWARD, ways.fronts[0]),
            ways.begins.get(BACKWARD, ways.fronts[0]),
            tuple(float(took[work]) for work in ways.order),
            tuple(exchanges),
            tuple(slower),
            max(_host_ns(cohort) for cohort in timeline.cohorts),
            float(sum(timing.spacing_ns[work, 0, 0] for work, group in enumerate(groups) if group == BACKWARD))
            * max(len(backward) - 1, 0)
            / max(len(backward), 1),
            replace(beside, kernels=tuple((backward / max(backward.sum(), 1.0)).tolist())),
        )

    def play(self, forward: Floats, backward: Floats, ends: Ends, together: LookupsTogether | None = None) -> Evaluation:
        """Plans with lookups that take so long by themselves, [plans, ranks], ns; `together`: on shares of one GPU."""
        forward, backward = forward * self.beside.slower, backward * self.beside.slower
        alone, most = backward, self.beside.factors(backward) if self.beside.law.known else None
        fronts = [np.zeros_like(forward) for _ in range(self.streams)]
        period, ended, between = np.zeros(len(forward)), np.zeros(len(forward)), np.zeros_like(forward)
        exchanged, waiting, ended_back = np.zeros_like(forward), np.zeros_like(forward), np.zeros_like(forward)
        way = {index: number for number, index in enumerate(self.exchanges)}
        for number in range(_SETTLING_STEPS if together is not None or most is not None else _STEPS):
            sources, waiting, exchanged = list(fronts), np.zeros_like(forward), np.zeros_like(forward)
            held: list[tuple[Floats, Floats]] = []
            ahead_ns = _latest(self.to_forward, sources, forward, backward)
            for index, (terms, moving) in enumerate(zip(self.arrivals, self.moving_ns, strict=True)):
                arrival = _latest(terms, sources, forward, backward)
                last = arrival.max(axis=1, keepdims=True)
                time = np.full_like(forward, moving)
                if index in way:
                    time = ends(way[index], arrival)
                    exchanged = exchanged + time
                waiting = waiting + (last - arrival)
                sources.append(last + time)
                held.append((arrival, sources[-1]))
            back_ns = _latest(self.to_backward, sources, forward, backward)
            this, ahead = forward, forward
            if number:
                between = np.maximum(ahead_ns - ended_back, 0.0)
            if most is not None:
                backward = _beside(alone, most, held, back_ns, backward)
            if together is not None:
                ahead, backward = _together(together, backward, self.pauses_ns, back_ns, between)
            ended_back = back_ns + backward + self.pauses_ns
            fronts = [_latest(terms, sources, this, backward) for terms in self.fronts]
            before, ended = ended, np.max([front.max(axis=1) for front in fronts], axis=0)
            period, forward = ended - before, ahead
        step = np.maximum(period, self.host_ns)
        return Evaluation(step, period, forward, backward, exchanged, waiting, step > period)


def _beside(alone: Floats, most: Floats, held: Sequence[tuple[Floats, Floats]], begin: Floats, took: Floats) -> Floats:
    """Lookups that begin then and took so long, slower by `most` while one of the collectives is there."""
    common = np.zeros_like(alone)
    for start, end in held:
        common += np.clip(np.minimum(end, begin + took) - np.maximum(start, begin), 0.0, None)
    share = np.clip(common / np.maximum(took, 1.0), 0.0, 1.0)
    return alone / (share / most + (1.0 - share))


def _together(
    lookups: LookupsTogether, backward: Floats, pauses_ns: float, begin_ns: Floats, between_ns: Floats
) -> tuple[Floats, Floats]:
    """Forward and backward of lookups that begin backward then; in the pauses between kernels nothing is taken or slowed."""
    whole = np.where(backward > 0, backward + pauses_ns, 0.0)
    share = backward / np.maximum(whole, 1.0)
    changed = replace(
        lookups,
        backward_ns=whole,
        backward_taken=lookups.backward_taken * share,
        backward_slowed=lookups.backward_slowed * share,
    )
    forward, result = changed.durations_ns(begin_ns, between_ns)
    return forward, np.maximum(result - pauses_ns * (backward > 0), 0.0)


def _latest(terms: Sequence[Term], sources: Sequence[Floats], forward: Floats, backward: Floats) -> Floats:
    result: Floats | None = None
    for term in terms:
        time = sources[term.source] + term.time_ns
        if term.forward:
            time = time + forward
        if term.backward:
            time = time + backward
        result = time if result is None else np.maximum(result, time)
    assert result is not None
    return result


def _host_ns(played: CohortTimeline) -> float:
    timing = played.cohort.timing
    return float((timing.gap_ns + timing.call_ns)[:, 0, 0].sum())


def _groups(issued: Issued) -> list[str]:
    """Per work. Of the lookups forward the first are the shards', of those backward the last: tables that every rank has a
    part of are looked up after the shards, and take the same time under all plans."""
    groups = [issued.groups[number] for number in issued.estimate]
    forward = next((number for number, group in zip(issued.estimate, groups, strict=True) if group == FORWARD), None)
    backward = next((number for number in reversed(issued.estimate) if issued.groups[number] == BACKWARD), None)
    return [
        _OTHER_LOOKUP if group in (FORWARD, BACKWARD) and number not in (forward, backward) else group
        for number, group in zip(issued.estimate, groups, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Ways:
    """Longest ways to the arrival at each collective, the begin of lookups and the end of each stream."""

    arrivals: list[tuple[Term, ...]]
    begins: dict[str, tuple[Term, ...]]  # forward, backward
    fronts: list[tuple[Term, ...]]
    order: list[int]  # the collectives' works


def _ways(issued: Issued, played: CohortTimeline, groups: Sequence[str], took: Floats) -> _Ways:
    program, timing = issued.program, played.cohort.timing
    streams = len(program.streams)
    spacing, release = timing.spacing_ns[:, 0, 0], timing.release_ns[:, 0, 0]
    awaited: dict[int, list[int]] = {}
    for work, before, next_window in stream_waits(program, Order.of(program)):
        assert not next_window, "a DLRM's step awaits all its collectives"
        awaited.setdefault(int(work), []).append(int(before))
    front: list[dict[Way, float]] = [{(stream, 0, 0): 0.0} for stream in range(streams)]
    ends: dict[int, dict[Way, float]] = {}
    arrivals: list[tuple[Term, ...]] = []
    order: list[int] = []
    begins: dict[str, tuple[Term, ...]] = {}
    for work, stream in enumerate(program.works.stream.tolist()):
        after = [(ends[at], float(release[work])) for at in awaited.get(work, ())]
        start = _longest([(front[stream], float(spacing[work])), *after])
        if groups[work].startswith("collective"):
            arrivals.append(_terms(start))
            order.append(work)
            ends[work] = {(streams + len(order) - 1, 0, 0): 0.0}
        elif groups[work] in (FORWARD, BACKWARD):
            ends[work] = start if groups[work] in begins else _over_lookup(start, groups[work])
            begins.setdefault(groups[work], _terms(start))
        else:
            ends[work] = {way: time + took[work] for way, time in start.items()}
        front[stream] = ends[work]
    return _Ways(arrivals, begins, [_terms(item) for item in front], order)


def _longest(ways: Sequence[tuple[Mapping[Way, float], float]]) -> dict[Way, float]:
    result: dict[Way, float] = {}
    for item, more in ways:
        for way, time in item.items():
            result[way] = max(result.get(way, -np.inf), time + more)
    return result


def _over_lookup(ways: Mapping[Way, float], group: str) -> dict[Way, float]:
    """Over all kernels of one lookup: its first stands for their durations, the others only for the pauses between them."""
    ahead, back = int(group == FORWARD), int(group == BACKWARD)
    return {(source, forward + ahead, backward + back): time for (source, forward, backward), time in ways.items()}


def _terms(ways: Mapping[Way, float]) -> tuple[Term, ...]:
    """Without dominated ones."""
    kept = []
    for (source, forward, backward), time in sorted(ways.items()):
        others = [way for way, item in ways.items() if item >= time and way != (source, forward, backward)]
        if not any(way[0] == source and way[1] >= forward and way[2] >= backward for way in others):
            kept.append(Term(source, forward, backward, float(time)))
    return tuple(kept)
