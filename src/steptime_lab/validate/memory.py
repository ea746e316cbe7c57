"""Peak memory of whole steps from their execution traces, against what PyTorch's allocator counted.

A case that the set `memory` has was alone in its process, or everything of the cases before was let go of first; of the others
the set `steps` tells, whose processes still held a few MiB of earlier cases.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from steptime._build.dlrm.model import Dlrm
from steptime._models.memory.peak import PeakMemory, peak_memory
from steptime_lab.measurements.shipped import CasePrograms, program_of, shipped
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation, grouped
from steptime_lab.validate.steps.cases import programs_of, rows_by_name

Row = Mapping[str, Any]  # of the set steps

_COLUMNS = ("workload", "name", "config", "ranks", "plan", "allocated_bytes", "reserved_bytes")
_ALONE_COLUMNS = ("name", "rank", "ranks", "share", "allocated_bytes", "reserved_bytes", "left_bytes")
# How many input batches every measured step keeps on the device (steptime_lab.workloads.training.BATCHES, which needs torch).
_BATCHES = 4
_FLOAT_BYTES = 4
_ALLOCATED_BAR, _RESERVED_BAR = 0.05, 0.10


@dataclass(frozen=True, slots=True)
class Measured:
    """What the allocator counted on one rank; `reserved` is not known where an earlier case kept segments alive."""

    allocated: int
    reserved: int | None
    alone: bool  # of the set `memory`


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank of a case: predicted and measured."""

    name: str
    workload: str
    ranks: int
    peak: PeakMemory
    measured: Measured

    @property
    def group(self) -> str:
        """Workload and ranks."""
        return f"{self.workload}, {self.ranks} rank{'s' * (self.ranks > 1)}"

    @property
    def allocated_case(self) -> MeasuredCase:
        """Allocated bytes; the interval: between the steady step and the one that still holds its former buckets, to 2 %."""
        interval = 0.98 * self.peak.steady_allocated, 1.02 * self.peak.allocated
        return MeasuredCase(self.name, self.peak.allocated, self.measured.allocated, interval=interval)

    @property
    def steady_case(self) -> MeasuredCase:
        """Allocated bytes, if no former bucket were held."""
        return MeasuredCase(self.name, self.peak.steady_allocated, self.measured.allocated)

    @property
    def reserved_cases(self) -> tuple[MeasuredCase, MeasuredCase] | None:
        """Reserved bytes, and if no former bucket were held; None where they are not known."""
        if self.measured.reserved is None:
            return None
        predicted = (self.peak.reserved, self.peak.steady_reserved)
        return MeasuredCase(self.name, predicted[0], self.measured.reserved), MeasuredCase(
            self.name, predicted[1], self.measured.reserved
        )


def validate_memory(names: Iterable[str] | None = None) -> Validation:
    """Allocated and reserved bytes of every rank of every shipped step, or of the cases of some names."""
    return validation_of(rank_memories(names))


def rank_memories(names: Iterable[str] | None = None) -> list[RankMemory]:
    """Every rank of the shipped cases whose memory was measured."""
    rows = _steps(names)
    alone = measured_alone(shipped("memory").select(_ALONE_COLUMNS).to_pylist())
    with _no_collector():
        return [memory for case in programs_of(rows) for memory in case_memories(case, rows[case.name], alone)]


def case_memories(case: CasePrograms, row: Row, alone: Mapping[tuple[str, int], Measured]) -> list[RankMemory]:
    """Every rank of a case; `row` is one of `steps`."""
    peaks: dict[tuple[int, int], PeakMemory] = {}
    results = []
    for rank, owner in enumerate(case.owners):
        weights, state = unnamed_bytes(row, rank)
        if (owner, weights) not in peaks:
            peaks[owner, weights] = peak_memory(
                program_of(case, owner),
                parameters=[weights] if weights else [],
                optimizer_state=[state] if state else [],
                batches=_BATCHES,
            )
        crowded = Measured(row["allocated_bytes"][rank], row["reserved_bytes"][rank], alone=False)
        measured = alone.get((case.name, rank), crowded)
        name = f"{case.name} rank {rank}"
        results.append(RankMemory(name, row["workload"], row["ranks"], peaks[owner, weights], measured))
    return results


def measured_alone(rows: Iterable[Row]) -> dict[tuple[str, int], Measured]:
    """Of the set `memory`, by case and rank; of several rows the one before which least was left."""
    best: dict[tuple[str, int], Row] = {}
    for row in rows:
        key = (row["name"], row["rank"])
        if row["share"] == row["ranks"] and (key not in best or row["left_bytes"] < best[key]["left_bytes"]):
            best[key] = row
    return {key: Measured(row["allocated_bytes"], row["reserved_bytes"], alone=True) for key, row in best.items()}


def unnamed_bytes(row: Row, rank: int) -> tuple[int, int]:
    """Tables that one kernel looks up together, and their optimiser state: they are no argument of any op."""
    if row["workload"] != "dlrm":
        return 0, 0
    model = Dlrm.from_dict(json.loads(row["config"]))
    if model.lookup != "table_batched":
        return 0, 0
    plan = json.loads(row["plan"]) if row["plan"] else {}
    mine = [table for table in model.tables if plan.get(table.name, 0) == rank]
    state = sum(_FLOAT_BYTES * table.rows for table in mine) if model.optimizer == "rowwise_adagrad" else 0
    return sum(_FLOAT_BYTES * table.rows * table.dim for table in mine), state


def validation_of(memories: Sequence[RankMemory]) -> Validation:
    """By workload and ranks, allocated; reserved beside, whose errors have a bar of their own."""
    allocated = [Compared(each.allocated_case, (each.group,), {"steady": each.steady_case}) for each in memories]
    reserved = [
        Compared(pair[0], ("all", each.group), {"steady": pair[1]})
        for each in memories
        if (pair := each.reserved_cases) is not None
    ]
    return Validation.of(
        "memory",
        "peak memory of whole steps, from execution traces",
        allocated,
        groups=grouped(allocated) | grouped(reserved, ", reserved"),
        facts=_facts(memories),
        notes=(
            "bytes of one rank, over its first dozen steps",
            "data-parallel ranks: predicted with the gradient buckets of the first step still held; steady: without; which"
            " of them depends on when NCCL's watchdog next looks, every 100 ms",
            "not from the trace: the four input batches that every measured step keeps, and tables that no op names",
            "reserved is left out where a block of an earlier case of the process kept segments alive",
        ),
    )


def _facts(memories: Sequence[RankMemory]) -> dict[str, float]:
    within = [abs(each.allocated_case.error) <= _ALLOCATED_BAR for each in memories]
    nearest = [min(abs(each.allocated_case.error), abs(each.steady_case.error)) <= _ALLOCATED_BAR for each in memories]
    pairs = [cases for cases in (each.reserved_cases for each in memories) if cases is not None]
    reserved = [abs(first.error) <= _RESERVED_BAR for first, _ in pairs]
    either = [min(abs(first.error), abs(steady.error)) <= _RESERVED_BAR for first, steady in pairs]
    return {
        "allocated_within_5_percent": sum(within) / len(memories),
        "allocated_or_steady_within_5_percent": sum(nearest) / len(memories),
        "reserved_within_10_percent": sum(reserved) / max(1, len(pairs)),
        "reserved_or_steady_within_10_percent": sum(either) / max(1, len(pairs)),
        "alone_in_process": sum(each.measured.alone for each in memories) / len(memories),
    }


def _steps(names: Iterable[str] | None) -> dict[str, Row]:
    """By case, the newest row that has memory."""
    newest = {}
    for name, rows in rows_by_name("steps", (*_COLUMNS, "run"), names).items():
        measured = [row for row in rows if row["allocated_bytes"]]
        if measured:
            newest[name] = max(reversed(measured), key=lambda row: str(row["run"]))
    return newest


@contextmanager
def _no_collector() -> Iterator[None]:
    """Reading hundreds of thousands of nodes takes twice as long where Python looks for cycles among them, of which there are
    none."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
