"""What the CPU spends: per op, per launch, between ops, with and without a profiler."""

from __future__ import annotations

import pyarrow as pa

from steptime.measurements.sets import NAME, MeasuredSet

SET = MeasuredSet(
    name="host",
    about="one kind of host cost of one op or one mechanism",
    columns=(
        pa.field("kind", NAME),  # op | launch_latency | kernel_gap | between_forward | between_backward | ... (measure/host)
        pa.field("op", NAME),  # the op or mechanism
        pa.field("call", pa.string()),  # JSON of the call, where there is one
        pa.field("source", NAME),  # the workload that issues it, or sweep
        pa.field("phase", NAME),  # forward | backward | optimizer | other
        pa.field("profiler", NAME),  # off | cuda | cpu_cuda | execution_trace
        pa.field("launches", pa.float32()),  # device launches per op
        pa.field("cores", pa.int16()),  # how many cores the process was pinned to
        pa.field("share", pa.int16()),
    ),
    case=("kind", "op", "call", "phase", "profiler", "cores", "share"),
)
