"""Every kernel of every profiled step."""

from __future__ import annotations

import pyarrow as pa

from steptime.measurements.sets import NAME, MeasuredSet

SET = MeasuredSet(
    name="step_kernels",
    about="one kernel, copy or collective of one profiled step on one rank; `times_ns` has one entry per profiled step",
    columns=(
        pa.field("name", NAME),  # the case in `steps`
        pa.field("position", pa.int32()),  # in the order of launches on this rank
        pa.field("op", NAME),  # the innermost op around the launch; empty where none
        pa.field("kernel", NAME),
        pa.field("stream", pa.int32()),
        pa.field("start_ns", pa.int64()),  # of the last profiled step, from the rank's step begin
    ),
    case=("name", "rank", "position"),
)
