"""`peak_memory`: how much device memory a step takes at most, as PyTorch's allocator counts it, and what fills it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from steptime._hardware.device import DeviceLimits, reference_device
from steptime._models.memory.allocator import Block, CachingAllocator
from steptime._models.memory.lifetimes import BEFORE, MemoryKind, Storage, graphed, storages_with
from steptime._models.memory.repeated import most_of
from steptime._models.memory.scratch import scratch
from steptime._ops.catalogue import Workspace
from steptime._ops.table import op_table
from steptime._program.program import Phase, Program
from steptime._program.repetition import Repetition

_MIB = 1 << 20
# What a process holds of a device beside what PyTorch's allocator reserves: its context, loaded kernels, NCCL's buffers.
# Measured on an H200 (driver 580.159, CUDA 13.0, torch 2.11, NCCL 2.28): what nvidia-smi says of a process less what the
# allocator had reserved, after twelve steps. These are the rows of the set `memory` with `outside_bytes`.
# 518 of the context, the rest kernels as they are first called; a DLRM and a BERT alike.
_PROCESS_BYTES = 742 * _MIB
# 278 when the group begins, the rest with the first collectives of each kind; two ranks over sockets. Over NVLink NCCL keeps
# buffers for every peer on the device, which was not measured.
_GROUP_BYTES = 434 * _MIB
# Ranks on parts of one GPU, through MPS, by how many share it: context and NCCL's buffers shrink with the part. Two ranks of a
# BERT held 738.
_PART_BYTES = {2: 764 * _MIB, 4: 548 * _MIB, 8: 436 * _MIB}
# PyTorch hands cuBLAS 32 MiB on Hopper and Blackwell, once per thread that multiplies (parseChosenWorkspaceSize in
# aten/src/ATen/cuda/CublasHandlePool.cpp), and cuBLASLt, which adds biases, 1 MiB (getCUDABlasLtWorkspaceSize there).
WORKSPACE_BYTES = 32 << 20
BIAS_WORKSPACE_BYTES = 1 << 20
_SETTLING = (MemoryKind.OPTIMIZER_STATE, MemoryKind.COMMUNICATION)
# The first step makes optimiser state and workspaces, the second finds its blocks cut by them, the third is like all others.
_STEPS = 3


def process_bytes(ranks: int, share: int = 1) -> int:
    """Of one of so many ranks, on a GPU of its own or on one of `share` parts of one."""
    if share > 1:
        # Parts of another size: as the next larger one that was measured.
        return _PART_BYTES[max((parts for parts in _PART_BYTES if parts <= share), default=min(_PART_BYTES))]
    return _PROCESS_BYTES + (_GROUP_BYTES if ranks > 1 else 0)


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes of one rank."""

    allocated: int  # at most, with the gradient buckets of the first step still held in the second
    steady_allocated: int  # at most, if they are not
    reserved: int
    steady_reserved: int
    parts: Mapping[MemoryKind, int]  # of `steady_allocated`, at that moment; they add up to it

    def device_bytes(self, ranks: int, share: int = 1) -> int:
        """What the process of one of so many ranks takes of its device in all, its context and NCCL included: does it fit?"""
        return self.reserved + process_bytes(ranks, share)


def peak_memory(
    program: Program,
    *,
    outside_bytes: Sequence[int] = (),
    parameters: Sequence[int] = (),
    optimizer_state: Sequence[int] = (),
    batches: int = 1,
    device: DeviceLimits | None = None,
) -> PeakMemory:
    """The peak of a program of one step.

    Bytes of allocations that no op names: `parameters` and `optimizer_state`, as tables of a kernel that is no op and their
    state, and others in `outside_bytes`, as further batches. `batches` says how many input batches like that of the step lie on
    the device. Data-parallel training rebuilds its gradient buckets after the first step, and the collectives of that step may
    still hold the former ones: `allocated` counts both. `device` is the one it runs on, the reference device if none.
    """
    # Of the device, what ops take beside their arguments is all that counts: most devices differ in none of it.
    beside = tuple(scratch(op_table(program), device or reference_device()))
    question = (tuple(outside_bytes), tuple(parameters), tuple(optimizer_state), batches, beside)
    known: tuple[tuple[object, ...], PeakMemory, tuple[Storage, ...]] | None = program.derived.get(PeakMemory)
    if known is None or known[0] != question:
        every = storages_with(program, beside)
        known = program.derived[PeakMemory] = (question, _peak(program, every, *question[:-1]), every)
    _, result, every = known
    return result if program.repetition is None else _repeated(result, every, program.repetition, len(program.ops))


def _repeated(sample: PeakMemory, every: Sequence[Storage], repetition: Repetition, ops: int) -> PeakMemory:
    """The peak of a step from that of a sample of it, which has all that stays, and as much that the allocator cannot use."""
    passing = [storage for storage in every if not storage.stays]
    in_sample = most_of(passing, replace(repetition, order=tuple(range(len(repetition.starts)))), ops)
    in_step = most_of(passing, repetition, ops)
    parts = {kind: nbytes + in_step[kind] - in_sample[kind] for kind, nbytes in sample.parts.items()}
    more = sum(in_step.values()) - sum(in_sample.values())
    unused, first = sample.steady_reserved - sample.steady_allocated, sample.allocated - sample.steady_allocated
    steady = sample.steady_allocated + more
    return PeakMemory(
        allocated=steady + first,
        steady_allocated=steady,
        reserved=steady + first + unused,
        steady_reserved=steady + unused,
        parts={kind: max(0, nbytes) for kind, nbytes in parts.items()},
    )


def _peak(
    program: Program,
    every: Sequence[Storage],
    outside_bytes: Sequence[int],
    parameters: Sequence[int],
    optimizer_state: Sequence[int],
    batches: int,
) -> PeakMemory:
    passing = [storage for storage in every if not storage.stays]
    state, buckets = ([storage for storage in every if storage.stays and storage.kind is kind] for kind in _SETTLING)
    unnamed = (
        (MemoryKind.PARAMETERS, parameters),
        (MemoryKind.OPTIMIZER_STATE, optimizer_state),
        (MemoryKind.INPUTS, outside_bytes),
    )
    before = [Storage(nbytes, BEFORE, BEFORE, kind) for kind, sizes in unnamed for nbytes in sizes]
    for storage in every:
        if storage.stays and storage.kind not in _SETTLING:
            before += [storage] * (batches if storage.kind is MemoryKind.INPUTS else 1)
    settling = _settling(program, state)
    steady = _Replay(passing, settling, buckets)
    steady.run(before, hold_former=False)
    first = steady
    if buckets:
        first = _Replay(passing, settling, buckets)
        first.run(before, hold_former=True)
    there = [*before, *buckets, *chain.from_iterable(settling.values())]
    there += [storage for storage in passing if storage.born <= steady.moment <= storage.dies]
    there = [storage for storage in there if not storage.pooled]  # what graphs hold counts as reserved, not as allocated
    parts = dict.fromkeys(MemoryKind, 0)
    for storage in there:
        parts[storage.kind] += storage.nbytes
    # What blocks are larger than what is in them.
    parts[MemoryKind.ROUNDING] = steady.allocator.most_allocated - sum(parts.values())
    return PeakMemory(
        allocated=first.allocator.most_allocated,
        steady_allocated=steady.allocator.most_allocated,
        reserved=first.reserved,
        steady_reserved=steady.reserved,
        parts=parts,
    )


class _Replay:
    """Some steps of one program on one allocator, and what CUDA graphs keep in a pool of their own."""

    def __init__(
        self, passing: Sequence[Storage], settling: Mapping[int, Sequence[Storage]], buckets: Sequence[Storage]
    ) -> None:
        self.allocator, self._pool = CachingAllocator(), CachingAllocator()
        self.moment = -1  # the op at which it is most
        self._passing, self._settling, self._buckets = passing, settling, buckets
        self._born: dict[int, list[int]] = defaultdict(list)
        self._dying: dict[int, list[int]] = defaultdict(list)
        for number, storage in enumerate(passing):
            self._born[storage.born].append(number)
            self._dying[storage.dies].append(number)
        rows = sorted({*self._born, *self._dying, *self._settling})
        self._events = [(row, self._born.get(row, ()), self._dying.get(row, ())) for row in rows]

    @property
    def reserved(self) -> int:
        """All of it."""
        return self.allocator.reserved + self._pool.reserved

    def _of(self, storage: Storage) -> CachingAllocator:
        return self._pool if storage.pooled else self.allocator

    def run(self, before: Iterable[Storage], *, hold_former: bool) -> None:
        """From what is there before the first step; every step frees what it makes.

        Gradient buckets are made anew for the second step: `hold_former` says whether the former ones are still there.
        """
        for storage in before:
            self.allocator.take(storage.nbytes)
        former = [self.allocator.take(bucket.nbytes) for bucket in self._buckets]
        for step in range(_STEPS):
            if step == 1:
                for block in [] if hold_former else former:
                    self.allocator.give_back(block)
                for bucket in self._buckets:
                    self.allocator.take(bucket.nbytes)
            self._step(self._settling if step == 0 else {})

    def _step(self, settling: Mapping[int, Sequence[Storage]]) -> None:
        allocator, passing = self.allocator, self._passing
        held: dict[int, Block] = {}
        most = allocator.most_allocated
        for row, born, dying in self._events:
            for storage in settling.get(row, ()):
                self._of(storage).take(storage.nbytes)
            for number in born:
                held[number] = self._of(passing[number]).take(passing[number].nbytes)
            if allocator.most_allocated > most:
                most, self.moment = allocator.most_allocated, row
            for number in dying:
                self._of(passing[number]).give_back(held.pop(number))


def _settling(program: Program, state: Iterable[Storage]) -> dict[int, list[Storage]]:
    """What the first step makes and keeps, by the op before which it does: a workspace where a thread first multiplies, the
    optimiser's state where it first steps."""
    result: dict[int, list[Storage]] = defaultdict(list)
    table, threads = op_table(program), program.ops.thread.tolist()
    pooled = graphed(table)
    for least, nbytes in ((Workspace.PRODUCT, WORKSPACE_BYTES), (Workspace.PRODUCT_WITH_BIAS, BIAS_WORKSPACE_BYTES)):
        # By thread, each of which has its own handle with its own workspace; graphs have theirs in their pool.
        first: dict[tuple[int, bool], int] = {}
        for row, (kind, thread) in enumerate(zip(table.kinds, threads, strict=True)):
            if kind.workspace >= least:
                first.setdefault((thread, row in pooled), row)
        for (_, inside), row in first.items():
            result[row].append(Storage(nbytes, BEFORE, BEFORE, MemoryKind.WORKSPACES, inside))
    optimizer = (program.ops.phase == Phase.OPTIMIZER).nonzero()[0]
    result[int(optimizer[0]) if len(optimizer) else len(program.ops.name)] += state
    return result
