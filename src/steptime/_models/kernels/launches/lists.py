"""Lists of tensors in one call: chunks of 65,536 elements, a block each, as many to a launch as ATen's arguments hold.

All blocks of a launch run at once, so it takes as long as its longest chunk, or as the SM that got the most of them; a chunk of
a tensor that is no multiple of the vector goes element by element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from steptime._models.kernels.call import TensorArg, contiguous
from steptime._models.kernels.launches import OVER_LISTS, Grids, Launch, Operand

# ATen's multi_tensor_apply: elements of a chunk and of a vector, chunks of a launch, tensors of a launch by how many lists go
# side by side; the second of these where every tensor has a number of its own.
CHUNK, _VECTOR, _MOST_CHUNKS = 65_536, 4, 320
_MOST_TENSORS = (110, 64, 48, 36, 30)
_MOST_TENSORS_SCALARS = (96, 64, 48, 36, 30)
# Nanoseconds of a full chunk, the smallest of the multiples that are fitted, and how much longer one takes element by element
# (seen in the measured rows: 7.7 and 10.4 us for an addition in place, warm).
_CHUNK_NS, _ODD = 2000.0, 1.35


@dataclass(frozen=True, slots=True)
class Packed:
    """One launch: elements of its chunks in order, those of them that go element by element, tensors they are of."""

    chunks: tuple[int, ...]
    odd: tuple[int, ...]
    tensors: int

    @property
    def elements(self) -> int:
        """Elements of all chunks."""
        return sum(self.chunks)

    def heaviest(self, sms: int) -> int:
        """Elements of the SM that has the most: blocks go to SMs in turn."""
        turns = (self.chunks[start : start + sms] for start in range(0, len(self.chunks), sms))
        return max(map(sum, zip_longest(*turns, fillvalue=0)))


def packed(counts: Iterable[int], most_tensors: int) -> list[Packed]:
    """How tensors of so many elements are spread over launches."""
    results: list[Packed] = []
    chunks: list[int] = []
    odd: list[int] = []
    tensors = 0
    for count in counts:
        left = count
        tensors += count > 0
        while left:
            full, rest = divmod(min(left, (_MOST_CHUNKS - len(chunks)) * CHUNK), CHUNK)
            fitting = [CHUNK] * full + ([rest] if rest else [])
            left -= full * CHUNK + rest
            chunks += fitting
            odd += fitting if count % _VECTOR else []
            if len(chunks) == _MOST_CHUNKS or (tensors == most_tensors and not left):
                results.append(Packed(tuple(chunks), tuple(odd), tensors))
                chunks, odd, tensors = [], [], 1 if left else 0
    return [*results, Packed(tuple(chunks), tuple(odd), tensors)] if chunks else results


def over_lists(
    first: Sequence[Operand | TensorArg],
    sms: int,
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
    most = (_MOST_TENSORS_SCALARS if scalars else _MOST_TENSORS)[depth - 1]
    path = f"{len(reads)}r{len(writes)}w"
    results: list[Launch] = []
    since_bytes = 0
    for cut in packed((item.numel for item in first), most):
        # Zeros are stored as fast one by one as in vectors (seen in the measured rows).
        launch = cut if reads else replace(cut, odd=())
        heaviest = launch.heaviest(sms)
        facts, grids = _facts(launch, depth, heaviest), _grids(launch, heaviest)
        parts = tuple(tuple(_stretch(item, launch.elements, since_bytes) for item in operands) for operands in (reads, writes))
        since_bytes += sum(item.nbytes for operands in parts for item in operands)
        results.append(Launch(OVER_LISTS, launch.elements, parts[0], parts[1], facts, grids, path, tag))
    return results


def _facts(launch: Packed, depth: int, heaviest: int) -> dict[str, float]:
    largest, largest_odd = max(launch.chunks), max(launch.odd, default=0)
    return {
        "blocks": len(launch.chunks),
        "tensors": launch.tensors,
        "fullness": launch.elements / (len(launch.chunks) * CHUNK),
        "largest": largest,
        "heaviest": heaviest,
        "depth": depth,
        "odd_share": sum(launch.odd) / launch.elements,
        "chain_ns": max(largest, _ODD * largest_odd) / CHUNK * _CHUNK_NS,
    }


def _grids(launch: Packed, heaviest: int) -> Grids:
    blocks = len(launch.chunks)
    return (
        (1.0, max(launch.chunks)),
        (1.0, max(launch.odd, default=0)),
        (launch.elements / heaviest, heaviest),
        (blocks, launch.elements / blocks),
        (blocks, 1.0),
    )


def _stretch(tensor: Operand, elements: int, since_bytes: int) -> Operand:
    shape = (elements,)
    return replace(tensor, shape=shape, strides=contiguous(shape), since_bytes=since_bytes)
