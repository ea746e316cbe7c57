"""Ranks that issue alike are played together, and end when they end played one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import steptime
from steptime._platforms.platform import Platform
from steptime._sim.core import schedule, simulate
from steptime._sim.modelled.step import modelled

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "dlrm_heavy4.toml"


def test_ranks_played_together_end_as_those_played_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    step = modelled(steptime.read(CONFIG), Platform.load("4xh200-quarter-loopback"))
    found = schedule.find_schedule(step.cohorts(), queue_depth=1024, repeated=True)
    assert schedule.stacks(found) == ((0, 1, 2, 3),)
    assert len(schedule.fused(found)) < len(found.steps)
    together = step.play().steady
    for module in (schedule, simulate):
        monkeypatch.setattr(module, "stacks", lambda given: tuple((cohort,) for cohort in range(len(given.blocks))))
    schedule.fused.cache_clear()
    apart = step.play().steady
    schedule.fused.cache_clear()
    assert together.period_ns == apart.period_ns
    for some, other in zip(together.timeline.cohorts, apart.timeline.cohorts, strict=True):
        for name in ("call_start_ns", "call_end_ns", "work_start_ns", "work_end_ns"):
            assert np.array_equal(getattr(some, name), getattr(other, name))
