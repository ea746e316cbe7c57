"""Lists of tensors in one call: ATen cuts them into chunks and puts as many into a launch as its arguments hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from steptime.models.kernels.launches import Launch, Operand, contiguous
from steptime.models.kernels.launches.names import OVER_LISTS

# ATen's multi_tensor_apply: elements of a chunk, chunks of a launch, tensors of a launch by how many lists go side by side.
CHUNK = 65_536
_MOST_CHUNKS = 320
_MOST_TENSORS = (110, 64, 48, 36, 30)
_MOST_TENSORS_SCALARS = (96, 64, 48, 36, 30)
# Nanoseconds that a block takes for a full chunk, the smallest of the multiples that are fitted (seen: 2,000 to 32,000).
_CHUNK_NS = 2000.0


@dataclass(frozen=True, slots=True)
class Packed:
    """One launch of a list: its chunks (a block each), their elements, and the tensors they are of."""

    chunks: int
    elements: int
    tensors: int


def packed(counts: Sequence[int], most_tensors: int) -> list[Packed]:
    """How tensors of so many elements are spread over launches."""
    found = []
    chunks = elements = tensors = 0
    for count in counts:
        tensors += count > 0
        left = -(-count // CHUNK)
        while left:
            left -= 1
            chunks += 1
            elements += count - (-(-count // CHUNK) - 1) * CHUNK if not left else CHUNK
            if chunks == _MOST_CHUNKS or (tensors == most_tensors and not left):
                found.append(Packed(chunks, elements, tensors))
                chunks = elements = 0
                tensors = 1 if left else 0
    return [*found, Packed(chunks, elements, tensors)] if chunks else found


def over_lists(
    first: Sequence[Operand],
    *,
    depth: int,
    reads: Sequence[Operand],
    writes: Sequence[Operand],
    scalars: bool = False,
    tag: str = "",
) -> list[Launch]:
    """The launches of an op over lists. `first` is the list that is cut; `depth` is how many lists go side by side.

    `reads` and `writes` stand for the lists that are read and written: one tensor of each, whose dtype and origin count.
    `scalars` says that every tensor has a number of its own.
    """
    counts = [one.numel for one in first]
    most = (_MOST_TENSORS_SCALARS if scalars else _MOST_TENSORS)[depth - 1]
    total, largest = sum(counts), max(counts, default=0)
    odd = sum(count % 4 != 0 for count in counts) / max(1, len(counts))
    found = []
    for launch in packed(counts, most):
        big = min(CHUNK, largest)
        each = launch.elements / launch.chunks
        facts = {
            "blocks": launch.chunks,
            "tensors": launch.tensors,
            "fullness": each / CHUNK,
            "largest": big,
            "depth": depth,
            "share": launch.elements / total,
            "odd_share": odd,
            "chain_ns": big / CHUNK * _CHUNK_NS,
        }
        grids = ((float(launch.chunks), float(big)), (float(launch.chunks), 1.0), (float(launch.chunks), each))
        parts = tuple(tuple(_stretch(one, launch.elements) for one in operands) for operands in (reads, writes))
        found.append(Launch(OVER_LISTS, launch.elements, parts[0], parts[1], facts, grids, "", tag))
    return found


def _stretch(one: Operand, elements: int) -> Operand:
    shape = (elements,)
    return replace(one, shape=shape, strides=contiguous(shape))
