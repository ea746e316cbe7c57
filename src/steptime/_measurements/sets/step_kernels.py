"""Every kernel of every profiled step: a row per case and rank, its columns are lists over the kernels.

An entry of three steps takes about 24 bytes; a row per kernel would add a key, a spread and a median to each. `op`, `kernel`,
`stream`, `launch_ns`, `start_ns` and `kernel_ns` of a row are equally long and unnest side by side.
"""

from __future__ import annotations

import pyarrow as pa

from steptime._measurements.sets import NAME, MeasuredSet

SET = MeasuredSet(
    name="step_kernels",
    about="kernels, copies and collectives of one profiled step on one rank; `times_ns` are their sums, one per step",
    columns=(
        pa.field("workload", NAME),
        pa.field("name", NAME),  # the case in `steps`
        pa.field("ranks", pa.int16()),
        pa.field("share", pa.int16()),
        pa.field("fabric", NAME),
        pa.field("op", pa.list_(NAME)),  # in the order of launches: the innermost op around the launch; empty where none
        pa.field("kernel", pa.list_(NAME)),
        pa.field("stream", pa.list_(pa.int32())),
        pa.field("launch_ns", pa.list_(pa.int64())),  # of the last profiled step, from the rank's step begin on its host
        pa.field("start_ns", pa.list_(pa.int64())),
        pa.field("kernel_ns", pa.list_(pa.list_(pa.int32()))),  # per kernel one entry per profiled step
        pa.field("host_ns", pa.list_(pa.int64())),  # the host's time in each profiled step, which the profiler inflates
    ),
    case=("name", "share", "fabric", "rank"),
)
