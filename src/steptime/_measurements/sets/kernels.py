"""Device time of every kernel an op launches."""

from __future__ import annotations

import pyarrow as pa

from steptime._measurements.sets import NAME, MeasuredSet

SET = MeasuredSet(
    name="kernels",
    about="one op call in one cache state on one device or part of it",
    columns=(
        pa.field("family", NAME),
        pa.field("op", NAME),
        pa.field("call", pa.string()),  # JSON of `models.kernels.call.Call`: enough to run it again
        pa.field("cache", NAME),  # cold | warm: whether the call's `written` arguments had just been written
        pa.field("tf32", pa.bool_()),  # whether matrix products and convolutions of fp32 may use TF32
        pa.field("benchmark", pa.bool_()),  # whether cuDNN tried its algorithms and kept the fastest
        pa.field("source", NAME),  # sweep | the workload whose step has this very call
        pa.field("share", pa.int16()),  # the device was one of so many equal parts (1: a whole GPU)
        pa.field("others", NAME),  # what the other parts did meanwhile: none | idle | same | streaming
        pa.field("kernel_names", pa.list_(NAME)),  # in launch order
        pa.field("kernel_ns", pa.list_(pa.float64())),  # median per kernel; `time_ns` is the median of their sum
        pa.field("span_ns", pa.float64()),  # median from the first kernel's start to the last one's end
        pa.field("event_ns", pa.float64()),  # the same call timed with CUDA events, where it was in the sample; else null
    ),
    case=("call", "cache", "tf32", "benchmark", "share", "others"),
)
