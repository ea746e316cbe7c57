"""Plays the programs of all ranks: when everything starts and ends, how long a step takes, and why."""

from steptime._program.queues import QUEUE_DEPTH
from steptime._sim.core.simulate import simulate
from steptime._sim.core.steady import Steady, steady
from steptime._sim.core.timing import Cohort, CohortTimeline, Nanoseconds, Timeline, Timing
from steptime._sim.explain.critical_path import PathSegment, critical_path
from steptime._units import LONG_AGO

__all__ = [
    "LONG_AGO",
    "QUEUE_DEPTH",
    "Cohort",
    "CohortTimeline",
    "Nanoseconds",
    "PathSegment",
    "Steady",
    "Timeline",
    "Timing",
    "critical_path",
    "simulate",
    "steady",
]
