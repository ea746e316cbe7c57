"""From a program's ops to the questions that kernel models answer: which ops launch device work, with which arguments.

An op launches by itself, launches nothing, is made of others that launch, is a collective or a lookup, or is not known. What
launches is found from the outermost op inwards: the first op with known overloads stands for all that is in it, as it does in
the measured calls. Autocast shows an op twice, around the casts of its arguments and as it runs: then the inner one stands.
Where a source does not say in which memory tensors lie (Kineto's traces do not), all lie on the device, and nothing is warm.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from steptime._models.kernels.from_ops.arguments import is_sparse, on_device, tensors_in
from steptime._models.kernels.from_ops.caches import Touched
from steptime._models.kernels.from_ops.names import Role, role_of
from steptime._models.kernels.from_ops.ordered import Ordered
from steptime._models.kernels.from_ops.resolved import Resolved, resolved
from steptime._models.kernels.question import Question
from steptime._program.program import Program, Signature, Tensor, WorkKind

COMPUTE, LOOKUP, COLLECTIVE, UNKNOWN = "compute", "lookup", "collective", "unknown"

# Bytes touched since an argument was: up to here kernels of measured steps take as long as with input just written, beyond
# as long as with nothing in cache (seen in the measured steps of an H200, whose L2 has 50 MB; it changes between 25 and 35 MB).
WARM_WITHIN_BYTES = 30_000_000


@dataclass(frozen=True, slots=True)
class IssuedWork:
    """Device work of one op: `op` is its row in the program. `question` is None but for compute."""

    op: int
    kind: str  # compute | lookup | collective | unknown
    name: str
    question: Question | None = None
    since_bytes: int = -1  # bytes touched since the nearest of its written inputs was; -1: none was in this program
    # Of the bytes its arguments have, those that move: a list given twice (Adam squares gradients so) is read once. Calls are
    # measured with arguments of their own each, and what goes through lists takes as long as memory does.
    moved: float = 1.0


def questions_of(program: Program, *, cached_bytes: int = WARM_WITHIN_BYTES) -> list[IssuedWork]:
    """The device work that a program's ops launch, in order, with what to ask about each piece of compute.

    `cached_bytes` is how much a cache keeps: ranks that share a GPU share its L2, so that each has its share of it.
    """
    return _Walk(program, cached_bytes).works()


@dataclass(slots=True)
class _Found:
    """One piece of work; `written` are the places of arguments that were just written, `since` bytes touched since each was."""

    op: int
    kind: str
    call: Resolved | None = None
    written: tuple[int, ...] = ()
    since: tuple[int, ...] = ()  # per positional argument


class _Walk:
    """Goes through the ops of a program once, outermost first."""

    def __init__(self, program: Program, cached_bytes: int) -> None:
        ops, works = program.ops, program.works
        self._program = program
        self._cached_bytes = cached_bytes
        self._names = [program.names[row] for row in ops.name.tolist()]
        self._parents: list[int] = ops.parent.tolist()
        self._signatures: list[int] = ops.signature.tolist()
        self._same_inside: dict[int, list[int]] = {}
        inside = np.flatnonzero((ops.parent >= 0) & (ops.name[np.maximum(ops.parent, 0)] == ops.name))
        for row in inside.tolist():
            self._same_inside.setdefault(self._parents[row], []).append(row)
        launching = works.call[(works.kind == WorkKind.COLLECTIVE) & (works.call >= 0)]
        self._collectives = set(program.calls.op[launching].tolist())
        self._touched = Touched()
        self._ordered = Ordered()
        self._found: list[_Found] = []

    def works(self) -> list[IssuedWork]:
        """Every piece of work, in order of its op."""
        open_ops = self._walk()
        self._found += [_Found(row, UNKNOWN) for row in self._launching(open_ops)]
        self._found.sort(key=lambda found: found.op)
        # Calls are recorded with what is written before most of their instances, so that a step has few distinct ones.
        before: dict[Resolved, Counter[tuple[int, ...]]] = {}
        for found in self._found:
            if found.call is not None:
                before.setdefault(found.call, Counter())[found.written] += 1
        usual = {call: counted.most_common(1)[0][0] for call, counted in before.items()}
        return [self._work(found, usual) for found in self._found]

    def _walk(self) -> list[int]:
        """Finds what launches; gives the ops of which the name does not tell."""
        roles = {name: role_of(name) for name in self._program.names}
        closed = bytearray(len(self._names))
        open_ops = []
        for row, (name, parent) in enumerate(zip(self._names, self._parents, strict=True)):
            role = roles[name]
            if parent >= 0 and closed[parent]:
                closed[row] = 1
            elif role == Role.OPEN and not self._sparse(row):
                open_ops.append(row)
                self._ordered.write(name, tensors_in(self._signature(row).outputs))
            elif role == Role.LAUNCHES and not self._sparse(row):
                closed[row] = self._launches(row, open_ops)
            elif role != Role.COMPOSITE:
                closed[row] = 1
                if row in self._collectives or role in (Role.LOOKUP, Role.LAUNCHES, Role.OPEN):
                    self._issue(_Found(row, COLLECTIVE if role == Role.COLLECTIVE else LOOKUP))
        return open_ops

    def _launches(self, row: int, open_ops: list[int]) -> bool:
        """Issues an op with known overloads; whether it stands for what is inside it."""
        signature = self._signature(row)
        every = [*tensors_in(signature.inputs), *tensors_in(signature.outputs)]
        if not any(map(on_device, every)):
            return True
        name = self._names[row]
        call = resolved(name, signature.inputs, ordered=self._ordered.index_of(name, signature.inputs))
        if call is None:
            open_ops.append(row)
            return False
        for inner in self._same_inside.get(row, ()):
            again = resolved(self._names[inner], self._signature(inner).inputs)
            if again is not None and again.overload is call.overload:
                return False
        self._issue(_Found(row, COMPUTE, call))
        return True

    def _issue(self, found: _Found) -> None:
        signature = self._signature(found.op)
        if found.call is not None:
            ages = [self._touched.since(value) for value in signature.inputs[: len(found.call.args)]]
            found.written = tuple(place for place, (recent, _) in enumerate(ages) if recent)
            found.since = tuple(age for _, age in ages)
            for value, parameter in zip(signature.inputs, found.call.overload.parameters, strict=False):
                if parameter.written:
                    self._touched.write(tensors_in((value,)))
        self._touched.read(tensors_in(signature.inputs))
        self._touched.write(tensors_in(signature.outputs))
        self._ordered.write(self._names[found.op], tensors_in(signature.outputs))
        self._found.append(found)

    def _launching(self, open_ops: list[int]) -> list[int]:
        """Ops not known by name that launch themselves: nothing inside them does, and they make what was not there."""
        around = bytearray(len(self._names))  # whether something inside an op launches

        def mark(row: int) -> None:
            while row >= 0 and not around[row]:
                around[row] = 1
                row = self._parents[row]

        for found in self._found:
            mark(self._parents[found.op])
        launching = []
        for row in reversed(open_ops):
            if not around[row] and self._makes_something(row):
                launching.append(row)
                mark(row)
        return launching

    def _sparse(self, row: int) -> bool:
        """Whether an op takes or makes a sparse tensor: the rows of a table that a lookup's gradient updates."""
        signature = self._signature(row)
        return any(map(is_sparse, tensors_in(signature.inputs))) or any(map(is_sparse, tensors_in(signature.outputs)))

    def _makes_something(self, row: int) -> bool:
        signature = self._signature(row)
        given = {tensor.storage for tensor in tensors_in(signature.inputs)}
        return any(on_device(tensor) and tensor.storage not in given for tensor in tensors_in(signature.outputs))

    def _signature(self, row: int) -> Signature:
        number = self._signatures[row]
        return self._program.signatures[number] if number >= 0 else Signature()

    def _work(self, found: _Found, usual: dict[Resolved, tuple[int, ...]]) -> IssuedWork:
        name = self._names[found.op]
        if found.call is None:
            return IssuedWork(found.op, found.kind, name)
        written = usual[found.call] or found.written
        since = min((found.since[place] for place in written if found.since[place] >= 0), default=-1)
        question = found.call.question(written, warm=0 <= since <= self._cached_bytes)
        return IssuedWork(found.op, COMPUTE, name, question, since, self._moved(found.op) if "_foreach_" in name else 1.0)

    def _moved(self, row: int) -> float:
        values = self._signature(row).inputs
        lists = [value[0] for value in values if isinstance(value, tuple) and value and isinstance(value[0], Tensor)]
        distinct = {(first.storage, first.offset) for first in lists}
        # One list is written, whether it is among those that are read or not.
        return (len(distinct) + 1) / (len(lists) + 1)
