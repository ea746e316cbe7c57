"""What rows of a program are called on a page: every text once, every label once, a label's number per row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._ops.families import WorkFamily, work_families
from steptime._program.program import Program, WorkKind
from steptime._report.html.columns import Integers, differences, packed
from steptime._report.html.lanes import Lanes
from steptime._report.html.markup import clean
from steptime._report.sizes import size_words
from steptime._sim.explain.path_summary import short_kernel_name

HOST = len(WorkFamily)  # the family of what a host thread does, behind those of the device

Document = dict[str, Any]
Describe = Callable[[int], tuple[int, ...]]


@dataclass
class Strings:
    """Every text once, by number."""

    numbers: dict[str, int] = field(default_factory=dict)  # text as it is shown -> number
    known: dict[str, int] = field(default_factory=dict)  # text as it was given -> the same

    def number(self, text: str) -> int:
        """The number of a text, the next one where it is new."""
        if text not in self.known:
            self.known[text] = self.numbers.setdefault(clean(text), len(self.numbers))
        return self.known[text]


def program_document(program: Program, lanes: Lanes, strings: Strings) -> Document:
    """Labels of a program's rows, and per lane its title, its rows' labels and, of works, the calls that launched them."""
    labels = _Labels(program, strings)
    hosts = lanes.rows[: lanes.hosts]
    position = np.full(len(program.calls) + 1, -1, dtype=np.int64)  # per call, its place among those drawn; the last: no call
    position[np.concatenate([*hosts, np.zeros(0, dtype=np.int64)])] = np.arange(sum(map(len, hosts)))
    columns: list[Document] = []
    for lane, (title, rows) in enumerate(zip(lanes.titles, lanes.rows, strict=True)):
        if lane < lanes.hosts:
            known = {"labels": packed(labels.of_calls(rows))}
        else:
            issued = position[program.works.call[rows]]
            known = {"labels": packed(labels.of_works(rows)), "calls": packed(differences(issued))}
        columns.append({"title": strings.number(title), **known})
    text = [list(label) for label in labels.numbers]
    return {"device": strings.number(program.device_name), "hosts": lanes.hosts, "labels": text, "lanes": columns}


class _Labels:
    """The labels of a program, by number: what a row is called, in full, the op around it, its family, its step, what else."""

    def __init__(self, program: Program, strings: Strings) -> None:
        calls, works = program.calls, program.works
        self.program, self.number = program, strings.number
        self.numbers: dict[tuple[int, ...], int] = {}
        self.families = work_families(program)
        name = np.append(program.ops.name, -1).astype(np.int64)  # -1, no op, has no name
        self.call_op = name[calls.op]
        self.work_op = np.append(self.call_op, -1)[works.call]

    def of_calls(self, rows: Integers) -> Integers:
        """The number of every call's label."""
        calls = self.program.calls
        return self._numbered(rows, (calls.api, self.call_op, calls.step), self._call)

    def of_works(self, rows: Integers) -> Integers:
        """The number of every work's label."""
        works = self.program.works
        telling = (works.name, self.work_op, self.families, works.bytes, works.collective, works.step)
        return self._numbered(rows, telling, self._work)

    def _numbered(self, rows: Integers, telling: Sequence[npt.NDArray[Any]], describe: Describe) -> Integers:
        """A number per row; rows alike in the telling columns have one label, which is made once."""
        told = np.column_stack([column[rows] for column in telling])
        _, first, which = np.unique(told, axis=0, return_index=True, return_inverse=True)
        result = np.zeros(len(first), dtype=np.int64)
        # In the order in which rows come, not in that of the columns' numbers, which depend on how a trace was read.
        for index in np.argsort(first).tolist():
            result[index] = self.numbers.setdefault(describe(int(rows[first[index]])), len(self.numbers))
        return result[which.reshape(-1)]

    def _call(self, row: int) -> tuple[int, ...]:
        calls, names, op = self.program.calls, self.program.names, int(self.call_op[row])
        around = names[op] if op >= 0 else "host work"
        return self._label(around, names[calls.api[row]], around, HOST, int(calls.step[row]), "")

    def _work(self, row: int) -> tuple[int, ...]:
        works, names = self.program.works, self.program.names
        kernel, op = names[works.name[row]], int(self.work_op[row])
        name, more = short_kernel_name(kernel), size_words(int(works.bytes[row])) if works.bytes[row] else ""
        if works.kind[row] == WorkKind.COLLECTIVE and works.collective[row] >= 0:
            item = self.program.collectives[works.collective[row]]
            among = f"{len(item.ranks)} ranks, " if item.ranks else ""
            name, more = item.kind, f"{among}{size_words(item.bytes_in)} in, {size_words(item.bytes_out)} out"
        return self._label(name, kernel, names[op] if op >= 0 else "", int(self.families[row]), int(works.step[row]), more)

    def _label(self, name: str, full: str, op: str, family: int, step: int, more: str) -> tuple[int, ...]:
        return (self.number(name), self.number(full), self.number(op), family, step, self.number(more))
