"""Collectives: alone, uneven, skewed, beside a compute kernel, with idle and busy host threads."""

from __future__ import annotations

import pyarrow as pa

from steptime.measurements.sets import NAME, MeasuredSet

SET = MeasuredSet(
    name="collectives",
    about="one collective on one fabric, wait-free",
    columns=(
        pa.field("collective", NAME),
        pa.field("ranks", pa.int16()),
        pa.field("fabric", NAME),  # a name for the settings below, e.g. loopback, loopback-2x2, nvlink
        pa.field("settings", NAME),  # NCCL environment that makes the fabric, JSON
        pa.field("dtype", NAME),
        pa.field("bytes", pa.int64()),  # as NCCL counts: the send buffer of a rank; the largest one where uneven
        pa.field("splits", pa.list_(pa.int64())),  # uneven all_to_all: the matrix of sent bytes, row by row; else null
        pa.field("share", pa.int16()),  # parts of one GPU; 1: a GPU per rank
        pa.field("beside", NAME),  # none | gemm | copy: what ran on another stream of every rank meanwhile
        pa.field("host_threads", NAME),  # idle | busy
        pa.field("arrival", NAME),  # together | skewed
        pa.field("skew_ns", pa.float64()),  # how far apart the ranks arrived, where skewed
        pa.field("waiting_ns", pa.float64()),  # median over repeats of the longest wait of a rank
        pa.field("beside_ns", pa.float64()),  # how long the kernel beside it took; null where none
        pa.field("beside_alone_ns", pa.float64()),  # how long that kernel takes without the collective
        pa.field("algorithm", NAME),  # from NCCL's debug output; empty where it did not say
        pa.field("protocol", NAME),
        pa.field("channels", pa.int16()),
    ),
    case=("collective", "ranks", "fabric", "settings", "dtype", "bytes", "splits", "share", "beside", "host_threads", "arrival",
          "skew_ns"),
)  # fmt: skip
