"""Sharding: the same task under several plans, interleaved in blocks so that differences are paired."""

from __future__ import annotations

import pyarrow as pa

from steptime._measurements.sets import NAME, MeasuredSet
from steptime._measurements.sets.steps import SET as STEPS

SET = MeasuredSet(
    name="sharding",
    about="one plan of one task in one block; rows of one task, block and process were timed together, in random order",
    columns=(
        *(column for column in STEPS.columns if column.name not in STEPS.added),
        # Other rules that give this very plan, with commas between: it is timed once, under `rule`; empty where none.
        pa.field("aliases", NAME),
        pa.field("turn", pa.int16()),  # when within its block, from 0
    ),
    case=(*STEPS.case, "block"),
    repeats=("block",),
)
