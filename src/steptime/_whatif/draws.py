"""Draws of what pieces of a step may take instead, by which the interval of a saving is found: the scenarios of a cohort."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np

from steptime._ops.families import WorkFamily, work_families
from steptime._sim.core.timing import Cohort
from steptime._whatif.edits import Floats

DRAWS = 32
# Of the logarithm of a ratio. Device times of architectures that models were not fitted on have a p90 of 8 to 14 %, a ratio of
# two models root two times that; collectives and kernels beside each other slow each other by 5 to 20 % (docs/accuracy.md,
# docs/collectives.md).
LEAST_ERROR, MOST_ERROR = 0.1, 0.15


def normal(group: str) -> Floats:
    """Draws of a standard normal, the same for a group in every answer."""
    return np.random.default_rng(zlib.crc32(f"what if {group}".encode())).standard_normal(DRAWS)


def with_draws(cohort: Cohort, error: float) -> Cohort:
    """A scenario per draw: the host, every family and every kind of collective, each off by so much (of its logarithm)."""
    timing, program = cohort.timing, cohort.program
    host = np.exp(error * normal("host"))
    names = [family.label for family in WorkFamily] + [each.kind for each in program.collectives]
    drawn = np.exp(error * np.stack([normal(name) for name in names]))
    row = np.where(program.works.collective >= 0, len(WorkFamily) + program.works.collective, work_families(program))
    changes = {
        "gap_ns": timing.gap_ns[:, :, :1] * host,
        "call_ns": timing.call_ns[:, :, :1] * host,
        "duration_ns": timing.duration_ns[:, :, :1] * drawn[row][:, None, :],
    }
    whole: dict[str, Any] = {name: np.rint(values).astype(np.int64) for name, values in changes.items()}
    return replace(cohort, timing=replace(timing, **whole))


def has_draws(cohort: Cohort) -> bool:
    """Whether the scenarios of a cohort are draws."""
    return int(cohort.timing.duration_ns.shape[2]) == DRAWS


def with_errors(cohort: Cohort, error: Floats) -> Cohort:
    """Works off by the error of what is said of each (0: nothing), a family together, where the cohort has draws.

    What is said is a ratio: of a model known to err more, both sides err alike; of one that errs little, they do not.
    """
    if not has_draws(cohort):
        return cohort
    duration_ns = cohort.timing.duration_ns
    of_family = np.stack([normal(f"ratio of {family.label}") for family in WorkFamily])[work_families(cohort.program)]
    each = np.where(error > 0, np.clip(error, LEAST_ERROR, MOST_ERROR), 0.0)
    drawn = np.exp(each[:, None, None] * of_family[:, None, :])
    return replace(cohort, timing=replace(cohort.timing, duration_ns=np.rint(duration_ns * drawn).astype(np.int64)))
