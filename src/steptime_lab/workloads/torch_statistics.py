"""`lookups.statistics` of indices that lie on a GPU: all tables of a launch in one sort, the same numbers as numpy's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from steptime._lookups.generators import Bags
from steptime._lookups.statistics import REUSE_BINS, REUSE_EDGES, Statistics, from_totals
from steptime.errors import InputError
from steptime_lab.workloads.torch_arrays import side_by_side


def statistics_of_tables(bags: Sequence[Bags], rows: Sequence[int]) -> tuple[Statistics, ...]:
    """Statistics of each table's lookups in one batch."""
    if not bags:
        return ()
    return statistics_of_launch(*side_by_side(bags), rows, len(bags[0].offsets) - 1)


def statistics_of_launch(
    indices: torch.Tensor, offsets: torch.Tensor, rows: Sequence[int], batch: int
) -> tuple[Statistics, ...]:
    """Statistics of each table of a table-batched launch.

    Sample i of table t looks up `indices[offsets[t * batch + i]:offsets[t * batch + i + 1]]`.
    """
    tables = len(rows)
    if len(offsets) != tables * batch + 1:
        raise InputError(
            f"A launch of {tables} tables and batch {batch} has {len(offsets)} offsets; expected {tables * batch + 1}."
        )
    offsets = offsets.to(torch.int64)
    lengths = torch.diff(offsets).view(tables, batch)
    sums = lengths.sum(1)
    bins = _reuse_counts(indices, lengths, rows)
    totals = torch.cat([sums[:, None], lengths.square().sum(1, keepdim=True), bins], 1).cpu().numpy()
    return tuple(
        from_totals(table_rows, batch, int(line[0]), int(line[1]), line[2:])
        for table_rows, line in zip(rows, totals, strict=True)
    )


def _reuse_counts(indices: torch.Tensor, lengths: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Distinct rows in each reuse bin, [tables, bins]; `lengths` of bags are [tables, batch]."""
    device, tables = indices.device, len(rows)
    bases = torch.tensor([0, *accumulate(rows)], dtype=torch.int64, device=device)
    # Repeated bag by bag, not table by table: a GPU repeats every entry with one warp.
    first_rows = bases[:-1, None].expand(lengths.shape).reshape(-1)
    keys = torch.repeat_interleave(first_rows, lengths.reshape(-1), output_size=len(indices)) + indices
    # A launch below 2**31 rows in all sorts half the bytes.
    if sum(rows) < 1 << 31:
        keys = keys.to(torch.int32)
    distinct, counts = torch.unique(keys, return_counts=True)
    table_of = torch.bucketize(distinct.to(torch.int64), bases, right=True) - 1
    bin_of = torch.bucketize(counts, torch.tensor(REUSE_EDGES, dtype=torch.int64, device=device))
    return torch.bincount(table_of * REUSE_BINS + bin_of, minlength=tables * REUSE_BINS).view(tables, REUSE_BINS)
