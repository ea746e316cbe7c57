"""What a measurement has: time, progress, a store of rows, a watchdog; and the setting of a pass."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steptime._calibrate.harness.conditions import ClockReader, completed
from steptime._measurements.recipe import Recipe
from steptime._measurements.store import Store
from steptime.errors import printable


@dataclass(frozen=True, slots=True)
class Budget:
    """A deadline that processes of one run share (wall clock, so that it can be handed on)."""

    ends_at: float

    @classmethod
    def of_minutes(cls, minutes: float) -> Budget:
        """From now on."""
        return cls(time.time() + 60 * minutes)

    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.ends_at - time.time())

    def part(self, fraction: float) -> Budget:
        """A budget that ends when this fraction of what is left has passed."""
        return Budget(time.time() + fraction * self.left_s())


@dataclass
class Progress:
    """One line on stderr every few seconds: what is measured, how far it is, how much time is left."""

    what: str
    total: int
    budget: Budget
    quiet: bool = False
    every_s: float = 5.0
    done: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    _said_at: float = 0.0

    def step(self, count: int = 1) -> None:
        """So many more cases are done."""
        self.done += count
        if time.monotonic() - self._said_at >= self.every_s:
            self._said_at = time.monotonic()
            self._say("")

    def skip(self, reason: str, count: int = 1) -> None:
        """So many cases were not measured, and why."""
        self.skipped[reason] = self.skipped.get(reason, 0) + count
        self.done += count

    def close(self) -> None:
        """The last line: how many were measured, how many skipped and why."""
        self._say(" (done)")

    def _say(self, end: str) -> None:
        if self.quiet:
            return
        text = "".join(f", {count} skipped: {reason}" for reason, count in sorted(self.skipped.items()))
        print(
            f"{self.what}: {self.done}/{self.total}{text}, {self.budget.left_s():.0f} s left{end}", file=sys.stderr, flush=True
        )


class LostContextError(RuntimeError):
    """What ran ended the CUDA context; only a new process can go on, without it."""


@dataclass(frozen=True)
class Setting:
    """What holds for every row of one pass."""

    share: int = 1
    others: str = "none"  # none | same | idle | streaming
    repeats: int = 3
    seed: int = 0


def clock_file(folder: Path, recipe: Recipe) -> Path:
    """Where a run's clock samples go."""
    return folder / f"clocks-{recipe.run}.csv"


@dataclass(frozen=True)
class Session:
    """One process of a run. `to_plan` and `from_plan` carry it from the parent to its workers."""

    folder: Path
    recipe: Recipe
    budget: Budget
    store: Store
    rank: int = 0
    warnings: list[str] = field(default_factory=list)  # what was said so far

    @classmethod
    def start(cls, folder: Path, recipe: Recipe, minutes: float) -> Session:
        """The parent's session."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, recipe, Budget.of_minutes(minutes), Store(folder, recipe, "parent"))

    def to_plan(self, **more: Any) -> dict[str, Any]:
        """The plan of a worker group: where rows go, their recipe, when to stop, and whatever the job adds."""
        return {
            "folder": str(self.folder.absolute()),
            "recipe": self.recipe.to_dict(),
            "ends_at": self.budget.ends_at,
            **more,
        }

    @classmethod
    def from_plan(cls, plan: Mapping[str, Any], rank: int) -> Session:
        """A worker's session; process ids tell groups of one run apart."""
        folder, recipe = Path(plan["folder"]), completed(Recipe.from_dict(plan["recipe"]))
        clock = ClockReader(clock_file(folder, recipe))
        store = Store(folder, recipe, f"p{os.getpid()}", rank=rank, clock_mhz=clock)
        return cls(folder, recipe, Budget(float(plan["ends_at"])), store, rank)

    def progress(self, what: str, total: int) -> Progress:
        """A progress line; only rank 0 speaks."""
        return Progress(what, total, self.budget, quiet=self.rank != 0)

    def warn(self, message: str) -> None:
        """Says what is not as it should be, once, on stderr."""
        self.warnings.append(message)
        if self.rank == 0:
            print(f"steptime: warning: {printable(message)}", file=sys.stderr, flush=True)


# The exit code of a rank that gave up waiting.
GAVE_UP = 17


@contextmanager
def watchdog(seconds: float, what: str, session: Session) -> Iterator[None]:
    """Within the block, waits so long at most; then keeps the rows there are and ends the process, whatever it hangs in."""

    def give_up() -> None:
        print(f"steptime: rank {session.rank} gave up on {what} after {seconds:.0f} s", file=sys.stderr, flush=True)
        try:
            session.store.flush()
        finally:
            os._exit(GAVE_UP)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
