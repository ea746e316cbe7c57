"""Tries a case on every rank together: what fails on one is skipped by all, and nothing of it stays behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from steptime._calibrate.harness.budget import Progress
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import Session
from steptime._calibrate.harness.watchdog import watchdog
from steptime.errors import InputError
from steptime_lab.measure.crash_marker import CrashMarker

# A case takes a few seconds; one that takes this long hangs.
CASE_S = 60.0
# The others are at most a build behind the rank that failed; when they do not come, they wait for it in a collective.
_FAILED_S = 20.0
_FLUSH_S = 2.0

Result = TypeVar("Result")


def reason_of(error: Exception) -> str:
    """Why a case was not measured, in few words, the same for every case it happened to."""
    if type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error):
        return "does not fit into memory"
    first = next(iter(str(error).strip().splitlines()), "")[:120]
    return first if isinstance(error, InputError) else f"{type(error).__name__}: {first}"


@dataclass
class Attempts:
    """The cases of one group of ranks, one after another."""

    group: Group
    session: Session
    marker: CrashMarker
    progress: Progress
    case_s: float = CASE_S
    reserve_s: float = 0.0  # for what comes after the cases
    flushed_at: float = field(default_factory=time.monotonic)

    def time_left(self, need_s: float = 1.0) -> bool:
        """Whether there is time for another one; every rank hears the same."""
        return bool(self.group.decide(int(self.session.budget.left_s() > need_s + self.reserve_s)))

    def attempt(self, case: str, work: Callable[[], Result], *, count: bool = True) -> Result | None:
        """What `work` gives if it does so on every rank; else None, and the case counts as skipped, unless `count` says no."""
        if self.group.rank == 0:
            self.marker.begin(case)
        with watchdog(self.case_s, case, self.session):
            result, reason = _tried(work)
            if reason:
                with watchdog(_FAILED_S, f"the other ranks, having failed at {case} ({reason})", self.session):
                    self.group.all_agree(False)
            elif not self.group.all_agree(True):
                result, reason = None, "failed on another rank"
            if reason:
                if count:
                    self.progress.skip(reason)
                forget()
                free(self.group)
        self._flush_now_and_then()
        return result

    def _flush_now_and_then(self) -> None:
        # A flush asks for the clock since the one before, and rows want that of their own time.
        if self.session.store.waiting() and time.monotonic() - self.flushed_at > _FLUSH_S:
            self.session.store.flush()
            self.flushed_at = time.monotonic()

    def close(self) -> None:
        """Everything went as it should: nothing is in flight, every row is stored."""
        self.session.store.flush()
        self.group.barrier()
        if self.group.rank == 0:
            self.marker.end()
        left = self.progress.total - self.progress.done
        if left > 0:
            self.progress.skip("no time left", left)
        self.progress.close()


def _tried(work: Callable[[], Result]) -> tuple[Result | None, str]:
    # The error ends here: its traceback would keep the tensors of the failed case.
    try:
        return work(), ""
    except Exception as error:
        return None, reason_of(error)


def forget() -> None:
    """Keeps no part of a model for later cases."""
    from steptime_lab.workloads.networks.dlrm import forget_dense

    forget_dense()


def free(group: Group) -> None:
    """Lets go of memory that nothing uses. Raises where the device is beyond use: a fresh process has to go on."""
    gc.collect()
    group.synchronize()
    if group.device_name.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()
