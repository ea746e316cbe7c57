"""From a program's ops to the questions that kernel models answer: which ops launch device work, with which arguments.

An op launches by itself, launches nothing, is made of others that launch, is a collective or a lookup, or is not known. What
launches is found from the outermost op inwards: the first op with known overloads stands for all that is in it, as it does in
the measured calls, but for the copy that autograd keeps of what an op in place overwrites (`silu_`), which is autograd's own,
and for how masks become indices.
Autocast shows an op twice, around the casts of its arguments and as it runs: then the inner one stands.
Where a source does not say in which memory tensors lie (Kineto's traces do not), all lie on the device, and nothing is warm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steptime._hardware.device import DeviceLimits, reference_device
from steptime._models.engine.constants import constants_of
from steptime._models.kernels.family import families
from steptime._models.kernels.generated_ops import question_of, tensors_of
from steptime._models.kernels.question import Question
from steptime._models.kernels.traced_call import TracedCall, traced_call
from steptime._ops.catalogue import INDEX_ARGUMENT, SPARSE_UPDATES, Data, HostClass, Integers, OpKind, Role
from steptime._ops.generated import LOAD
from steptime._ops.generated import NAMES as GENERATED_NAMES
from steptime._ops.generated_calls import kernel_called
from steptime._ops.table import Touch, is_sparse, memory_bytes, op_table
from steptime._program.program import Program, Signature, Tensor, Value
from steptime._units import MIB

COMPUTE, LOOKUP, COLLECTIVE, RECURRENT, UNKNOWN = "compute", "lookup", "collective", "recurrent", "unknown"
# What calls are recorded with: an argument counts as just written within so many written bytes and so many tensors.
_WRITTEN_WITHIN_BYTES = 32 * MIB
_REMEMBERED = 64
_COPY, _KEPT_COPY = "copy_", "aten::clone"
_ROW_MAJOR = "aten::contiguous"
_MASK_READ = "aten::nonzero"  # by ops that index by masks
# Whether what is inside an op is the op's own.
_CLOSED, _IN_PLACE, _LOOKED_UP = 1, 2, 3
# Ops that are one kernel in this dtype, and made of others in any other (native/cuda/GroupedBlas.cpp).
_ONE_KERNEL_IN = {"aten::_grouped_mm": "bfloat16"}


@dataclass(frozen=True)
class StepConstants:
    """Of a device: bytes touched since an argument was, up to which kernels take as long as with input just written."""

    warm_within_bytes: float


def warm_within_bytes(limits: DeviceLimits) -> int:
    """Bytes that may be touched between writing something and reading it from the cache of a whole GPU."""
    return int(constants_of(limits, "steps", StepConstants).warm_within_bytes)


@dataclass(frozen=True, slots=True)
class IssuedWork:
    """Device work of one op: `op` is its row in the program. `question` is None but for compute."""

    op: int
    kind: str  # compute | lookup | collective | recurrent | unknown
    name: str
    question: Question | None = None
    since_bytes: int = -1  # bytes touched since the nearest of its written inputs was; -1: none was in this program
    # Of the bytes its arguments have, those that move: a list given twice (Adam squares gradients so) is read once. Calls are
    # measured with arguments of their own each, and what goes through lists takes as long as memory does.
    moved: float = 1.0


def questions_of(program: Program, *, cached_bytes: int | None = None, launches_recorded: bool = False) -> list[IssuedWork]:
    """The device work that a program's ops launch, in order, with what to ask about each piece of compute.

    `cached_bytes` is how much a cache keeps (the reference device's if none is given): ranks that share a GPU share its L2, so
    that each has its share of it. `launches_recorded`: kernels were recorded beside the ops, so that an op without any launched
    none.
    """
    cached = warm_within_bytes(reference_device()) if cached_bytes is None else cached_bytes
    key = (IssuedWork, cached, launches_recorded)
    if key not in program.derived:
        program.derived[key] = tuple(_Walk(program, cached, launches_recorded=launches_recorded).works())
    return list(program.derived[key])


class Touched:
    """Which arguments of a call are in the cache when it comes: by the bytes touched since they were touched last."""

    def __init__(self) -> None:
        self._written_bytes = 0
        self._touched_bytes = 0
        self._written: dict[int, int] = {}  # storage -> bytes written when it was written last, in the order of the writes
        self._touched: dict[int, int] = {}  # storage -> bytes touched when it was read or written last

    def since(self, touches: Iterable[Touch]) -> tuple[bool, int]:
        """Whether an argument counts as just written, and the bytes touched since it was read or written (-1: it never was)."""
        recent, nearest = False, -1
        for storage, _ in touches:
            if storage is None:
                continue
            if storage in self._touched:
                age = self._touched_bytes - self._touched[storage]
                nearest = age if nearest < 0 else min(nearest, age)
            recent = recent or self._written_bytes - self._written.get(storage, -_WRITTEN_WITHIN_BYTES) < _WRITTEN_WITHIN_BYTES
        return recent, nearest

    def read(self, touches: Iterable[Touch]) -> None:
        """A work reads these tensors of the device."""
        for storage, size in touches:
            self._touched_bytes += size
            if storage is not None:
                self._touched[storage] = self._touched_bytes

    def write(self, touches: Iterable[Touch]) -> None:
        """A work writes these."""
        for storage, size in touches:
            self._written_bytes += size
            self._touched_bytes += size
            if storage is not None:
                self._touched[storage] = self._touched_bytes
                self._written.pop(storage, None)
                self._written[storage] = self._written_bytes
                if len(self._written) > _REMEMBERED:
                    del self._written[next(iter(self._written))]


class Ordered:
    """Indices that count: tensors that `arange` made, seen through views, until something else is written where they lie."""

    def __init__(self) -> None:
        self._storages: set[int] = set()

    def write(self, kind: OpKind, tensors: Iterable[Tensor]) -> None:
        """An op writes these: memory that held a count is given to other tensors once it is free."""
        for tensor in tensors:
            if tensor.storage is None:
                continue
            if kind.counts and tensor.dtype.startswith("int"):
                self._storages.add(tensor.storage)
            else:
                self._storages.discard(tensor.storage)

    def index_of(self, kind: OpKind, values: Sequence[Value]) -> bool:
        """Whether an op indexes along a dimension by such a tensor."""
        if len(values) <= INDEX_ARGUMENT or not self._storages or kind.integers(INDEX_ARGUMENT) is not Integers.ALONG:
            return False
        index = values[INDEX_ARGUMENT]
        # What is broadcast repeats itself, and what was made of several dimensions is in another order.
        return isinstance(index, Tensor) and index.storage in self._storages and index.strides in (None, (1,))


@dataclass(slots=True)
class _Issue:
    """One piece of work; `written` are the places of arguments that were just written, `since` bytes touched since each was."""

    op: int
    kind: str
    call: TracedCall | None = None
    written: tuple[int, ...] = ()
    since: tuple[int, ...] = ()  # per positional argument
    question: Question | None = None  # of a generated kernel


class _Walk:
    """Goes through the table of a program's ops once, outermost first."""

    def __init__(self, program: Program, cached_bytes: int, *, launches_recorded: bool) -> None:
        families()  # which may declare ops of their own
        self._table = op_table(program)
        self._launches_recorded = launches_recorded
        self._outputs_recorded = any(signature.outputs for signature in program.signatures)
        self._cached_bytes = cached_bytes
        self._sums_rows = SPARSE_UPDATES["rowwise_adagrad"] in self._table.names
        self._collectives = {row for row, _ in self._table.launching_collectives()}
        self._touched = Touched()
        self._ordered = Ordered()
        self._issued: list[_Issue] = []

    def works(self) -> list[IssuedWork]:
        """Every piece of work, in order of its op."""
        open_ops = self._walk()
        self._issued += [_Issue(row, UNKNOWN) for row in self._launching(open_ops)]
        self._issued.sort(key=lambda issue: issue.op)
        # Calls are recorded with what is written before most of their instances, so that a step has few distinct ones.
        before: dict[TracedCall, Counter[tuple[int, ...]]] = {}
        for issue in self._issued:
            if issue.call is not None:
                before.setdefault(issue.call, Counter())[issue.written] += 1
        usual = {call: counted.most_common(1)[0][0] for call, counted in before.items()}
        return [self._work(issue, usual) for issue in self._issued]

    def _walk(self) -> list[int]:
        """Finds what launches; gives the ops of which the name does not tell."""
        table = self._table
        closed = bytearray(len(table))
        open_ops = []
        for row, (kind, parent, arguments) in enumerate(zip(table.kinds, table.parents, table.arguments, strict=True)):
            role = kind.role
            if parent >= 0 and closed[parent] and not self._apart(kind, closed[parent]):
                closed[row] = _CLOSED
            elif arguments.sparse and role in (Role.OPEN, Role.LAUNCHES) and not self._updates(row):
                # What a sparse tensor is made of is worked on by ops inside this one.
                open_ops += [] if table.children[row] else [row]
            elif role is Role.OPEN and not arguments.sparse:
                open_ops.append(row)
                self._ordered.write(kind, arguments.outputs)
            elif role is Role.LAUNCHES and not arguments.sparse:
                closed[row] = self._launches(row, open_ops) and (_IN_PLACE if kind.data is Data.IN_PLACE else _CLOSED)
            elif role is Role.RECURRENT:
                if row not in table.same_inside:
                    self._issue(_Issue(row, RECURRENT))
            elif role is not Role.COMPOSITE:
                closed[row] = _LOOKED_UP if role is Role.LOOKUP else _CLOSED
                if row in self._collectives or role in (Role.LOOKUP, Role.LAUNCHES, Role.OPEN):
                    self._issue(_Issue(row, COLLECTIVE if role is Role.COLLECTIVE else LOOKUP))
        return open_ops

    @staticmethod
    def _apart(kind: OpKind, around: int) -> bool:
        """Whether an op is no part of the measured call that it is inside of."""
        if around == _LOOKED_UP:  # measured with gradients that lie in rows
            return kind.name == _ROW_MAJOR
        return kind.name == _MASK_READ or (around == _IN_PLACE and kind.name == _KEPT_COPY)

    def _updates(self, row: int) -> bool:
        """Whether an op on a sparse gradient is one that models of lookups answer: its rows summed, or added as they are."""
        name = self._table.names[row]
        if name == SPARSE_UPDATES["rowwise_adagrad"]:
            return True
        first = self._table.arguments[row].by_input[:1]
        return name == SPARSE_UPDATES["sgd"] and not self._sums_rows and not any(map(is_sparse, *first))

    def _launches(self, row: int, open_ops: list[int]) -> bool:
        """Issues an op with known overloads; whether it stands for what is inside it."""
        table, arguments = self._table, self._table.arguments[row]
        if not arguments.on_device:
            # On the host, unless nothing is recorded of its tensors.
            if arguments.inputs or arguments.outputs or self._launches_recorded:
                return True
            open_ops.append(row)
            return False
        name, signature = table.names[row], table.signatures[row]
        if GENERATED_NAMES.fullmatch(name):
            return self._generated(row, open_ops)
        if table.kinds[row].plain == _COPY and len(signature.inputs) > 1 and signature.inputs[0] == signature.inputs[1]:
            return True  # of a tensor to itself: nothing (native/Copy.cpp)
        if name in _ONE_KERNEL_IN and arguments.inputs[0].dtype != _ONE_KERNEL_IN[name]:
            open_ops.append(row)
            return False
        call = traced_call(name, signature, ordered=self._ordered.index_of(table.kinds[row], signature.inputs))
        if call is None:
            open_ops.append(row)
            return False
        for inner in table.same_inside.get(row, ()):
            again = traced_call(name, table.signatures[inner])
            if again is not None and again.overload is call.overload:
                return False
        self._issue(_Issue(row, COMPUTE, call))
        return True

    def _generated(self, row: int, open_ops: list[int]) -> bool:
        """Issues a generated kernel: every tensor counts with when it was touched."""
        name, signature = self._table.names[row], self._table.signatures[row]
        kernel = kernel_called(name, signature)
        if kernel is None:
            open_ops.append(row)
            return False
        tensors = tensors_of(kernel, signature.inputs)
        touches = [() if tensor is None else ((tensor.storage, memory_bytes(tensor)),) for tensor in tensors]
        since = tuple(self._touched.since(each)[1] for each in touches)
        loaded = {access.argument for access in kernel.accesses if access.kind == LOAD}
        stored = {access.argument for access in kernel.accesses if access.kind != LOAD}
        for argument, each in enumerate(touches):
            if argument in loaded:
                self._touched.read(each)
        for argument, each in enumerate(touches):
            if argument in stored:
                self._touched.write(each)
        question = question_of(name, kernel, tensors, since)
        self._issued.append(_Issue(row, COMPUTE, since=since, question=question))
        return True

    def _issue(self, issue: _Issue) -> None:
        arguments = self._table.arguments[issue.op]
        if arguments.touched is None:
            arguments.touch()  # of a sparse tensor
        assert arguments.touched is not None
        touches = arguments.touched
        if issue.call is not None:
            ages = [self._touched.since(each) for each in touches.by_input[: len(issue.call.args)]]
            issue.written = tuple(index for index, (recent, _) in enumerate(ages) if recent)
            issue.since = tuple(age for _, age in ages)
            for each, parameter in zip(touches.by_input, issue.call.overload.parameters, strict=False):
                if parameter.written:
                    self._touched.write(each)
        self._touched.read(touches.read)
        self._touched.write(touches.written)
        self._ordered.write(self._table.kinds[issue.op], arguments.outputs)
        self._issued.append(issue)

    def _launching(self, open_ops: list[int]) -> list[int]:
        """Ops without a known call that launch themselves: nothing inside them does, and they have something to do."""
        around = bytearray(len(self._table))  # whether something inside an op launches
        parents = self._table.parents

        def mark(row: int) -> None:
            while row >= 0 and not around[row]:
                around[row] = 1
                row = parents[row]

        for issue in self._issued:
            mark(parents[issue.op])
        launching = []
        for row in reversed(open_ops):
            if not around[row] and self._does_something(row):
                launching.append(row)
                mark(row)
        return launching

    def _does_something(self, row: int) -> bool:
        """Whether an op that stands alone works on the device: it makes what was not there, or writes what was.

        Where nothing of that is recorded, an op that launches by its name does, and any op with tensors of a device.
        """
        kind, arguments = self._table.kinds[row], self._table.arguments[row]
        if self._launches_recorded or arguments.makes_something():
            return arguments.makes_something()
        if kind.role is Role.LAUNCHES:
            return True
        if kind.host_class is HostClass.VIEW or not arguments.on_device:
            return False
        return kind.data is Data.IN_PLACE or not self._outputs_recorded

    def _work(self, issue: _Issue, usual: dict[TracedCall, tuple[int, ...]]) -> IssuedWork:
        kind = self._table.kinds[issue.op]
        if issue.question is not None:
            nearest = min((age for age in issue.since if age >= 0), default=-1)
            return IssuedWork(issue.op, COMPUTE, kind.name, issue.question, nearest)
        if issue.call is None:
            return IssuedWork(issue.op, issue.kind, kind.name)
        written = usual[issue.call] or issue.written
        since = min((issue.since[index] for index in written if issue.since[index] >= 0), default=-1)
        question = issue.call.question(written, warm=0 <= since <= self._cached_bytes)
        moved = _moved(self._table.signatures[issue.op]) if "_foreach_" in kind.name else 1.0
        return IssuedWork(issue.op, COMPUTE, kind.name, question, since, moved)


def _moved(signature: Signature) -> float:
    lists = [value[0] for value in signature.inputs if isinstance(value, tuple) and value and isinstance(value[0], Tensor)]
    distinct = {(first.storage, first.offset) for first in lists}
    # One list is written, whether it is among those that are read or not.
    return (len(distinct) + 1) / (len(lists) + 1)
