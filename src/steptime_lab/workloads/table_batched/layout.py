"""`Layout`: where the rows of many tables lie in one flat buffer, and which columns of the output each table fills."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from steptime.errors import InputError

ALIGNMENT = 64
"""Elements between which tables start: 256 bytes of fp32, as the device's own allocator aligns."""

_MOST_TABLES = 1 << 16
_KEPT_BATCHES = 8


class Layout:
    """Rows and dims of the tables, and where each begins; what kernels read of it lies on the device."""

    def __init__(self, rows: Sequence[int], dims: Sequence[int], device: torch.device) -> None:
        self.rows, self.dims, self.device = tuple(rows), tuple(dims), device
        _check(self.rows, self.dims)
        starts = tuple(accumulate(_sizes(rows, dims), initial=0))
        self.starts, self.elements = starts[:-1], starts[-1]
        self.column_starts = (0, *accumulate(self.dims))[:-1]
        self.state_starts = (0, *accumulate(self.rows))[:-1]
        self.columns, self.widest = sum(self.dims), max(self.dims)
        entries = zip(self.starts, self.dims, self.column_starts, self.state_starts, strict=True)
        meta = [(start // 4, dim // 4, column // 4, state) for start, dim, column, state in entries]
        self.meta = torch.tensor(meta, dtype=torch.int64, device=device)
        self._programs: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @staticmethod
    def elements_of(rows: Sequence[int], dims: Sequence[int]) -> int:
        """How long a buffer for such tables has to be."""
        return sum(_sizes(rows, dims))

    @property
    def tables(self) -> int:
        """How many."""
        return len(self.rows)

    def batch_of(self, offsets: torch.Tensor) -> int:
        """Samples in a batch with these offsets (one per bag, table by table, and the end)."""
        batch, rest = divmod(offsets.numel() - 1, self.tables)
        if rest or batch < 0:
            raise InputError(f"{offsets.numel()} offsets for {self.tables} tables; expected tables * batch + 1")
        return batch

    def view(self, weights: torch.Tensor, table: int) -> torch.Tensor:
        """A table's rows, [rows, dim]."""
        start, count, dim = self.starts[table], self.rows[table], self.dims[table]
        return weights[start : start + count * dim].view(count, dim)

    def programs(self, batch: int, quads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The table of each program of a launch, and each table's first program: bags of a table that fit so many quads."""
        if (batch, quads) not in self._programs:
            if len(self._programs) >= _KEPT_BATCHES:
                self._programs.clear()
            self._programs[batch, quads] = self._divided(batch, quads)
        return self._programs[batch, quads]

    def _divided(self, batch: int, quads: int) -> tuple[torch.Tensor, torch.Tensor]:
        counts = []
        for dim in self.dims:
            wide = dim // 4
            counts.append(-(-batch // max(quads // wide, 1)) * -(-wide // quads))
        first = torch.tensor((0, *accumulate(counts))[:-1], dtype=torch.int64, device=self.device)
        tables = torch.arange(self.tables, dtype=torch.int32, device=self.device)
        each = torch.tensor(counts, dtype=torch.int64, device=self.device)
        return torch.repeat_interleave(tables, each, output_size=sum(counts)), first


def _sizes(rows: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Elements from each table's start to the next one's."""
    return [-(count * dim // -ALIGNMENT) * ALIGNMENT for count, dim in zip(rows, dims, strict=True)]


def _check(rows: Sequence[int], dims: Sequence[int]) -> None:
    if len(rows) != len(dims) or not rows or len(rows) > _MOST_TABLES:
        raise InputError(f"{len(rows)} row counts and {len(dims)} dims; expected one each for 1 to {_MOST_TABLES} tables")
    for table, (count, dim) in enumerate(zip(rows, dims, strict=True)):
        if count < 1:
            raise InputError(f"table {table} has {count} rows; expected at least 1")
        if dim < 4 or dim % 4:
            raise InputError(f"table {table} has dim {dim}; expected a multiple of 4")
