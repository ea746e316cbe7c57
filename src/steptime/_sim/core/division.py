"""Divides ranks that run one program but cannot advance together, such as the equal stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from steptime._sim.core.meetings import Part
from steptime._sim.core.timing import Cohort

_Groups = tuple[tuple[int, ...], ...]


def divide(cohorts: Sequence[Cohort], parts: Sequence[Part], stuck: set[int]) -> list[Part]:
    """Smaller parts in place of those that are stuck: apart by whom they meet, or single ranks where that tells nothing.

    Ranks are told apart by the kinds of ranks they meet, again and again: the second stage of a pipeline is the one that meets
    the first, the third the one that meets the second. A thousand copies of a pipeline remain as many parts as it has stages.
    """
    kind = _kinds(cohorts, parts)
    divided: list[Part] = []
    for number, part in enumerate(parts):
        divided.extend(_runs(cohorts[part.cohort].ranks, part, kind) if number in stuck else (part,))
    if len(divided) > len(parts):
        return divided
    single = {number: [Part(p.cohort, place, place + 1) for place in range(p.low, p.high)] for number, p in enumerate(parts)}
    return [piece for number, part in enumerate(parts) for piece in (single[number] if number in stuck else [part])]


def _runs(ranks: Sequence[int], part: Part, kind: dict[int, int]) -> Iterator[Part]:
    """Neighbours of the same kind; a part is a slice of its cohort."""
    low = part.low
    for index in range(part.low + 1, part.high + 1):
        if index == part.high or kind[ranks[index]] != kind[ranks[low]]:
            yield Part(part.cohort, low, index)
            low = index


def _kinds(cohorts: Sequence[Cohort], parts: Sequence[Part]) -> dict[int, int]:
    """A number per rank, equal for ranks of one part that meet equal kinds of ranks."""
    groups = {rank: item for cohort in cohorts for rank, item in _groups(cohort)}
    kind = {rank: n for n, part in enumerate(parts) for rank in cohorts[part.cohort].ranks[part.low : part.high]}
    known = -1
    while known != len(set(kind.values())):
        known = len(set(kind.values()))
        company: dict[tuple[int, ...], int] = {}  # sorted kinds -> number
        met: dict[tuple[int, ...], int] = {}  # concrete group -> number of its company
        for group in dict.fromkeys(group for item in groups.values() for group in item):
            kinds = tuple(sorted(kind[rank] for rank in group if rank in kind))
            met[group] = company.setdefault(kinds, len(company))
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        seen = {rank: (entry, tuple(met[group] for group in groups[rank])) for rank, entry in kind.items()}
        kind = {rank: numbers.setdefault(each, len(numbers)) for rank, each in seen.items()}
    return kind


def _groups(cohort: Cohort) -> Iterator[tuple[int, _Groups]]:
    """The concrete groups of each rank, in the order in which it first meets them."""
    if cohort.members is None:
        results = tuple(dict.fromkeys(collective.ranks for collective in cohort.program.collectives))
        yield from ((rank, results) for rank in cohort.ranks)
    else:
        yield from ((rank, tuple(dict.fromkeys(member))) for rank, member in zip(cohort.ranks, cohort.members, strict=True))
