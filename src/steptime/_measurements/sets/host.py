"""What the CPU spends: per op, per launch, between ops, with and without a profiler."""

from __future__ import annotations

import pyarrow as pa

from steptime._measurements.sets import NAME, MeasuredSet

SET = MeasuredSet(
    name="host",
    about="one kind of host cost of one op or one mechanism",
    columns=(
        pa.field("kind", NAME),  # op | op_python | op_autograd | backward_node | launch | ... (all in measure.host.KINDS)
        pa.field("op", NAME),  # the op (aten::mm.default), the functional form (linear) or the mechanism (adam_foreach)
        pa.field("call", pa.string()),  # JSON of the call that was run, sizes mostly shrunk; empty where there is none
        pa.field("source", NAME),  # the workload that issues it, sweep, or calibration
        pa.field("phase", NAME),  # forward | backward | optimizer | other
        pa.field("profiler", NAME),  # off | cuda | cpu_cuda | execution_trace | after: a profiler was on before, and is off
        pa.field("launches", pa.float32()),  # kernels, copies and memsets per call; known where `profiler` is cuda, else null
        pa.field("cores", pa.int16()),  # how many cores the process was pinned to
        pa.field("share", pa.int16()),
        # What a fixed call took around each of `times_ns`: one that stays on the CPU, one that launches. Hosts change speed.
        pa.field("reference_cpu_ns", pa.list_(pa.float64())),
        pa.field("reference_launch_ns", pa.list_(pa.float64())),
    ),
    case=("kind", "op", "call", "phase", "profiler", "cores", "share"),
    added=("reference_cpu_ns", "reference_launch_ns"),
)
