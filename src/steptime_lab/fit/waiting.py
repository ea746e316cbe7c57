"""Collectives of profiled steps on several ranks: how long each rank waited in them, and what they did to kernels beside them.

A rank's NCCL kernel runs from its own arrival to the common end. The clocks of ranks do not agree; ends of collectives do,
which all ranks leave together, and so a rank's clock is set by the ends of the other collectives of the step, never by that of
the one in question. Then: time on a rank = (last arrival - own arrival) + wait-free time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._measurements.store import read
from steptime._models.collectives.message import KINDS, Message
from steptime._models.collectives.overlap import is_persistent
from steptime._models.kernels.from_ops import questions_of
from steptime._models.kernels.launches import short_name
from steptime._platforms.fabric import Fabric
from steptime._program.program import Collective, Program
from steptime.errors import InputError
from steptime_lab.fit.attribution import launched_by
from steptime_lab.fit.overlap import KernelPairs
from steptime_lab.measurements.sets import STEP_KERNELS
from steptime_lab.measurements.shipped import FILE_NAME, program_of, read_programs

Floats = npt.NDArray[np.float64]
Row = Mapping[str, Any]  # of the set step_kernels

STEP_FABRIC = "loopback"  # over which the ranks of profiled steps talk
# Who broadcasts or sends leaves first.
LEFT_TOGETHER = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter")
_COLUMNS = ("workload", "name", "rank", "ranks", "fabric", "op", "kernel", "start_ns", "kernel_ns")
_LOT = 16  # cases, as many as lie side by side in the file
_COLLECTIVE_KERNELS = ("nccl", "void nccl")
# A kernel counts as beside a collective from this share of its time on; as clear of all where it has nothing in common.
_BESIDE = 0.95
_FEWEST = 2  # calls on either side that a comparison needs
_MOVES_BYTES = 1 << 20  # smaller messages are latency
_DISTURBED = 0.5  # in ln of time: something else happened to that collective
_EVERY = 1e18


@dataclass(frozen=True)
class StepCollective:
    """One collective of the last profiled step as all its ranks saw it, each by its own clock."""

    case: str
    workload: str
    message: Message
    start_ns: Floats  # [ranks]
    ran_ns: Floats  # [ranks]
    covered: float = 0.0  # of its time, what other kernels of the rank run as well; mean over ranks


@dataclass(frozen=True)
class Waited:
    """One collective with clocks set."""

    collective: StepCollective
    waited_ns: Floats  # [ranks] until the last one arrived
    free_ns: float  # from then to the last end
    apart_ns: float  # between the first end and the last: what clocks and ranks disagree by
    alone_ns: float  # the fabric's estimate

    @property
    def kind(self) -> str:
        """Of the collective."""
        return self.collective.message.kind

    @property
    def ranks(self) -> int:
        """Of the collective."""
        return self.collective.message.ranks


@dataclass(frozen=True)
class ProfiledStep:
    """The profiled steps of all ranks of a case, and their programs."""

    name: str
    workload: str
    programs: Mapping[int, Program]  # by owner
    owners: Sequence[int]
    rows: Mapping[int, Row]  # by rank


def profiled_steps(folder: Path, names: Iterable[str] | None = None) -> Iterator[ProfiledStep]:
    """The cases of a folder on several ranks of which every rank was profiled, or those of some names."""
    table = read(folder, STEP_KERNELS)
    if not table.num_rows or not (folder / FILE_NAME).is_file():
        return
    table = table.select(_COLUMNS)
    wanted = None if names is None else set(names)
    heads = zip(table["name"].to_pylist(), table["ranks"].to_pylist(), strict=True)
    profiled: dict[str, list[int]] = defaultdict(list)
    for index, (name, ranks) in enumerate(heads):
        if ranks > 1 and (wanted is None or name in wanted):
            profiled[name].append(index)
    every = sorted(profiled)
    for first in range(0, len(every), _LOT):
        for case in read_programs(folder / FILE_NAME, every[first : first + _LOT]):
            rows = {row["rank"]: row for row in table.take(profiled[case.name]).to_pylist()}
            if len(rows) == len(case.owners):
                programs = {owner: program_of(case, owner) for owner in set(case.owners)}
                yield ProfiledStep(case.name, rows[0]["workload"], programs, case.owners, rows)


def collectives_of(case: ProfiledStep) -> list[StepCollective]:
    """Its collectives in the order of their launches, which is that of the programs; none where the two do not agree."""
    rows = [case.rows[rank] for rank in range(len(case.owners))]
    calls = [case.programs[owner].collectives for owner in case.owners]
    times = [(start[nccl], ran[nccl]) for start, ran, nccl in map(_times, rows)]
    if len({*map(len, calls), *(len(start) for start, _ in times)}) != 1:
        return []
    begun, ran = (np.array(columns) for columns in zip(*times, strict=True))  # [ranks, collectives]
    covered = [covered_share(row) for row in rows]
    return [
        StepCollective(
            case.name, case.workload, message_of(each), begun[:, index], ran[:, index],
            float(np.mean([shares[index] for shares in covered])),
        )
        for index, each in enumerate(zip(*calls, strict=True))
    ]  # fmt: skip


def message_of(calls: Sequence[Collective]) -> Message:
    """What the ranks ask for together; each rank says what it sends to whom."""
    ranks, first = len(calls), calls[0]
    if first.kind not in KINDS:
        raise InputError(f"a step has a collective of kind {first.kind!r}, expected one of {', '.join(KINDS)}")
    largest = max(max(call.bytes_in, call.bytes_out) for call in calls)
    if first.kind != "all_to_all":
        return Message(first.kind, ranks, largest)
    splits = tuple(_sent(call, ranks) for call in calls)
    return Message(first.kind, ranks, max(map(sum, splits)), splits)


def _sent(call: Collective, ranks: int) -> tuple[int, ...]:
    """Bytes to each rank; splits count elements."""
    parts = call.in_splits if len(call.in_splits) == ranks else (1,) * ranks
    total = max(sum(parts), 1)
    return tuple(call.bytes_in * part // total for part in parts)


def waits_of(collectives: Sequence[StepCollective], alone_ns: Sequence[float]) -> list[Waited]:
    """Those of one step that ranks leave together, clocks set by the others; nothing where there are no others."""
    places = [index for index, collective in enumerate(collectives) if collective.message.kind in LEFT_TOGETHER]
    if len(places) < _FEWEST:
        return []
    start = np.array([collectives[index].start_ns for index in places])
    ends = start + np.array([collectives[index].ran_ns for index in places])
    ahead = ends - ends.mean(axis=1, keepdims=True)
    results = []
    for row, index in enumerate(places):
        clock = np.median(np.delete(ahead, row, axis=0), axis=0)
        arrived, left = start[row] - clock, ends[row] - clock
        last = float(arrived.max())
        free = max(float(left.max()) - last, 1.0)
        results.append(Waited(collectives[index], last - arrived, free, float(np.ptp(left)), alone_ns[index]))
    return results


def waits(cases: Iterable[ProfiledStep], fabric: Fabric) -> list[Waited]:
    """All collectives of all cases."""
    results = []
    for case in cases:
        collectives = collectives_of(case)
        estimates = fabric.estimates([collective.message for collective in collectives])
        results += waits_of(collectives, [estimate.time_ns for estimate in estimates])
    return results


def slowed_beside(waited: Sequence[Waited]) -> tuple[float, float]:
    """What all_reduces of a case take more, in ln, where kernels run beside them all the while, and its standard error.

    Within cases, so that the wire's speed on a day plays no part.
    """
    cases: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for item in waited:
        if item.kind == "all_reduce" and item.collective.message.bytes >= _MOVES_BYTES:
            cases[item.collective.case].append((item.collective.covered, float(np.log(item.free_ns / item.alone_ns))))
    known = [np.array(entry) for entry in cases.values() if len(entry) >= _FEWEST]
    if not known:
        return 0.0, float("inf")
    covered = np.concatenate([entry[:, 0] - entry[:, 0].mean() for entry in known])
    slower = np.concatenate([entry[:, 1] - np.median(entry[:, 1]) for entry in known])
    usual = np.abs(slower) < _DISTURBED
    covered, slower = covered[usual], slower[usual]
    weight = max(float((covered**2).sum()), 1e-9)
    slope = float((covered * slower).sum()) / weight
    left = float(((slower - slope * covered) ** 2).sum())
    return slope, float(np.sqrt(left / max(len(slower) - 2, 1) / weight))


def kernels_beside(cases: Iterable[ProfiledStep]) -> KernelPairs:
    """The same kernel of the same call in the same case: the middle of those beside a collective, of those clear of any."""
    times: dict[tuple[str, ...], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    shares: dict[str, int] = {}
    for case in cases:
        shares[case.name] = len(case.owners)
        works = {owner: questions_of(program) for owner, program in case.programs.items()}
        texts = {
            owner: ["" if work.question is None else work.question.call.to_json() for work in item]
            for owner, item in works.items()
        }
        for rank, row in case.rows.items():
            owner = case.owners[rank]
            _gather(row, launched_by(case.programs[owner], works[owner], row["op"]), texts[owner], times, case.name)
    kept = {key: pair for key, pair in times.items() if min(map(len, pair)) >= _FEWEST}
    return KernelPairs(
        alone_ns=np.array([np.median(clear) for clear, _ in kept.values()]),
        beside_ns=np.array([np.median(beside) for _, beside in kept.values()]),
        share=np.array([float(shares[key[0]]) for key in kept]),
        persistent=np.array([is_persistent(key[2]) for key in kept], dtype=np.bool_),
        text=np.array([key[1] for key in kept], dtype=np.str_),
        collective_ns=np.full(len(kept), _EVERY),
        kernel=np.array([" ".join(key) for key in kept], dtype=np.str_),
    )


def _gather(
    row: Row, owners: Sequence[int], texts: Sequence[str], times: dict[tuple[str, ...], tuple[list[float], list[float]]],
    case: str,
) -> None:  # fmt: skip
    common = beside_share(row)
    seen: dict[int, int] = defaultdict(int)
    for index, owner in enumerate(owners):
        name, ran = row["kernel"][index], row["kernel_ns"][index]
        if owner < 0 or not texts[owner] or not len(ran) or ran[-1] <= 0 or name.startswith(_COLLECTIVE_KERNELS):
            continue
        key = (case, texts[owner], short_name(name), str(seen[owner]))
        seen[owner] += 1
        if common[index] == 0:
            times[key][0].append(float(ran[-1]))
        elif common[index] >= _BESIDE:
            times[key][1].append(float(ran[-1]))


def beside_share(row: Row) -> Floats:
    """Of each kernel's time in the last step, what collectives of the same rank ran as well."""
    start, ran, nccl = _times(row)
    end = start + ran
    common = np.minimum(end[:, None], end[nccl]) - np.maximum(start[:, None], start[nccl])
    result: Floats = np.maximum(common, 0.0).sum(axis=1) / np.maximum(end - start, 1.0)
    return result


def covered_share(row: Row) -> Floats:
    """Of each collective's time in the last step, what other kernels of the same rank ran as well, each moment once."""
    start, ran, nccl = _times(row)
    end = start + ran
    order = np.argsort(start[~nccl])
    begin, until = start[~nccl][order], end[~nccl][order]
    results = []
    for first, last in zip(start[nccl], end[nccl], strict=True):
        ends = np.maximum.accumulate(np.clip(until, first, last))
        begins = np.maximum(np.clip(begin, first, last), np.concatenate([[first], ends[:-1]])[: len(ends)])
        results.append(float(np.maximum(ends - begins, 0.0).sum()) / max(last - first, 1.0))
    return np.array(results)


def _times(row: Row) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Start and time of each kernel in the last step, and which are collectives."""
    start = np.asarray(row["start_ns"], dtype=np.float64)
    ran = np.array([float(times[-1]) if len(times) else 0.0 for times in row["kernel_ns"]])
    nccl = np.array([name.startswith(_COLLECTIVE_KERNELS) for name in row["kernel"]], dtype=np.bool_)
    return start, ran, nccl
