"""`written`: the ops that a group becomes: a generated kernel, two where a reduction is divided, and sums of partial ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from steptime._fuse.nodes import LoopKind, LoopNode, Read, Value
from steptime._fuse.schedule import FusedGroup
from steptime._fuse.splits import Processors, parts, persistent
from steptime._ops.generated import (
    ATOMIC,
    LOAD,
    PERSISTENT,
    POINTWISE,
    REDUCTION,
    STORE,
    Access,
    AddressTerm,
    GeneratedKernel,
)
from steptime._program.program import Signature, Tensor
from steptime._units import dtype_bytes

_PREFIX = {POINTWISE: "poi", REDUCTION: "red", PERSISTENT: "per"}
_LONGEST_NAME = 100
_BLOCKS_EACH = 8  # of a multiprocessor, where rows and columns are summed together (codegen/simd.py)
_ROWS_LEAST, _ROWS_MOST = 16, 128
_SMALL = 8  # a tensor of so many times fewer elements is not read by every iteration
_ADDED = (("plain", 1.0),)


@dataclass(frozen=True, slots=True)
class FusedOp:
    """One op of the compiled program, and the rows of the ops that went into it."""

    name: str
    signature: Signature
    rows: tuple[int, ...]
    generated: bool
    leads: bool = True  # whether it is the first of the ops of its group


class Names:
    """Kernels that are equal have one name, as Inductor's have; its number counts those that differ."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}

    def of(self, kernel: GeneratedKernel, labels: Iterable[str]) -> GeneratedKernel:
        """The kernel under its name."""
        joined = "_".join(sorted(set(labels)))[:_LONGEST_NAME].rstrip("_")
        stem = f"triton_{_PREFIX[kernel.kind]}_fused_{joined}"
        key = (stem, kernel.text())
        name = self._known.setdefault(key, f"{stem}_{len(self._known)}")
        return replace(kernel, name=name)


class KernelWriter:
    """Makes ops of groups."""

    def __init__(
        self,
        nodes: Mapping[int, LoopNode],
        values: Sequence[Value],
        ops: Mapping[int, frozenset[tuple[int, str]]],
        processors: Processors,
        fresh: Iterator[int],
    ) -> None:
        self._nodes, self._values, self._ops, self._processors = nodes, values, ops, processors
        self._names, self._fresh = Names(), fresh
        self._readers: dict[int, set[int]] = {}
        for number, node in nodes.items():
            for value in {each.value for each in node.reads} | set(node.after):
                self._readers.setdefault(value, set()).add(number)

    def written(self, group: FusedGroup) -> list[FusedOp]:
        """The ops of a group that is no call."""
        inside = {*group.nodes, *group.columns}
        made = {value for number in inside for value in self._nodes[number].writes}
        stores = [value for value in sorted(made) if self._goes_out(value, inside)]
        loads = self._loads(group, made)
        ops = {op for number in inside for op in self._ops[number]}
        rows, labels = tuple(sorted({row for row, _ in ops})), {label for _, label in ops}
        if group.columns:
            return self._mixed(group, loads, stores, rows, labels)
        if group.split > 1:
            return self._divided(group, loads, stores, rows, labels)
        kernel = self._kernel(group, loads, [self._values[each].tensor for each in stores], self._functions(group.nodes))
        return [self._op(kernel, loads, [self._values[each].tensor for each in stores], rows, labels)]

    def _goes_out(self, value: int, inside: set[int]) -> bool:
        known = self._values[value]
        return known.kept or bool(self._readers.get(value, set()) - inside) or not self._readers.get(value)

    def _loads(self, group: FusedGroup, made: set[int]) -> list[Read]:
        """What is read from memory, each tensor once."""
        loads: dict[tuple[int, tuple[int, ...], tuple[int, ...] | None, int], Read] = {}
        for number in (*group.nodes, *group.columns):
            for read in self._nodes[number].reads:
                if read.value not in made:
                    tensor = read.tensor
                    loads.setdefault((read.value, tensor.shape, tensor.strides, tensor.offset), read)
        distinct: dict[tuple[int, int, int], Read] = {}
        for read in loads.values():  # views of as many elements read the same memory
            distinct.setdefault((read.value, -1 if read.indirect else read.numel, read.tensor.offset), read)
        return list(distinct.values())

    def _functions(self, numbers: Iterable[int]) -> tuple[tuple[str, float], ...]:
        total: Counter[str] = Counter()
        for number in numbers:
            total += self._nodes[number].loop.functions
        return tuple(sorted((name, float(count)) for name, count in total.items()))

    def _kernel(
        self,
        group: FusedGroup | _KernelStage,
        loads: Sequence[Read],
        stores: Sequence[Tensor],
        functions: tuple[tuple[str, float], ...],
        *,
        rows: int = 0,
    ) -> GeneratedKernel:
        size, reduced = group.size, group.reduced
        kind = POINTWISE
        if group.reduces:
            kind = PERSISTENT if rows or persistent(reduced, inner=group.inner) else REDUCTION
        atomic = {value for number in group.nodes if self._nodes[number].loop.atomic for value in self._nodes[number].writes}
        added = {id(self._values[value].tensor) for value in atomic}

        order = _order([*(read.tensor for read in loads if not read.indirect), *stores])
        columns = group.columns_of if isinstance(group, _KernelStage) else 0

        def laid(tensor: Tensor, *, indirect: bool) -> tuple[AddressTerm, ...]:
            if columns and not group.inner and tensor.numel == size * reduced:
                return _divided_columns(columns, size // columns, reduced)
            return _terms(_ordered(tensor, order), size, reduced, inner=group.inner, indirect=indirect)

        passes = self._passes(group) if kind == REDUCTION else {}
        accesses = []
        for place, read in enumerate(loads):
            whole, terms = read.numel * _SMALL > size * reduced, laid(read.tensor, indirect=read.indirect)
            for loop in passes.get(read.value, (1,)) if kind == REDUCTION and whole else (0,):
                accesses.append(Access(LOAD, place, dtype_bytes(read.tensor.dtype), terms, read.indirect, loop=loop))
        last = max((loop for loops in passes.values() for loop in loops), default=1)
        for place, tensor in enumerate(stores, len(loads)):
            add, item = id(tensor) in added, dtype_bytes(tensor.dtype)
            loop = last if kind == REDUCTION and tensor.numel > size else 0
            accesses.append(Access(ATOMIC if add else STORE, place, item, laid(tensor, indirect=add), add, loop=loop))
        arguments = [(f"in_ptr{place}", read.tensor.dtype) for place, read in enumerate(loads)]
        arguments += [(f"out_ptr{place}", tensor.dtype) for place, tensor in enumerate(stores)]
        return GeneratedKernel(
            name="",
            kind=kind,
            extents=(("x", size), ("r0", reduced)) if group.reduces else (("x", size),),
            hint=("INNER" if group.inner else "OUTER") if group.reduces else "",
            arguments=tuple(arguments),
            accesses=tuple(accesses),
            functions=functions,
            reductions=sum(self._nodes[number].loop.reductions for number in (*group.nodes, *group.columns)),
            rows=rows,
        )

    def _passes(self, group: FusedGroup | _KernelStage) -> dict[int, tuple[int, ...]]:
        """Per value, in which passes over the reduced elements a kernel reads it that does not hold them all at once."""
        of_value: dict[int, int] = {}
        found: dict[int, set[int]] = {}
        for number in group.nodes:
            node = self._nodes[number]
            at = max((of_value.get(read.value, 1) for read in node.reads), default=1)
            for read in node.reads:
                found.setdefault(read.value, set()).add(at)
            of_value.update(dict.fromkeys(node.writes, at + (node.kind is LoopKind.REDUCTION)))
        return {value: tuple(sorted(each)) for value, each in found.items()}

    def _op(
        self,
        kernel: GeneratedKernel,
        loads: Sequence[Read],
        stores: Sequence[Tensor],
        rows: tuple[int, ...],
        labels: Iterable[str],
    ) -> FusedOp:
        named = self._names.of(kernel, labels)
        reads, writes = tuple(each.tensor for each in loads), tuple(stores)
        return FusedOp(named.name, Signature((reads, writes, named.text()), writes), rows, generated=True)

    def _partial(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        number = next(self._fresh)
        strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
        return Tensor(shape, "float32", strides, next(self._fresh), number, 0, like.device)

    def _divided(
        self, group: FusedGroup, loads: Sequence[Read], stores: Sequence[int], rows: tuple[int, ...], labels: set[str]
    ) -> list[FusedOp]:
        """A reduction in two kernels or more: parts of it, and these summed with what comes after.

        Sums that a kernel makes parts of are finished one by one; means and deviations, which belong together, at once, and
        divided again where they are many.
        """
        reducing = [number for number in group.nodes if self._nodes[number].kind is LoopKind.REDUCTION]
        results = [value for number in reducing for value in self._nodes[number].writes]
        like = self._values[results[0]].tensor
        between = [self._partial(like, (group.split, group.size)) for _ in results]
        whole = [value for value in stores if self._values[value].tensor.numel >= group.size * group.reduced]
        first_loads = [read for read in loads if read.numel > group.size or group.size == 1 or read.indirect]
        first_stores = [*(self._values[value].tensor for value in whole), *between]
        split = _KernelStage(group.size * group.split, -(-group.reduced // group.split), group)
        first = self._kernel(split, first_loads, first_stores, self._functions(reducing))
        result = [self._op(first, first_loads, first_stores, rows, labels)]
        together = not all(self._nodes[number].loop.sums for number in reducing)
        others = [read for read in loads if read not in first_loads]
        rest = [value for value in stores if value not in whole]
        for at, partial in [(0, between)] if together else list(enumerate([each] for each in between)):
            last_stores = [self._values[value].tensor for value in rest if together or value == results[at]]
            left, partly = group.split, partial
            while together and (again := parts(group.size, left, self._processors, inner=False)) > 1:
                fewer = [self._partial(like, (again, group.size)) for _ in partly]
                stage = _KernelStage(group.size * again, -(-left // again))
                reads = [Read(-1, tensor) for tensor in partly]
                result.append(self._after(self._kernel(stage, reads, fewer, _ADDED), reads, fewer, rows, labels))
                partly, left = fewer, again
            reads = [*(Read(-1, tensor) for tensor in partly), *(others if at == 0 else ())]
            outputs = last_stores or [self._values[results[at]].tensor]
            result.append(
                self._after(self._kernel(_KernelStage(group.size, left), reads, outputs, _ADDED), reads, outputs, rows, labels)
            )
        return result

    def _after(
        self,
        kernel: GeneratedKernel,
        loads: Sequence[Read],
        stores: Sequence[Tensor],
        rows: tuple[int, ...],
        labels: Iterable[str],
    ) -> FusedOp:
        return replace(self._op(kernel, loads, stores, rows, labels), leads=False)

    def _mixed(
        self, group: FusedGroup, loads: Sequence[Read], stores: Sequence[int], rows: tuple[int, ...], labels: set[str]
    ) -> list[FusedOp]:
        """Sums along rows with partial sums down columns in one kernel; PyTorch's own sums of the partial ones follow."""
        blocks = self._processors.count * _BLOCKS_EACH
        each = 1 << max(group.size // blocks, 1).bit_length() - 1
        each = min(max(each, _ROWS_LEAST), _ROWS_MOST)
        columns = [value for number in group.columns for value in self._nodes[number].writes]
        like = self._values[columns[0]].tensor
        partial = [self._partial(like, (-(-group.size // each), group.reduced)) for _ in columns]
        direct = [self._values[value].tensor for value in stores if value not in columns]
        functions = self._functions((*group.nodes, *group.columns))
        kernel = self._kernel(group, loads, [*direct, *partial], functions, rows=each)
        result = [self._op(kernel, loads, [*direct, *partial], rows, labels)]
        for value, tensor in zip(columns, partial, strict=True):
            output = self._values[value].tensor
            summed = output if output.dtype == tensor.dtype else self._partial(output, output.shape)
            signature = Signature((tensor, (0,), False, None), (summed,))
            result.append(FusedOp("aten::sum", signature, rows, generated=False, leads=False))
            if summed is not output:
                reads = [Read(-1, summed)]
                cast = self._kernel(_KernelStage(output.numel, 1), reads, [output], _ADDED)
                result.append(self._after(cast, reads, [output], rows, labels))
        return result


class _KernelStage:
    """A kernel beside those of groups: a part of a divided reduction, or the sum of parts, which lie side by side."""

    def __init__(self, size: int, reduced: int, of: FusedGroup | None = None) -> None:
        self.size, self.reduced = size, reduced
        self.inner = of is not None and of.inner
        self.nodes: Sequence[int] = () if of is None else of.nodes
        self.columns: Sequence[int] = ()
        self.columns_of = 0 if of is None else of.size  # of what a part of each column is reduced

    @property
    def reduces(self) -> bool:
        """Whether it has a reduction."""
        return self.reduced > 1


def _terms(tensor: Tensor, size: int, reduced: int, *, inner: bool, indirect: bool) -> tuple[AddressTerm, ...]:
    """Where a tensor's elements lie, along the axes of a kernel of `size` results of `reduced` elements each."""
    whole = size * reduced
    if indirect and tensor.numel > whole:
        return (
            _along("x", (size,), (1,), size)
            if reduced == 1
            else (AddressTerm("r0", 1, reduced, 1), AddressTerm("x", 1, size, reduced))
        )
    dims = [(length, stride) for length, stride in _laid(tensor) if length > 1]
    if not dims:
        return ()
    lengths, strides = [each[0] for each in dims], [each[1] for each in dims]
    if reduced == 1:
        return _along("x", lengths, strides, size)
    numel = math.prod(lengths)
    if numel == reduced and numel != size:
        return _along("r0", lengths, strides, reduced)
    if numel == size and numel != reduced:
        return _along("x", lengths, strides, size)
    for cut in range(len(lengths) + 1):
        left, right = math.prod(lengths[:cut]), math.prod(lengths[cut:])
        if inner and right == reduced:
            return (*_along("r0", lengths[cut:], strides[cut:], reduced), *_along("x", lengths[:cut], strides[:cut], size))
        if not inner and right == size and left == reduced:
            return (*_along("x", lengths[cut:], strides[cut:], size), *_along("r0", lengths[:cut], strides[:cut], reduced))
    # Dimensions that no axis ends between: as if row by row.
    fast, slow = (reduced, size) if inner else (size, reduced)
    first = AddressTerm("r0" if inner else "x", 1, min(fast, numel), 1)
    rest = numel // min(fast, numel)
    return (first, AddressTerm("x" if inner else "r0", 1, min(rest, slow), min(fast, numel))) if rest > 1 else (first,)


def _divided_columns(columns: int, parts_of: int, each: int) -> tuple[AddressTerm, ...]:
    """All of a matrix whose columns are reduced in parts."""
    return (
        AddressTerm("x", 1, columns, 1),
        AddressTerm("x", columns, parts_of, columns * each),
        AddressTerm("r0", 1, each, columns),
    )


def _order(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Dimensions as the largest tensor of a kernel has them in memory, the fastest last: loops go that way."""
    largest = max(tensors, key=lambda tensor: tensor.numel, default=None)
    if largest is None:
        return ()
    dims = _laid(largest)
    return tuple(sorted(range(len(dims)), key=lambda place: -dims[place][1] if dims[place][0] > 1 else -(1 << 62)))


def _ordered(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    if len(tensor.shape) != len(order) or order == tuple(range(len(order))):
        return tensor
    dims = _laid(tensor)
    return replace(tensor, shape=tuple(dims[at][0] for at in order), strides=tuple(dims[at][1] for at in order))


def _laid(tensor: Tensor) -> list[tuple[int, int]]:
    strides = tensor.strides
    if strides is None or len(strides) != len(tensor.shape):
        strides = tuple(math.prod(tensor.shape[place + 1 :]) for place in range(len(tensor.shape)))
    return list(zip(tensor.shape, strides, strict=True))


def _along(axis: str, lengths: Sequence[int], strides: Sequence[int], extent: int) -> tuple[AddressTerm, ...]:
    """Dimensions of a tensor along one axis, the fastest last; those that lie as one are one."""
    merged: list[tuple[int, int]] = []
    for length, stride in zip(lengths, strides, strict=True):
        if merged and merged[-1][1] == stride * length:
            merged[-1] = (merged[-1][0] * length, stride)
        else:
            merged.append((length, stride))
    terms, every = [], 1
    for length, stride in reversed(merged):
        if stride and every < extent:
            terms.append(AddressTerm(axis, every, length, stride))
        every *= length
    return tuple(terms)
