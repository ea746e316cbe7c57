"""The ways to divide an embedding table over ranks, by the names TorchRec has for them."""

from __future__ import annotations

TABLE_WISE = "table_wise"
"""A whole table on one rank."""

COLUMN_WISE = "column_wise"
"""Slices of its columns, each on a rank and looked up there as a narrower table."""

ROW_WISE = "row_wise"
"""A share of its rows on every rank; ranks sum what they found of a bag, and the sums meet in a reduce_scatter."""

DATA_PARALLEL = "data_parallel"
"""A copy on every rank, looked up for that rank's samples; gradients meet in an all_reduce."""

KINDS = (TABLE_WISE, COLUMN_WISE, ROW_WISE, DATA_PARALLEL)

USUAL_KINDS = (TABLE_WISE, COLUMN_WISE)
"""Allowed where a task does not say: what the evaluation models in full."""

EVERYWHERE = (ROW_WISE, DATA_PARALLEL)
"""Kinds that put a part of the table on every rank."""
