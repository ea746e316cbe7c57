"""Peak memory of training steps: a row per case and rank."""

from __future__ import annotations

import pyarrow as pa

from steptime._measurements.sets import NAME, MeasuredSet

SET = MeasuredSet(
    name="memory",
    about="peak memory of one rank of one step case that has the process to itself; `times_ns`: how long measuring it took",
    columns=(
        pa.field("workload", NAME),
        pa.field("name", NAME),  # the case in `steps`
        pa.field("ranks", pa.int16()),
        pa.field("share", pa.int16()),  # the device was one of so many equal parts (1: a whole GPU, or turns on one)
        pa.field("fabric", NAME),
        pa.field("steps", pa.int16()),  # over how many steps the peaks are
        pa.field("allocated_bytes", pa.int64()),  # most that the caching allocator had handed out
        # Most that it had taken from the device; null where blocks that an earlier case left kept segments alive.
        pa.field("reserved_bytes", pa.int64()),
        pa.field("built_bytes", pa.int64()),  # handed out before the first step: model, tables, inputs
        # Most handed out in each of the first steps, ranks waiting for one another after each; then in the rest of them, not
        # waiting. Optimiser state comes with the first, and former gradient buckets go some time after the second.
        pa.field("step_allocated_bytes", pa.list_(pa.int64())),
        pa.field("left_bytes", pa.int64()),  # still handed out before the case was built, of earlier ones; 0 in a new process
        # What nvidia-smi says the rank's process holds of the device, less what its allocator had reserved then: context,
        # kernels, NCCL. Null where nobody asked or nvidia-smi did not say.
        pa.field("outside_bytes", pa.int64()),
    ),
    case=("name", "share", "fabric", "rank"),
    timed=False,
)
