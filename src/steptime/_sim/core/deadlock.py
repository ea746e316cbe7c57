"""Says who waits for whom when ranks can never meet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steptime._program.program import Collective
from steptime._sim.core.compile import LaneGraph
from steptime._sim.core.meetings import Meeting, Part, Party
from steptime._sim.core.timing import Cohort
from steptime.errors import DeadlockError

# More than this many ranks or collectives are counted, not listed.
LISTED_RANKS = 8
LISTED_COLLECTIVES = 3
# Names of kernels run to hundreds of letters.
NAME_LETTERS = 60


@dataclass(frozen=True, eq=False)
class Stuck:
    """A lane that cannot go on at `row`: `meeting` where it has arrived at one, else it waits for another lane of its rank."""

    part: int
    lane: int
    graph: LaneGraph
    row: int
    meeting: Meeting | None
    party: Party | None


def deadlock(cohorts: Sequence[Cohort], parts: Sequence[Part], stuck: Sequence[Stuck]) -> DeadlockError:
    """The error for a schedule in which these lanes are left over."""

    def ranks_of(part: int) -> tuple[int, ...]:
        return cohorts[parts[part].cohort].ranks[parts[part].low : parts[part].high]

    part_of = {rank: part for part in range(len(parts)) for rank in ranks_of(part)}
    left: dict[int, list[Stuck]] = {}
    for lane in stuck:
        left.setdefault(lane.part, []).append(lane)
    doing = {part: _doing(cohorts[parts[part].cohort], lanes) for part, lanes in left.items()}
    clauses: dict[int, str] = {}
    for lane in stuck:
        if lane.meeting is None or lane.party is None or id(lane.meeting) in clauses:
            continue
        here = {s.part for s in stuck if s.meeting is lane.meeting}
        waiting = [rank for part in here for rank in ranks_of(part) if rank not in lane.meeting.missing]
        absent = {rank for p in lane.meeting.parties if p.part not in here and p.waits for rank in ranks_of(p.part)}
        never = set(lane.meeting.missing)
        fates: dict[str, list[int]] = {}
        for rank in sorted(absent | never):
            suffix = " and never issues it" if rank in never else ""
            fates.setdefault(doing.get(part_of[rank], "has finished") + suffix, []).append(rank)
        reasons = " and ".join(f"{name_ranks(who)}, which {fate}" for fate, who in fates.items())
        wait = "wait" if len(waiting) > 1 else "waits"
        clauses[id(lane.meeting)] = f"{name_ranks(waiting)} {wait} at {name_collective(lane.party.collective)} for {reasons}"
    if not clauses:
        first = stuck[0]
        source = cohorts[parts[first.part].cohort].program.source
        where = f"{source}: " if source else ""
        return DeadlockError(
            f"{where}{name_ranks(ranks_of(first.part))} {doing[first.part]}; what it waits for never happens, "
            "as in a trace whose times or ids are damaged"
        )
    listed = list(clauses.values())
    more = f"; and {len(listed) - LISTED_COLLECTIVES} more collectives" if len(listed) > LISTED_COLLECTIVES else ""
    return DeadlockError("deadlock: " + "; ".join(listed[:LISTED_COLLECTIVES]) + more)


def name_collective(collective: Collective) -> str:
    """A collective as messages call it."""
    return f"{collective.kind} {collective.sequence} of group {collective.group!r}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks as messages list them; many are summarised."""
    results = sorted(ranks)
    if len(results) == 1:
        return f"rank {results[0]}"
    if len(results) <= LISTED_RANKS:
        return "ranks " + ", ".join(map(str, results))
    return f"{len(results)} ranks ({', '.join(map(str, results[:3]))}, ..., {results[-1]})"


def _doing(cohort: Cohort, stuck: Sequence[Stuck]) -> str:
    """What a part whose lanes are stuck is at: the collectives it waits at, else the host call that blocks."""
    at = [name_collective(s.party.collective) for s in stuck if s.party is not None]
    if at:
        return "waits at " + " and ".join(at[:2])
    first = stuck[0]
    row = int(first.graph.table_row[first.row])
    program = cohort.program
    if first.lane < first.graph.threads:
        api = program.names[program.calls.api[row]] if len(program.names) else ""
        return f"is blocked in call {row} {api}".rstrip()
    name = f" ({program.names[program.works.name[row]][:NAME_LETTERS]})" if len(program.names) else ""
    return f"has work {row}{name} that cannot start"
