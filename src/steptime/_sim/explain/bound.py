"""What bounds the step, as one plain sentence; and whom the others wait for: at every collective, the last to arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from steptime._sim.core.meetings import meetings, whole_cohorts
from steptime._sim.core.timing import Nanoseconds, Timeline
from steptime._sim.explain.activity import Activity, RankSummary
from steptime._sim.explain.critical_path import PathSummary, Reason
from steptime._units import ms

# A rank that makes each of the others wait for less than this share of the step is no straggler.
NOISE = 0.01
# The regimes by which errors are reported: device busy at least this share of the step, below that share, and
# communication that nothing hides above this share.
GPU_BOUND = 0.95
HOST_BOUND = 0.60
WIRE_BOUND = 0.40

_FAMILY_WORDS = {"softmax_loss": "softmax and loss", "indexing": "indexing and data movement"}

# Where the reasons of a critical path lie, in the order in which a tie is decided.
_PLACES: dict[str, tuple[Reason, ...]] = {
    "on the host": ("host", "hand-over", "sync", "launch latency"),
    "on the GPU": ("device", "stream order", "stream wait", "queue full", "queue order"),
    "on the wire": ("collective", "collective wait"),
    "waiting for absent ranks": ("absent peer",),
}

# What makes the step shorter where the critical path lies there.
_SHORTER = {
    "on the host": "less work on the host",
    "on the GPU": "faster kernels",
    "on the wire": "faster or hidden collectives",
    "waiting for absent ranks": "earlier arrivals of the absent ranks",
}
# Share of the critical path from which a place is worth a change of its own.
_WORTH_SHORTENING = 0.1


@dataclass(frozen=True)
class Straggler:
    """The rank whose late arrivals cost the others most."""

    rank: int
    caused_ms: float  # per step, summed over the ranks that wait for it
    share: float  # of all waiting inside collectives


@dataclass(frozen=True)
class Waiting:
    """Who the waiting inside collectives is for."""

    straggler: Straggler | None  # None: what any one rank causes is small
    absent_share: float  # of all waiting: for ranks without a program


def waiting(timeline: Timeline, *, steps: int, step_ns: float) -> Waiting:
    """Who ranks wait for in the first scenario. Waiting for ranks without a program is nobody's here."""
    arrivals = _arrivals(timeline)
    total = int(arrivals.waited_ns.sum())
    if not total:
        return Waiting(None, 0.0)
    last, caused = arrivals.last()
    absent = 1 - float(caused.sum() / total)
    totals = np.bincount(last, weights=caused, minlength=1)
    worst = int(totals.argmax())
    others = sum(len(c.cohort.ranks) for c in timeline.cohorts) - 1
    if totals[worst] < NOISE * step_ns * steps * max(others, 1):
        return Waiting(None, absent)
    return Waiting(Straggler(worst, ms(totals[worst]) / steps, float(totals[worst] / total)), absent)


@dataclass(frozen=True, eq=False)
class _Arrivals:
    """Every rank's arrival at every collective, one row each."""

    meeting: Nanoseconds  # number of the meeting
    rank: Nanoseconds
    start_ns: Nanoseconds
    moving_ns: Nanoseconds

    @property
    def waited_ns(self) -> Nanoseconds:
        """How long each waited."""
        return np.asarray(np.maximum(self.moving_ns - self.start_ns, 0), dtype=np.int64)

    def last(self) -> tuple[Nanoseconds, Nanoseconds]:
        """Per meeting that its last arrival set going: who that was (the lowest of several), how long the others waited."""
        order = np.lexsort((self.rank, -self.start_ns, self.meeting))
        first = np.flatnonzero(np.diff(self.meeting[order], prepend=-1))  # never empty: nobody waits without a meeting
        caused = np.add.reduceat(self.waited_ns[order], first)
        set_going = self.start_ns[order[first]] >= np.maximum.reduceat(self.moving_ns[order], first)
        return self.rank[order[first]][set_going], caused[set_going]


def _arrivals(timeline: Timeline) -> _Arrivals:
    cohorts = [t.cohort for t in timeline.cohorts]
    columns: list[tuple[Nanoseconds, ...]] = [(np.zeros(0, dtype=np.int64),) * 4]
    number = 0
    for meeting in meetings(cohorts, whole_cohorts(cohorts)):
        for party in meeting.parties:
            at = timeline.cohorts[party.block]
            ranks = np.array(at.cohort.ranks, dtype=np.int64)
            group = np.zeros(len(ranks), dtype=np.int64) if party.group is None else party.group
            start, moving = at.work_start_ns[party.work, :, 0], at.moving_ns[party.work, :, 0]
            columns.append((number + group, ranks, start, moving))
        number += meeting.groups
    return _Arrivals(*(np.concatenate(column) for column in zip(*columns, strict=True)))


# --- the sentence ----------------------------------------------------------------------------------------------------------


def bound_by(seen: Activity, path: PathSummary, waited: Waiting) -> str:
    """The regime and its evidence; and where the critical path lies, because a busy device need not be what decides."""
    exposed = _share(seen.ranks, lambda r: r.exposed_communication_ms)
    waiting = min(_share(seen.ranks, lambda r: r.waiting_ms), exposed)
    busy = _share(seen.ranks, lambda r: r.device_busy_ms)
    launches = _share(seen.ranks, lambda r: r.host_bound_fraction * r.step_ms)  # of the step, idle until the host launches
    kind, expected = regime(exposed, busy), ""
    if kind == "wire-bound" and waiting > exposed / 2:
        return _waiting(seen.ranks, waiting, waited) + _decided(path, expected)
    if kind == "wire-bound":
        evidence = f"{_percent(exposed)} of the step is communication that no computation hides "
        evidence, expected = evidence + f"({_percent(waiting)} is waiting for peers)", "on the wire"
    elif kind == "GPU-bound":
        family = max(seen.breakdown, key=lambda f: seen.breakdown[f], default="other")
        share = _percent(seen.breakdown.get(family, 0.0) / (sum(seen.breakdown.values()) or 1.0))
        evidence = f"the device is busy {_percent(busy)} of the step, {share} of that with {family_words(family)}"
        expected = "on the GPU"
    elif kind == "host-bound":
        until = _percent(launches / max(1 - busy, launches, 1e-9))
        evidence = f"the device idles {_percent(1 - busy)} of the step, {until} of that until the host launches something"
        expected = "on the host"
    else:
        evidence = f"the device is busy {_percent(busy)} of the step ({_percent(exposed)} exposed communication) "
        evidence += f"and idles {_percent(1 - busy)} ({_percent(launches)} until the host launches something)"
    return f"{kind}: {evidence}" + _decided(path, expected)


def regime(exposed: float, busy: float) -> str:
    """The regime, from the shares of the step that are exposed communication and device busy."""
    if exposed > WIRE_BOUND:
        return "wire-bound"
    if busy >= GPU_BOUND:
        return "GPU-bound"
    return "host-bound" if busy < HOST_BOUND else "mixed"


def _regime_of(rank: RankSummary) -> str:
    step = rank.step_ms or 1.0
    return regime(rank.exposed_communication_ms / step, rank.device_busy_ms / step)


def _decided(path: PathSummary, expected: str) -> str:
    """Where most of the critical path lies; and what shortens the step, where that is not what the regime suggests alone."""
    shares = {where: path.share(*reasons) for where, reasons in _PLACES.items()}
    where = max(shares, key=lambda p: shares[p])
    if not shares[where]:
        return ""
    if where == expected:
        return f"; {_percent(shares[where])} of the critical path is {where}"
    if shares.get(expected, 0.0) >= _WORTH_SHORTENING:
        both = f"{_percent(shares[where])} {where} and {_percent(shares[expected])} {expected}"
        return f"; the critical path is {both}, so {_SHORTER[where]} and {_SHORTER[expected]} both shorten the step"
    return f"; {_percent(shares[where])} of the critical path is {where}, so {_SHORTER[where]} would shorten the step"


def _waiting(ranks: Sequence[RankSummary], waiting: float, waited: Waiting) -> str:
    spent = f"ranks spend {_percent(waiting)} of the step in collectives until the last one arrives"
    if waited.absent_share > 1 / 2:
        return f"waiting for ranks without a trace: {spent}, and {_percent(waited.absent_share)} of that is for them"
    worst = waited.straggler
    if worst is None:
        return f"waiting for each other: {spent}"
    itself = next((r for r in ranks if r.rank == worst.rank), None)
    because = "" if itself is None else f"; rank {worst.rank} itself is {_regime_of(itself)}"
    return f"waiting for rank {worst.rank}: {spent}, and {_percent(worst.share)} of that is for rank {worst.rank}{because}"


def family_words(family: str) -> str:
    """A family's name as people say it."""
    return _FAMILY_WORDS.get(family, family)


def _share(ranks: Sequence[RankSummary], value: Callable[[RankSummary], float]) -> float:
    """The mean over ranks of a quantity as a share of the rank's step."""
    return sum(value(r) / (r.step_ms or 1.0) for r in ranks) / max(len(ranks), 1)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
