"""The report of `steptime inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from steptime._program.workload import Workload
from steptime._report.inspection.inspection import GroupInspection, Inspection, RankInspection
from steptime._report.layout import grid, literal, percent, print_line, print_numbers, print_section, time_ms
from steptime._report.text import print_header, print_warnings
from steptime._units import MIB

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


def print_inspection(console: Console, workload: Workload, found: Inspection) -> None:
    """What is in the files, what is missing, and what that costs."""
    print_header(console, "inspect", workload)
    print_section(console, "Files", _formats(found), _files(found))
    print_section(console, "Ranks", _missing(found))
    print_numbers(console, _RANK_HEADS, list(_ranks(found.ranks)))
    print_section(console, "Device events", "")
    print_numbers(console, _EVENT_HEADS, list(_events(found.ranks)))
    if found.groups:
        print_section(console, "Collectives", "per rank, whole window", _groups(found.groups))
    if found.steps:
        times = ", ".join(f"{s.step}: {time_ms(s.recorded_ms)}" for s in found.steps[:ROWS_SHOWN])
        more = f", ... ({len(found.steps)} in all)" if len(found.steps) > ROWS_SHOWN else ""
        print_line(console, "Recorded steps, ms", times + more)
    if found.findings:
        print_section(console, "What is missing, and what that costs", "", _findings(found))
    print_warnings(console, found.warnings)


def _formats(found: Inspection) -> str:
    counts = Counter(_FORMAT_WORDS.get(file["format"], file["format"]) for file in found.files)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _files(found: Inspection) -> Table:
    table = grid("left")
    table.add_column(overflow="fold")
    for file in found.files[:ROWS_SHOWN]:
        table.add_row(Text(_FORMAT_WORDS.get(file["format"], file["format"]), style="dim"), literal(file["file"]))
    if len(found.files) > ROWS_SHOWN:
        table.add_row("", Text(f"... and {len(found.files) - ROWS_SHOWN} more", style="dim"))
    return table


def _missing(found: Inspection) -> str:
    if not found.absent:
        return f"all {found.world_size} of the job" if found.world_size > 1 else "the only one of the job"
    listed = ", ".join(map(str, found.absent[:ROWS_SHOWN])) + (", ..." if len(found.absent) > ROWS_SHOWN else "")
    return f"{len(found.ranks)} of {found.world_size}; missing: {listed}"


def _ranks(ranks: tuple[RankInspection, ...]) -> Iterator[list[str]]:
    for r in ranks[:ROWS_SHOWN]:
        shapes = percent(r.ops_with_shapes / r.ops) if r.ops else "-"
        counts = (r.calls, r.synchronisations, r.stream_waits)
        known = [str(r.rank), r.rank_from, str(r.steps), str(len(r.threads)), str(r.streams), f"{r.ops:,}", shapes]
        yield known + [f"{count:,}" for count in counts]


def _events(ranks: tuple[RankInspection, ...]) -> Iterator[list[str]]:
    for r in ranks[:ROWS_SHOWN]:
        counts = (r.rank, r.kernels, r.copies, r.memsets, r.collectives, r.backlog, r.unlaunched, r.queue_most)
        clock = f"{r.clock_offset_ns / 1e6:,.1f} ms" if r.clock_offset_ns else "-"
        yield [*(f"{count:,}" for count in counts), "yes" if r.queue_full else "no", clock]


def _groups(groups: tuple[GroupInspection, ...]) -> Table:
    table = grid("left", "right", "right")
    table.add_column(overflow="fold", style="dim")
    for g in groups[:ROWS_SHOWN]:
        size = f"{g.bytes_in / MIB:,.2f} MiB" if g.bytes_in else "size not known"
        members = f"{len(g.ranks)} ranks" if g.ranks else "ranks not known"
        table.add_row(literal(g.kind), f"{g.count} x", size, literal(f"group {g.group or '(unnamed)'}, {members}"))
    if len(groups) > ROWS_SHOWN:
        table.add_row(Text(f"... and {len(groups) - ROWS_SHOWN} more", style="dim"))
    return table


def _findings(found: Inspection) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", style="dim")
    for finding in found.findings:
        table.add_row(literal(finding.what), literal(finding.cost))
    return table
