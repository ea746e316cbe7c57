"""A sample of a step as the whole step: its calls and works, section by section, in the order in which the step runs them.

Within a section everything refers to the same things as in the sample. What a section refers to outside itself is nearly always
what a lane did last: compute waits for the last receive, a collective for the last kernel, a thread for the one that hands over
to it. It is the last thing of that lane in the step, too. Anything else belongs to the last section of its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._models.estimate import Estimate
from steptime._program.collectives import numbered
from steptime._program.program import Calls, Program, Works
from steptime._program.repetition import Repetition
from steptime._sim.core.sections import Mark, SectionLayout
from steptime._sim.modelled.issue import Issued

Indices = npt.NDArray[np.int64]
_NONE = -1


@dataclass(frozen=True, eq=False)
class _SectionRows:
    """The rows of one table: where each section's are in the sample, and where its repetitions' are in the step."""

    first: Indices  # per section of the sample: its first row
    base: Indices  # per repetition: its first row in the step
    source: Indices  # per row of the step: the row of the sample
    repetition: Indices  # per row of the step

    @classmethod
    def of(cls, section_of_row: Indices, sections: int, order: Indices) -> _SectionRows:
        bounds = np.searchsorted(section_of_row, np.arange(sections + 1))
        first, lengths = bounds[:-1], (bounds[1:] - bounds[:-1])[order]
        base = np.cumsum(lengths) - lengths
        repetition = np.repeat(np.arange(len(order)), lengths)
        source = np.arange(int(lengths.sum())) - base[repetition] + first[order[repetition]]
        return cls(first, base, source, repetition)

    def moved(self, rows: Indices, section: Indices, repetition: Indices) -> Indices:
        """Rows of the sample in a section, as rows of a repetition of it."""
        return np.where(rows >= 0, rows - self.first[section] + self.base[repetition], rows)


def unrolled(sample: Issued, program: Program, wire: Sequence[Estimate]) -> Issued:
    """The step of `program`, whose ops are those of the sample; `wire` are the estimates of the sample's collectives there."""
    repetition, sections = program.repetition, sample.sections
    assert repetition is not None
    assert sections is not None
    return _Unroll(sample, program, repetition, sections).issued(wire)


class _Unroll:
    def __init__(self, sample: Issued, program: Program, repetition: Repetition, section_of_call: Indices) -> None:
        self._sample, self._program, self._repetition = sample, program, repetition
        self._order = np.array(repetition.order, dtype=np.int64)
        count = len(repetition.starts)
        works = sample.program.works
        self._section_of_call, self._section_of_work = section_of_call, section_of_call[works.call]
        self._calls = _SectionRows.of(self._section_of_call, count, self._order)
        self._works = _SectionRows.of(self._section_of_work, count, self._order)
        self._ran_by: dict[int, tuple[tuple[int, int], ...]] = {}
        self._awaiting: dict[int, list[tuple[int, int]]] = {}
        self._waits: dict[int, int] = {}
        self._find_references()

    def issued(self, wire: Sequence[Estimate]) -> Issued:
        """Everything in its place."""
        sample, calls, works = self._sample, self._calls.source, self._works.source
        collective = sample.program.works.collective[works]
        moving = np.flatnonzero(collective >= 0)
        met = collective[moving].tolist()
        numbers = np.full(len(works), _NONE)
        numbers[moving] = np.arange(len(moving))
        asked = len(sample.estimates) - len(sample.program.collectives)
        estimate = np.array(sample.estimate, dtype=np.int64)[works]
        estimate[moving] = asked + np.arange(len(moving))
        program = replace(
            sample.program,
            rank=self._program.rank,
            repetition=self._repetition,
            calls=self._all_calls(),
            works=self._all_works(numbers),
            collectives=numbered([self._program.collectives[index] for index in met]),
        )
        sections = np.arange(len(self._repetition.starts) + 1)
        # Layers that wait for layers; what waits for one section alone (an optimizer for each of many buckets) has its streams.
        repeated = {mark: number for number, mark in enumerate(mark for mark in self._marks if len(mark.sections) > 1)}
        layout = SectionLayout(
            sample=sample.program,
            order=self._repetition.order,
            call_first=np.searchsorted(self._section_of_call, sections),
            work_first=np.searchsorted(self._section_of_work, sections),
            call_base=self._calls.base,
            work_base=self._works.base,
            marks=tuple(repeated),
            waits={row: repeated[self._marks[mark]] for row, mark in self._waits.items() if self._marks[mark] in repeated},
        )
        program.derived[SectionLayout] = layout
        return replace(
            sample,
            program=program,
            gap_cpu_ns=sample.gap_cpu_ns[calls],
            call_cpu_ns=sample.call_cpu_ns[calls],
            call_launch_ns=sample.call_launch_ns[calls],
            estimate=tuple(estimate.tolist()),
            share=sample.share[works],
            estimates=(*sample.estimates[:asked], *(wire[index] for index in met)),
            groups=(*sample.groups[:asked], *(sample.groups[asked + index] for index in met)),
            memory=(*sample.memory[:asked], *[None] * len(met)),
            sections=None,
        )

    def _all_works(self, collectives: Indices) -> Works:
        table = self._sample.program.works.take(self._works.source)
        section = self._order[self._works.repetition]
        return table.replace(
            call=self._calls.moved(table.call.astype(np.int64), section, self._works.repetition), collective=collectives
        )

    def _all_calls(self) -> Calls:
        rows, sample = self._calls, self._sample.program.calls
        table = sample.take(rows.source)
        section = self._order[rows.repetition]
        after = rows.moved(table.after.astype(np.int64), section, rows.repetition)
        first = np.flatnonzero(np.diff(rows.repetition, prepend=_NONE))
        after[first] = self._handed_over(table, first)
        awaits = self._works.moved(table.awaits.astype(np.int64), section, rows.repetition)
        for row, work in self._outside():
            awaits[row] = work
        return table.replace(after=after, awaits=awaits)

    def _handed_over(self, table: Calls, first: Indices) -> Indices:
        """Which call hands over to the first of each repetition: the one before it, where that is of another thread."""
        turns = np.array([thread.role in ("main", "backward") for thread in self._sample.program.threads], dtype=bool)
        before = np.maximum(first - 1, 0)
        one, other = table.thread[before], table.thread[first]
        return np.where((first > 0) & (one != other) & turns[one] & turns[other], before, _NONE)

    def _outside(self) -> list[tuple[int, int]]:
        """Calls of the step that wait for works outside their section, with those works."""
        moved: dict[int, list[int]] = {}  # per section its marks
        for number, mark in enumerate(self._marks):
            for section in mark.sections:
                moved.setdefault(section, []).append(number)
        tails, last_of_stream, last_of_mark = self._tails(), dict[int, int](), dict[int, int]()
        result, first = [], self._works.first.tolist()
        bases = zip(self._order.tolist(), self._calls.base.tolist(), self._works.base.tolist(), strict=True)
        for section, call_base, work_base in bases:
            for row, stream in self._awaiting.get(section, ()):
                marked = self._waits.get(row)
                work = last_of_stream.get(stream, _NONE) if marked is None else last_of_mark.get(marked, _NONE)
                result.append((call_base + row - int(self._calls.first[section]), work))
            for number in moved.get(section, ()):
                last_of_mark[number] = work_base + self._marks[number].place
            for stream, row in tails.get(section, ()):
                last_of_stream[stream] = work_base + row - first[section]
        return result

    def _find_references(self) -> None:
        """Per section its calls that wait for works before it, with their streams; marks, where these are not the last ones."""
        works = self._sample.program.works
        awaits, streams = self._sample.program.calls.awaits.astype(np.int64), works.stream.astype(np.int64)
        target = self._section_of_work[np.maximum(awaits, 0)]
        known: dict[Mark, int] = {}
        for row in np.flatnonzero((awaits >= 0) & (target != self._section_of_call)).tolist():
            section, work = int(self._section_of_call[row]), int(awaits[row])
            stream, begin = int(streams[work]), int(self._works.first[section])
            self._awaiting.setdefault(section, []).append((row, stream))
            if np.any(streams[work + 1 : begin] == stream):
                mark = Mark(self._alike(section, int(target[row])), work - int(self._works.first[target[row]]))
                self._waits[row] = known.setdefault(mark, len(known))
        self._marks = list(known)

    def _alike(self, section: int, target: int) -> frozenset[int]:
        """Whose works stand for a target's: a layer waits for whichever layer came before it, others for their kind."""
        if self._ran(target) == self._ran(section):
            return frozenset(each for each in range(len(self._repetition.starts)) if self._ran(each) == self._ran(section))
        kinds = self._repetition.kinds
        return frozenset(each for each, kind in enumerate(kinds) if kind == kinds[target])

    def _ran(self, section: int) -> tuple[tuple[int, int], ...]:
        """Names and streams of a section's works."""
        if section not in self._ran_by:
            works, mine = self._sample.program.works, self._section_of_work == section
            self._ran_by[section] = tuple(zip(works.name[mine].tolist(), works.stream[mine].tolist(), strict=True))
        return self._ran_by[section]

    def _tails(self) -> dict[int, list[tuple[int, int]]]:
        """Per section the last work of each stream in it, as a row of the sample."""
        result: dict[int, dict[int, int]] = {}
        streams = self._sample.program.works.stream.tolist()
        for row, (section, stream) in enumerate(zip(self._section_of_work.tolist(), streams, strict=True)):
            result.setdefault(section, {})[stream] = row
        return {section: list(each.items()) for section, each in result.items()}
