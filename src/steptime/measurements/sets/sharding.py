"""Sharding: the same task under several plans, interleaved in blocks so that differences are paired."""

from __future__ import annotations

from steptime.measurements.sets import MeasuredSet
from steptime.measurements.sets.steps import SET as STEPS

SET = MeasuredSet(
    name="sharding",
    about="one plan of one task in one block; rows of one task and block were timed together, in random order",
    columns=STEPS.columns,
    case=(*STEPS.case, "block"),
)
