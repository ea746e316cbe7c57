"""The step that stands for all plans of a model: built, asked and played once, under a plan that gives every rank tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.workload import dlrm_workload
from steptime._models.collectives.overlap import Overlap
from steptime._platforms.calibration import Calibration
from steptime._platforms.platform import Platform
from steptime._sim.composed import BACKWARD, EXCHANGE, FORWARD, BesideCollectives, ComposedStep
from steptime._sim.modelled.step import modelled

# On more ranks the tables of the step that stands for all are alike, so that all ranks run one program.
_MOST_PROGRAMS = 8


def composed_step(model: Dlrm, platform: Platform, ranks: int, calibration: Calibration) -> ComposedStep:
    """A model's step on so many ranks, whatever its plan."""
    like = model if ranks <= min(_MOST_PROGRAMS, len(model.tables)) else _alike(model, ranks)
    built = dlrm_workload(like, ranks, {table.name: index % ranks for index, table in enumerate(like.tables)})
    step = modelled(built, platform)
    settled, _ = step.steady(calibration)
    # A rank whose tables look nothing up has nothing to update either.
    both = [len({FORWARD, BACKWARD} & set(program.groups)) for program in step.programs]
    index = both.index(max(both))
    issued, played = step.programs[index], settled.timeline.cohorts[index]
    slowdowns = step.slowdowns(settled, calibration)[index][:, 0, 0]
    exchanges = [work for work, number in enumerate(issued.estimate) if issued.groups[number] == EXCHANGE]
    overlap = Overlap() if platform.fabric is None else Overlap.load(platform.fabric.limits.name)
    beside = BesideCollectives(overlap, platform.device.limits.share, ())
    return ComposedStep.of(issued, played, slowdowns[exchanges].tolist(), beside)


def _alike(model: Dlrm, ranks: int) -> Dlrm:
    """As many tables on every rank, all like the one in the middle, with as many columns in all but for rounding."""
    each = max(1, round(len(model.tables) / ranks))
    dims = np.array([table.dim for table in model.tables])
    dim = int(dims[0]) if model.interaction == "dot" else max(1, round(float(dims.sum()) / (each * ranks)))
    looked_up = [table for table in model.tables if table.pooling_factor > 0] or model.tables
    lookups = sorted(looked_up, key=lambda table: table.pooling_factor * table.dim)
    middle = replace(lookups[len(lookups) // 2], dim=dim)
    return replace(model, tables=tuple(replace(middle, name=f"like{place}") for place in range(each * ranks)))
