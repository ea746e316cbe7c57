"""`Program`: what one rank issues, as the CUDA API sees it.

Data goes one way through three tables. An *op* (a row of `Ops`) is what the framework calls; it makes *calls* (rows of
`Calls`: launches, waits, synchronisations) on a host thread; a launching call enqueues *work* (rows of `Works`: kernels,
copies, memsets, collectives) on a stream. Times are nanoseconds since `Program.origin_ns`, or -1 where the program never ran
(captured, built, or read from an execution trace alone).

The tables are columns, not objects: a trace of a hundred thousand events must load in a second and simulate in another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from steptime._program.repetition import Repetition
from steptime._values import value_class

IntColumn = npt.NDArray[np.int64]
SmallColumn = npt.NDArray[np.int32]
KindColumn = npt.NDArray[np.int8]
_COLUMN_TYPES: Mapping[str, type[np.generic]] = {"IntColumn": np.int64, "SmallColumn": np.int32, "KindColumn": np.int8}

NEVER = -1
CUDA_GRAPH = "cuda_graph"
"""In a program's `meta`: whether its step is captured in a CUDA graph and replayed."""

PARAMETER_STORAGES = "parameter_storages"
"""In a program's `meta`: the storages of parameters, trained or not, where they are known."""

# No job is larger; what claims to be comes from damage.
MOST_RANKS = 2**18


class Phase(IntEnum):
    """Which part of a training step an op belongs to."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3


class CallKind(IntEnum):
    """What a host call does to the device or to another thread."""

    LAUNCH = 0  # enqueues one or more works (kernel, copy, memset, graph); blocks while the launch queue is full
    BLOCKING_COPY = 1  # enqueues a copy and returns when it has finished
    STREAM_WAIT = 2  # later work on `stream` starts after the work in `awaits`
    EVENT_SYNC = 3  # the host blocks until the work in `awaits` has finished
    STREAM_SYNC = 4  # the host blocks until everything enqueued on `stream` so far has finished
    DEVICE_SYNC = 5  # the host blocks until everything enqueued on every stream so far has finished
    HOST = 6  # costs host time only (marks a place another thread or a step boundary refers to)
    STEP_BEGIN = 7  # zero-cost mark: the host enters step `step`
    STEP_END = 8  # zero-cost mark: the host leaves step `step`


class WorkKind(IntEnum):
    """What a piece of device work is."""

    KERNEL = 0
    COPY = 1
    MEMSET = 2
    COLLECTIVE = 3


@value_class
class Tensor:
    """A tensor argument: shape, dtype and, where the source records them, strides and identity."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    id: int | None = None
    storage: int | None = None
    offset: int = 0
    device: str | None = None

    @property
    def numel(self) -> int:
        """How many elements the shape holds."""
        return math.prod(self.shape)


Scalar = str | int | float | bool | None
Value = Tensor | Scalar | tuple["Value", ...]


def tensors_in(values: Sequence[Value]) -> list[Tensor]:
    """Every tensor among arguments, those in lists included."""
    result: list[Tensor] = []
    for value in values:
        if value.__class__ is Tensor:
            result.append(value)
        elif value.__class__ is tuple:
            result += tensors_in(value)
    return result


@dataclass(frozen=True, slots=True)
class Switches:
    """PyTorch's global switches when an op was called, where they choose its kernels and are not as PyTorch has them."""

    tf32: bool | None = None  # whether products and convolutions of float32 may use TF32; None: PyTorch's default for the op
    benchmark: bool = False  # whether cuDNN tries its algorithms and keeps the fastest
    deterministic: bool = False  # whether kernels that give the same bits in every run are asked for
    other_library: bool = False  # whether cuDNN is switched off, or another BLAS preferred


DEFAULT_SWITCHES = Switches()


@value_class
class Signature:
    """How one op was called. Ops that were called alike share one signature, and what is derived from it alone."""

    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    switches: Switches = DEFAULT_SWITCHES
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Thread:
    """A host thread: its operating-system id and what it is for (`main`, `backward`, `other`)."""

    tid: int
    role: str = "other"


@dataclass(frozen=True, slots=True)
class Stream:
    """An in-order device queue, as numbered by the source."""

    id: int
    device: int = 0
    queue: int | None = None  # streams of one hardware queue start work in the order it was enqueued; None: a queue of its own


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective call: who takes part, its index within its group (from 0), and what it moves.

    `sequence` counts the collectives of one group on this rank from 0; ranks meet where group and sequence agree. What was
    launched before the first step counts backwards from -1. Point-to-point calls are groups of two.
    """

    # all_reduce, all_to_all, all_gather, reduce_scatter, broadcast, reduce, send, recv, barrier, unknown; and send_recv, in
    # which every rank of a ring sends to the next
    kind: str
    group: str
    ranks: tuple[int, ...]  # global ranks, sorted; empty = not known
    sequence: int
    bytes_in: int = 0
    bytes_out: int = 0
    dtype: str = ""
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()
    root: int | None = None  # source of a broadcast, destination of a reduce or of a send


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """What a captured script says about its streams before it calls an op; stream 0 is where compute is.

    `kind` LAUNCH: from here on ops launch on `stream`. STREAM_WAIT: what comes next on `stream` starts after what ops before
    `before` gave the stream `of`. EVENT_SYNC: the host waits for that. DEVICE_SYNC: the host waits for everything. What a step
    waits for and gives only later is what the step before gave.
    """

    op: int  # row of the op that is called next, or as many as there are
    kind: int  # CallKind
    stream: int = -1
    of: int = -1
    before: int = -1  # row of an op


@dataclass(frozen=True, eq=False)
class ColumnTable:
    """Equal-length columns that behave like a value: frozen, comparable, sliceable. A subclass declares them as fields."""

    TYPES: ClassVar[Mapping[str, type[np.generic]]] = {}

    def __init_subclass__(cls) -> None:
        cls.TYPES = {name: _COLUMN_TYPES[kind] for name, kind in cls.__annotations__.items()}

    def __post_init__(self) -> None:
        length = None
        for name, kind in self.TYPES.items():
            values = np.ascontiguousarray(getattr(self, name), dtype=kind).view()
            if values.ndim != 1 or (length is not None and len(values) != length):
                raise ValueError(f"{type(self).__name__}.{name}: {values.shape}, expected ({length},)")
            length = len(values)
            values.flags.writeable = False
            object.__setattr__(self, name, values)

    def __len__(self) -> int:
        return len(getattr(self, next(iter(self.TYPES))))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(np.array_equal(values, getattr(other, name)) for name, values in self.columns().items())

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Self:
        """Build from any sequences by column name; without any, a table without rows."""
        return cls(**{name: columns[name] if columns else [] for name in cls.TYPES})

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, ...]]) -> Self:
        """Build from rows that hold the columns in their order."""
        return cls.from_columns(dict(zip(cls.TYPES, zip(*rows, strict=True), strict=True)) if rows else {})

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The columns by name, in declaration order."""
        return {name: getattr(self, name) for name in self.TYPES}

    def take(self, rows: npt.NDArray[Any]) -> Self:
        """The given rows (indices or mask) as a new table."""
        return type(self)(**{name: values[rows] for name, values in self.columns().items()})

    def replace(self, **changes: Any) -> Self:
        """A copy with some columns exchanged."""
        return type(self)(**{**self.columns(), **changes})


@dataclass(frozen=True, eq=False)
class Ops(ColumnTable):
    """Framework ops, in order of start."""

    name: SmallColumn  # index into Program.names
    thread: SmallColumn  # index into Program.threads
    start_ns: IntColumn
    end_ns: IntColumn
    parent: SmallColumn  # enclosing op, or -1
    step: SmallColumn  # step number, or -1 outside every step
    phase: KindColumn  # Phase
    sequence: IntColumn  # autograd sequence number that ties forward to backward, or -1
    signature: SmallColumn  # index into Program.signatures, or -1
    node: IntColumn  # id of the execution-trace node behind it, or -1


@dataclass(frozen=True, eq=False)
class Calls(ColumnTable):
    """Host calls that touch the device, another thread or a step boundary, per thread in order of start."""

    kind: KindColumn  # CallKind
    api: SmallColumn  # index into Program.names
    thread: SmallColumn
    op: SmallColumn  # innermost op around it, or -1
    step: SmallColumn
    start_ns: IntColumn
    end_ns: IntColumn
    stream: SmallColumn  # STREAM_WAIT, STREAM_SYNC: index into Program.streams; else -1
    awaits: SmallColumn  # STREAM_WAIT, EVENT_SYNC: index of the last work waited for, or -1 (nothing to wait for)
    after: SmallColumn  # call on another thread that hands over to this one, or -1


@dataclass(frozen=True, eq=False)
class Works(ColumnTable):
    """Device work. Within one stream, rows are in execution order; `call` is -1 for what was launched before the window."""

    kind: KindColumn  # WorkKind
    name: SmallColumn
    stream: SmallColumn  # index into Program.streams
    call: SmallColumn  # launching call, or -1: backlog from before the window
    step: SmallColumn
    start_ns: IntColumn
    end_ns: IntColumn
    bytes: IntColumn  # copies and memsets; else 0
    collective: SmallColumn  # index into Program.collectives, or -1


@dataclass(frozen=True)
class Program:
    """What one rank issues in one or more consecutive steps."""

    rank: int
    world_size: int
    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    streams: tuple[Stream, ...]
    ops: Ops
    calls: Calls
    works: Works
    collectives: tuple[Collective, ...] = ()
    signatures: tuple[Signature, ...] = ()
    steps: tuple[int, ...] = ()  # step numbers, in order
    origin_ns: int = 0  # absolute time of the program's zero
    device_name: str = ""
    source: str = ""  # where it came from, for messages
    warnings: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    orders: tuple[StreamOrder, ...] = ()  # of a captured step, in order of `op`
    repetition: Repetition | None = None  # where the tables are a sample of the step, which repeats parts of them

    @property
    def recorded(self) -> bool:
        """Whether the program carries times from a real run."""
        return bool(len(self.works)) and bool((self.works.start_ns >= 0).any())

    @property
    def hardware_queues(self) -> IntColumn:
        """Per stream the number of its hardware queue: 0 and up where streams share one, below 0 for a queue of its own."""
        numbers = [-1 - i if s.queue is None else s.queue for i, s in enumerate(self.streams)]
        return np.array(numbers, dtype=np.int64)

    @property
    def op_counts(self) -> IntColumn:
        """How often a step runs each op."""
        if self.repetition is None:
            return np.ones(len(self.ops), dtype=np.int64)
        return self.repetition.counts(len(self.ops))

    @property
    def derived(self) -> dict[Any, Any]:
        """What was found out from the program alone, kept with it: a step is predicted on several platforms."""
        values: dict[Any, Any] = vars(self).setdefault("_derived", {})
        return values

    def on_device(self, device_name: str) -> Program:
        """The same program for a device of this name; what was derived does not depend on that and is kept."""
        result = replace(self, device_name=device_name)
        vars(result)["_derived"] = self.derived
        return result

    def of_rank(self, rank: int) -> Program:
        """The same program of another rank; what was derived is shared, for it does not depend on that."""
        result = replace(self, rank=rank)
        vars(result)["_derived"] = self.derived
        return result

    def with_warnings(self, *messages: str) -> Program:
        """The same program with more warnings."""
        return replace(self, warnings=(*self.warnings, *messages))
