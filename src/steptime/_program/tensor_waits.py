"""Which op a collective has to wait for and which op has to wait for it, from the tensors alone.

For programs without kernels and streams (an execution trace, a captured step). Followed are storages: views share one, an op in
place writes one, and an id that an op brings forth anew is memory used again, so that what was there before is gone. Waits that
the program records come first, then what is known about how collectives are called, then who touches the data.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from steptime._program.program import CallKind, Phase, Program, Signature, Tensor, Value, WorkKind

# Why an op has to wait.
WAIT = "wait"  # the program waits here
ORDER = "order"  # the collective was called in order with compute (async_op=False): what comes next has to wait
REDUCER = "reducer"  # DistributedDataParallel waits for its buckets at the end of backward, gradients in the buckets or not
DATA = "data"  # the op reads or overwrites the result, or overwrites what is sent
UNSEEN = "unseen"  # nothing recorded uses the result, but a compiled kernel comes whose arguments are not recorded
NOBODY = ""

# Ops that touch no data of what they are given: memory, shapes, bookkeeping. As PyTorch's list of native functions has them.
_NO_DATA = re.compile(
    r"(?:new_\w+|\w+_like|empty\w*|resize_|resize_as_|_resize_output_|set_|record_stream|result_type|size|stride|numel|is_\w+"
    r"|detach_?|squeeze_|unsqueeze_|t_|transpose_|as_strided_|requires_grad_|_version|_has_compatible_shallow_copy_type)"
)
_RESERVES = re.compile(r"(?:new_empty\w*|empty\w*|resize_|resize_as_|_resize_output_)")
# Frames around ops, and autograd's own nodes: what they do, ops inside them do. Nodes of somebody's own may launch kernels too.
_FRAME = re.compile(
    r"^(?:autograd::|torch::autograd::(?!CppNode)|torch::distributed|torch\.|Optimizer\.|ProfilerStep|##|\[|nn\.Module)|[ #]"
    r"|Backward\d+$|\.forward$"
)
_COMMUNICATES = ("c10d::", "nccl:", "_c10d_functional", "c10d_functional", "record_param_comms")
_WAIT_TENSOR = ("_c10d_functional::wait_tensor", "c10d_functional::wait_tensor")
_COMPILED = "triton_"  # what torch.compile calls its kernels
_GRADIENT_READY = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True, slots=True)
class TensorWaits:
    """What ties one collective to compute; rows are ops, -1 for none in the step."""

    collective: int  # in Program.collectives
    launched_by: int
    sent_by: int  # the last op that wrote what is sent
    needed_by: int  # from here on compute waits for the collective
    reason: str = NOBODY


def tensor_waits(program: Program, *, recorded: bool = True) -> tuple[TensorWaits, ...]:
    """What every collective of a program waits for and who waits for it, in order of launch.

    Without `recorded`, waits in the program are passed over as if it had none.
    """
    return _Follow(program, recorded=recorded).all()


def needed_by_nobody(waits: Sequence[TensorWaits]) -> tuple[int, ...]:
    """The collectives that nothing in their step waits for."""
    return tuple(each.collective for each in waits if each.needed_by < 0)


class _Kind:
    """What an op does with data, by its name."""

    __slots__ = ("communicates", "frame", "in_place", "no_data", "opaque", "reserves")

    def __init__(self, name: str) -> None:
        plain = name.rsplit("::", 1)[-1].partition(".")[0]
        self.communicates = name.startswith(_COMMUNICATES)
        self.frame = bool(_FRAME.search(name))
        self.no_data = bool(_NO_DATA.fullmatch(plain))
        self.reserves = bool(_RESERVES.fullmatch(plain))
        self.in_place = plain.endswith("_") and not plain.endswith("__") and not self.no_data
        # A function of somebody's own: what it does with its arguments is not recorded.
        self.opaque = not self.frame and ("::" not in name or "CppNode" in name) and not self.no_data


_kind = lru_cache(maxsize=1 << 14)(_Kind)


@dataclass(slots=True)
class _Effect:
    """The tensors that one op mentions, reads, writes and brings forth; ops inside it not looked at."""

    mentions: frozenset[int] = frozenset()
    reads: tuple[Tensor, ...] = ()
    writes: tuple[Tensor, ...] = ()
    perhaps: tuple[Tensor, ...] = ()  # of what it reads, what it may write
    born: tuple[Tensor, ...] = ()

    @property
    def touched(self) -> set[int]:
        """The storages whose data it reads or writes."""
        return {_storage(tensor) for tensor in (*self.reads, *self.writes)}

    def without(self, storages: set[int]) -> _Effect:
        """The same less what ops inside it do themselves. What it brings forth stays, for memory is new either way."""
        reads, writes, perhaps = (
            tuple(tensor for tensor in tensors if _storage(tensor) not in storages)
            for tensors in (self.reads, self.writes, self.perhaps)
        )
        return _Effect(self.mentions, reads, writes, perhaps, self.born)


_NOTHING = _Effect()


@dataclass
class _Open:
    """A collective in flight."""

    place: int  # in the list of collectives, by launch
    step: int
    results: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]
    in_order: bool
    reducer: bool


@dataclass
class _Memory:
    """What is known of one storage since it was reserved."""

    born: int = -1
    writes: list[tuple[Tensor, int]] = field(default_factory=list)


class _Follow:
    """Goes through the ops in order of start."""

    def __init__(self, program: Program, *, recorded: bool) -> None:
        ops, calls, works = program.ops, program.calls, program.works
        self._program = program
        self._names = [program.names[name] for name in ops.name.tolist()]
        self._parents: list[int] = ops.parent.tolist()
        self._steps: list[int] = ops.step.tolist()
        self._phases: list[int] = ops.phase.tolist()
        self._signatures = [program.signatures[row] if row >= 0 else None for row in ops.signature.tolist()]
        launched = np.flatnonzero((works.kind == WorkKind.COLLECTIVE) & (works.call >= 0))
        rows = calls.op[works.call[launched]] if len(calls) else launched
        pairs = sorted(zip(rows.tolist(), launched.tolist(), strict=True), key=lambda pair: pair[0])
        pairs = [pair for pair in pairs if pair[0] >= 0]
        self._collectives = [int(works.collective[work]) for _, work in pairs]
        self._launches = [row for row, _ in pairs]
        self._launched_at: dict[int, list[int]] = defaultdict(list)
        for place, row in enumerate(self._launches):
            self._launched_at[row].append(place)
        self._sent_by = [-1] * len(pairs)
        self._needed_by = [-1] * len(pairs)
        self._reasons = [NOBODY] * len(pairs)
        if recorded:
            self._take_recorded({work: place for place, (_, work) in enumerate(pairs)})
        self._memory: dict[int, _Memory] = defaultdict(_Memory)
        self._open: list[_Open] = []
        self._recorded = recorded
        self._unseen: dict[int, int] = {}

    def all(self) -> tuple[TensorWaits, ...]:
        """Every collective in order of launch."""
        for row, effect in enumerate(self._effects()):
            if row in self._launched_at:
                self._launch(row)
            elif self._recorded and self._names[row] in _WAIT_TENSOR:
                self._end([each for each in self._open if _meet(self._tensors(row), each.results)], row, WAIT)
            elif effect is not _NOTHING:
                self._pass(row, effect)
            elif self._names[row].startswith(_COMPILED):
                for each in self._open:
                    if each.results and each.step == self._steps[row]:
                        self._unseen.setdefault(each.place, row)
        for place, row in self._unseen.items():
            if self._needed_by[place] < 0:
                self._needed_by[place], self._reasons[place] = row, UNSEEN
        columns = zip(self._collectives, self._launches, self._sent_by, self._needed_by, self._reasons, strict=True)
        return tuple(TensorWaits(*each) for each in columns)

    def _take_recorded(self, places: dict[int, int]) -> None:
        calls = self._program.calls
        for call in np.flatnonzero((calls.kind == CallKind.STREAM_WAIT) & (calls.awaits >= 0)).tolist():
            place = places.get(int(calls.awaits[call]), -1)
            row = int(calls.op[call])
            if place >= 0 and row > self._launches[place] and self._needed_by[place] < 0:
                self._needed_by[place], self._reasons[place] = row, WAIT

    def _tensors(self, row: int) -> tuple[Tensor, ...]:
        signature = self._signatures[row]
        return tuple(_flat((signature.inputs, signature.outputs))) if signature else ()

    def _effects(self) -> list[_Effect]:
        """Per op what it does itself: what ops inside it do is theirs, and calls that communicate do nothing else."""
        inside: list[set[int]] = [set() for _ in self._names]  # storages whose data ops inside an op touch
        mentioned: list[set[int]] = [set() for _ in self._names]
        effects = [_NOTHING] * len(self._names)
        for row in range(len(self._names) - 1, -1, -1):
            signature, kind = self._signatures[row], _kind(self._names[row])
            effect = _effect(kind, signature) if signature else _NOTHING
            if not kind.communicates and effect is not _NOTHING:
                effects[row] = effect.without(mentioned[row] if kind.opaque else inside[row])
            if (parent := self._parents[row]) >= 0:
                inside[parent] |= inside[row] if kind.communicates else inside[row] | effect.touched
                mentioned[parent] |= mentioned[row] | effect.mentions
        return effects

    def _launch(self, row: int) -> None:
        signature = self._signatures[row] or Signature()
        sent, results = tuple(_flat(signature.inputs)), tuple(_flat(signature.outputs))
        # A collective that sends the result of another waits for it.
        self._end([each for each in self._open if _touches(_Effect(reads=sent, writes=results), each)], row, DATA)
        sent_by = max((self._written(tensor) for tensor in sent), default=-1)
        for tensor in results or sent:
            self._memory[_storage(tensor)].writes.append((tensor, row))
        for place in self._launched_at[row]:
            self._sent_by[place] = sent_by
            if self._needed_by[place] < 0:
                in_order, reducer = self._called_in_order(row), self._of_reducer(row)
                self._open.append(_Open(place, self._steps[row], results or sent, sent, in_order, reducer))

    def _pass(self, row: int, effect: _Effect) -> None:
        for tensor in effect.born:
            self._reuse(_storage(tensor), row)
        self._open = [each for each in self._open if each.step == self._steps[row]]
        if self._open and (effect.reads or effect.writes):
            after = self._phases[row] != Phase.BACKWARD
            self._end([each for each in self._open if each.in_order], row, ORDER)
            self._end([each for each in self._open if _touches(effect, each)], row, DATA)
            self._end([each for each in self._open if each.reducer and after], row, REDUCER)
        for tensor in (*effect.writes, *effect.perhaps):
            self._memory[_storage(tensor)].writes.append((tensor, row))

    def _reuse(self, storage: int, row: int) -> None:
        # The allocator hands out memory of a collective in flight only once the collective is over.
        self._memory[storage] = _Memory(row)
        for each in self._open:
            each.results = tuple(other for other in each.results if _storage(other) != storage)
            each.sent = tuple(other for other in each.sent if _storage(other) != storage)

    def _end(self, waited: Sequence[_Open], row: int, reason: str) -> None:
        for each in waited:
            self._needed_by[each.place], self._reasons[each.place] = row, reason
            self._open.remove(each)

    def _written(self, tensor: Tensor) -> int:
        memory = self._memory[_storage(tensor)]
        for other, row in reversed(memory.writes):
            if _overlap(tensor, other):
                return row
        # Reserved and never seen written: by what reserved it for itself, as functions with kernels of their own do.
        row = memory.born
        while row >= 0 and _kind(self._names[row]).reserves:
            row = self._parents[row]
        return row

    def _called_in_order(self, row: int) -> bool:
        # c10d's ops end in (..., async_op, timeout).
        parent = self._parents[row]
        signature = self._signatures[parent] if parent >= 0 and self._names[parent].startswith("c10d::") else None
        return signature is not None and len(signature.inputs) > 1 and signature.inputs[-2] is False

    def _of_reducer(self, row: int) -> bool:
        while (row := self._parents[row]) >= 0:
            if self._names[row].endswith(_GRADIENT_READY):
                return True
        return False


def _touches(effect: _Effect, flying: _Open) -> bool:
    return _meet((*effect.reads, *effect.writes), flying.results) or _meet(effect.writes, flying.sent)


def _effect(kind: _Kind, signature: Signature) -> _Effect:
    inputs, outputs = tuple(_flat(signature.inputs)), tuple(_flat(signature.outputs))
    given = {_storage(tensor) for tensor in inputs}
    mentions = frozenset(given | {_storage(tensor) for tensor in outputs})
    born = tuple(tensor for tensor in outputs if _storage(tensor) not in given)
    if kind.frame:
        return _Effect(mentions)
    if kind.no_data:
        return _Effect(mentions, born=born)
    if kind.opaque:
        return _Effect(mentions, inputs, outputs, inputs, born)
    written = _written_in_place(kind, signature, outputs)
    if outputs and not born and not written:  # a view, or the same tensor handed back
        return _Effect(mentions)
    return _Effect(mentions, inputs, (*written, *born), born=born)


def _written_in_place(kind: _Kind, signature: Signature, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if kind.in_place:
        return tuple(_flat(signature.inputs[:1]))
    # An `out` argument comes back as the output; the first argument comes back where there was nothing to do.
    later = {tensor.id for tensor in _flat(signature.inputs[1:])} - {tensor.id for tensor in _flat(signature.inputs[:1])}
    return tuple(tensor for tensor in outputs if tensor.id is not None and tensor.id in later)


def _flat(value: Value) -> Iterator[Tensor]:
    """The tensors with data on a device in a value."""
    if isinstance(value, Tensor):
        # Empty tensors share one storage id.
        if value.numel and not (value.device or "").startswith("cpu") and (value.storage or value.id is not None):
            yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _flat(each)


def _storage(tensor: Tensor) -> int:
    # Where no storage is recorded, the tensor's own id, apart from storages.
    return tensor.storage if tensor.storage else -1 - (tensor.id or 0)


def _meet(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return any(_storage(one) == _storage(other) and _overlap(one, other) for one in some for other in others)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage share elements, by first and last; offsets count elements, so dtypes must agree."""
    if one.dtype != other.dtype:
        return True
    return one.offset < other.offset + _extent(other) and other.offset < one.offset + _extent(one)


def _extent(tensor: Tensor) -> int:
    if tensor.strides is None or len(tensor.strides) != len(tensor.shape):
        return tensor.numel
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
