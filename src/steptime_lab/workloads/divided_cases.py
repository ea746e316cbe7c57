"""DLRM steps under several ways to divide the same tables: what each kind costs, and which is fastest.

`steptime measure steps --only divided` times them; they have no part in any fit. Tables and MLPs are drawn as those of the step
study, from seeds that nothing else uses. On the testbed's wire an all_reduce of a megabyte takes a millisecond, so that only
small tables are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import DATA_PARALLEL, QUAD, ROW_WISE
from steptime._lookups.populations import PRODUCTION_2021, PRODUCTION_2022, Population
from steptime._shard.rules import Machine, place
from steptime_lab.workloads.case import Case
from steptime_lab.workloads.drawn_tasks import Draws

DIVIDED = "divided"
"""What `--only` calls all of them."""

_RULE = "size_lookup_greedy"
_SEED = 19_000
_FEATURES = 64
_MOST_COPIED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Model:
    """What is chosen of a model; the rest is drawn."""

    ranks: int
    tables: int
    dims: tuple[int, ...]
    rows: tuple[float, float]
    pooling: tuple[float, float]
    samples: int  # of one rank
    plans: tuple[str, ...]
    lookup: str = "table_batched"
    optimizer: str = "sgd"
    interaction: str = "cat"
    population: Population = PRODUCTION_2021


_ALL = ("whole", "columns", "rows", "copies", "mixed")
_MODELS: Mapping[str, _Model] = {
    "few-large": _Model(2, 6, (32, 64), (2e4, 4e6), (30, 200), 8192, _ALL),
    "bags": _Model(2, 8, (32, 64), (1e3, 1e6), (5, 100), 4096, ("whole", "columns", "rows", "copies"), lookup="embedding_bag"),
    "small-and-large": _Model(4, 14, (16, 32, 64), (5e2, 3e6), (1, 100), 2048, _ALL, population=PRODUCTION_2022),
    "dot": _Model(4, 10, (32,), (5e2, 2e6), (5, 80), 1024, ("whole", "rows", "copies", "all_rows"), interaction="dot"),
    "three-giants": _Model(4, 3, (64,), (1e5, 2e6), (90, 200), 8192, ("whole", "columns", "rows"), optimizer="rowwise_adagrad"),
    "eight": _Model(8, 16, (32, 64), (5e2, 1e6), (2, 80), 512, _ALL),
}


def divided_cases(ranks: int) -> tuple[Case, ...]:
    """Those of so many ranks: every model under its plans."""
    chosen = [(name, model) for name, model in _MODELS.items() if model.ranks == ranks]
    return tuple(case for name, model in chosen for case in _cases(name, model, _SEED + list(_MODELS).index(name)))


def _cases(name: str, chosen: _Model, seed: int) -> Iterator[Case]:
    model = _drawn(name, chosen, Draws(seed))
    for rule in chosen.plans:
        plan = plan_of(rule, model.tables, chosen.ranks)
        case = f"{DIVIDED}-{name}-{rule.replace('_', '-')}-r{chosen.ranks}"
        yield Case("dlrm", case, model.to_dict(), "fp32", model.batch, chosen.ranks, plan, f"{DIVIDED}-{name}", rule)


def _drawn(name: str, chosen: _Model, draws: Draws) -> Dlrm:
    dims = [draws.pick(chosen.dims) for _ in range(chosen.tables)]
    streams = [draws.stream(chosen.population, chosen.rows, chosen.pooling) for _ in dims]
    tables = tuple(Table(f"t{at:02d}", dim, stream) for at, (dim, stream) in enumerate(zip(dims, streams, strict=True)))
    return Dlrm(
        name=f"{DIVIDED}-{name}",
        batch=chosen.ranks * chosen.samples,
        dense_features=_FEATURES,
        bottom=(256, dims[0]),
        top=(256, 64, 1),
        tables=tables,
        lookup=chosen.lookup,
        optimizer=chosen.optimizer,
        interaction=chosen.interaction,
    )


def plan_of(rule: str, tables: Sequence[Table], ranks: int) -> dict[str, Any]:
    """Whole tables by the usual rule; of these the busiest third cut by columns, the largest by rows, small ones copied."""
    placed: dict[str, Any] = dict(place(_RULE, tables, Machine(ranks)).owners())
    third = max(len(tables) // 3, 1)
    busiest = sorted(tables, key=lambda table: -table.dim * table.pooling_factor)[:third]
    largest = sorted(tables, key=lambda table: -table.nbytes)[:third]
    rows = {"all_rows": tables, "rows": largest, "mixed": largest[:1]}.get(rule, ())
    placed |= {table.name: {"kind": ROW_WISE} for table in rows}
    if rule in ("copies", "mixed"):
        small = [table for table in tables if table.nbytes <= _MOST_COPIED_BYTES]
        placed |= {table.name: {"kind": DATA_PARALLEL} for table in small or sorted(tables, key=lambda one: one.nbytes)[:1]}
    if rule in ("columns", "mixed"):
        cut = [table for table in busiest if isinstance(placed[table.name], int) and table.dim >= QUAD * ranks]
        placed |= {table.name: list(range(ranks)) for table in cut}
    return placed
