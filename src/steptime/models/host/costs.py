"""`HostCosts`: what the CPU spends around every op, read from recorded programs, with every sample kept.

Keeping the samples makes pooling exact: over ranks, over workloads, in any order and any grouping, the statistics are
those of one big recording. What each kind of cost means is said in `segments`; waiting and blocking are in none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from steptime.errors import InputError
from steptime.graph.program import Phase, Program
from steptime.graph.table import IntColumn
from steptime.models.host.segments import COSTS, Segments, Spent, segments

SCHEMA_VERSION = 1
KINDS = tuple(kind.name.lower() for kind in COSTS)
PHASES = tuple(phase.name.lower() for phase in Phase)
# Tukey's fences: values further than this many interquartile ranges from the quartiles are left out.
FENCE = 1.5


class Key(NamedTuple):
    """Which cost: its kind, the op (for `launch`: the API) and the phase of the step."""

    kind: str
    name: str
    phase: str


@dataclass(frozen=True, slots=True)
class Cost:
    """One cost: statistics of the samples within the fences; `dropped` counts those beyond, `total_ns` sums all."""

    count: int
    mean_ns: float
    std_ns: float
    median_ns: float
    mad_ns: float  # median distance from the median
    dropped: int
    total_ns: int


@dataclass(frozen=True)
class HostCosts:
    """All costs of one or more programs. `samples_ns` are sorted, so that equal costs are equal values."""

    samples_ns: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)
    programs: int = 0

    def cost(self, kind: str, name: str, phase: str) -> Cost | None:
        """The statistics of one cost, or None where it was never seen."""
        samples = self.samples_ns.get(Key(kind, name, phase))
        return summarise(samples) if samples else None

    def over(self, kind: str, *, name: str | None = None, phase: str | None = None) -> Cost | None:
        """The statistics of one kind over all ops and phases, or over those of one name or phase."""
        chosen = [
            np.asarray(samples, dtype=np.int64)
            for key, samples in self.samples_ns.items()
            if key.kind == kind and name in (None, key.name) and phase in (None, key.phase)
        ]
        return summarise(np.concatenate(chosen)) if chosen else None

    @property
    def total_ns(self) -> int:
        """All host time in all costs."""
        return sum(sum(samples) for samples in self.samples_ns.values())


def host_costs(program: Program) -> HostCosts:
    """The costs of one recorded program."""
    if not program.recorded:
        raise InputError(
            f"{program.source or f'rank {program.rank}'}: holds no times to read host costs from; give a Kineto trace"
        )
    pieces = segments(program)
    return HostCosts(_grouped(program, pieces.take(pieces.spent < Spent.BLOCKED)), programs=1)


def pool(costs: Iterable[HostCosts]) -> HostCosts:
    """Costs of several ranks or workloads as one. In any order and any grouping the result is the same."""
    found: dict[Key, list[int]] = {}
    programs = 0
    for each in costs:
        programs += each.programs
        for key, samples in each.samples_ns.items():
            found.setdefault(key, []).extend(samples)
    return HostCosts({key: tuple(sorted(found[key])) for key in sorted(found)}, programs)


def summarise(samples_ns: Iterable[int] | IntColumn) -> Cost:
    """The statistics of some samples: negative ones count as 0, those beyond Tukey's fences are left out."""
    values = np.maximum(np.asarray(samples_ns, dtype=np.int64), 0)
    low, high = np.percentile(values, (25, 75))
    margin = FENCE * (high - low)
    kept = values[(values >= low - margin) & (values <= high + margin)]
    median = float(np.median(kept))
    return Cost(
        count=len(kept),
        mean_ns=float(kept.mean()),
        std_ns=float(kept.std()),
        median_ns=median,
        mad_ns=float(np.median(np.abs(kept - median))),
        dropped=len(values) - len(kept),
        total_ns=int(values.sum()),
    )


def _grouped(program: Program, pieces: Segments) -> dict[Key, tuple[int, ...]]:
    duration = np.maximum(pieces.end_ns - pieces.start_ns, 0)
    order = np.lexsort((duration, pieces.phase, pieces.name, pieces.spent))
    columns = np.stack([pieces.spent, pieces.name, pieces.phase])[:, order]
    edges = np.flatnonzero((np.diff(columns, axis=1) != 0).any(axis=0)) + 1
    found: dict[Key, list[int]] = {}
    if not len(order):
        return {}
    for rows, samples in zip(np.split(np.arange(len(order)), edges), np.split(duration[order], edges), strict=True):
        spent, name, phase = columns[:, rows[0]].tolist()
        # Interned names are distinct, but a table built by hand may hold one twice.
        found.setdefault(Key(KINDS[spent], program.names[name], PHASES[phase]), []).extend(samples.tolist())
    return {key: tuple(sorted(found[key])) for key in sorted(found)}


class _SavedCost(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    name: str
    phase: str
    samples_ns: list[int]


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    schema_version: int
    programs: int
    costs: list[_SavedCost]


class _Version(msgspec.Struct):
    schema_version: int


def save(costs: HostCosts, path: Path) -> None:
    """Write costs as JSON; the same costs give the same bytes."""
    rows = [_SavedCost(*key, list(costs.samples_ns[key])) for key in sorted(costs.samples_ns)]
    path.write_bytes(msgspec.json.encode(_Saved(SCHEMA_VERSION, costs.programs, rows)) + b"\n")


def load(path: Path) -> HostCosts:
    """Read costs that `save` wrote."""
    try:
        text = path.read_bytes()
        version = msgspec.json.decode(text, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise InputError(f"{path}: host costs of schema version {version}, expected {SCHEMA_VERSION}; extract them again")
        saved = msgspec.json.decode(text, type=_Saved)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); expected a file of host costs") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a file of host costs ({error}); extract them again") from error
    found: dict[Key, tuple[int, ...]] = {}
    for row in saved.costs:
        if row.kind not in KINDS or row.phase not in PHASES or not row.samples_ns:
            raise InputError(
                f"{path}: cost {row.kind!r} of {row.name!r} in {row.phase!r} is unknown or empty; extract them again"
            )
        found[Key(row.kind, row.name, row.phase)] = tuple(row.samples_ns)
    return HostCosts(found, saved.programs)
