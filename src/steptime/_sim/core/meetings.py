"""Which ranks meet at which collective: matched over all programs by group, members and sequence number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._program.program import Collective, WorkKind
from steptime._sim.core.timing import Cohort
from steptime.errors import InputError

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """Ranks `low` to `high` (places, not numbers) of one cohort, which advance together."""

    cohort: int
    low: int
    high: int


@dataclass(frozen=True, eq=False)
class Party:
    """One part at one collective. `group` numbers, per rank, the concrete groups of the meeting; None: all in one."""

    part: int
    work: int
    collective: Collective
    waits: bool
    group: Places | None = None


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
    """The concrete groups of a part's ranks at one collective. `closed`: nobody outside the part takes part."""

    groups: tuple[tuple[int, ...], ...]
    place: Places  # per rank of the part: index into groups
    closed: bool


# (group name, members, sequence number, how many of the same came before)
_Key = tuple[str, tuple[int, ...], int, int]


def meetings(cohorts: Sequence[Cohort], parts: Sequence[Part]) -> tuple[Meeting, ...]:
    """All meetings of these parts."""
    present = frozenset(rank for cohort in cohorts for rank in cohort.ranks)
    results: list[Meeting] = []
    matching = _Matching(cohorts, parts, present)
    for number, part in enumerate(parts):
        cohort = cohorts[part.cohort]
        columns = _Columns(cohort, part, present)
        for work in np.flatnonzero(cohort.program.works.kind == WorkKind.COLLECTIVE).tolist():
            index = int(cohort.program.works.collective[work])
            collective = cohort.program.collectives[index] if index >= 0 else Collective("unknown", "", (), 0)
            party = Party(number, work, collective, bool(cohort.timing.waits[work]))
            column = columns.at(index, collective)
            if column.closed:
                group = None if len(column.groups) == 1 else column.place
                results.append(Meeting((replace(party, group=group),), column.groups, ()))
            else:
                matching.add(party, column)
    return (*results, *matching.meetings())


class _Columns:
    """Finds the columns of one part, each once: the same groups usually meet again and again."""

    def __init__(self, cohort: Cohort, part: Part, present: frozenset[int]) -> None:
        self.ranks = cohort.ranks[part.low : part.high]
        self.members = None if cohort.members is None else cohort.members[part.low : part.high]
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
        place = np.array([number[ranks] for ranks in members], dtype=np.int64)
        place = np.broadcast_to(place, (len(self.ranks),))
        here: list[set[int]] = [set() for _ in number]
        for rank, group in zip(self.ranks, place.tolist(), strict=True):
            here[group].add(rank)
        for ranks, item in zip(number, here, strict=True):
            stranger = item - set(ranks) if ranks else set()
            if stranger:
                raise InputError(
                    f"rank {min(stranger)} issues {collective.kind} {collective.sequence} of group {collective.group!r}, whose"
                    f" ranks are {_few(ranks)}: expected a member of the group; check the process groups of the traces"
                )
        closed = all(bool(ranks) and item == self.present.intersection(ranks) for ranks, item in zip(number, here, strict=True))
        return _Column(tuple(number), place, closed)


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


class _Matching:
    """Joins parties that share a concrete group, directly or through others, into meetings."""

    def __init__(self, cohorts: Sequence[Cohort], parts: Sequence[Part], present: frozenset[int]) -> None:
        self.cohorts = cohorts
        self.parts = parts
        self.present = present
        self.parties: list[Party] = []
        self.attending: dict[_Key, list[tuple[int, Places]]] = {}  # key -> (party, places of its ranks)
        self.before: Counter[tuple[int, int, str, tuple[int, ...], int]] = Counter()

    def add(self, party: Party, column: _Column) -> None:
        """Note who of a party meets whom."""
        name, sequence = party.collective.group, party.collective.sequence
        for ranks, places in self._by_group(column):
            same = (party.part, int(places[0]), name, ranks, sequence)
            self.attending.setdefault((name, ranks, sequence, self.before[same]), []).append((len(self.parties), places))
            for index in places.tolist():
                self.before[party.part, index, name, ranks, sequence] += 1
        self.parties.append(party)

    def _by_group(self, column: _Column) -> Iterator[tuple[tuple[int, ...], Places]]:
        order = np.argsort(column.place, kind="stable")
        bounds = np.searchsorted(column.place[order], np.arange(len(column.groups) + 1)).tolist()
        for group, ranks in enumerate(column.groups):
            yield ranks, order[bounds[group] : bounds[group + 1]]

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
                item, other = sorted((find(who[0][0]), find(party)))
                leader[other] = item
        keys: dict[int, list[_Key]] = {}
        for key, who in self.attending.items():
            keys.setdefault(find(who[0][0]), []).append(key)
        for lead in sorted(keys):
            yield self._meeting(keys[lead])

    def _meeting(self, keys: list[_Key]) -> Meeting:
        groups: dict[int, Places] = {}
        missing: set[int] = set()
        for number, key in enumerate(keys):
            here: set[int] = set()
            for party, places in self.attending[key]:
                part = self.parts[self.parties[party].part]
                group = groups.setdefault(party, np.zeros(part.high - part.low, dtype=np.int64))
                group[places] = number
                ranks = self.cohorts[part.cohort].ranks
                here.update(ranks[part.low + index] for index in places.tolist())
            missing |= self.present.intersection(key[1]) - here
        parties = tuple(replace(self.parties[p], group=None if len(keys) == 1 else groups[p]) for p in sorted(groups))
        return Meeting(parties, tuple(key[1] for key in keys), tuple(sorted(missing)))
