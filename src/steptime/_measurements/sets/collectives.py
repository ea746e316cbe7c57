"""Collectives: alone, uneven, skewed, beside a compute kernel, with idle and busy host threads."""

from __future__ import annotations

import pyarrow as pa

from steptime._measurements.sets import NAME, MeasuredSet

SET = MeasuredSet(
    name="collectives",
    about="one collective on one fabric, wait-free",
    columns=(
        # all_reduce, all_to_all, all_gather, reduce_scatter, broadcast, reduce, barrier, send_recv (ranks 0 and 1 exchange),
        # send_recv_ring (every rank sends to the next and receives from the one before)
        pa.field("collective", NAME),
        pa.field("ranks", pa.int16()),
        pa.field("fabric", NAME),  # a name for the settings below, e.g. loopback, loopback-2x2, default
        pa.field("settings", NAME),  # NCCL environment that makes the fabric, JSON
        pa.field("dtype", NAME),
        # As nccl-tests counts: the larger of a rank's two buffers (all_gather: received, reduce_scatter: sent), its own share
        # included; uneven all_to_all: the largest send buffer of a rank; send_recv: the message in one direction.
        pa.field("bytes", pa.int64()),
        # Uneven all_to_all: the matrix of sent bytes, row by row (row: sender, column: receiver); else null.
        pa.field("splits", pa.list_(pa.int64())),
        pa.field("share", pa.int16()),  # parts of one GPU; 1: a GPU per rank
        # stream: the mean of `calls` queued ones on the device, after one that waited for everybody.
        # single: one, host to host, from the last rank's call until the last rank's device is done.
        pa.field("mode", NAME),
        pa.field("calls", pa.int16()),  # how many back to back in one repeat
        pa.field("beside", NAME),  # none | gemm | copy: what ran on another stream of every rank meanwhile
        pa.field("host_threads", NAME),  # idle | busy: a thread of each rank computing on the rank's own cores
        pa.field("arrival", NAME),  # together | skewed
        pa.field("skew_ns", pa.float64()),  # how much later than the others one rank was asked to arrive; null where together
        pa.field("late_rank", pa.int16()),  # which one; null where together
        pa.field("waiting_ns", pa.float64()),  # median over repeats of the longest wait of a rank; null where mode is stream
        pa.field("beside_ns", pa.float64()),  # mean time of the kernels that ran wholly beside it; null where none did
        pa.field("beside_alone_ns", pa.float64()),  # how long that kernel takes without the collective, all ranks running it
        pa.field("algorithm", NAME),  # from NCCL's debug output; empty where it did not say, as for send and receive
        pa.field("protocol", NAME),
        pa.field("channels", pa.int16()),  # null where NCCL did not say
        # What an all_reduce of 1 MiB took in the block of cases in which each of `times_ns` was taken. Fabrics drift.
        pa.field("reference_ns", pa.list_(pa.float64())),
    ),
    case=("collective", "ranks", "fabric", "settings", "dtype", "bytes", "splits", "share", "mode", "beside", "host_threads",
          "arrival", "skew_ns", "late_rank"),
    optional=("splits", "skew_ns", "late_rank"),
    added=("reference_ns",),
)  # fmt: skip
