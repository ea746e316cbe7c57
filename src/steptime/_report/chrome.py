"""A timeline as a Chrome trace, which opens in Perfetto: a process per rank, a thread per host thread and per stream.

Events are written one by one, so that the file may be far larger than memory. Times are microseconds with three decimals,
which keeps every nanosecond.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from steptime._files import output
from steptime._ops.families import WorkFamily, work_families
from steptime._program.formats import saved
from steptime._program.program import CallKind, Program, WorkKind
from steptime._program.workload import Workload
from steptime._report.played import played_workload
from steptime._sim.core.timing import CohortTimeline, Timeline
from steptime._sim.explain.critical_path import short_kernel_name
from steptime._units import NS_PER_MS, NS_PER_US

# Process ids count from 1, and thread ids differ between ranks: Perfetto keeps 0 for the idle task and takes a thread whose
# id is its process's for the main one.
TIDS_PER_RANK = 10_000
# Order of a rank's threads: the steps, then host threads, then streams.
STEPS_LANE = 0
FIRST_HOST_LANE = 1
FIRST_STREAM_LANE = 1_000

STEP_MARKS = (CallKind.STEP_BEGIN, CallKind.STEP_END)


def write_chrome_trace(timeline: Timeline, file: Path, workload: Workload | None = None, *, profiled: bool = False) -> None:
    """Write the first scenario of a timeline; compressed if the name ends in .gz.

    With the workload it is of, the file can be read again as a run of it.
    """
    played = ""
    if workload is not None:
        run = played_workload(workload, timeline, _origin(timeline), profiled=profiled)
        played = f'"played":{saved.encode(run, file).decode()},'
    with output(file) as unfinished, _writer(unfinished, packed=file.name.endswith(".gz")) as out:
        out.write('{"displayTimeUnit":"ms",' + played + '"traceEvents":[')
        separator = "\n"
        for event in events(timeline):
            out.write(separator + event)
            separator = ",\n"
        out.write("\n]}\n")


@contextmanager
def _writer(file: Path, *, packed: bool) -> Iterator[IO[str]]:
    with file.open("wb") as raw:
        if packed:
            # Neither name nor time in the header: same timeline, same bytes.
            with (
                gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as archive,
                io.TextIOWrapper(archive, "utf-8") as out,
            ):
                yield out
        else:
            with io.TextIOWrapper(raw, "utf-8") as out:
                yield out


def events(timeline: Timeline) -> Iterator[str]:
    """Every event as one line of JSON: per rank its names, steps, host calls, device work and the flows between them."""
    origin = _origin(timeline)
    flow = 0
    for cohort in timeline.cohorts:
        families = [WorkFamily(f).label for f in work_families(cohort.cohort.program).tolist()]
        for index in range(len(cohort.cohort.ranks)):
            rank = _Rank(cohort, index, origin, families)
            yield from rank.names()
            yield from rank.steps()
            yield from rank.host()
            yield from rank.device()
            yield from rank.flows(flow)
            flow += len(families)


def _origin(timeline: Timeline) -> int:
    """The earliest time drawn, which becomes zero."""
    starts: list[int] = []
    for cohort in timeline.cohorts:
        hosts = (cohort.call_start_ns - cohort.cohort.timing.gap_ns)[:, :, 0]
        works = cohort.work_start_ns[:, :, 0][_drawn(cohort)]
        starts += [int(times.min()) for times in (hosts, works) if times.size]
    return min(starts, default=0)


def _drawn(cohort: CohortTimeline) -> npt.NDArray[np.bool_]:
    """Per work and rank, whether it is there to be seen: backlog that a steady state leaves out is not."""
    length = (cohort.work_end_ns - cohort.work_start_ns)[:, :, 0]
    return np.asarray((cohort.cohort.program.works.call >= 0)[:, None] | (length > 0))


@dataclass(frozen=True)
class _Rank:
    """One rank of a cohort's timeline."""

    cohort: CohortTimeline
    index: int
    origin: int
    families: list[str]

    @property
    def program(self) -> Program:
        return self.cohort.cohort.program

    @property
    def pid(self) -> int:
        return self.rank + 1

    @property
    def rank(self) -> int:
        return self.cohort.cohort.ranks[self.index]

    def times(self, name: str) -> list[int]:
        """A column of the timeline, from zero."""
        column = getattr(self.cohort, name)[:, self.index, 0]
        return [int(t) for t in (column - self.origin).tolist()]

    def names(self) -> Iterator[str]:
        """Names and order of the process and its threads."""
        device = f" ({self.program.device_name})" if self.program.device_name else ""
        yield _meta(self.pid, 0, "process_name", name=f"rank {self.rank}{device}")
        yield _meta(self.pid, 0, "process_sort_index", sort_index=self.rank)
        lanes = {STEPS_LANE: "steps"}
        for index, thread in enumerate(self.program.threads):
            lanes[FIRST_HOST_LANE + index] = f"host {thread.role} ({thread.tid})"
        for index, stream in enumerate(self.program.streams):
            lanes[FIRST_STREAM_LANE + index] = f"stream {stream.id}"
        for lane, name in lanes.items():
            yield _meta(self.pid, lane, "thread_name", name=name)
            yield _meta(self.pid, lane, "thread_sort_index", sort_index=lane)

    def steps(self) -> Iterator[str]:
        """From where the host enters a step to where it leaves it."""
        for step, begin, end in step_spans(self.program, self.times("call_start_ns"), self.times("call_end_ns")):
            yield _span(self.pid, STEPS_LANE, f"step {step}", "step", begin, end, {"step": step})

    def host(self) -> Iterator[str]:
        """Per call, an event under the name of its op that begins with the host work before it, and the call inside it."""
        calls, names = self.program.calls, self.program.names
        start, end = self.times("call_start_ns"), self.times("call_end_ns")
        gap = self._row_values(self.cohort.cohort.timing.gap_ns)
        for row in np.flatnonzero(~np.isin(calls.kind, STEP_MARKS)).tolist():
            lane, op, api = FIRST_HOST_LANE + int(calls.thread[row]), int(calls.op[row]), names[calls.api[row]]
            around = names[self.program.ops.name[op]] if op >= 0 else "host work"
            args = {"step": int(calls.step[row])}
            yield _span(self.pid, lane, around, "host", start[row] - gap[row], end[row], args)
            yield _span(
                self.pid, lane, api, CallKind(calls.kind[row]).name.lower(), start[row], end[row], {"op": around, **args}
            )

    def device(self) -> Iterator[str]:
        """Device work; a collective in two parts, waiting for its peers and moving data."""
        start, moving, end = self.times("work_start_ns"), self.times("moving_ns"), self.times("work_end_ns")
        works = self.program.works
        for row in self._drawn():
            lane = FIRST_STREAM_LANE + int(works.stream[row])
            name, args = self._describe(row)
            if works.kind[row] != WorkKind.COLLECTIVE:
                yield _span(self.pid, lane, name, self.families[row], start[row], end[row], args)
                continue
            moved = min(max(moving[row], start[row]), end[row])
            args["waiting_ms"] = (moved - start[row]) / NS_PER_MS
            if moved > start[row]:
                yield _span(self.pid, lane, f"{name} (waiting)", "waiting", start[row], moved, args)
            yield _span(self.pid, lane, name, self.families[row], moved, end[row], args)

    def flows(self, first: int) -> Iterator[str]:
        """An arrow from every launch to its work."""
        calls, works = self.program.calls, self.program.works
        issued, start = self.times("call_start_ns"), self.times("work_start_ns")
        for row in self._drawn():
            call = int(works.call[row])
            if call >= 0:
                host, stream = FIRST_HOST_LANE + int(calls.thread[call]), FIRST_STREAM_LANE + int(works.stream[row])
                yield _flow("s", self.pid, host, issued[call], first + row)
                yield _flow("f", self.pid, stream, start[row], first + row)

    def _drawn(self) -> list[int]:
        return [int(row) for row in np.flatnonzero(_drawn(self.cohort)[:, self.index]).tolist()]

    def _describe(self, row: int) -> tuple[str, dict[str, Any]]:
        works, program = self.program.works, self.program
        kernel, call = program.names[works.name[row]], int(works.call[row])
        op = int(program.calls.op[call]) if call >= 0 else -1
        args: dict[str, Any] = {
            "op": program.names[program.ops.name[op]] if op >= 0 else "",
            "family": self.families[row],
            "step": int(works.step[row]),
            "kernel": kernel,
        }
        if works.bytes[row]:
            args["bytes"] = int(works.bytes[row])
        if works.kind[row] != WorkKind.COLLECTIVE or works.collective[row] < 0:
            return short_kernel_name(kernel), args
        collective = program.collectives[works.collective[row]]
        args |= {"group": collective.group, "sequence": collective.sequence, "ranks": list(collective.ranks[:64])}
        args |= {"bytes_in": collective.bytes_in, "bytes_out": collective.bytes_out}
        return collective.kind, args

    def _row_values(self, values: Any) -> list[int]:
        return [int(v) for v in values[:, self.index if values.shape[1] > 1 else 0, 0].tolist()]


def step_spans(program: Program, start: Sequence[int], end: Sequence[int]) -> list[list[int]]:
    """Number, begin and end of every step, as the host enters and leaves it."""
    calls, begun, spans = program.calls, dict[int, int](), []
    for row in np.flatnonzero(np.isin(calls.kind, STEP_MARKS)).tolist():
        step = int(calls.step[row])
        if calls.kind[row] == CallKind.STEP_BEGIN:
            begun[step] = int(start[row])
        elif step in begun:
            spans.append([step, begun[step], int(end[row])])
    return spans


def _span(pid: int, lane: int, name: str, category: str, start: int, end: int, args: dict[str, Any]) -> str:
    head = f'{{"ph":"X","pid":{pid},"tid":{_tid(pid, lane)},"ts":{_us(start)},"dur":{_us(max(end - start, 0))},'
    return head + f'"name":{json.dumps(name)},"cat":{json.dumps(category)},"args":{json.dumps(args)}}}'


def _flow(phase: str, pid: int, lane: int, at: int, identity: int) -> str:
    end = ',"bp":"e"' if phase == "f" else ""
    where = f'"pid":{pid},"tid":{_tid(pid, lane)},"ts":{_us(at)}'
    return f'{{"ph":"{phase}",{where},"id":{identity},"name":"launch","cat":"launch"{end}}}'


def _meta(pid: int, lane: int, kind: str, **args: Any) -> str:
    return f'{{"ph":"M","pid":{pid},"tid":{_tid(pid, lane)},"ts":0,"name":"{kind}","args":{json.dumps(args)}}}'


def _tid(pid: int, lane: int) -> int:
    return pid * TIDS_PER_RANK + lane


def _us(nanoseconds: int) -> str:
    whole, rest = divmod(abs(nanoseconds), NS_PER_US)
    return f"{'-' if nanoseconds < 0 else ''}{whole}.{rest:03d}"
