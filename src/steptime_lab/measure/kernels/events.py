"""The profiler's kernel times against CUDA events: the same calls, queued back to back behind a kernel that waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from steptime._calibrate.harness.session import Session
from steptime._calibrate.ops.arguments import Prepared
from steptime_lab.measure.kernels.cases import Case, draw_of
from steptime_lab.measure.kernels.executor import COLD, Executor

# Of the calls long enough that the gaps between launches do not matter.
SAMPLE = 0.03
_LONG_ENOUGH_NS = 20_000
# What fits the launch queue (about 1,024) with room for launches nobody counted.
_LAUNCHES = 600
_MOST_RUNS = 30
# An H200 counts at most so many cycles in a second; a slower device waits longer, which does no harm.
_CYCLES_PER_S = 2.0e9
_LONGEST_WAIT_S = 0.05


@dataclass
class Sample:
    """Rows kept back until the process profiles no more; then their calls are timed with events too."""

    enabled: bool = True
    held: list[tuple[Case, dict[str, Any]]] = field(default_factory=list)

    def keeps(self, case: Case, row: dict[str, Any]) -> bool:
        """Takes the row where it belongs to the sample."""
        if not self.enabled or row["cache"] != COLD or float(np.median(row["times_ns"])) < _LONG_ENOUGH_NS:
            return False
        # A copy that the host waits for cannot be queued.
        on_device = all(tensor.device == "device" for tensor in case.call.tensors())
        if not on_device or draw_of(case.text, "events") >= SAMPLE:
            return False
        self.held.append((case, row))
        return True

    def release(self, executor: Executor, session: Session, cuda: bool, *, at_least_s: float = 1.0) -> None:
        """Times what is held, stores it and says how far the two ways of timing lie apart."""
        ratios = []
        for case, row in self.held:
            if session.budget.left_s() > at_least_s:
                try:
                    row["event_ns"] = event_ns(executor.prepare(case), len(row["kernel_ns"]), cuda=cuda)
                    ratios.append(row["event_ns"] / float(np.median(row["times_ns"])))
                except RuntimeError as error:
                    session.warn(f"{case.call.op} could not be timed with events: {str(error).splitlines()[0]}")
            session.store.add("kernels", row)
        self.held.clear()
        session.store.flush()
        if ratios and session.rank == 0:
            print(said(ratios), file=sys.stderr, flush=True)


def said(ratios: Sequence[float]) -> str:
    """One line about how events compare with kernel records."""
    low, middle, high = np.quantile(np.asarray(ratios), (0.1, 0.5, 0.9))
    return f"CUDA events / kernel records: median {middle:.3f} (10-90 %: {low:.3f}-{high:.3f}) over {len(ratios)} calls"


def event_ns(prepared: Prepared, kernels: int, *, cuda: bool) -> float:
    """Time per run of several in a row, each on memory of its own, so cold."""
    runs = max(3, min(_MOST_RUNS, _LAUNCHES // max(1, kernels)))
    prepared.run()
    if not cuda:
        start = time.perf_counter_ns()
        for _ in range(runs):
            prepared.run()
        return (time.perf_counter_ns() - start) / runs
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    prepared.run()
    issue_s = time.perf_counter() - start_s
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    # The host is ahead before the first run starts: what is timed is the device alone.
    wait_s = min(_LONGEST_WAIT_S, 1e-3 + 2 * runs * issue_s)
    torch.cuda._sleep(int(_CYCLES_PER_S * wait_s))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(runs):
        prepared.run()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) * 1e6 / runs
