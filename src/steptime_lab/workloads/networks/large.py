"""Decoders divided over ranks by pipelines, contexts, experts, shards and tensors (`steptime_lab.workloads.large`)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from steptime_lab.workloads.case import Case, GroupLike, Step, Workload
from steptime_lab.workloads.large import context, experts, pipelines, sharded
from steptime_lab.workloads.large.settings import Batch

if TYPE_CHECKING:
    from steptime._lookups.statistics import Statistics

SMALL = {"layers": 4, "width": 32, "heads": 4, "inner": 64, "vocabulary": 97, "tokens": 16}


class LargeStep:
    """One rank's step."""

    batches = 1
    spare_bytes = 0

    def __init__(self, step: Callable[[], None]) -> None:
        self._step: Callable[[], None] | None = step

    def __call__(self) -> None:
        """Queues the next step."""
        assert self._step is not None
        self._step()

    def lookups(self, iteration: int) -> list[Statistics]:
        """No tables, no lookups."""
        del iteration
        return []

    def close(self) -> None:
        """Frees the model; hooks of wrappers hold it in circles."""
        self._step = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def training_step(case: Case, rank: int, device: torch.device) -> Callable[[], None]:
    """The step of one rank as a plain function, in a job that has its process group."""
    config: dict[str, Any] = {"precision": case.precision, **case.config}
    how = next((how for name, how in _KINDS.items() if name in config), sharded.step_of)
    return how(config, Batch(rank, case.ranks, case.local_batch), device)


_KINDS = {"pipeline": pipelines.step_of, "context": context.step_of, "experts": experts.step_of}


def build(case: Case, group: GroupLike, device: torch.device) -> Step:
    """The step of `group.rank`."""
    return LargeStep(training_step(case, group.rank, device))


def small_cases(ranks: int) -> tuple[Case, ...]:
    """A tiny one of every way to divide a decoder."""
    if ranks == 1:
        return (Case("large", "large-small-r1", dict(SMALL), "fp32", 2, 1),)
    kinds: dict[str, dict[str, Any]] = {
        "pipeline": {"pipeline": ranks, "schedule": "1f1b", "micro_batches": 2 * ranks, "layers": ranks},
        "ulysses": {"context": ranks, "exchange": "ulysses"},
        "ring": {"context": ranks, "exchange": "ring"},
        "experts": {"experts": 2 * ranks, "top": 2},
        "tensor": {"tensor": ranks, "rotary": True},
    }
    return tuple(
        Case("large", f"large-small-{kind}-r{ranks}", {**SMALL, **config}, "fp32", 2 * ranks, ranks)
        for kind, config in kinds.items()
    )


WORKLOAD = Workload("large", build, small_cases)
