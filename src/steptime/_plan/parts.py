"""`parts_of`: where the step of a layout goes: computing, exchanges that nothing hides, by what they are for, and waiting.

Of a pipeline it is the stage that computes longest, for it bounds the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from steptime._build.emit.writer import CONTEXT, DATA, EXPERT, EXPERT_DATA, FSDP, GROUP, TENSOR
from steptime._build.transformer.parallelism import groups_of
from steptime._build.transformer.recompute import NONE
from steptime._plan.space import ModelLayout
from steptime._program.program import Phase, Program, WorkKind
from steptime._sim.core.timing import CohortTimeline, Timeline
from steptime._sim.explain.activity import fold
from steptime._sim.prediction import Operations

FORWARD, BACKWARD, AGAIN, OPTIMIZER = "forward", "backward", "recomputation", "optimizer"
BUBBLE, IDLE = "pipeline bubble", "idle"
_TENSOR, _CONTEXT, _EXPERT, _PIPELINE, _DATA = WIRES = (
    "tensor wire", "context wire", "expert wire", "pipeline wire", "data wire",
)  # fmt: skip
PARTS = (FORWARD, BACKWARD, AGAIN, OPTIMIZER, *WIRES, BUBBLE, IDLE)
_USES = {TENSOR: _TENSOR, CONTEXT: _CONTEXT, EXPERT: _EXPERT, EXPERT_DATA: _DATA, FSDP: _DATA, DATA: _DATA}
_POINT_TO_POINT = ("send", "recv")


def parts_of(layout: ModelLayout, timeline: Timeline, step_ns: float, operations: Operations) -> dict[str, float]:
    """Nanoseconds of each part of a steady step; they add up to it."""
    stages = [_stage(layout, each, step_ns) for each in timeline.cohorts]
    parts = max(stages, key=lambda stage: stage[FORWARD] + stage[BACKWARD])
    if layout.recompute != NONE and operations.hardware > operations.forward:
        again = (operations.hardware - operations.model) / (operations.hardware - operations.forward)
        parts[AGAIN], parts[BACKWARD] = again * parts[BACKWARD], (1.0 - again) * parts[BACKWARD]
    return {name: parts[name] for name in PARTS if parts.get(name)}


def _stage(layout: ModelLayout, played: CohortTimeline, step_ns: float) -> dict[str, float]:
    """Of the first rank of a cohort."""
    program = played.cohort.program
    steps = max(1, len(program.steps))
    window = round(step_ns * steps)
    start, end, moving = (np.asarray(times[:, :1, 0]) for times in (played.work_start_ns, played.work_end_ns, played.moving_ns))
    length = np.array([window], dtype=np.int64)
    communicating = program.works.kind == WorkKind.COLLECTIVE
    computing = fold(start, end, length).keep(np.flatnonzero(~communicating))
    by_phase = np.bincount(_phases(program)[~communicating], weights=computing.own_ns()[:, 0], minlength=len(Phase))
    result = {FORWARD: by_phase[Phase.FORWARD] + by_phase[Phase.OTHER], BACKWARD: by_phase[Phase.BACKWARD]}
    result |= {OPTIMIZER: by_phase[Phase.OPTIMIZER], AGAIN: 0.0}
    # Each kind of exchange counts for what it shows beside computing and the kinds before it; waiting for a peer comes last.
    uses, moved = _uses(layout, program), fold(np.maximum(start, moving), end, length)
    shown = [np.flatnonzero(~communicating)]
    covered = float(by_phase.sum())
    for name in WIRES:
        shown.append(np.flatnonzero(uses == WIRES.index(name)))
        reached = float(moved.keep(np.concatenate(shown)).covered_ns()[0])
        result[name], covered = reached - covered, reached
    busy = float(fold(start, end, length).covered_ns()[0])
    result |= {BUBBLE: max(busy - covered, 0.0), IDLE: max(window - max(busy, covered), 0.0)}
    return {name: float(value) / steps for name, value in result.items()}


def _phases(program: Program) -> npt.NDArray[np.int64]:
    """Per work."""
    call = program.works.call
    op = np.where(call >= 0, program.calls.op[call], -1)
    return np.where(op >= 0, program.ops.phase[op], Phase.OTHER).astype(np.int64)


def _uses(layout: ModelLayout, program: Program) -> npt.NDArray[np.int64]:
    """Per work, the index of what its exchange is for; -1 where it is none."""
    named: Mapping[str, str] = {
        GROUP if len(sets[0]) == layout.parallel.ranks else name: _USES[name]
        for name, sets in groups_of(layout.parallel).items()
    }
    of_collective = []
    for collective in program.collectives:
        use = _PIPELINE if collective.kind in _POINT_TO_POINT else named.get(collective.group, _DATA)
        if collective.kind == "all_to_all" and layout.parallel.expert > 1:
            use = _EXPERT
        of_collective.append(WIRES.index(use))
    return np.array([*of_collective, -1], dtype=np.int64)[program.works.collective]
