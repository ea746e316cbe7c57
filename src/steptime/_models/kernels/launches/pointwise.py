"""One element-wise kernel: vectorised over dense elements, unrolled where it converts dtypes, strided for anything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from steptime._models.kernels.launches import Launch, Operand
from steptime._models.kernels.launches.iteration import Iteration, iterate
from steptime._models.kernels.launches.names import STRIDED, UNROLLED, VECTORIZED

# Bytes of a sector, the least that is moved between L2 and an SM, and of a line, for which an SM asks at once.
_SECTOR_BYTES, _LINE_BYTES = 32, 128
# Elements of a block: 128 threads of 8 each. In the strided kernel a thread takes 2 one after the other, or 4 of less than
# four bytes (ATen's launch code; the names of measured kernels say the same).
_BLOCK, _THREADS, _STRIDED_EACH, _STRIDED_EACH_SHORT, _FULL_BYTES = 1024, 128, 2, 4, 4


def pointwise(
    inputs: Sequence[Operand], output: Operand, *, tag: str = "", casts: bool = False, existing: bool = False, kernel: str = ""
) -> Launch:
    """An element-wise kernel over `inputs` into `output`. `existing` says that the output has its memory and strides already.

    `casts` says that operands differ in dtype; `kernel` overrides the choice, where an op has its own.
    """
    walk = _walk(inputs, output, existing)
    elements = output.numel
    items = (output.item_bytes, *(entry.item_bytes for entry in inputs))
    flat = len(walk.sizes) == 1 and (
        elements == 1
        or all(
            element[0] == item or (index == 0 and not existing)
            for index, (element, item) in enumerate(zip(walk.strides, items, strict=True))
        )
    )
    kernel = kernel or ((UNROLLED if casts else VECTORIZED) if flat else STRIDED)
    facts: dict[str, float] = {
        "dimensions": len(walk.sizes),
        "size_0": walk.sizes[0],
        "size_1": walk.sizes[1] if len(walk.sizes) > 1 else 1,
        "tail": elements % (4 if max(items) >= 4 else 8) != 0,
        "ragged_block": elements % _BLOCK != 0,
        "casts": casts,
    }
    if not flat:
        facts.update(_strided_facts(walk, inputs, items, elements, existing))
    grids = _strided_grids(items[0], elements) if kernel == STRIDED else ((elements / _BLOCK, 1.0),)
    return Launch(kernel, elements, tuple(inputs), (output,), facts, grids, _path(kernel, facts, output.item_bytes, tag), tag)


def fill(output: Operand, *, tag: str = "", existing: bool = False) -> Launch:
    """A constant written to every element."""
    return pointwise((), output, tag=tag or output.dtype, existing=existing)


def cleared(result: Operand) -> Launch:
    """A result set to zero before a kernel adds to it: with code of its own, since it reads nothing."""
    return replace(fill(result), path="fill")


def _walk(inputs: Sequence[Operand], output: Operand, existing: bool) -> Iteration:
    every = (output, *inputs) if existing else inputs
    first = every[0] if every else output
    # The usual case: all alike and dense, which joins to one dimension.
    if all(entry.strides == first.strides and entry.shape == output.shape for entry in every) and first.dense:
        items = (output.item_bytes, *(entry.item_bytes for entry in inputs))
        return Iteration((output.numel,), tuple((item,) for item in items))
    return iterate(output.shape, (output if existing else None, *inputs))


def _strided_facts(
    walk: Iteration, inputs: Sequence[Operand], items: Sequence[int], elements: int, existing: bool
) -> dict[str, float]:
    inner = [own[0] / item for own, item in zip(walk.strides, items, strict=True)]
    if not existing:
        inner[0] = 1.0
    far = [stride for stride in inner[1:] if stride > 1]
    waste = [min(stride * item, _SECTOR_BYTES) / item for stride, item in zip(inner, items, strict=True) if stride]
    return {
        "output_stride": inner[0],
        "input_stride": max(far, default=0.0),
        "broadcast_inputs": sum(entry.distinct < elements for entry in inputs),
        "sector_waste": max(1.0, *waste) if walk.sizes[0] > 1 and waste else 1.0,
        "size_2": walk.sizes[2] if len(walk.sizes) > 2 else 1,
        "next_stride_bytes": min((own[1] for own in walk.strides if len(own) > 1 and own[1] > 0), default=0),
    }


def _strided_grids(item_bytes: int, elements: int) -> tuple[tuple[float, float], ...]:
    each = _STRIDED_EACH if item_bytes >= _FULL_BYTES else _STRIDED_EACH_SHORT
    blocks = elements / (_THREADS * each)
    return ((blocks, float(min(each, math.ceil(elements / _THREADS)))), (blocks, 1.0))


def _path(kernel: str, facts: dict[str, float], item_bytes: int, tag: str) -> str:
    if kernel == UNROLLED:
        return tag
    if kernel != STRIDED:
        return ""
    apart = max(facts.get("input_stride", 0.0), facts.get("output_stride", 1.0))
    # Threads side by side that are not a whole line apart share what they ask for.
    crossed = "transposed-near" if apart * item_bytes < _LINE_BYTES else "transposed"
    way = crossed if apart > 1 else "broadcast" if facts.get("broadcast_inputs") else "sliced"
    return way + ("-cast" if facts["casts"] else "")
