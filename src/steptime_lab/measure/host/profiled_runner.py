"""`ProfiledRunner`: runs probes under a profiler, and remembers a probe that ends its process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from steptime._calibrate.host.probe import Probe
from steptime._calibrate.host.runner import Runner
from steptime_lab.measure.crash_marker import CrashMarker
from steptime_lab.measure.host.marked_bench import MarkedBench
from steptime_lab.measure.host.recording import Recording, recording


@dataclass
class ProfiledRunner(Runner):
    """Its `mode` names the profiler; `marker` holds the probe that runs."""

    bench: MarkedBench
    marker: CrashMarker | None = None
    _loops: dict[int, tuple[int, int]] = field(default_factory=dict)  # probe -> its loop in the recording, the calls of that

    @contextmanager
    def around(self, block: Mapping[int, Probe]) -> Iterator[None]:
        """One recording of a block; how much each probe launched is known when it has ended."""
        bench = self.bench
        bench.marking = self.mode == "cuda" and bench.cuda and all(probe.kinds == ("op",) for probe in block.values())
        bench.loops = 0
        self._loops = {}
        records = Recording()
        try:
            with recording(self.mode, read=bench.marking) as records:
                yield
        finally:
            counts = records.launches()
            if bench.marking and len(counts) == bench.loops:
                for number, (loop, calls) in self._loops.items():
                    self._results[number].launches = counts[loop - 1] / calls

    def starts(self, probe: Probe) -> None:
        """Notes the probe that comes next."""
        if self.marker is not None:
            self.marker.begin(probe.name)

    def ran(self, number: int) -> None:
        """Notes which loop of the recording the probe was."""
        self._loops[number] = self.bench.loops, self.bench.calls_made
