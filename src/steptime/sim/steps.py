"""When the steps of a recorded run ended, and so how long each took."""

from __future__ import annotations

import numpy as np

from steptime.graph.program import CallKind
from steptime.sim.recorded import Recorded


def recorded_steps_ns(inputs: Recorded) -> dict[int, int]:
    """Step number -> its time as recorded: from the end of the step before (the first: from its start) to its own end.

    A step ends with the latest, over ranks, of the host's end of the step and the end of the device work it launched.
    """
    programs = [(cohort.program, offset) for cohort, offset in zip(inputs.cohorts, inputs.offsets_ns, strict=True)]
    steps = sorted(set.intersection(*(set(program.steps) for program, _ in programs)))
    if not steps:
        return {}
    begins = []
    for program, offset in programs:
        calls = program.calls
        begun = (calls.kind == CallKind.STEP_BEGIN) & (calls.step == steps[0])
        begins += (calls.start_ns[begun] + offset).tolist()
    ends = np.full((len(programs), len(steps)), min(begins), dtype=np.int64)
    for row, (program, offset) in enumerate(programs):
        calls, works = program.calls, program.works
        ended = calls.kind == CallKind.STEP_END
        for step, end in ((calls.step[ended], calls.end_ns[ended]), (works.step, works.end_ns)):
            place = np.searchsorted(steps, step)
            known = np.isin(step, steps)
            np.maximum.at(ends[row], place[known], end[known] + offset)
    periods = np.diff(ends.max(axis=0), prepend=min(begins))
    return dict(zip(steps, periods.tolist(), strict=True))
