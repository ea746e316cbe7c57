"""`peak_memory`: how much device memory a step takes at most, as PyTorch's allocator counts it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from steptime.graph.memory.allocator import Block, CachingAllocator
from steptime.graph.memory.lifetimes import Role, Storage, storages
from steptime.graph.program import Program

# PyTorch hands cuBLAS 4096 KiB times 8 on Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp), once per thread that multiplies.
WORKSPACE_BYTES = 32 << 20
_PRODUCTS = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation", "aten::addmv", "aten::mv", "aten::dot",
)  # fmt: skip
# A second step finds the blocks as the first one cut them; in some shipped cases with sparse gradients it takes 1 MiB more.
_STEPS = 2


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes of one rank."""

    allocated: int  # at most, from the first step on
    steady_allocated: int  # at most, once gradient buckets are settled
    reserved: int
    state: int  # parameters, optimiser state
    inputs: int  # of all batches that are held
    buckets: int
    workspaces: int
    outside: int  # what the program does not name
    passing: int  # activations, gradients and temporaries, where the steady step takes most


def peak_memory(program: Program, *, outside_bytes: Sequence[int] = (), batches: int = 1) -> PeakMemory:
    """The peak of a program of one step.

    `outside_bytes` are allocations that no op names, as the tables of a kernel that is no op; `batches` says how many input
    batches lie on the device, of which the step takes one. Data-parallel training rebuilds its gradient buckets after the
    first step, and the collectives of that step may still hold the former ones: `allocated` counts both.
    """
    found = storages(program)
    kept = [*outside_bytes]
    for storage in found:
        if storage.role is not Role.PASSING:
            kept += [storage.nbytes] * (batches if storage.role is Role.INPUT else 1)
    spaces = [WORKSPACE_BYTES] * _multiplying_threads(program)
    former = [storage.nbytes for storage in found if storage.role is Role.BUCKET]
    passing = [storage for storage in found if storage.role is Role.PASSING]
    steady = _run([*kept, *spaces], passing)
    first = _run([*former, *kept, *spaces], passing) if former else steady
    of_role = _bytes_by_role(found)
    inputs, stays = batches * of_role[Role.INPUT], sum(outside_bytes) + sum(spaces)
    return PeakMemory(
        allocated=first.most_allocated,
        steady_allocated=steady.most_allocated,
        reserved=first.reserved,
        state=of_role[Role.STATE],
        inputs=inputs,
        buckets=of_role[Role.BUCKET],
        workspaces=sum(spaces),
        outside=sum(outside_bytes),
        passing=steady.most_allocated - of_role[Role.STATE] - of_role[Role.BUCKET] - inputs - stays,
    )


def _run(kept: Sequence[int], passing: Sequence[Storage]) -> CachingAllocator:
    """What some steps take, each of which frees all that it makes."""
    allocator = CachingAllocator()
    for nbytes in kept:
        allocator.take(nbytes)
    born: dict[int, list[int]] = defaultdict(list)
    dying: dict[int, list[int]] = defaultdict(list)
    for number, storage in enumerate(passing):
        born[storage.born].append(number)
        dying[storage.dies].append(number)
    held: dict[int, Block] = {}
    for row in _STEPS * sorted({*born, *dying}):
        for number in born[row]:
            held[number] = allocator.take(passing[number].nbytes)
        for number in dying[row]:
            allocator.give_back(held.pop(number))
    return allocator


def _bytes_by_role(found: Sequence[Storage]) -> dict[Role, int]:
    total = dict.fromkeys(Role, 0)
    for storage in found:
        total[storage.role] += storage.nbytes
    return total


def _multiplying_threads(program: Program) -> int:
    """How many threads call cuBLAS: each has a handle, and each handle a workspace."""
    products = {row for row, name in enumerate(program.names) if name in _PRODUCTS}
    pairs = zip(program.ops.name.tolist(), program.ops.thread.tolist(), strict=True)
    return len({thread for name, thread in pairs if name in products})
