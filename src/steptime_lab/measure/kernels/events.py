"""The profiler's kernel times against CUDA events: the same calls, queued back to back behind a kernel that waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from steptime._calibrate.harness.clock import Clock, clock_of
from steptime._calibrate.harness.session import Session
from steptime._units import NS_PER_MS
from steptime_lab.measure.kernels.bench import COLD, KernelBench
from steptime_lab.measure.kernels.cases import KernelCase, draw_of
from steptime_lab.measure.ops.arguments import PreparedCall
from steptime_lab.measurements.sets import KERNELS

# Of the calls long enough that the gaps between launches do not matter.
SAMPLE = 0.03
_LONG_ENOUGH_NS = 20_000
# What fits the launch queue (about 1,024) with room for launches nobody counted.
_LAUNCHES = 600
_MOST_RUNS = 30
_LONGEST_WAIT_NS = 50 * NS_PER_MS


@dataclass
class Sample:
    """Rows kept back until the process profiles no more; then their calls are timed with events too."""

    enabled: bool = True
    held: list[tuple[KernelCase, dict[str, Any]]] = field(default_factory=list)

    def keeps(self, case: KernelCase, row: dict[str, Any]) -> bool:
        """Takes the row where it belongs to the sample."""
        if not self.enabled or row["cache"] != COLD or float(np.median(row["times_ns"])) < _LONG_ENOUGH_NS:
            return False
        # A copy that the host waits for cannot be queued.
        on_device = all(tensor.device == "device" for tensor in case.call.tensors())
        if not on_device or draw_of(case.text, "events") >= SAMPLE:
            return False
        self.held.append((case, row))
        return True

    def release(self, bench: KernelBench, session: Session, *, at_least_s: float = 1.0) -> None:
        """Times what is held, stores it and says how far the two ways of timing lie apart."""
        ratios, clock = [], clock_of(bench.group)
        for case, row in self.held:
            if session.budget.left_s() > at_least_s:
                try:
                    row["event_ns"] = event_ns(bench.prepare(case), len(row["kernel_ns"]), clock)
                    ratios.append(row["event_ns"] / float(np.median(row["times_ns"])))
                except RuntimeError as error:
                    session.warn(f"{case.call.op} could not be timed with events: {str(error).splitlines()[0]}")
            session.store.add(KERNELS, row)
        self.held.clear()
        session.store.flush()
        if ratios and session.rank == 0:
            print(said(ratios), file=sys.stderr, flush=True)


def said(ratios: Sequence[float]) -> str:
    """One line about how events compare with kernel records."""
    low, middle, high = np.quantile(np.asarray(ratios), (0.1, 0.5, 0.9))
    return f"CUDA events / kernel records: median {middle:.3f} (10-90 %: {low:.3f}-{high:.3f}) over {len(ratios)} calls"


def event_ns(prepared: PreparedCall, kernels: int, clock: Clock) -> float:
    """Time per run of several in a row, each on memory of its own, so cold."""
    runs = max(3, min(_MOST_RUNS, _LAUNCHES // max(1, kernels)))
    prepared.run()
    clock.wait(clock.mark())
    start_ns = time.perf_counter_ns()
    prepared.run()
    issue_ns = time.perf_counter_ns() - start_ns
    clock.wait(clock.mark())
    # The host is ahead before the first run starts: what is timed is the device alone.
    clock.run_ahead(min(_LONGEST_WAIT_NS, NS_PER_MS + 2.0 * runs * issue_ns))
    first = clock.mark()
    for _ in range(runs):
        prepared.run()
    last = clock.mark()
    clock.wait(last)
    return clock.between_ns(first, last) / runs
