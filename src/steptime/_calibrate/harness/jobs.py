"""Where a measuring job is: calibration is part of the package, the others are in the lab."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def job_module(job: str) -> ModuleType:
    """The module with a job's `run` and `work`."""
    return import_module("steptime._calibrate.calibrate" if job == "calibrate" else f"steptime_lab.measure.{job}")
