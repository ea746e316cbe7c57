"""Groups of ranks that try cases together, leave word of what they are at, and are started again when one ends them."""

from __future__ import annotations

import gc
import json
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import Layout, RanksError, mps, run_ranks
from steptime._calibrate.harness.session import Budget, Progress, Session, watchdog
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class CrashMarker:
    """The marker of one rank, or of a group whose rank 0 writes it, in a folder of measurements."""

    folder: Path
    group: str  # as in timed4

    @property
    def file(self) -> Path:
        """Where the marker is."""
        return self.folder / f"running_{self.group}.txt"

    def begin(self, case: str) -> None:
        """That case is tried from now on."""
        self.file.write_text(case, encoding="utf-8")

    def end(self) -> None:
        """Nothing is tried."""
        self.file.unlink(missing_ok=True)

    def take(self) -> str:
        """The case that was tried when a group died, once: asking again says nothing. Empty where none was."""
        try:
            case = self.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            case = ""
        self.end()
        return case


@dataclass(frozen=True, slots=True)
class AvoidList:
    """Cases of a job that ended a process in a folder's runs. Every rank has a marker; the parent gathers them."""

    folder: Path
    job: str

    def marker(self, rank: int) -> CrashMarker:
        """Of one rank."""
        return CrashMarker(self.folder, f"{self.job}_rank{rank}")

    def forget_markers(self) -> None:
        """What an interrupted run was trying did not end it."""
        for marker in self._markers():
            marker.end()

    def add_crashed(self) -> bool:
        """Adds the cases whose markers were left behind; whether there are any."""
        return self.add(marker.take() for marker in self._markers())

    def add(self, cases: Iterable[str]) -> bool:
        """Adds cases; whether there are any."""
        crashed = sorted(set(cases) - {""})
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(case) + "\n" for case in crashed)
        return bool(crashed)

    def cases(self) -> frozenset[str]:
        """What is not tried again."""
        if not self._file.exists():
            return frozenset()
        return frozenset(str(json.loads(line)) for line in self._file.read_text(encoding="utf-8").splitlines())

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.job}.avoid"

    def _markers(self) -> list[CrashMarker]:
        prefix = f"running_{self.job}_rank"
        ranks = sorted(int(file.stem.removeprefix(prefix)) for file in self.folder.glob(f"{prefix}*.txt"))
        return [self.marker(rank) for rank in ranks]


class SharedMps:
    """Starting one takes seconds, so that groups share it; clients that were killed can leave it useless."""

    def __init__(self, session: Session, options: Options) -> None:
        self._session = session
        self._needed = options.share_gpu and options.device == "cuda" and max(options.ranks) > 1
        self._running: AbstractContextManager[dict[str, str]] | None = None
        self._environment: dict[str, str] | None = None

    def __enter__(self) -> SharedMps:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def environment(self, ranks: int) -> dict[str, str] | None:
        """What a group of so many ranks needs to find it; None where it needs none."""
        return self._environment if ranks > 1 else None

    def renew(self) -> None:
        """Ends it and starts another."""
        self._stop()
        self._start()

    def _start(self) -> None:
        if self._needed:
            self._running = mps()
            self._environment = self._running.__enter__()

    def _stop(self) -> None:
        running, self._running, self._environment = self._running, None, None
        if running is None:
            return
        try:
            running.__exit__(None, None, None)
        except (subprocess.TimeoutExpired, OSError) as error:
            self._session.warn(f"the CUDA MPS daemon did not end ({error}); another one is started beside it")


# How often a group that died is started again.
RESTARTS = 4


def run_avoiding(
    session: Session,
    module: str,
    layout: Layout,
    plan: Mapping[str, Any],
    avoid: AvoidList,
    *,
    attempts: int,
    limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs a group until it ends well, each time without the calls that ended it before; what was measured is kept."""
    avoid.forget_markers()
    for _ in range(attempts):
        left_s = session.budget.left_s()
        if left_s <= 0:
            return
        try:
            run_ranks(module, layout, plan, limit_s=min(limit_s or left_s, left_s) + 30.0, environment=environment)
            return
        except RanksError as error:
            session.warn(f"{error}; what it had measured is kept")
            if not avoid.add_crashed():
                return


@dataclass(frozen=True)
class CaseGroup:
    """Ranks that go through named cases together; rank 0 marks the case they are at."""

    session: Session
    module: str
    layout: Layout
    daemon: SharedMps
    marker: CrashMarker
    environment: Mapping[str, str]
    grace_s: float  # the last case may begin just before the end

    def run(
        self,
        budget: Budget,
        due: Callable[[], Sequence[str]],
        plan: Callable[[Sequence[str], int], Mapping[str, Any]],
        skipped: set[str],
        names: Callable[[str], Collection[str]] = lambda case: (case,),
    ) -> None:
        """Until nothing is due or time is up. A case that was running when the group died joins those skipped this time.

        `plan` gets the names that are due and how often the group was started; `names` are those of a marked case.
        """
        for start in range(1 + RESTARTS):
            crashed = self.marker.take()
            if crashed:
                self.session.warn(f"{self.marker.group}: {crashed} was running when its ranks ended; it is skipped this time")
                skipped.update(names(crashed))
            waiting = [name for name in due() if name not in skipped]
            if not waiting or budget.left_s() <= 0:
                return
            try:
                run_ranks(
                    self.module, self.layout, plan(waiting, start), limit_s=budget.left_s() + self.grace_s,
                    environment=self.environment, daemon=self.daemon.environment(self.layout.ranks),
                )  # fmt: skip
                return
            except RanksError as error:
                self.session.warn(str(error))
                self.daemon.renew()
            except KeyboardInterrupt:
                # The case did nothing wrong: the next run begins with it.
                self.marker.end()
                raise


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
        # A flush asks for the clock since the one before, and rows want that of their own time.
        if self.session.store.waiting() and time.monotonic() - self.flushed_at > _FLUSH_S:
            self.session.store.flush()
            self.flushed_at = time.monotonic()
        return result

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
