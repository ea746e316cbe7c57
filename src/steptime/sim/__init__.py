"""Plays the programs of all ranks: when everything starts and ends, and how long a step takes."""

from steptime.sim.simulate import simulate
from steptime.sim.timeline import CohortTimeline, Timeline
from steptime.sim.timing import LONG_AGO, QUEUE_DEPTH, Cohort, Nanoseconds, Timing

__all__ = ["LONG_AGO", "QUEUE_DEPTH", "Cohort", "CohortTimeline", "Nanoseconds", "Timeline", "Timing", "simulate"]
