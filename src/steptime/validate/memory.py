"""Peak memory of whole steps from their execution traces, against what PyTorch's allocator counted."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steptime.build.dlrm import Dlrm
from steptime.graph.memory.peak import PeakMemory, peak_memory
from steptime.measurements.programs import FILE_NAME, CasePrograms, read_programs
from steptime.measurements.shipped import FOLDER, shipped
from steptime.validate.device_time import program_of
from steptime.validate.summary import Case, Part, Summary, Validation, summary

Row = Mapping[str, Any]  # of the set steps

_COLUMNS = ("workload", "name", "config", "ranks", "plan", "allocated_bytes", "reserved_bytes")
_LOT = 16  # cases, as many as lie side by side in the file
# How many input batches every measured step keeps on the device (steptime.workloads.training.BATCHES, which needs torch).
_BATCHES = 4
_FLOAT_BYTES = 4
_FRESH = "dlrm, first case of its process"
_ALLOCATED_BAR, _RESERVED_BAR = 0.05, 0.10


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank of a case: predicted, and the newest measurement; `least`, `most`: of all measurements of it."""

    name: str
    workload: str
    ranks: int
    peak: PeakMemory
    allocated: int
    reserved: int
    least: int
    most: int
    # The same two in a process that had no tables before; None: never measured so. In a long process the same case measures up
    # to 145 MiB more than in a new one, and the more cases ran before, the more: something of theirs stays, most likely the
    # rounding of blocks in buffers that cases share, which are taken off by their exact size.
    fresh: tuple[int, int] | None = None

    @property
    def in_fresh_process(self) -> RankMemory | None:
        """The same against its measurement in a process that had no tables before, if there is one."""
        if self.fresh is None:
            return None
        return replace(self, allocated=self.fresh[0], reserved=self.fresh[1], least=self.fresh[0], most=self.fresh[0])

    @property
    def allocated_case(self) -> Case:
        """Allocated bytes; covered: between the steady step and the one that still holds its former buckets, to 2 %."""
        low, high = 0.98 * self.peak.steady_allocated, 1.02 * self.peak.allocated
        # Nothing but chance differs between measurements of a case: when the former buckets went, what an earlier case left.
        spread = (self.most - self.least) / self.allocated
        return Case(self.name, self.peak.allocated, self.allocated, spread, low <= self.allocated <= high)

    @property
    def steady_case(self) -> Case:
        """Allocated bytes, if no former bucket were held."""
        return Case(self.name, self.peak.steady_allocated, self.allocated)

    @property
    def reserved_case(self) -> Case:
        """Reserved bytes."""
        return Case(self.name, self.peak.reserved, self.reserved)


def validate_memory(names: Iterable[str] | None = None) -> Validation:
    """Allocated and reserved bytes of every rank of every shipped step, or of the cases of some names."""
    return validation_of(rank_memories(names))


def rank_memories(names: Iterable[str] | None = None, *, said: Callable[[str], None] = lambda _: None) -> list[RankMemory]:
    """Every rank of the shipped cases whose memory was measured. Traces are read in lots, of which one is in memory."""
    rows = _measured(None if names is None else set(names))
    every = sorted(rows)
    found: list[RankMemory] = []
    for first in range(0, len(every), _LOT):
        for case in read_programs(FOLDER / FILE_NAME, every[first : first + _LOT]):
            found += case_memories(case, rows[case.name])
        said(f"{min(first + _LOT, len(every))} of {len(every)} cases")
    return found


def case_memories(case: CasePrograms, rows: Sequence[Row]) -> list[RankMemory]:
    """Every rank of a case; `rows` are its measurements, the newest last."""
    newest = rows[-1]
    fresh = next((row for row in reversed(rows) if row.get("fresh")), None)
    peaks: dict[tuple[int, int], PeakMemory] = {}
    found = []
    for rank, owner in enumerate(case.owners):
        outside = unnamed_bytes(newest, rank)
        key = (owner, sum(outside))
        if key not in peaks:
            peaks[key] = peak_memory(program_of(case, owner), outside_bytes=outside, batches=_BATCHES)
        every = [row["allocated_bytes"][rank] for row in rows]
        found.append(
            RankMemory(
                name=f"{case.name} rank {rank}",
                workload=newest["workload"],
                ranks=newest["ranks"],
                peak=peaks[key],
                allocated=newest["allocated_bytes"][rank],
                reserved=newest["reserved_bytes"][rank],
                least=min(every),
                most=max(every),
                fresh=None if fresh is None else (fresh["allocated_bytes"][rank], fresh["reserved_bytes"][rank]),
            )
        )
    return found


def unnamed_bytes(row: Row, rank: int) -> list[int]:
    """Tables that one kernel looks up together, and their optimiser state: they are no argument of any op."""
    if row["workload"] != "dlrm":
        return []
    model = Dlrm.from_dict(json.loads(row["config"]))
    if model.lookup != "table_batched":
        return []
    plan = json.loads(row["plan"]) if row["plan"] else {}
    mine = [table for table in model.tables if plan.get(table.name, 0) == rank]
    weights = sum(_FLOAT_BYTES * table.rows * table.dim for table in mine)
    state = sum(_FLOAT_BYTES * table.rows for table in mine) if model.optimizer == "rowwise_adagrad" else 0
    return [nbytes for nbytes in (weights, state) if nbytes]


def validation_of(found: Sequence[RankMemory]) -> Validation:
    """By workload and ranks, allocated; reserved beside, whose errors have a bar of their own."""
    cases = [each.allocated_case for each in found]
    groups = _parts(found)
    parts = {name: _part(chosen) for name, chosen in groups}
    reserved = {f"{name}, reserved": Part(_reserved(chosen)) for name, chosen in (("all", list(found)), *groups)}
    return Validation(
        name="memory",
        title="peak memory of whole steps, from execution traces",
        cases=cases,
        whole=_part(found),
        parts={**parts, **reserved},
        facts=_facts(found),
        notes=(
            "bytes of one rank; the newest measurement of a case counts",
            "dlrm: up to 145 MiB of a measurement seem to be left by earlier cases of its process; the first case has none",
            "data-parallel ranks: predicted with the gradient buckets of the first step still held; steady: without",
            "not from the trace: the four input batches that every measured step keeps, and tables that no op names",
        ),
    )


def _part(found: Sequence[RankMemory]) -> Part:
    return Part(summary([each.allocated_case for each in found]), {"steady": summary([each.steady_case for each in found])})


def _reserved(found: Sequence[RankMemory]) -> Summary:
    return summary([each.reserved_case for each in found])


def _parts(found: Sequence[RankMemory]) -> list[tuple[str, list[RankMemory]]]:
    groups: dict[tuple[str, int], list[RankMemory]] = defaultdict(list)
    for each in found:
        groups[each.workload, each.ranks].append(each)
    named = [(f"{workload}, {ranks} rank{'s' * (ranks > 1)}", groups[workload, ranks]) for workload, ranks in sorted(groups)]
    fresh = [each.in_fresh_process for each in found]
    first = [each for each in fresh if each is not None]
    return [*named, (_FRESH, first)] if first else named


def _facts(found: Sequence[RankMemory]) -> dict[str, float]:
    within = [abs(each.allocated_case.error) <= _ALLOCATED_BAR for each in found]
    nearest = [min(abs(each.allocated_case.error), abs(each.steady_case.error)) <= _ALLOCATED_BAR for each in found]
    reserved = [abs(each.reserved_case.error) <= _RESERVED_BAR for each in found]
    return {
        "allocated_within_5_percent": sum(within) / len(found),
        "allocated_or_steady_within_5_percent": sum(nearest) / len(found),
        "reserved_within_10_percent": sum(reserved) / len(found),
    }


def _measured(names: set[str] | None) -> dict[str, list[Row]]:
    """Rows with memory by case, the newest last; `fresh` says whether no case with tables ran before in that process."""
    rows = shipped("steps").select([*_COLUMNS, "run", "process"]).to_pylist()
    found: dict[str, list[Row]] = defaultdict(list)
    used: set[tuple[str, str]] = set()
    for row in sorted(rows, key=lambda row: str(row["run"])):
        process = (row["run"], row["process"])
        with_tables = row["workload"] == "dlrm"
        if row["allocated_bytes"] and (names is None or row["name"] in names):
            found[row["name"]].append({**row, "fresh": with_tables and process not in used})
        used |= {process} if with_tables else set()
    return dict(found)
