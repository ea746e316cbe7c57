"""Random DLRM tasks after the published ones, scaled to a quarter of a large GPU: steps of 3 to 40 ms.

Published: 20 tasks a platform, for each of two populations 5 *heavy* (only tables with at least 20 lookups a sample) and then
5 *ordinary* ones (any table with lookups); 13 * N * 0.7 to 13 * N * 1.3 tables on N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from steptime._build.dlrm.model import Dlrm, Table
from steptime._lookups.populations import PRODUCTION_2021, PRODUCTION_2022, Population
from steptime._shard.search.draws import HEAVY, MOST_BYTES_PER_RANK, Draws
from steptime._shard.task.unequal import further_tasks, sharding_tasks

__all__ = ["Variant", "further_tasks", "random_task", "sharding_tasks", "step_batches", "step_tasks"]

_MOST_POOLING = 200.0  # a longer bag alone would make a step of the testbed too long
_LEAST_POOLING = 0.05
_ROWS = (1e3, 5e6)
_DIMS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Variant:
    """What is chosen for a task, not drawn."""

    heavy: bool
    lookup: str = "table_batched"
    optimizer: str = "sgd"
    interaction: str = "cat"  # `dot` makes all dims equal
    loss: str = "bce"
    population: Population = PRODUCTION_2021


def step_batches(ranks: int) -> tuple[int, ...]:
    """Global batch sizes that every step task is measured at: from host-bound to GPU-bound."""
    return tuple(ranks * local for local in (256, 512, 1024, 2048))


@cache
def step_tasks(ranks: int) -> tuple[Dlrm, ...]:
    """The 20 tasks of the step study: both lookups, optimisers and interactions among heavy and ordinary ones."""
    return tuple(random_task(seed, _variant(seed), ranks) for seed in range(20))


def random_task(seed: int, variant: Variant, ranks: int) -> Dlrm:
    """The task of a seed; the same arguments always give the same task."""
    draws = Draws(seed * 1000 + ranks)
    model = _drawn(f"task{seed:02d}-{'heavy' if variant.heavy else 'ordinary'}", draws, variant, ranks)
    while sum(table.nbytes for table in model.tables) > MOST_BYTES_PER_RANK * ranks:
        model = _drawn(model.name, draws, variant, ranks)
    return model


def _variant(number: int) -> Variant:
    """Groups of five: 2021 heavy, 2021 ordinary, 2022 heavy, 2022 ordinary; the other choices alternate within."""
    group, place = divmod(number, 5)
    batched = (number + group // 2) % 2 == 0
    return Variant(
        heavy=group % 2 == 0,
        lookup="table_batched" if batched else "embedding_bag",
        optimizer="rowwise_adagrad" if place in (2, 3) else "sgd",
        interaction="dot" if place in (1, 4) else "cat",
        loss="mse" if place == 4 else "bce",
        population=PRODUCTION_2021 if group < 2 else PRODUCTION_2022,
    )


def _drawn(name: str, draws: Draws, variant: Variant, ranks: int) -> Dlrm:
    # One `nn.EmbeddingBag` per table: with the published number of them every step would be bound by its host.
    ends = (int(13 * ranks * 0.7), int(13 * ranks * 1.3) - 1) if variant.lookup == "table_batched" else (8, 20)
    count = draws.count(*ends)
    dims = [draws.pick(_DIMS)] * count if variant.interaction == "dot" else [draws.pick(_DIMS) for _ in range(count)]
    pooling = (HEAVY if variant.heavy else _LEAST_POOLING, _MOST_POOLING)
    tables = tuple(Table(f"t{i:02d}", dim, draws.stream(variant.population, _ROWS, pooling)) for i, dim in enumerate(dims))
    # The published MLPs of this model (512-1024-256-128, 1024-512-256-1), or half as wide.
    narrower = draws.pick((1, 2))
    return Dlrm(
        name=name,
        batch=step_batches(ranks)[0],
        dense_features=512,
        bottom=(1024 // narrower, 256 // narrower, dims[0] if variant.interaction == "dot" else 128),
        top=(1024 // narrower, 512 // narrower, 256 // narrower, 1),
        tables=tables,
        lookup=variant.lookup,
        optimizer=variant.optimizer,
        interaction=variant.interaction,
        loss=variant.loss,
    )
