"""How ranks met at collectives in a recorded run: clocks aligned at their ends, moving separated from waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from steptime._program.program import Collective, Program
from steptime._program.workload import Workload

Key = tuple[str, tuple[int, ...], int]

Spans = Mapping[Key, Mapping[int, tuple[int, int]]]

# Collectives end on all ranks within microseconds (1-7 us on eight V100s); clocks that agree better than this are left alone,
CLOCK_TRUSTED_NS = 1_000_000
# unless more than this share of the collectives would have ended on one rank before they began on another.
IMPOSSIBLE_SHARE = 0.1
# Nobody leaves these before everybody has arrived; the root of a broadcast or the sender of a message may.
_ALL_WAIT_FOR_ALL = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter", "barrier")


@dataclass(frozen=True)
class Meetings:
    """Per meeting and rank, start and end on the common clock; per rank, how much its clock is ahead."""

    spans: Spans
    clock_ns: Mapping[int, int]
    shortest_ns: Mapping[tuple[str, str, int, int], int]  # (kind, group, bytes in, out) -> least duration seen
    origin_ns: int

    def of(self, program: Program, work: int) -> tuple[int, bool, int | None]:
        """For one collective: how long it moves data, whether it waits for peers, when absent ones arrived (own clock)."""
        collective = program.collectives[program.works.collective[work]]
        own_start, own_end = int(program.works.start_ns[work]), int(program.works.end_ns[work])
        shift = program.origin_ns - self.origin_ns - self.clock_ns[program.rank]
        spans = self.spans.get(key_of(collective), {})
        last = max((s for s, _ in spans.values()), default=own_start + shift)
        missing = [r for r in collective.ranks if r not in spans]
        if missing or not collective.ranks:
            moving = max(min(own_end - own_start, self.shortest_ns[_message(collective)]), 0)
            # A rank that has a trace without this collective would never come: its window began later or ended earlier.
            waits = not any(rank in self.clock_ns for rank in missing)
            return moving, waits, own_end - moving
        if own_end + shift <= last:
            # It left before the last came, as the root of a broadcast may. Whom it waited for is not known: no waiting is kept.
            came = max(start for start, _ in spans.values() if start < own_end + shift or start == own_start + shift)
            return own_end + shift - came, False, None
        return own_end + shift - last, True, None


def key_of(collective: Collective) -> Key:
    """What ranks must agree on to meet."""
    return collective.group, collective.ranks, collective.sequence


def _message(collective: Collective) -> tuple[str, str, int, int]:
    return collective.kind, collective.group, collective.bytes_in, collective.bytes_out


def recorded_meetings(workload: Workload) -> Meetings:
    """Every meeting of a recorded workload."""
    origin = min(p.origin_ns for p in workload.programs)
    spans: dict[Key, dict[int, tuple[int, int]]] = {}
    telling: set[Key] = set()
    shortest: dict[tuple[str, str, int, int], int] = {}
    for program in workload.programs:
        shift = program.origin_ns - origin
        works = program.works
        for row in np.flatnonzero((works.collective >= 0) & (works.call >= 0)).tolist():
            collective = program.collectives[works.collective[row]]
            start, end = int(works.start_ns[row]), int(works.end_ns[row])
            spans.setdefault(key_of(collective), {})[program.rank] = (start + shift, end + shift)
            if collective.kind in _ALL_WAIT_FOR_ALL:
                telling.add(key_of(collective))
            message = _message(collective)
            shortest[message] = min(shortest.get(message, end - start), end - start)
    clock = clock_offsets({key: spans[key] for key in spans if key in telling or not telling}, workload.ranks)
    aligned = {
        key: {rank: (start - clock[rank], end - clock[rank]) for rank, (start, end) in by_rank.items()}
        for key, by_rank in spans.items()
    }
    return Meetings(aligned, clock, shortest, origin)


def clock_offsets(spans: Spans, ranks: tuple[int, ...]) -> dict[int, int]:
    """How far each rank's clock is ahead, from the ends of collectives; all 0 where the clocks agree well enough."""
    ahead = _ahead(spans)
    left_early = [min(e for _, e in by_rank.values()) < max(s for s, _ in by_rank.values()) for by_rank in spans.values()]
    agree = sum(left_early) <= IMPOSSIBLE_SHARE * len(left_early)
    if agree and all(abs(value) <= CLOCK_TRUSTED_NS for value in ahead.values()):
        return dict.fromkeys(ranks, 0)
    return {rank: round(ahead.get(rank, 0)) for rank in ranks}


def _ahead(spans: Spans) -> dict[int, float]:
    """Per rank, the median distance of its ends to those of its group; groups that share ranks are tied through them."""
    ends: dict[tuple[int, ...], list[list[int]]] = {}
    for by_rank in spans.values():
        members = tuple(sorted(by_rank))
        ends.setdefault(members, []).append([by_rank[rank][1] for rank in members])
    groups = sorted((members for members in ends if len(members) > 1), key=lambda members: (-len(members), members))
    known: dict[int, float] = {}
    while groups:
        members = next((group for group in groups if known.keys() & group), groups[0])
        groups.remove(members)
        table = np.array(ends[members], dtype=np.float64)
        own = dict(zip(members, np.median(table - np.median(table, axis=1, keepdims=True), axis=0).tolist(), strict=True))
        shared = [known[rank] - own[rank] for rank in members if rank in known]
        shift = float(np.median(shared)) if shared else 0.0
        known = {**{rank: value + shift for rank, value in own.items()}, **known}
    return known
