"""PyTorch's caching allocator on one stream: what requests take, and what is reserved for them.

The numbers are those of c10/cuda/CUDACachingAllocator.cpp with default settings: sizes are rounded up to 512 bytes; requests up
to 1 MiB come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from segments rounded up to 2 MiB; the
smallest free block that is large enough is taken, and split where enough is left; neighbours merge when they are free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

BLOCK_BYTES = 512
_MIB = 1 << 20
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT_FROM = 10 * _MIB
_SEGMENT_ROUNDING = 2 * _MIB


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment."""

    begin: int
    nbytes: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass
class CachingAllocator:
    """Counts like `torch.cuda.memory_stats`: bytes now and at most."""

    allocated: int = 0
    reserved: int = 0
    most_allocated: int = 0
    _sizes: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})  # of free blocks
    _free: dict[int, Block] = field(default_factory=dict)  # by begin

    def take(self, nbytes: int) -> Block:
        """A block of at least that many bytes."""
        size = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES if nbytes > 0 else BLOCK_BYTES
        small = size <= _SMALL
        pool = self._sizes[small]
        index = bisect_left(pool, (size, 0))
        if index < len(pool):
            block = self._free.pop(pool.pop(index)[1])
            block.free = False
        else:
            block = Block(self.reserved, _segment_bytes(size), small)
            self.reserved += block.nbytes
        left = block.nbytes - size
        if left >= BLOCK_BYTES if small else left > _SMALL:
            self._split(block, size)
        self.allocated += block.nbytes
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def give_back(self, block: Block) -> None:
        """Frees a block for later requests; nothing goes back to the device."""
        self.allocated -= block.nbytes
        if block.after is not None and block.after.free:
            self._unlist(block.after)
            _absorb(block)
        if block.before is not None and block.before.free:
            block = block.before
            self._unlist(block)
            _absorb(block)
        self._list(block)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.begin + size, block.nbytes - size, block.small, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.nbytes, block.after = size, rest
        self._list(rest)

    def _list(self, block: Block) -> None:
        block.free = True
        self._free[block.begin] = block
        insort(self._sizes[block.small], (block.nbytes, block.begin))

    def _unlist(self, block: Block) -> None:
        pool = self._sizes[block.small]
        del pool[bisect_left(pool, (block.nbytes, block.begin))]
        del self._free[block.begin]
        block.free = False


def rounded(nbytes: int, to: int) -> int:
    """Up to the next multiple."""
    return -(-nbytes // to) * to


def _absorb(block: Block) -> None:
    """Makes a block and the one after it one."""
    gone = block.after
    assert gone is not None
    block.nbytes += gone.nbytes
    block.after = gone.after
    if block.after is not None:
        block.after.before = block


def _segment_bytes(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _OWN_SEGMENT_FROM else rounded(size, _SEGMENT_ROUNDING)
