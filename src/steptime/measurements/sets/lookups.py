"""Embedding lookups, forward and backward with update."""

from __future__ import annotations

import pyarrow as pa

from steptime.measurements.sets import NAME, MeasuredSet

SET = MeasuredSet(
    name="lookups",
    about="one lookup of one or many tables, in one direction",
    columns=(
        pa.field("implementation", NAME),  # embedding_bag | table_batched
        pa.field("direction", NAME),  # forward | backward (with the optimiser's update)
        pa.field("optimizer", NAME),  # sgd | rowwise_adagrad
        pa.field("dtype", NAME),  # of the rows
        pa.field("weighted", pa.bool_()),  # per-sample weights
        pa.field("batch", pa.int32()),
        pa.field("tables", pa.int16()),
        pa.field("rows", pa.list_(pa.int64())),  # from here on one entry per table
        pa.field("dims", pa.list_(pa.int32())),
        pa.field("pooling", pa.list_(pa.float32())),  # mean lookups per sample
        pa.field("lookups", pa.list_(pa.int64())),
        pa.field("unique", pa.list_(pa.int64())),
        pa.field("reuse", pa.list_(pa.list_(pa.float32()))),  # the 17-bin reuse histogram
        pa.field("generators", pa.list_(pa.string())),  # JSON of `lookups.generators.Generator`, with version and seed
        pa.field("cache", NAME),  # cold | warm: whether the tables had just been read by the same lookup
        pa.field("share", pa.int16()),
        pa.field("others", NAME),
        pa.field("kernel_names", pa.list_(NAME)),
        pa.field("kernel_ns", pa.list_(pa.float64())),
        pa.field("event_ns", pa.float64()),
    ),
    case=("implementation", "direction", "optimizer", "dtype", "weighted", "batch", "rows", "dims", "generators", "cache",
          "share", "others"),
)  # fmt: skip
