"""`StepLookups`: what every table looks up in every iteration, so that a step's time is a distribution and not one number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptime._lookups.generators import Generator
from steptime._lookups.saved import SCHEMA_VERSION, from_dict, read_json, to_dict, write_json
from steptime._lookups.scaling import scaled
from steptime._lookups.table import TableStatistics, table_statistics
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class StepLookups:
    """Statistics of the same tables, in the same order, in one iteration after the other."""

    steps: tuple[tuple[TableStatistics, ...], ...]  # [iterations][tables]

    def __post_init__(self) -> None:
        if not self.steps:
            raise InputError("Step lookups: no iteration; expected at least one.")
        expected = _tables(self.steps[0])
        names = [name for name, _, _ in expected]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise InputError(f"Step lookups: table {double} is there twice; expected every name once.")
        for index, step in enumerate(self.steps):
            result = _tables(step)
            if result != expected:
                odd = next(
                    (pair for pair in zip(result, expected, strict=False) if pair[0] != pair[1]), (len(result), len(expected))
                )
                raise InputError(f"Step lookups: iteration {index} has the table {odd[0]} where iteration 0 has {odd[1]}.")
            if len({table.batch for table in step}) > 1:
                batches = sorted({table.batch for table in step})
                raise InputError(
                    f"Step lookups: iteration {index} has tables of batch {batches[0]} and {batches[-1]}; expected one."
                )

    @property
    def tables(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(table.table for table in self.steps[0])

    @property
    def iterations(self) -> int:
        """How many there are."""
        return len(self.steps)

    def table(self, name: str) -> tuple[TableStatistics, ...]:
        """One table over all iterations."""
        if name not in self.tables:
            raise InputError(f"Step lookups: no table {name}; expected one of {list(self.tables)}.")
        index = self.tables.index(name)
        return tuple(step[index] for step in self.steps)

    def of_batch(self, batch: int) -> StepLookups:
        """The same iterations with another batch, as far as these tell."""
        return StepLookups(tuple(tuple(scaled(table, batch) for table in step) for step in self.steps))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"schema_version": SCHEMA_VERSION, "steps": [[to_dict(table) for table in step] for step in self.steps]}

    @classmethod
    def from_dict(cls, values: Any, where: str = "Step lookups") -> StepLookups:
        """What `to_dict` gave; `where` is said in errors."""
        if not isinstance(values, dict) or set(values) != {"schema_version", "steps"}:
            raise InputError(f"{where}: expected a JSON object with schema_version and steps.")
        if values["schema_version"] != SCHEMA_VERSION:
            raise InputError(f"{where}: schema_version is {values['schema_version']!r}; this release reads {SCHEMA_VERSION}.")
        steps = values["steps"]
        if not isinstance(steps, list) or not all(isinstance(step, list) for step in steps):
            raise InputError(f"{where}: steps are not lists of tables; expected one list for every iteration.")
        return cls(
            tuple(
                tuple(from_dict(table, f"{where}, iteration {i}, table {t}") for t, table in enumerate(step))
                for i, step in enumerate(steps)
            )
        )

    def save(self, path: Path) -> None:
        """Writes JSON; compressed where the name ends in .gz."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> StepLookups:
        """What `save` wrote."""
        return cls.from_dict(read_json(path), str(path))


def _tables(step: Sequence[TableStatistics]) -> list[tuple[str, int, int]]:
    return [(table.table, table.rows, table.dim) for table in step]


def drawn_steps(generators: Sequence[Generator], dims: Sequence[int], batch: int, iterations: int) -> StepLookups:
    """Statistics of what generators draw, iteration by iteration; tables are named by their place."""
    if len(generators) != len(dims):
        raise InputError(f"Step lookups: {len(generators)} generators and {len(dims)} dims; expected one dim for every table.")
    steps = []
    for iteration in range(iterations):
        drawn = (generator.bags(batch, iteration) for generator in generators)
        tables = zip(drawn, generators, dims, strict=True)
        steps.append(
            tuple(table_statistics(bags.indices, bags.offsets, g.rows, dim, f"t{t}") for t, (bags, g, dim) in enumerate(tables))
        )
    return StepLookups(tuple(steps))
