"""`Session`: what a measuring process works with: where rows go, how long it may take, what to say."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steptime._calibrate.harness.budget import Budget, Progress
from steptime._calibrate.harness.conditions import ClockReader, completed
from steptime._measurements.recipe import Recipe
from steptime._measurements.store import Store
from steptime.errors import printable


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
