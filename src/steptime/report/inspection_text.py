"""The report of `steptime inspect`."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from steptime.graph.workload import Workload
from steptime.report.inspection import GroupInspection, Inspection, RankInspection
from steptime.report.text import print_header, print_line, print_section, print_warnings, table_of
from steptime.units import MIB

# More rows than this are cut, with a line that says so.
ROWS_SHOWN = 16

_FORMAT_WORDS = {"kineto": "Kineto", "execution_trace": "execution trace", "chakra": "Chakra", "saved": "saved workload"}


def print_inspection(console: Console, workload: Workload, found: Inspection) -> None:
    """What is in the files, what is missing, and what that costs."""
    print_header(console, "inspect", workload)
    print_section(console, "Files", _formats(found), _files(found))
    print_section(console, "Ranks", _missing(found), _ranks(found.ranks))
    print_section(console, "Device events", "", _events(found.ranks))
    if found.groups:
        print_section(console, "Collectives", "per rank, whole window", _groups(found.groups))
    if found.steps:
        times = ", ".join(f"{s.step}: {s.recorded_ms:,.3f}" for s in found.steps[:ROWS_SHOWN])
        more = f", ... ({len(found.steps)} in all)" if len(found.steps) > ROWS_SHOWN else ""
        print_line(console, "Recorded steps, ms", times + more)
    if found.findings:
        print_section(console, "What is missing, and what that costs", "", _findings(found))
    print_warnings(console, found.warnings)


def _formats(found: Inspection) -> str:
    counts = Counter(_FORMAT_WORDS.get(file["format"], file["format"]) for file in found.files)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _files(found: Inspection) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for file in found.files[:ROWS_SHOWN]:
        schema = f" {file['schema']}" if file.get("schema") else ""
        table.add_row(_FORMAT_WORDS.get(file["format"], file["format"]) + schema, file["file"])
    if len(found.files) > ROWS_SHOWN:
        table.add_row("", Text(f"... and {len(found.files) - ROWS_SHOWN} more", style="dim"))
    return table


def _missing(found: Inspection) -> str:
    if not found.absent:
        return f"all {found.world_size} of the job" if found.world_size > 1 else "the only one of the job"
    listed = ", ".join(map(str, found.absent[:ROWS_SHOWN])) + (", ..." if len(found.absent) > ROWS_SHOWN else "")
    return f"{len(found.ranks)} of {found.world_size}; missing: {listed}"


def _ranks(ranks: tuple[RankInspection, ...]) -> Table:
    table = table_of(
        "rank", "known\nfrom", "steps", "host\nthreads", "streams", "ops", "with\nshapes", "calls", "synchro-\nnising"
    )
    for r in ranks[:ROWS_SHOWN]:
        shapes = f"{100 * r.ops_with_shapes / r.ops:.0f} %" if r.ops else "-"
        known, threads = r.rank_from, str(len(r.threads))
        row = [str(r.rank), known, str(r.steps), threads, str(r.streams), f"{r.ops:,}", shapes, f"{r.calls:,}"]
        table.add_row(*row, f"{r.synchronisations:,}")
    return table


def _events(ranks: tuple[RankInspection, ...]) -> Table:
    names = ("rank", "kernels", "copies", "memsets", "collec-\ntives", "from before\nthe window", "without\na launch")
    table = table_of(*names, "most\nqueued", "queue\nfull", "clock\noff by")
    for r in ranks[:ROWS_SHOWN]:
        counts = (r.rank, r.kernels, r.copies, r.memsets, r.collectives, r.backlog, r.unlaunched, r.queue_most)
        clock = f"{r.clock_offset_ns / 1e6:,.1f} ms" if r.clock_offset_ns else "-"
        table.add_row(*(f"{count:,}" for count in counts), "yes" if r.queue_full else "no", clock)
    return table


def _groups(groups: tuple[GroupInspection, ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for g in groups[:ROWS_SHOWN]:
        size = f"{g.bytes_in / MIB:,.2f} MiB" if g.bytes_in else "size not known"
        members = f"{len(g.ranks)} ranks" if g.ranks else "ranks not known"
        table.add_row(g.kind, f"{g.count} x", size, Text(f"group {g.group or '(unnamed)'}, {members}", style="dim"))
    if len(groups) > ROWS_SHOWN:
        table.add_row(Text(f"... and {len(groups) - ROWS_SHOWN} more", style="dim"))
    return table


def _findings(found: Inspection) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", style="dim")
    for finding in found.findings:
        table.add_row(finding.what, finding.cost)
    return table
