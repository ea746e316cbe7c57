"""What would make a step fit: each change is made to its config and its memory is predicted before it is said."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steptime._build.transformer.recompute import FULL
from steptime._platforms.platform import Platform
from steptime._program.workload import Workload
from steptime._report.words import size_words
from steptime._shard.configs import BuildConfig
from steptime._sim.modelled.prediction import memory_of
from steptime._sim.prediction import PredictedStep
from steptime.errors import InputError

# A batch is halved so often at most.
_HALVINGS = 8


def helps(step: PredictedStep, platform: Platform) -> tuple[str, ...] | None:
    """Changes of a config that fit; None where there is no config to change."""
    if not isinstance(step.workload.rebuild, BuildConfig):
        return None
    trial = _Trial(step.workload, platform, int(step.memory["capacity_bytes"]))
    halvings = trial.halvings()
    found = [trial.recomputed(), trial.sharded()]
    if halvings is not None:
        found += [trial.accumulated(halvings), trial.smaller(halvings)]
    return tuple(text for text in found if text)


@dataclass(frozen=True)
class _Trial:
    workload: Workload
    platform: Platform
    limit_bytes: int

    @property
    def batch(self) -> int:
        """Samples of a step; 0 where that is not known."""
        return self.workload.description.batch or 0

    def halvings(self) -> int | None:
        """How often the batch has to be halved, found by halving the number of times; None where no such batch fits."""
        ways = self.workload.description.parallelism or {}
        copies = math.prod(ways.get(kind, 1) for kind in ("data", "fsdp"))
        low, high = 0, min(_HALVINGS, (self.batch // copies).bit_length() - 1)
        if high < 1 or self._bytes(batch=self.batch >> high) is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._bytes(batch=self.batch >> middle) is not None else (middle, high)
        return high

    def recomputed(self) -> str:
        """Activations computed again in backward."""
        return self._said("activation checkpointing", {"recompute": FULL})

    def accumulated(self, halvings: int) -> str:
        """As many micro-batches as leave each of them a batch that fits."""
        return self._said("as many micro-batches, one after another", {"gradient_accumulation": 1 << halvings})

    def sharded(self) -> str:
        """Copies that share what they keep."""
        ways = self.workload.description.parallelism or {}
        copies = ways.get("data", 1)
        if copies < 2 or "fsdp" in ways or "tables" in ways:
            return ""
        meaning = "parameters, gradients and optimizer state shared by the copies"
        return self._said(meaning, {"parallel.data": 1, "parallel.fsdp": copies})

    def smaller(self, halvings: int) -> str:
        """The batch halved so often, or half as much more where that fits too."""
        for batch in (3 * self.batch >> halvings + 1, self.batch >> halvings):
            nbytes = self._bytes(batch=batch)
            if nbytes is not None:
                return f"--batch {batch} (of {self.batch:,} now): {size_words(nbytes)}"
        return ""

    def _said(self, meaning: str, settings: Mapping[str, Any]) -> str:
        nbytes = self._bytes(settings=settings)
        options = " ".join(f"--set {key}={value}" for key, value in settings.items())
        return "" if nbytes is None else f"{options} ({meaning}): {size_words(nbytes)}"

    def _bytes(self, **changes: Any) -> int | None:
        """What the fullest rank then needs, where that fits."""
        try:
            changed = self.workload.varied(**changes)
        except InputError:  # a batch that ranks do not divide, a key that this kind of config does not have
            return None
        needed = memory_of(changed, self.platform).get("peak_bytes") if changed.world_size == self.workload.world_size else None
        return None if needed is None or needed > self.limit_bytes else int(needed)
