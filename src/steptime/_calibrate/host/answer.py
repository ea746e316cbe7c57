"""`Answer`: what the bursts of one probe have said so far, with the host's speed around each."""

from __future__ import annotations

from typing import Any

from steptime._calibrate.host.probe import Probe, Times
from steptime._calibrate.host.reference import Speed


class Answer:
    """Of a probe, or of the one that was asked otherwise; `launches` per call where a recording told."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.launches: float | None = None
        self._times: tuple[list[float], ...] = tuple([] for _ in probe.kinds)
        self._speeds: tuple[list[Speed], ...] = tuple([] for _ in probe.kinds)

    def add(self, times: Times, speed: Speed) -> None:
        """One pass: a list of times per kind, all of them taken at about this speed."""
        for kept, speeds, values in zip(self._times, self._speeds, times, strict=True):
            kept.extend(values)
            speeds.extend([speed] * len(values))

    def rows(self) -> list[dict[str, Any]]:
        """One per kind, less what is the same for all rows of a process; none before the first pass."""
        return [
            {
                "kind": kind, "op": self.probe.op, "call": self.probe.call, "source": self.probe.source,
                "phase": self.probe.phase, "launches": self.launches, "times_ns": times,
                "reference_cpu_ns": [speed.cpu_ns for speed in speeds],
                "reference_launch_ns": [speed.launch_ns for speed in speeds],
            }
            for kind, times, speeds in zip(self.probe.kinds, self._times, self._speeds, strict=True) if times
        ]  # fmt: skip
