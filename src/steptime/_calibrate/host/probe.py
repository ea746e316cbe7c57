"""`Probe`: one thing that is asked of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steptime._calibrate.host.bench import HostBench

# One list of times per kind of the probe.
Times = Sequence[list[float]]


@dataclass(frozen=True)
class Probe:
    """What is measured, and how. One measurement may answer for several kinds (a slope and its intercept).

    `otherwise` is asked where this one cannot be run; `together`: all ranks have to run it at the same time.
    """

    kinds: tuple[str, ...]
    op: str
    measure: Callable[[HostBench], Times]
    phase: str = "other"
    call: str = ""
    source: str = "sweep"
    otherwise: Probe | None = None
    together: bool = False

    @property
    def name(self) -> str:
        """One line, for messages and for the list of probes that ended a process."""
        return f"{self.kinds[0]} {self.op} {self.call}".rstrip()

    def ways(self) -> list[Probe]:
        """This probe, then what is asked where it cannot be run."""
        return [self, *(self.otherwise.ways() if self.otherwise else ())]
