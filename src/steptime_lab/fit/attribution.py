"""Which piece of a program's work launched each kernel of a profiled step, where the profile names the innermost op alone.

Works and kernels come in one order, and a work launches kernels of its own op and of the ops inside it. Of all ways to give
kernels to works in that order, one that places the most kernels is taken; where neighbours could both have launched a kernel,
that one which then has as many as is expected of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.from_ops import IssuedWork
from steptime._program.program import Program

# What Kineto calls its own pauses; a kernel launched in one can be of any op.
_PROFILER = (
    "Activity Buffer Request",
    "Buffer Flush",
    "Command Buffer Full",
    "Instrumentation",
    "Lazy Function Loading",
    "Resource",
    "Runtime Triggered Module Loading",
    "Unrecognized",
)

Counts = npt.NDArray[np.int32]


def launched_by(
    program: Program, works: Sequence[IssuedWork], ops: Sequence[str], expected: Mapping[int, int] | None = None
) -> list[int]:
    """Per kernel, given the innermost op around its launch, the row of its work; -1 where no work fits.

    `expected` is how many kernels a work should have, by its row; one where it does not say.
    """
    launches = expected or {}
    inside = _names_inside(program, works)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(ops))}
    names = np.array([numbers[name] for name in ops], dtype=np.int32)
    before = {item: _matches_before(names, [numbers.get(name, -1) for name in (*item, *_PROFILER)]) for item in set(inside)}
    # Most kernels placed with the first so many works and the first so many kernels.
    placed = np.zeros((len(works) + 1, len(ops) + 1), dtype=np.int32)
    for row, item in enumerate(inside):
        # A work takes all that fit it from where the works before it end.
        placed[row + 1] = before[item] + np.maximum.accumulate(placed[row] - before[item])
    owners = [-1] * len(ops)
    end = len(ops)
    for row in range(len(works) - 1, -1, -1):
        own = before[inside[row]]
        start = _start(placed[row], own, end, int(placed[row + 1, end]), launches.get(row, 1))
        for kernel in range(start, end):
            if own[kernel + 1] > own[kernel]:
                owners[kernel] = row
        end = start
    return owners


def _names_inside(program: Program, works: Sequence[IssuedWork]) -> list[frozenset[str]]:
    """Per work, its op's name and those of all ops inside it."""
    names = [program.names[row] for row in program.ops.name.tolist()]
    work_of = {work.op: row for row, work in enumerate(works)}
    owner = [-1] * len(names)
    results: list[set[str]] = [set() for _ in works]
    for op, parent in enumerate(program.ops.parent.tolist()):
        owner[op] = work_of.get(op, owner[parent] if parent >= 0 else -1)
        if owner[op] >= 0:
            results[owner[op]].add(names[op])
    return [frozenset(item) for item in results]


def _matches_before(names: Counts, some: Sequence[int]) -> Counts:
    """Per place between kernels, how many kernels before it are of these ops."""
    matching = np.isin(names, some)
    return np.concatenate([[0], np.cumsum(matching)]).astype(np.int32)


def _start(placed: Counts, own: Counts, end: int, best: int, expected: int) -> int:
    """Where a work's kernels begin: among the best placings, that with the nearest to as many as expected, the latest."""
    allowed = np.flatnonzero(placed[: end + 1] + own[end] - own[: end + 1] == best)
    off = np.abs(own[end] - own[allowed] - expected)
    return int(allowed[np.flatnonzero(off == off.min())[-1]])
