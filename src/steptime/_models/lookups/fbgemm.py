"""FBGEMM's table-batched lookups as traces show them: what a call's arguments tell, and what its kernels took.

Argument positions are those of `split_embedding_codegen_lookup_*_function` and `dense_embedding_codegen_lookup_function` in
FBGEMM 0.1 to 0.5 (codegen/embedding_backward_split_host_template.cpp, embedding_backward_dense_host.cpp). Kineto traces of
2022 hold the shapes of tensors but no numbers: then the gradient, the optimiser's state and kernel names tell what is missing.
How long a lookup takes is in `fbgemm_kernels`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steptime._lookups.workload import row_bytes
from steptime._models.lookups.question import BACKWARD, ITEM_BYTES, Lookup
from steptime._program.program import Program, Tensor, Value
from steptime.errors import InputError

DENSE = "dense"
"""In the place of an optimiser: the backward pass makes a gradient of all tables and updates nothing."""

STATE_ELEMENTS: Mapping[str, tuple[int, int]] = {
    DENSE: (0, 0),
    **dict.fromkeys(("sgd", "approx_sgd"), (0, 0)),
    **dict.fromkeys(("rowwise_adagrad", "approx_rowwise_adagrad"), (0, 1)),
    **dict.fromkeys(("adagrad", "lars_sgd"), (1, 0)),
    **dict.fromkeys(("partial_rowwise_adam", "partial_rowwise_lamb"), (1, 1)),
    **dict.fromkeys(("adam", "lamb"), (2, 0)),
}
"""Elements of an optimiser's state for each element of a row, and for each row (embedding_backward_code_generator.py)."""

VECTOR = 4
"""Elements a lane loads at a time (fbgemm_utils.cuh, Vec4T)."""
WARP = 32

_FORWARD = re.compile(r"fbgemm::(?:split_embedding_codegen_lookup_(\w+)_function|dense_embedding_codegen_lookup_function)")
_BACKWARD = re.compile(r"torch::autograd::CppNode<SplitLookupFunction_(\w+)_Op>")
# The last whole numbers among a lookup kernel's template arguments: vectors per lane and, since 2022, lanes per row.
_KERNEL = re.compile(r"embedding\w*_codegen_\w+_kernel\w*<[^()]*?, (\d+)ul(?:, (\d+)(?:ul)?)?>")

_SPLIT_PLACES = {
    "weights": 1, "managed weights": 2, "cached weights": 3, "D_offsets": 6, "total_D": 7, "max_D": 8,
    "total_hash_size_bits": 10, "indices": 11, "offsets": 12, "pooling_mode": 13, "indice_weights": 14, "momentum1": 20,
}  # fmt: skip
_DENSE_PLACES = {
    "weights": 0, "D_offsets": 2, "total_D": 3, "max_D": 4, "total_hash_size_bits": 6, "indices": 7, "offsets": 8,
    "pooling_mode": 9, "indice_weights": 10,
}  # fmt: skip
_INDEX_BYTES = {"int32": 4, "int64": 8}
# By the type of the tensor of weights: 8-bit rows are bytes.
_ROW_DTYPES = {**{dtype: dtype for dtype in ITEM_BYTES if dtype != "int8"}, "uint8": "int8"}
_SUM, _MEAN = 0, 1  # of PoolingMode


@dataclass(frozen=True, slots=True)
class FbgemmLookup:
    """One lookup of many tables, as far as its call tells. Which rows it looks up, and how tables differ, no trace tells."""

    optimizer: str  # a key of `STATE_ELEMENTS`
    tables: int
    batch: int  # samples
    lookups: int
    rows: int  # of all tables
    total_dim: int  # elements of all tables' rows
    max_dim: int  # elements of the widest row, or as many as the kernels are made for
    lanes: int = WARP  # threads that work on one row
    dtype: str = "float32"  # of the rows
    index_bytes: int = 8
    mean: bool = False  # bags are averaged instead of summed
    weighted: bool = False  # by a weight for each lookup

    @property
    def bits(self) -> int:
        """Of the numbers of rows that the backward pass sorts (split_table_batched_embeddings_ops.py)."""
        return int(math.log2(max(self.rows, 1)) + 1)

    @property
    def vectors(self) -> int:
        """How often a lane loads a vector of the widest row."""
        return max(1, -(-self.max_dim // (VECTOR * self.lanes)))


def of_question(lookup: Lookup) -> FbgemmLookup:
    """The same as a call; a forward pass is that of any optimiser."""
    dims = [table.dim for table in lookup.tables]
    return FbgemmLookup(
        optimizer=lookup.optimizer if lookup.direction == BACKWARD else DENSE,
        tables=len(dims),
        batch=lookup.tables[0].batch,
        lookups=sum(table.lookups for table in lookup.tables),
        rows=sum(table.rows for table in lookup.tables),
        total_dim=sum(dims),
        max_dim=max(dims),
        dtype=lookup.dtype,
        weighted=lookup.weighted,
    )


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel, or several that belong together, and what it takes."""

    name: str
    time_ns: float


@dataclass(frozen=True, slots=True)
class FbgemmCall:
    """A lookup of a recorded step with what its kernels took; no backward kernels where its backward pass was not found."""

    lookup: FbgemmLookup
    step: int
    forward: tuple[KernelTime, ...]
    backward: tuple[KernelTime, ...]


@dataclass(frozen=True)
class _Arguments:
    """The arguments of one call by name."""

    op: str
    values: Sequence[Value]
    places: Mapping[str, int]

    def wrong(self, name: str, expected: str) -> InputError:
        index = self.places[name]
        value = self.values[index] if index < len(self.values) else "missing"
        result = f"{value.dtype} of shape {value.shape}" if isinstance(value, Tensor) else repr(value)
        return InputError(f"{self.op}: argument {index} ({name}) is {result}; expected {expected}")

    def value(self, name: str) -> Value:
        index = self.places.get(name, len(self.values))
        return self.values[index] if index < len(self.values) else None

    def vector(self, name: str, dtypes: Sequence[str], least: int = 0) -> Tensor:
        result = self.value(name)
        if not isinstance(result, Tensor) or len(result.shape) != 1 or result.dtype not in dtypes or result.numel < least:
            raise self.wrong(name, f"a vector of {' or '.join(dtypes)}" + (f" with {least} or more elements" if least else ""))
        return result

    def number(self, name: str) -> int | None:
        """A whole number, or None where the trace has no numbers."""
        result = self.value(name)
        if result is None:
            return None
        if isinstance(result, bool) or not isinstance(result, int) or result < 0:
            raise self.wrong(name, "a whole number")
        return result

    def elements(self, name: str) -> int:
        result = self.value(name)
        return result.numel if isinstance(result, Tensor) else 0


def optimizer_of(op: str) -> str | None:
    """The optimiser (or `dense`) in the name of a lookup op or of its backward node; None for other ops."""
    for pattern in (_FORWARD, _BACKWARD):
        result = pattern.fullmatch(op)
        if result is not None:
            return DENSE if result[1] in (None, "Dense") else str(result[1])
    return None


def lookup_of(op: str, inputs: Sequence[Value], gradient: Tensor | None = None, kernels: Sequence[str] = ()) -> FbgemmLookup:
    """A lookup from the name and arguments of its forward op.

    The gradient of its result tells the elements of all rows, and names of its kernels the widest row, where the arguments
    do not; where nothing tells the widest row, all rows are taken as equally wide.
    """
    optimizer = optimizer_of(op)
    if optimizer is None or _FORWARD.fullmatch(op) is None:
        raise InputError(
            f"{op}: not a table-batched lookup of FBGEMM; expected fbgemm::split_embedding_codegen_lookup_*_function"
        )
    if optimizer not in STATE_ELEMENTS:
        raise InputError(f"{op}: optimiser {optimizer!r} is not known; there are {', '.join(STATE_ELEMENTS)}")
    given = _Arguments(op, inputs, _DENSE_PLACES if optimizer == DENSE else _SPLIT_PLACES)
    for name in ("managed weights", "cached weights"):
        if given.elements(name):
            raise given.wrong(name, "no elements: tables outside the device's memory are not modelled")
    tables = given.vector("D_offsets", ("int32", "int64"), 2).numel - 1
    indices = given.vector("indices", tuple(_INDEX_BYTES))
    batch, rest = divmod(given.vector("offsets", tuple(_INDEX_BYTES), 2).numel - 1, tables)
    if rest or not batch:
        raise given.wrong("offsets", f"a multiple of the {tables} tables, and one")
    weights = given.vector("weights", tuple(_ROW_DTYPES), 1)
    dtype = _ROW_DTYPES[weights.dtype]
    rows, total_dim = _size(given, optimizer, tables, weights.numel, _gradient_dim(op, batch, gradient), row_bytes(0, dtype))
    pooling = given.number("pooling_mode") or _SUM
    if pooling not in (_SUM, _MEAN):
        raise given.wrong("pooling_mode", f"{_SUM} (sum) or {_MEAN} (mean); rows that are not pooled are not modelled")
    vectors, lanes = _template(kernels)
    widest = given.number("max_D") or (vectors * lanes * VECTOR if vectors else -(-total_dim // tables))
    return FbgemmLookup(
        optimizer=optimizer,
        tables=tables,
        batch=batch,
        lookups=indices.numel,
        rows=rows,
        total_dim=total_dim,
        max_dim=widest,
        lanes=lanes,
        dtype=dtype,
        index_bytes=_INDEX_BYTES[indices.dtype],
        mean=pooling == _MEAN,
        weighted=isinstance(given.value("indice_weights"), Tensor),
    )


def _gradient_dim(op: str, batch: int, gradient: Tensor | None) -> int | None:
    if gradient is None:
        return None
    if len(gradient.shape) != 2 or gradient.shape[0] != batch:
        raise InputError(f"{op}: the gradient has shape {gradient.shape}; expected a row for each of {batch} samples")
    return gradient.shape[1]


def _size(
    given: _Arguments, optimizer: str, tables: int, elements: int, gradient_dim: int | None, of_row: int
) -> tuple[int, int]:
    """Rows and elements of all tables' rows, each with some beside. A state of one element for each row counts the rows."""
    counted = given.elements("momentum1") if STATE_ELEMENTS[optimizer] == (0, 1) else 0
    total_dim = given.number("total_D") or gradient_dim
    if total_dim is None and counted:
        total_dim = round(tables * elements / counted) - of_row * tables
    if not total_dim:
        raise given.wrong("total_D", "the elements of all rows, or a gradient that tells them")
    return counted or max(1, round(elements * tables / (total_dim + of_row * tables))), total_dim


def _template(kernels: Sequence[str]) -> tuple[int, int]:
    """Vectors per lane (0: not told) and lanes per row, from the first name of a lookup kernel."""
    for kernel in kernels:
        result = _KERNEL.search(kernel)
        if result is not None:
            return int(result[1]), int(result[2] or WARP)
    return 0, WARP


def calls_in(program: Program) -> list[FbgemmCall]:
    """The lookups of a recorded program, in order of start, each with its backward pass."""
    return [call for _, _, call in _calls(program)]


def lookups_in(program: Program) -> dict[int, FbgemmLookup]:
    """What each lookup op of a program and the backward node that belongs to it look up; no node without its op."""
    return {place: call.lookup for op, backward, call in _calls(program) for place in (op, backward) if place is not None}


def _calls(program: Program) -> Iterator[tuple[int, int | None, FbgemmCall]]:
    """Each forward op, its backward node and what both are."""
    pairs = _pairs(program)
    kernels = _kernels_of(program, [op for pair in pairs.items() for op in pair if op is not None])
    for op, backward in pairs.items():
        launched = (kernels[op], kernels[backward] if backward is not None else ())
        names = [kernel.name for one in launched for kernel in one]
        gradient = _gradient(program, backward) if backward is not None else None
        lookup = lookup_of(_name(program, op), _inputs(program, op), gradient, names)
        yield op, backward, FbgemmCall(lookup, int(program.ops.step[op]), *launched)


def _pairs(program: Program) -> dict[int, int | None]:
    """Forward op -> its backward node."""
    optimizers = {number: known for number, name in enumerate(program.names) if (known := optimizer_of(name)) is not None}
    results = [op for op, name in enumerate(program.ops.name.tolist()) if name in optimizers]
    forwards = [op for op in results if _FORWARD.fullmatch(_name(program, op))]
    backwards = _paired(program, forwards, [op for op in results if not _FORWARD.fullmatch(_name(program, op))])
    return {op: backwards.get(op) for op in forwards}


def _name(program: Program, op: int) -> str:
    return program.names[int(program.ops.name[op])]


def _inputs(program: Program, op: int) -> tuple[Value, ...]:
    signature = int(program.ops.signature[op])
    return program.signatures[signature].inputs if signature >= 0 else ()


def _gradient(program: Program, backward: int) -> Tensor | None:
    inputs = _inputs(program, backward)
    return inputs[0] if inputs and isinstance(inputs[0], Tensor) else None


def _kernels_of(program: Program, ops: Sequence[int]) -> dict[int, tuple[KernelTime, ...]]:
    """What was launched inside each of some ops, in order of launch."""
    owner = np.full(len(program.ops) + 1, -1, dtype=np.int64)  # the last place answers for "no op"
    wanted = set(ops)
    for op, parent in enumerate(program.ops.parent.tolist()):  # in order of start: parents come first
        owner[op] = op if op in wanted else owner[parent]
    kernels: dict[int, list[KernelTime]] = {op: [] for op in ops}
    works = program.works
    for work in np.flatnonzero(works.call >= 0).tolist():
        op = int(owner[program.calls.op[works.call[work]]])
        if op >= 0:
            kernels[op].append(KernelTime(program.names[works.name[work]], float(works.end_ns[work] - works.start_ns[work])))
    return {op: tuple(launched) for op, launched in kernels.items()}


def _paired(program: Program, forwards: Sequence[int], backwards: Sequence[int]) -> dict[int, int]:
    """Forward -> backward: a backward pass takes the last lookup of its step that is like it and still open."""
    open_forwards = list(forwards)
    pairs: dict[int, int] = {}
    for backward in backwards:
        alike = [op for op in open_forwards if _alike(program, op, backward)]
        if alike:
            pairs[alike[-1]] = backward
            open_forwards.remove(alike[-1])
    return pairs


def _alike(program: Program, forward: int, backward: int) -> bool:
    if (
        program.ops.step[forward] != program.ops.step[backward]
        or program.ops.start_ns[forward] > program.ops.start_ns[backward]
    ):
        return False
    optimizer = optimizer_of(_name(program, forward))
    gradient = _gradient(program, backward)
    if optimizer != optimizer_of(_name(program, backward)) or gradient is None or len(gradient.shape) != 2:
        return False
    given = _Arguments("", _inputs(program, forward), _DENSE_PLACES if optimizer == DENSE else _SPLIT_PLACES)
    bags, tables = given.elements("offsets") - 1, given.elements("D_offsets") - 1
    return bags == gradient.shape[0] * tables and given.value("total_D") in (None, gradient.shape[1])
