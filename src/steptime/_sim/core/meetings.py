"""Which ranks meet at which collective: matched over all programs by group, members and sequence number.

Ranks that run one program advance together, as a block. Where they cannot, such as the equal stages of a pipeline, blocks are
divided; where ranks can never meet, an error says who waits for whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from steptime._program.program import Collective, WorkKind
from steptime._sim.core.graph import LaneGraph
from steptime._sim.core.timing import Cohort
from steptime.errors import DeadlockError, InputError

Indices = npt.NDArray[np.int64]

# More than this many ranks or collectives are counted, not listed.
LISTED_RANKS = 8
LISTED_COLLECTIVES = 3
# Names of kernels run to hundreds of letters.
NAME_LETTERS = 60


@dataclass(frozen=True, slots=True)
class RankBlock:
    """Neighbouring ranks of one cohort, which advance together; `low` is the index of the first in its cohort."""

    cohort: int
    low: int
    ranks: tuple[int, ...]

    @property
    def high(self) -> int:
        """The index behind the last."""
        return self.low + len(self.ranks)


def whole_cohorts(cohorts: Sequence[Cohort]) -> list[RankBlock]:
    """A block for every cohort."""
    return [RankBlock(number, 0, cohort.ranks) for number, cohort in enumerate(cohorts)]


@dataclass(frozen=True, eq=False)
class Party:
    """One block at one collective. `group` numbers, per rank, the concrete groups of the meeting; None: all in one."""

    block: int
    work: int
    collective: Collective
    waits: bool
    group: Indices | None = None


@dataclass(frozen=True, eq=False)
class Meeting:
    """Parties that must all have arrived before any of them departs. `missing`: ranks that never issue it."""

    parties: tuple[Party, ...]
    members: tuple[tuple[int, ...], ...]  # of every concrete group, in the order of the group
    missing: tuple[int, ...]

    @property
    def groups(self) -> int:
        """How many concrete groups there are."""
        return len(self.members)


@dataclass(frozen=True, eq=False)
class _Column:
    """The concrete groups of a block's ranks at one collective. `closed`: nobody outside the block takes part."""

    groups: tuple[tuple[int, ...], ...]
    group: Indices  # per rank of the block: index into groups
    closed: bool


# (group name, members, sequence number, how many of the same came before)
_Key = tuple[str, tuple[int, ...], int, int]


def meetings(cohorts: Sequence[Cohort], blocks: Sequence[RankBlock]) -> tuple[Meeting, ...]:
    """All meetings of these blocks."""
    present = frozenset(rank for cohort in cohorts for rank in cohort.ranks)
    results: list[Meeting] = []
    matching = _Matching(blocks, present)
    for number, block in enumerate(blocks):
        cohort = cohorts[block.cohort]
        columns = _Columns(cohort, block, present)
        for work in np.flatnonzero(cohort.program.works.kind == WorkKind.COLLECTIVE).tolist():
            index = int(cohort.program.works.collective[work])
            collective = cohort.program.collectives[index] if index >= 0 else Collective("unknown", "", (), 0)
            party = Party(number, work, collective, bool(cohort.timing.waits[work]))
            column = columns.at(index, collective)
            if column.closed:
                group = None if len(column.groups) == 1 else column.group
                results.append(Meeting((replace(party, group=group),), column.groups, ()))
            else:
                matching.add(party, column)
    return (*results, *matching.meetings())


class _Columns:
    """Finds the columns of one block, each once: the same groups usually meet again and again."""

    def __init__(self, cohort: Cohort, block: RankBlock, present: frozenset[int]) -> None:
        self.ranks = block.ranks
        self.members = None if cohort.members is None else cohort.members[block.low : block.high]
        self.present = present
        self.known: dict[tuple[int, ...], _Column] = {}

    def at(self, index: int, collective: Collective) -> _Column:
        """The column of one collective; index -1: a collective nothing is known about, which every rank does alone."""
        if index < 0:
            return _Column(tuple((rank,) for rank in self.ranks), np.arange(len(self.ranks)), True)
        members = [collective.ranks] if self.members is None else [member[index] for member in self.members]
        key = tuple(map(id, members))  # the tuples live as long as the cohort does
        if key not in self.known:
            self.known[key] = self._column(members, collective)
        return self.known[key]

    def _column(self, members: Sequence[tuple[int, ...]], collective: Collective) -> _Column:
        number = {ranks: i for i, ranks in enumerate(dict.fromkeys(members))}
        groups = np.broadcast_to(np.array([number[ranks] for ranks in members], dtype=np.int64), (len(self.ranks),))
        here: list[set[int]] = [set() for _ in number]
        for rank, group in zip(self.ranks, groups.tolist(), strict=True):
            here[group].add(rank)
        for ranks, arriving in zip(number, here, strict=True):
            stranger = arriving - set(ranks) if ranks else set()
            if stranger:
                raise InputError(
                    f"rank {min(stranger)} issues {collective.kind} {collective.sequence} of group {collective.group!r}, whose"
                    f" ranks are {_few(ranks)}: expected a member of the group; check the process groups of the traces"
                )
        closed = all(
            ranks and arriving == self.present.intersection(ranks) for ranks, arriving in zip(number, here, strict=True)
        )
        return _Column(tuple(number), groups, closed)


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


class _Matching:
    """Joins parties that share a concrete group, directly or through others, into meetings."""

    def __init__(self, blocks: Sequence[RankBlock], present: frozenset[int]) -> None:
        self.blocks, self.present = blocks, present
        self.parties: list[Party] = []
        self.attending: dict[_Key, list[tuple[int, Indices]]] = {}  # key -> (party, which of its ranks)
        self.before: Counter[tuple[int, int, str, tuple[int, ...], int]] = Counter()

    def add(self, party: Party, column: _Column) -> None:
        """Note who of a party meets whom."""
        name, sequence = party.collective.group, party.collective.sequence
        order = np.argsort(column.group, kind="stable")
        bounds = np.searchsorted(column.group[order], np.arange(len(column.groups) + 1)).tolist()
        for ranks, (low, high) in zip(column.groups, pairwise(bounds), strict=True):
            indices = order[low:high]
            same = (party.block, int(indices[0]), name, ranks, sequence)
            self.attending.setdefault((name, ranks, sequence, self.before[same]), []).append((len(self.parties), indices))
            for index in indices.tolist():
                self.before[party.block, index, name, ranks, sequence] += 1
        self.parties.append(party)

    def meetings(self) -> Iterator[Meeting]:
        """The meetings, in order of their first party."""
        leader = list(range(len(self.parties)))

        def find(party: int) -> int:
            while leader[party] != party:
                leader[party] = leader[leader[party]]
                party = leader[party]
            return party

        for who in self.attending.values():
            for party, _ in who[1:]:
                first, other = sorted((find(who[0][0]), find(party)))
                leader[other] = first
        keys: dict[int, list[_Key]] = {}
        for key, who in self.attending.items():
            keys.setdefault(find(who[0][0]), []).append(key)
        for lead in sorted(keys):
            yield self._meeting(keys[lead])

    def _meeting(self, keys: list[_Key]) -> Meeting:
        groups: dict[int, Indices] = {}
        missing: set[int] = set()
        for number, key in enumerate(keys):
            here: set[int] = set()
            for party, indices in self.attending[key]:
                ranks = self.blocks[self.parties[party].block].ranks
                group = groups.setdefault(party, np.zeros(len(ranks), dtype=np.int64))
                group[indices] = number
                here.update(ranks[index] for index in indices.tolist())
            missing |= self.present.intersection(key[1]) - here
        parties = tuple(replace(self.parties[p], group=None if len(keys) == 1 else groups[p]) for p in sorted(groups))
        return Meeting(parties, tuple(key[1] for key in keys), tuple(sorted(missing)))


def divide(cohorts: Sequence[Cohort], blocks: Sequence[RankBlock], stuck: set[int]) -> list[RankBlock]:
    """Smaller blocks in place of those that are stuck: apart by whom they meet, or single ranks where that tells nothing.

    Ranks are told apart by the kinds of ranks they meet, again and again: the second stage of a pipeline is the one that meets
    the first, the third the one that meets the second. A thousand copies of a pipeline remain as many blocks as it has stages.
    """
    kind = _kinds(cohorts, blocks)
    divided: list[RankBlock] = []
    for by in (kind.__getitem__, int):
        pieces = ((_split(block, by) if number in stuck else (block,)) for number, block in enumerate(blocks))
        divided = [piece for of_block in pieces for piece in of_block]
        if len(divided) > len(blocks):
            break
    return divided


def _split(block: RankBlock, by: Callable[[int], int]) -> Iterator[RankBlock]:
    """Neighbours that are alike; a block is a slice of its cohort."""
    low = block.low
    for _, alike in groupby(block.ranks, by):
        ranks = tuple(alike)
        yield RankBlock(block.cohort, low, ranks)
        low += len(ranks)


def _kinds(cohorts: Sequence[Cohort], blocks: Sequence[RankBlock]) -> dict[int, int]:
    """A number per rank, equal for ranks of one block that meet equal kinds of ranks."""
    groups = {rank: of_rank for cohort in cohorts for rank, of_rank in _groups(cohort)}
    kind = {rank: number for number, block in enumerate(blocks) for rank in block.ranks}
    known = -1
    while known != len(set(kind.values())):
        known = len(set(kind.values()))
        company: dict[tuple[int, ...], int] = {}  # sorted kinds -> number
        met: dict[tuple[int, ...], int] = {}  # concrete group -> number of its company
        for group in dict.fromkeys(group for of_rank in groups.values() for group in of_rank):
            kinds = tuple(sorted(kind[rank] for rank in group if rank in kind))
            met[group] = company.setdefault(kinds, len(company))
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        signatures = {rank: (was, tuple(met[group] for group in groups[rank])) for rank, was in kind.items()}
        kind = {rank: numbers.setdefault(signature, len(numbers)) for rank, signature in signatures.items()}
    return kind


def _groups(cohort: Cohort) -> Iterator[tuple[int, tuple[tuple[int, ...], ...]]]:
    """The concrete groups of each rank, in the order in which it first meets them."""
    if cohort.members is None:
        results = tuple(dict.fromkeys(collective.ranks for collective in cohort.program.collectives))
        yield from ((rank, results) for rank in cohort.ranks)
    else:
        yield from ((rank, tuple(dict.fromkeys(member))) for rank, member in zip(cohort.ranks, cohort.members, strict=True))


@dataclass(frozen=True, eq=False)
class Stuck:
    """A lane that cannot go on at `row`: `meeting` where it has arrived at one, else it waits for another lane of its rank."""

    block: int
    lane: int
    graph: LaneGraph
    row: int
    meeting: Meeting | None
    party: Party | None


def deadlock(cohorts: Sequence[Cohort], blocks: Sequence[RankBlock], stuck: Sequence[Stuck]) -> DeadlockError:
    """The error for a schedule in which these lanes are left over."""
    block_of = {rank: number for number, block in enumerate(blocks) for rank in block.ranks}
    left: dict[int, list[Stuck]] = {}
    for lane in stuck:
        left.setdefault(lane.block, []).append(lane)
    doing = {number: _doing(cohorts[blocks[number].cohort], lanes) for number, lanes in left.items()}
    clauses: dict[int, str] = {}
    for lane in stuck:
        if lane.meeting is None or lane.party is None or id(lane.meeting) in clauses:
            continue
        here, never = {other.block for other in stuck if other.meeting is lane.meeting}, set(lane.meeting.missing)
        waiting = [rank for number in here for rank in blocks[number].ranks if rank not in never]
        late = [party.block for party in lane.meeting.parties if party.block not in here and party.waits]
        fates: dict[str, list[int]] = {}
        for rank in sorted({rank for number in late for rank in blocks[number].ranks} | never):
            suffix = " and never issues it" if rank in never else ""
            fates.setdefault(doing.get(block_of[rank], "has finished") + suffix, []).append(rank)
        reasons = " and ".join(f"{name_ranks(who)}, which {fate}" for fate, who in fates.items())
        wait = "wait" if len(waiting) > 1 else "waits"
        clauses[id(lane.meeting)] = f"{name_ranks(waiting)} {wait} at {name_collective(lane.party.collective)} for {reasons}"
    if not clauses:
        first = blocks[stuck[0].block]
        source = cohorts[first.cohort].program.source
        where = f"{source}: " if source else ""
        return DeadlockError(
            f"{where}{name_ranks(first.ranks)} {doing[stuck[0].block]}; what it waits for never happens, "
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
    """What a block whose lanes are stuck is at: the collectives it waits at, else the host call that blocks."""
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
