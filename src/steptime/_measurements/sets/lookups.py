"""Embedding lookups, forward and backward with update."""

from __future__ import annotations

import pyarrow as pa

from steptime._measurements.sets import NAME, MeasuredSet

SET = MeasuredSet(
    name="lookups",
    about="one lookup of one or many tables, in one direction",
    columns=(
        # embedding_bag (sparse gradients) | table_batched | embedding_bag_dense | embedding_dense | embedding_sparse
        pa.field("implementation", NAME),
        pa.field("direction", NAME),  # forward | backward (with the optimiser's update)
        pa.field("optimizer", NAME),  # none (forward) | sgd | adagrad (PyTorch's, per element) | rowwise_adagrad
        pa.field("dtype", NAME),  # of the rows
        pa.field("weighted", pa.bool_()),  # per-sample weights
        pa.field("batch", pa.int32()),
        pa.field("tables", pa.int16()),
        pa.field("series", NAME),  # cases of one series differ in nothing but which rows are looked up; null: in none
        pa.field("rows", pa.list_(pa.int64())),  # from here on one entry per table
        pa.field("dims", pa.list_(pa.int32())),
        pa.field("pooling", pa.list_(pa.float32())),  # mean lookups per sample
        pa.field("pooling_spread", pa.list_(pa.float32())),  # standard deviation of the bags' lengths
        pa.field("lookups", pa.list_(pa.int64())),
        pa.field("unique", pa.list_(pa.int64())),
        pa.field("reuse", pa.list_(pa.list_(pa.float32()))),  # the 17-bin reuse histogram
        pa.field("generators", pa.list_(pa.string())),  # JSON of `lookups.generators.Generator`, with version and seed
        # cold: rows, indices and gradient had left the caches. warm: forward, the same lookup ran just before; backward,
        # the forward pass of the same lookup did.
        pa.field("cache", NAME),
        pa.field("share", pa.int16()),  # the device was one of so many equal parts (1: a whole GPU)
        pa.field("others", NAME),  # what the other parts did meanwhile: none | idle | same | streaming
        pa.field("kernel_names", pa.list_(NAME)),  # in launch order
        pa.field("kernel_ns", pa.list_(pa.float64())),  # median per kernel; `time_ns` is the median of their sum
        pa.field("span_ns", pa.float64()),  # median from the first kernel's start to the last one's end
        pa.field("event_ns", pa.float64()),  # the same lookup timed with CUDA events, where it was in the sample; else null
    ),
    case=("implementation", "direction", "optimizer", "dtype", "weighted", "batch", "rows", "dims", "generators", "cache",
          "share", "others"),
)  # fmt: skip
