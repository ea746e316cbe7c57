"""What is in a workload's files, what is missing, and what that costs: the answer of `steptime inspect`, and its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from steptime._notices import Notices
from steptime._program.program import CallKind, Program, WorkKind
from steptime._program.queues import held_up, unstarted
from steptime._program.workload import Workload
from steptime._report.json import SCHEMA_VERSION, Document
from steptime._report.layout import grid, literal, print_line, print_notices, print_numbers, print_section
from steptime._report.text import print_header
from steptime._report.words import percent, time_ms
from steptime._sim.recorded.replay import step_times_ns
from steptime._sim.recorded.timing import Recorded, recorded
from steptime._units import MIB, ms

_SYNCHRONISING = (CallKind.EVENT_SYNC, CallKind.STREAM_SYNC, CallKind.DEVICE_SYNC, CallKind.BLOCKING_COPY)


@dataclass(frozen=True)
class RankInspection:
    """One rank's trace."""

    rank: int
    source: str
    device: str
    rank_from: str  # trace, file name, assumed
    steps: int
    threads: tuple[str, ...]  # roles
    streams: int
    ops: int
    ops_with_shapes: int
    calls: int
    synchronisations: int
    stream_waits: int
    stream_waits_unresolved: int
    kernels: int
    copies: int
    memsets: int
    collectives: int
    unlaunched: int  # device events whose launch is not in the trace
    backlog: int  # device events enqueued before the window
    queue_most: int  # most launches outstanding at once
    queue_full: bool
    clock_offset_ns: int  # what was taken off its clock to agree with the other ranks


@dataclass(frozen=True)
class GroupInspection:
    """The collectives of one kind in one group, over all ranks at hand."""

    group: str
    ranks: tuple[int, ...]
    kind: str
    count: int  # per rank
    bytes_in: int  # per rank, all of them


@dataclass(frozen=True)
class StepInspection:
    """One step that all ranks recorded."""

    step: int
    recorded_ms: float


@dataclass(frozen=True)
class Finding:
    """Something missing, and what it costs."""

    what: str
    cost: str


@dataclass(frozen=True)
class Inspection:
    """What `steptime inspect` says."""

    name: str
    files: tuple[dict[str, str], ...]  # file, format
    world_size: int
    ranks: tuple[RankInspection, ...]
    absent: tuple[int, ...]
    steps: tuple[StepInspection, ...]
    groups: tuple[GroupInspection, ...]
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    basis: tuple[str, ...]

    def to_dict(self) -> Document:
        """What `steptime inspect --json` writes."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


def inspect_workload(workload: Workload) -> Inspection:
    """Look at everything, change nothing."""
    inputs = recorded(workload) if all(p.recorded for p in workload.programs) else None
    offsets = _clock_offsets(workload, inputs)
    ranks = tuple(_rank(program, offsets[program.rank]) for program in workload.programs)
    shared = inputs is not None and set.intersection(*(set(p.steps) for p in workload.programs))
    steps = tuple(StepInspection(s, ms(ns)) for s, ns in step_times_ns(inputs).items()) if inputs and shared else ()
    notices = Notices.of(workload.warnings).without_headline
    return Inspection(
        name=workload.name,
        files=tuple(dict(file) for file in workload.meta.get("files", ())),
        world_size=workload.world_size,
        ranks=ranks,
        absent=workload.absent,
        steps=steps,
        groups=_groups(workload),
        findings=tuple(_findings(workload, ranks, steps)),
        warnings=notices.warnings,
        basis=notices.basis,
    )


def _clock_offsets(workload: Workload, inputs: Recorded | None) -> dict[int, int]:
    if inputs is None:
        return dict.fromkeys(workload.ranks, 0)
    pairs = zip(workload.programs, inputs.offsets_ns, strict=True)
    return {program.rank: program.origin_ns - inputs.origin_ns - offset for program, offset in pairs}


def _rank(program: Program, clock_offset_ns: int) -> RankInspection:
    calls, works = program.calls, program.works
    kinds = np.bincount(works.kind, minlength=len(WorkKind))
    waits = calls.kind == CallKind.STREAM_WAIT
    unrecorded = [i for i, thread in enumerate(program.threads) if thread.role == "unrecorded"]
    most = int(unstarted(program).max(initial=0)) if program.recorded else 0
    return RankInspection(
        rank=program.rank,
        source=program.source,
        device=program.device_name,
        rank_from=_rank_from(program),
        steps=len(program.steps),
        threads=tuple(t.role for t in program.threads if t.role != "unrecorded"),
        streams=len(program.streams),
        ops=len(program.ops),
        ops_with_shapes=int((program.ops.signature >= 0).sum()),
        calls=len(calls),
        synchronisations=int(np.isin(calls.kind, _SYNCHRONISING).sum()),
        stream_waits=int(waits.sum()),
        stream_waits_unresolved=int((waits & (calls.awaits < 0)).sum()),
        kernels=int(kinds[WorkKind.KERNEL]),
        copies=int(kinds[WorkKind.COPY]),
        memsets=int(kinds[WorkKind.MEMSET]),
        collectives=int(kinds[WorkKind.COLLECTIVE]),
        unlaunched=int(np.isin(calls.thread, unrecorded).sum()),
        backlog=int((works.call < 0).sum()),
        queue_most=most,
        queue_full=program.recorded and bool(held_up(program).any()),
        clock_offset_ns=clock_offset_ns,
    )


def _rank_from(program: Program) -> str:
    if not program.meta.get("rank_known", True):
        return "assumed"
    return "trace" if program.meta.get("rank_said", True) else "file name"


def _groups(workload: Workload) -> tuple[GroupInspection, ...]:
    """Collectives by group, members and kind, without backlog; the counts are those of the rank that has most."""
    counts: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for program in workload.programs:
        of_rank: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
        works = program.works
        for index in works.collective[(works.collective >= 0) & (works.call >= 0)].tolist():
            collective = program.collectives[index]
            entry = of_rank.setdefault((collective.group, collective.ranks, collective.kind), [0, 0])
            entry[0] += 1
            entry[1] += collective.bytes_in
        for key, entry in of_rank.items():
            counts[key] = max(counts.get(key, entry), entry)
    return tuple(GroupInspection(*key, *counts[key]) for key in sorted(counts))


def _findings(workload: Workload, ranks: tuple[RankInspection, ...], steps: tuple[StepInspection, ...]) -> Iterator[Finding]:
    if workload.absent:
        cost = "replay takes their arrivals at collectives as recorded, predict lets them come as late as recorded"
        yield Finding(f"{len(workload.absent)} of {workload.world_size} ranks have no trace", cost)
    if not all(p.recorded for p in workload.programs):
        yield Finding("no device times", "the files can be inspected, but neither replayed nor predicted as recorded")
    elif not steps:
        yield Finding("no step that all ranks recorded", "there is nothing to compare a replay with")
    elif len(steps) == 1:
        yield Finding("one recorded step only", "how much steps differ is not known")
    yield from _counted(
        ranks, "unlaunched", "device events have no launch in the trace", "they start when they were seen to start"
    )
    backlog = "replay takes them as recorded, predict starts from empty queues"
    yield from _counted(ranks, "backlog", "device events were enqueued before the window", backlog)
    unresolved = "stream waits have nothing in the trace to wait for"
    yield from _counted(ranks, "stream_waits_unresolved", unresolved, "they are ignored")
    shapes, ops = sum(r.ops_with_shapes for r in ranks), sum(r.ops for r in ranks)
    if shapes < ops:
        cost = "replay does not need them; predicting other devices or batch sizes will (record_shapes=True)"
        yield Finding(f"{ops - shapes:,} of {ops:,} ops have no shapes", cost)
    late = [r.rank for r in ranks if r.clock_offset_ns]
    if late:
        yield Finding(f"clocks disagreed ({_listed(late)})", "they were aligned at the ends of collectives")


def _counted(ranks: tuple[RankInspection, ...], field: str, what: str, cost: str) -> Iterator[Finding]:
    result = {r.rank: int(getattr(r, field)) for r in ranks if getattr(r, field)}
    if result:
        yield Finding(f"{sum(result.values()):,} {what} ({_listed(list(result))})", cost)


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


# --- text ------------------------------------------------------------------------------------------------------------------

# More rows than this are cut, with a line that says so.
ROWS_SHOWN = 16

_RANK_HEADS = (
    "rank", "known\nfrom", "steps", "host\nthreads", "streams", "ops", "with\nshapes", "calls", "synchro-\nnising",
    "stream\nwaits",
)  # fmt: skip
_EVENT_HEADS = (
    "rank", "kernels", "copies", "memsets", "collec-\ntives", "from before\nthe window", "without\na launch",
    "most\nqueued", "queue\nfull", "clock\noff by",
)  # fmt: skip
_FORMAT_WORDS = {"kineto": "Kineto", "execution_trace": "execution trace", "chakra": "Chakra", "saved": "saved workload"}


def print_inspection(console: Console, workload: Workload, inspection: Inspection) -> None:
    """What is in the files, what is missing, and what that costs."""
    print_header(console, "inspect", workload)
    kinds = Counter(_format_words(file) for file in inspection.files)
    print_section(
        console, "Files", ", ".join(f"{count} {name}" for name, count in sorted(kinds.items())), _file_list(inspection)
    )
    print_section(console, "Ranks", _missing_words(inspection))
    print_numbers(console, _RANK_HEADS, [_rank_cells(rank) for rank in inspection.ranks[:ROWS_SHOWN]])
    print_section(console, "Device events", "")
    print_numbers(console, _EVENT_HEADS, [_event_cells(rank) for rank in inspection.ranks[:ROWS_SHOWN]])
    if inspection.groups:
        print_section(console, "Collectives", "per rank, whole window", _group_list(inspection.groups))
    if inspection.steps:
        times = ", ".join(f"{s.step}: {time_ms(s.recorded_ms)}" for s in inspection.steps[:ROWS_SHOWN])
        more = f", ... ({len(inspection.steps)} in all)" if len(inspection.steps) > ROWS_SHOWN else ""
        print_line(console, "Recorded steps, ms", times + more)
    if inspection.findings:
        table = Table.grid(padding=(0, 2))
        table.add_column(overflow="fold")
        table.add_column(overflow="fold", style="dim")
        for finding in inspection.findings:
            table.add_row(literal(finding.what), literal(finding.cost))
        print_section(console, "What is missing, and what that costs", "", table)
    print_notices(console, Notices((), inspection.warnings, inspection.basis))


def _format_words(file: Mapping[str, str]) -> str:
    return _FORMAT_WORDS.get(file["format"], file["format"])


def _file_list(inspection: Inspection) -> Table:
    table = grid("left")
    table.add_column(overflow="fold")
    for file in inspection.files[:ROWS_SHOWN]:
        table.add_row(Text(_format_words(file), style="dim"), literal(file["file"]))
    if len(inspection.files) > ROWS_SHOWN:
        table.add_row("", Text(f"... and {len(inspection.files) - ROWS_SHOWN} more", style="dim"))
    return table


def _missing_words(inspection: Inspection) -> str:
    if not inspection.absent:
        return f"all {inspection.world_size} of the job" if inspection.world_size > 1 else "the only one of the job"
    listed = ", ".join(map(str, inspection.absent[:ROWS_SHOWN])) + (", ..." if len(inspection.absent) > ROWS_SHOWN else "")
    return f"{len(inspection.ranks)} of {inspection.world_size}; missing: {listed}"


def _rank_cells(r: RankInspection) -> list[str]:
    shapes = percent(r.ops_with_shapes / r.ops) if r.ops else "-"
    known = [str(r.rank), r.rank_from, str(r.steps), str(len(r.threads)), str(r.streams), f"{r.ops:,}", shapes]
    return known + [f"{count:,}" for count in (r.calls, r.synchronisations, r.stream_waits)]


def _event_cells(r: RankInspection) -> list[str]:
    counts = (r.rank, r.kernels, r.copies, r.memsets, r.collectives, r.backlog, r.unlaunched, r.queue_most)
    clock = f"{r.clock_offset_ns / 1e6:,.1f} ms" if r.clock_offset_ns else "-"
    return [*(f"{count:,}" for count in counts), "yes" if r.queue_full else "no", clock]


def _group_list(groups: tuple[GroupInspection, ...]) -> Table:
    table = grid("left", "right", "right")
    table.add_column(overflow="fold", style="dim")
    for g in groups[:ROWS_SHOWN]:
        size = f"{g.bytes_in / MIB:,.2f} MiB" if g.bytes_in else "size not known"
        members = f"{len(g.ranks)} ranks" if g.ranks else "ranks not known"
        table.add_row(literal(g.kind), f"{g.count} x", size, literal(f"group {g.group or '(unnamed)'}, {members}"))
    if len(groups) > ROWS_SHOWN:
        table.add_row(Text(f"... and {len(groups) - ROWS_SHOWN} more", style="dim"))
    return table
