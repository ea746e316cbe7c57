"""Plays the programs of all ranks: when everything starts and ends, how long a step takes, and why."""

from steptime.graph.launch_queue import QUEUE_DEPTH
from steptime.sim.critical_path import PathSegment, critical_path
from steptime.sim.simulate import simulate
from steptime.sim.steady import Steady, steady
from steptime.sim.timeline import CohortTimeline, Timeline
from steptime.sim.timing import Cohort, Nanoseconds, Timing
from steptime.units import LONG_AGO

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
