"""How ranks met at collectives in a recorded run: clocks aligned at their ends, moving separated from waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from steptime.graph.program import Collective, Program
from steptime.graph.workload import Workload

Key = tuple[str, tuple[int, ...], int]

# Collectives end on all ranks within microseconds (1-7 us on eight V100s); clocks that agree better than this are left alone.
CLOCK_TRUSTED_NS = 1_000_000


@dataclass(frozen=True)
class Meetings:
    """Per meeting and rank, start and end on the common clock; per rank, how much its clock is ahead."""

    spans: Mapping[Key, Mapping[int, tuple[int, int]]]
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
        missing = [r for r in collective.ranks if r not in spans] or (not collective.ranks)
        if missing:
            moving = min(own_end - own_start, self.shortest_ns[_message(collective)])
            return max(moving, 0), True, own_end - moving
        if own_end + shift <= last:
            return own_end - own_start, False, None
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
    shortest: dict[tuple[str, str, int, int], int] = {}
    for program in workload.programs:
        shift = program.origin_ns - origin
        works = program.works
        for row in np.flatnonzero((works.collective >= 0) & (works.call >= 0)).tolist():
            collective = program.collectives[works.collective[row]]
            start, end = int(works.start_ns[row]), int(works.end_ns[row])
            spans.setdefault(key_of(collective), {})[program.rank] = (start + shift, end + shift)
            message = _message(collective)
            shortest[message] = min(shortest.get(message, end - start), end - start)
    clock = clock_offsets(spans, workload.ranks)
    aligned = {
        key: {rank: (start - clock[rank], end - clock[rank]) for rank, (start, end) in by_rank.items()}
        for key, by_rank in spans.items()
    }
    return Meetings(aligned, clock, shortest, origin)


def clock_offsets(spans: Mapping[Key, Mapping[int, tuple[int, int]]], ranks: tuple[int, ...]) -> dict[int, int]:
    """How far each rank's clock is ahead, from the ends of collectives all took part in; 0 where they agree well enough."""
    shared = [by_rank for by_rank in spans.values() if len(by_rank) == len(ranks)]
    offsets = dict.fromkeys(ranks, 0)
    if len(ranks) < 2 or not shared:
        return offsets
    ends = np.array([[by_rank[r][1] for r in ranks] for by_rank in shared], dtype=np.float64)
    ahead = np.median(ends - np.median(ends, axis=1, keepdims=True), axis=0)
    for rank, value in zip(ranks, ahead.tolist(), strict=True):
        if abs(value) > CLOCK_TRUSTED_NS:
            offsets[rank] = round(value)
    return offsets
