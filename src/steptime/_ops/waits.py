"""Which op a collective has to wait for and which op has to wait for it, from the tensors alone.

For programs without kernels and streams (an execution trace, a captured step). Followed are storages: views share one, an op in
place writes one, and an id that an op brings forth anew is memory used again, so that what was there before is gone. Waits that
the program records come first, then what is known about how collectives are called, then who touches the data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from steptime._ops.catalogue import Data
from steptime._ops.table import NO_SIGNATURE, Arguments, arguments_of, op_table
from steptime._program.program import CallKind, Phase, Program, Signature, Tensor

# Why an op has to wait.
WAIT = "wait"  # the program waits here
ORDER = "order"  # the collective was called in order with compute (async_op=False): what comes next has to wait
REDUCER = "reducer"  # DistributedDataParallel waits for its buckets at the end of backward, gradients in the buckets or not
DATA = "data"  # the op reads or overwrites the result, or overwrites what is sent
UNSEEN = "unseen"  # nothing recorded uses the result, but a compiled kernel comes whose arguments are not recorded
NOBODY = ""

_WAIT_TENSOR = ("_c10d_functional::wait_tensor", "c10d_functional::wait_tensor")
_COMPILED = "triton_"  # what torch.compile calls its kernels
_GRADIENT_READY = "torch::autograd::AccumulateGrad"
_NO_STORAGES: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TensorWaits:
    """What ties one collective to compute; rows are ops, -1 for none in the step."""

    collective: int  # in Program.collectives
    launched_by: int
    sent_by: int  # the last op that wrote what is sent
    needed_by: int  # from here on compute waits for the collective
    reason: str = NOBODY


def tensor_waits(program: Program, *, recorded: bool = True, ordered: bool = True) -> tuple[TensorWaits, ...]:
    """What every collective of a program waits for and who waits for it, in order of launch.

    Without `recorded`, waits in the program are passed over as if it had none; without `ordered`, collectives that were called
    in order with compute are followed as if they had been called beside it.
    """
    key = (TensorWaits, recorded, ordered)
    if key not in program.derived:
        program.derived[key] = _Follow(program, recorded=recorded, ordered=ordered).all()
    waits: tuple[TensorWaits, ...] = program.derived[key]
    return waits


def _storage(tensor: Tensor) -> int:
    # Where no storage is recorded, the tensor's own id, apart from storages.
    return tensor.storage if tensor.storage else -1 - (tensor.id or 0)


class _Effect:
    """The tensors that one op mentions, reads, writes and brings forth; ops inside it not looked at."""

    __slots__ = ("born", "mentions", "perhaps", "reads", "touched", "writes")

    def __init__(
        self,
        mentions: frozenset[int] = frozenset(),
        reads: tuple[Tensor, ...] = (),
        writes: tuple[Tensor, ...] = (),
        perhaps: tuple[Tensor, ...] = (),
        born: tuple[Tensor, ...] = (),
    ) -> None:
        self.mentions = mentions
        self.reads = reads
        self.writes = writes
        self.perhaps = perhaps  # of what it reads, what it may write
        self.born = born
        # Storages whose data it reads or writes.
        self.touched = frozenset(map(_storage, (*reads, *writes))) if reads or writes else _NO_STORAGES

    def without(self, storages: AbstractSet[int]) -> _Effect:
        """The same less what ops inside it do themselves. What it brings forth stays, for memory is new either way."""
        if storages.isdisjoint(self.touched):
            return self
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


@dataclass
class _Memory:
    """What is known of one storage since it was reserved."""

    born: int = -1
    writes: list[tuple[Tensor, int]] = field(default_factory=list)


class _Follow:
    """Goes through the ops in order of start."""

    def __init__(self, program: Program, *, recorded: bool, ordered: bool) -> None:
        self._program, self._table = program, op_table(program)
        pairs = self._table.launching_collectives()
        self._collectives = [int(program.works.collective[work]) for _, work in pairs]
        self._launches = [row for row, _ in pairs]
        self._launched_at: dict[int, list[int]] = defaultdict(list)
        for index, row in enumerate(self._launches):
            self._launched_at[row].append(index)
        self._sent_by = [-1] * len(pairs)
        self._needed_by = [-1] * len(pairs)
        self._reasons = [NOBODY] * len(pairs)
        if recorded:
            self._take_recorded({work: index for index, (_, work) in enumerate(pairs)})
        self._memory: dict[int, _Memory] = defaultdict(_Memory)
        self._open: dict[int, _Open] = {}  # by place
        self._holding: dict[int, dict[int, _Open]] = defaultdict(dict)  # per storage: those in flight that receive or send it
        self._steps: set[int] = set()  # of what is in flight
        self._urgent: dict[str, list[_Open]] = {ORDER: [], REDUCER: []}  # that wait for no data
        self._recorded, self._ordered = recorded, ordered
        self._unseen: dict[int, int] = {}

    def all(self) -> tuple[TensorWaits, ...]:
        """Every collective in order of launch."""
        names = self._table.names if self._launches else ()
        for row, (name, effect) in enumerate(zip(names, self._effects(), strict=True)):
            if row in self._launched_at:
                self._launch(row)
            elif self._recorded and name in _WAIT_TENSOR:
                arguments = self._table.arguments[row]
                mentioned = tuple(_on_device(arguments.inputs + arguments.outputs))
                held = self._held(map(_storage, mentioned))
                self._end([each for each in held if _meet(mentioned, each.results)], row, WAIT)
            elif effect is not _NOTHING:
                self._pass(row, effect)
            elif name.startswith(_COMPILED):
                for each in self._open.values():
                    if each.results and each.step == self._table.steps[row]:
                        self._unseen.setdefault(each.place, row)
        for index, row in self._unseen.items():
            if self._needed_by[index] < 0:
                self._needed_by[index], self._reasons[index] = row, UNSEEN
        columns = zip(self._collectives, self._launches, self._sent_by, self._needed_by, self._reasons, strict=True)
        return tuple(TensorWaits(*each) for each in columns)

    def _take_recorded(self, places: dict[int, int]) -> None:
        calls = self._program.calls
        for call in np.flatnonzero((calls.kind == CallKind.STREAM_WAIT) & (calls.awaits >= 0)).tolist():
            index = places.get(int(calls.awaits[call]), -1)
            row = int(calls.op[call])
            if index >= 0 and row > self._launches[index] and self._needed_by[index] < 0:
                self._needed_by[index], self._reasons[index] = row, WAIT

    def _effects(self) -> list[_Effect]:
        """Per op what it does itself: what ops inside it do is theirs, and calls that communicate do nothing else."""
        if not self._launches:
            return []
        table = self._table
        parents, kinds, signatures = table.parents, table.kinds, table.signatures
        effects = [_NOTHING] * len(table)
        alone = [_NOTHING] * len(table)  # with what the ops inside do
        inside: dict[int, set[int]] = {}  # storages whose data ops inside an op touch
        for row in range(len(table) - 1, -1, -1):
            kind = kinds[row]
            effect = alone[row] = _effect(kind.data, signatures[row])
            below = inside.pop(row, _NO_STORAGES)
            if not kind.communicates and effect is not _NOTHING:
                hidden = below
                if kind.data is Data.OPAQUE:
                    hidden = {each for within in alone[row + 1 : table.last[row] + 1] for each in within.mentions}
                effects[row] = effect.without(hidden) if hidden else effect
            if (parent := parents[row]) >= 0 and (below or effect.touched):
                above = inside.get(parent)
                if above is None:
                    above = inside[parent] = set()
                if below:
                    above |= below
                if not kind.communicates:
                    above |= effect.touched
        return effects

    def _launch(self, row: int) -> None:
        arguments = self._table.arguments[row]
        sent, results = tuple(_on_device(arguments.inputs)), tuple(_on_device(arguments.outputs))
        # A collective that sends the result of another waits for it.
        self._end_touched(_Effect(reads=sent, writes=results), row)
        sent_by = max((self._written(tensor) for tensor in sent), default=-1)
        for tensor in results or sent:
            self._memory[_storage(tensor)].writes.append((tensor, row))
        for index in self._launched_at[row]:
            self._sent_by[index] = sent_by
            if self._needed_by[index] < 0:
                in_order, reducer = self._ordered and self._called_in_order(row), self._of_reducer(row)
                self._begin(_Open(index, self._table.steps[row], results or sent, sent), in_order=in_order, reducer=reducer)

    def _begin(self, flying: _Open, *, in_order: bool, reducer: bool) -> None:
        self._open[flying.place] = flying
        self._steps.add(flying.step)
        for tensor in (*flying.results, *flying.sent):
            self._holding[_storage(tensor)][flying.place] = flying
        for reason, holds in ((ORDER, in_order), (REDUCER, reducer)):
            if holds:
                self._urgent[reason].append(flying)

    def _pass(self, row: int, effect: _Effect) -> None:
        for tensor in effect.born:
            self._reuse(_storage(tensor), row)
        step = self._table.steps[row]
        if self._steps - {step}:
            for each in [each for each in self._open.values() if each.step != step]:
                self._forget(each)
            self._steps = {step}
        if self._open and effect.touched:
            self._end_urgent(row, ORDER)
            self._end_touched(effect, row)
            if self._table.phases[row] != Phase.BACKWARD:
                self._end_urgent(row, REDUCER)
        for tensor in (*effect.writes, *effect.perhaps):
            self._memory[_storage(tensor)].writes.append((tensor, row))

    def _reuse(self, storage: int, row: int) -> None:
        # The allocator hands out memory of a collective in flight only once the collective is over.
        self._memory[storage] = _Memory(row)
        for each in self._holding.pop(storage, {}).values():
            each.results = tuple(other for other in each.results if _storage(other) != storage)
            each.sent = tuple(other for other in each.sent if _storage(other) != storage)

    def _held(self, storages: Iterable[int]) -> list[_Open]:
        """What is in flight about any of these storages."""
        found = {place: each for storage in storages for place, each in self._holding.get(storage, {}).items()}
        return list(found.values())

    def _end_touched(self, effect: _Effect, row: int) -> None:
        held = self._held(effect.touched)
        if held:
            self._end([each for each in held if _touches(effect, each)], row, DATA)

    def _end_urgent(self, row: int, reason: str) -> None:
        if self._urgent[reason]:
            self._end([each for each in self._urgent[reason] if each.place in self._open], row, reason)
            self._urgent[reason] = []

    def _end(self, waited: Sequence[_Open], row: int, reason: str) -> None:
        for each in waited:
            self._needed_by[each.place], self._reasons[each.place] = row, reason
            self._forget(each)

    def _forget(self, each: _Open) -> None:
        """It is in flight no longer."""
        del self._open[each.place]
        for tensor in (*each.results, *each.sent):
            self._holding[_storage(tensor)].pop(each.place, None)

    def _written(self, tensor: Tensor) -> int:
        memory = self._memory[_storage(tensor)]
        for other, row in reversed(memory.writes):
            if _overlap(tensor, other):
                return row
        # Reserved and never seen written: by what reserved it for itself, as functions with kernels of their own do.
        row = memory.born
        while row >= 0 and self._table.kinds[row].reserves:
            row = self._table.parents[row]
        return row

    def _called_in_order(self, row: int) -> bool:
        # c10d's ops end in (..., async_op, timeout).
        parent = self._table.parents[row]
        if parent < 0 or not self._table.names[parent].startswith("c10d::"):
            return False
        inputs = self._table.signatures[parent].inputs
        return len(inputs) > 1 and inputs[-2] is False

    def _of_reducer(self, row: int) -> bool:
        while (row := self._table.parents[row]) >= 0:
            if self._table.names[row].endswith(_GRADIENT_READY):
                return True
        return False


def _touches(effect: _Effect, flying: _Open) -> bool:
    return _meet((*effect.reads, *effect.writes), flying.results) or _meet(effect.writes, flying.sent)


def _effect(data: Data, signature: Signature) -> _Effect:
    """What an op that does this with its data does to these arguments; ops called alike share it."""
    key = (_Effect, data)
    known: _Effect | None = signature.derived.get(key)
    if known is None:
        known = signature.derived[key] = _new_effect(data, signature)
    return known


def _new_effect(data: Data, signature: Signature) -> _Effect:
    if signature is NO_SIGNATURE:
        return _NOTHING
    arguments = arguments_of(signature)
    inputs, outputs = tuple(_on_device(arguments.inputs)), tuple(_on_device(arguments.outputs))
    if not inputs and not outputs:
        return _NOTHING
    before = set(map(_storage, inputs))
    mentions = frozenset(before.union(map(_storage, outputs)))
    born = tuple([tensor for tensor in outputs if _storage(tensor) not in before])
    if data is Data.FRAME:
        return _Effect(mentions)
    if data is Data.UNTOUCHED:
        return _Effect(mentions, born=born)
    if data is Data.OPAQUE:
        return _Effect(mentions, inputs, outputs, inputs, born)
    written = _written_in_place(data, arguments, outputs)
    if outputs and not born and not written:  # a view, or the same tensor handed back
        return _Effect(mentions)
    return _Effect(mentions, inputs, (*written, *born), born=born)


def _written_in_place(data: Data, arguments: Arguments, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if not outputs and data is not Data.IN_PLACE:
        return ()
    first = tuple(_on_device(chain.from_iterable(arguments.by_input[:1])))
    if data is Data.IN_PLACE:
        return first
    # An `out` argument comes back as the output; the first argument comes back where there was nothing to do.
    later = {tensor.id for tensor in _on_device(chain.from_iterable(arguments.by_input[1:]))} - {tensor.id for tensor in first}
    return tuple(tensor for tensor in outputs if tensor.id is not None and tensor.id in later)


def _on_device(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those with data on a device. Empty tensors share one storage id."""
    return [
        tensor
        for tensor in tensors
        if (tensor.storage or tensor.id is not None) and not (tensor.device or "").startswith("cpu") and 0 not in tensor.shape
    ]


def _meet(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    if not tensors or not others:
        return False
    storages = set(map(_storage, others))
    return any(
        _storage(tensor) == _storage(other) and _overlap(tensor, other)
        for tensor in tensors
        if _storage(tensor) in storages
        for other in others
    )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage share elements, by first and last; offsets count elements, so dtypes must agree."""
    if one.dtype != other.dtype:
        return True
    return one.offset < other.offset + _extent(other) and other.offset < one.offset + _extent(one)


def _extent(tensor: Tensor) -> int:
    if tensor.strides is None or len(tensor.strides) != len(tensor.shape):
        return tensor.numel
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
