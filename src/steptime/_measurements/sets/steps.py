"""Training steps: unprofiled step times, kernel times, memory, lookup statistics."""

from __future__ import annotations

import pyarrow as pa

from steptime._measurements.sets import NAME, MeasuredSet

SET = MeasuredSet(
    name="steps",
    about="one training step of one workload configuration, timed in a process that never profiled",
    columns=(
        pa.field("workload", NAME),  # dlrm | bert | gpt2 | xlnet | resnet50 | inception_v3
        pa.field("name", NAME),  # the case, unique: also the name of its trace files
        pa.field("config", NAME),  # JSON, enough to build it again
        pa.field("precision", NAME),  # fp32 | bf16
        pa.field("batch", pa.int32()),  # global
        pa.field("ranks", pa.int16()),
        pa.field("share", pa.int16()),
        pa.field("fabric", NAME),
        pa.field("plan", NAME),  # JSON table -> rank; null where nothing is sharded
        pa.field("task", NAME),  # of which the case is one plan or one batch size; null otherwise
        pa.field("rule", NAME),  # the sharding rule that made the plan; null otherwise
        pa.field("block", pa.int16()),  # in sharding: the block of interleaved plans this row was timed in; else 0
        pa.field("steps_per_time", pa.int16()),  # `times_ns` are means over so many unsynchronised steps, the slowest rank's
        # Peak per rank as the allocator counts, less what buffers shared by the cases of a process hold beyond this case.
        pa.field("allocated_bytes", pa.list_(pa.int64())),
        pa.field("reserved_bytes", pa.list_(pa.int64())),
        # JSON: per iteration an object table -> [lookups, distinct rows, [17 bins of reuse]]; null without tables.
        pa.field("lookups", pa.string()),
        # The state of the machine, one per repeat: a fixed loop of calls on the CPU right before it, and an all_reduce of
        # 1 MiB before its round; the slowest rank's. Null: nobody looked; the latter also for one rank.
        pa.field("host_probe_ns", pa.list_(pa.float64())),
        pa.field("wire_probe_ns", pa.list_(pa.float64())),
    ),
    case=("workload", "config", "precision", "batch", "ranks", "share", "fabric", "plan"),
    optional=("plan",),
    added=("host_probe_ns", "wire_probe_ns"),
)
