"""How much time a run may still take, and what it has to show for it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field


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
