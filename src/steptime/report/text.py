"""Answers for people: what was read, the step time, where it goes, why, and what to doubt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from steptime.graph.workload import Workload
from steptime.report.replayed import ReplayReport
from steptime.sim.activity import RankSummary
from steptime.sim.bound import family_words
from steptime.sim.path_summary import PathSummary
from steptime.sim.prediction import Prediction
from steptime.units import ms

# More ranks than this are shown by their extremes.
RANKS_SHOWN = 16
# Replay error from which a step stands out: the most that any case may have.
LARGE_ERROR = 0.03

_INDENT = 2
_TITLE_WIDTH = 10
_PATH_NUMBERS = 50  # what a row of the critical path needs besides the name
_BAR_WIDTH = 40
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
_UNITS = re.compile(r"(?<=\d) (?=%|ms\b)")
_NUMBERS = re.compile(r"\d+")

_RANK_COLUMNS: tuple[tuple[str, Callable[[RankSummary], float]], ...] = (
    ("step", lambda r: r.step_ms),
    ("device\nbusy", lambda r: r.device_busy_ms),
    ("\ncompute", lambda r: r.compute_ms),
    ("commu-\nnication", lambda r: r.communication_ms),
    ("exposed\ncomm.", lambda r: r.exposed_communication_ms),
    ("waiting\nfor peers", lambda r: r.waiting_ms),
    ("device\nidle", lambda r: r.idle_ms),
    ("idle for\nthe host", lambda r: r.host_bound_fraction * r.step_ms),
    ("host\nblocked", lambda r: r.host_blocked_ms),
)


def print_prediction(console: Console, workload: Workload, prediction: Prediction) -> None:
    """The report of `steptime predict`."""
    print_header(console, "predict", workload)
    low, high = prediction.interval_ms
    beside = [f"recorded: {_between(low, high)} ms"]
    if prediction.first_step_ms is not None:
        beside.append(f"a single step from empty queues: {_time(prediction.first_step_ms)} ms")
    _step_time(console, prediction.step_time_ms, beside)
    _explanation(console, prediction)


def print_replay(console: Console, workload: Workload, report: ReplayReport) -> None:
    """The report of `steptime replay`."""
    print_header(console, "replay", workload)
    measured = f"recorded {_time(report.measured_step_ms)} ms, error {_signed(report.error)}"
    _step_time(console, report.prediction.step_time_ms, [measured])
    table = table_of("step", "replayed", "recorded", "error")
    for step in report.steps:
        style = "bold red" if abs(step.error) > LARGE_ERROR else ""
        error = Text(_signed(step.error), style=style)
        table.add_row(str(step.step), _time(ms(step.predicted_ns)), _time(ms(step.measured_ns)), error)
    print_section(console, "Steps", "ms; from the end of the step before to the end of its last work on any rank", table)
    if report.unprofiled is not None:
        seen = report.unprofiled
        said = (
            f"{_time(seen.step_ms)} ms measured without a profiler ({_between(seen.low_ms, seen.high_ms)}); "
            f"this recording repeats every {_time(seen.as_recorded_ms)} ms ({_signed(seen.as_recorded_error)}), "
            f"{_time(seen.deflated_ms)} ms ({_signed(seen.deflated_error)}) with the published cost of profiling taken out"
        )
        print_line(console, "Unprofiled", said)
    _explanation(console, report.prediction)


def print_warnings(console: Console, warnings: Sequence[str]) -> None:
    """Every warning once; those that differ in numbers only, as one."""
    if not warnings:
        return
    alike: dict[str, list[str]] = {}
    for warning in warnings:
        alike.setdefault(_NUMBERS.sub("#", warning), []).append(warning)
    table = Table.grid(padding=(0, 1))
    table.add_column(style="yellow")
    table.add_column(overflow="fold")
    for found in alike.values():
        more = Text(f" (and {len(found) - 1} more like this)", style="dim") if len(found) > 1 else Text()
        table.add_row("!", Text(found[0]) + more)
    print_section(console, "Warnings", "", table)


def print_header(console: Console, command: str, workload: Workload) -> None:
    """One line: what was read."""
    programs = workload.programs
    devices = list(dict.fromkeys(p.device_name for p in programs if p.device_name))
    steps = sorted({len(p.steps) for p in programs})
    parts = [
        workload.name,
        f"{len(programs)} of {workload.world_size} ranks" if workload.world_size > 1 else "1 rank",
        ", ".join(devices[:2]) + (", ..." if len(devices) > 2 else ""),
        f"{steps[-1]} step{'s' if steps[-1] != 1 else ''}",
        f"{sum(len(p.works) for p in programs):,} device events",
    ]
    line = Text().append(f"steptime {command}", style="bold")
    for part in parts:
        if part:
            line.append(" · ", style="dim").append(part)
    console.print()
    console.print(Padding(line, (0, _INDENT), expand=False))


def _step_time(console: Console, step_ms: float, beside: Sequence[str]) -> None:
    line = Text().append("Step time  ", style="bold").append(f"{_time(step_ms)} ms", style="bold green")
    line.append("   " + "; ".join(beside), style="dim")
    console.print()
    console.print(Padding(line, (0, _INDENT), expand=False))


def _explanation(console: Console, prediction: Prediction) -> None:
    print_section(console, "Ranks", "ms per step", _ranks(prediction.ranks))
    what = "ms per step, mean over ranks; communication behind computation is not counted"
    print_section(console, "Device busy with", what, _breakdown(console, prediction.breakdown))
    path = prediction.critical_path
    print_section(console, "Critical path", _path_line(path), _path(path, console.width - _PATH_NUMBERS))
    straggler = prediction.straggler
    if straggler is not None:
        said = f"rank {straggler.rank}: the others together wait {_time(straggler.caused_ms)} ms per step for it, "
        print_line(console, "Straggler", said + f"{_percent(straggler.share)} of all waiting for peers")
    elif len(prediction.ranks) > 1:
        print_line(console, "Straggler", "none")
    sources = ", ".join(f"{_percent(share)} {source}" for source, share in prediction.coverage.items())
    print_line(console, "Coverage", f"device time is {sources}", spaced=len(prediction.ranks) < 2)
    print_warnings(console, prediction.warnings)
    print_line(console, "Bound by", prediction.bound_by, style="bold")


def _ranks(ranks: Sequence[RankSummary]) -> Table:
    table = table_of("rank", *(name for name, _ in _RANK_COLUMNS))
    if len(ranks) <= RANKS_SHOWN:
        for rank in ranks:
            table.add_row(str(rank.rank), *(_time(value(rank)) for _, value in _RANK_COLUMNS))
        return table
    for label, summary in (("least", min), ("median", median), ("most", max)):
        table.add_row(label, *(_time(summary([value(r) for r in ranks])) for _, value in _RANK_COLUMNS))
    return table


def _breakdown(console: Console, breakdown: Mapping[str, float]) -> Table:
    total = sum(breakdown.values()) or 1.0
    fine = console.encoding.lower().startswith("utf")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(no_wrap=True, style="cyan")
    for family, busy_ms in breakdown.items():
        name = "communication, exposed" if family == "communication" else family_words(family)
        table.add_row(name, _time(busy_ms), _percent(busy_ms / total), _bar(busy_ms / total, fine=fine))
    return table


def _bar(share: float, *, fine: bool) -> str:
    """A bar as long as the share, to an eighth of a character where the terminal can draw it."""
    if not fine:
        return "#" * round(_BAR_WIDTH * share)
    full, eighths = divmod(round(8 * _BAR_WIDTH * share), 8)
    return "█" * full + _EIGHTHS[eighths]


def _path_line(path: PathSummary) -> str:
    kinds = ", ".join(f"{k.kind} {_percent(k.share)}" for k in path.kinds if k.share >= 0.005)
    ranks = ", ".join(f"{_percent(r.share)} on rank {r.rank}" for r in path.ranks[:4] if r.share >= 0.005)
    return f"{_time(path.length_ms)} ms per step: {kinds}" + (f"; {ranks}" if len(path.ranks) > 1 else "")


def _path(path: PathSummary, name_width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(name_width, 16))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(justify="right", no_wrap=True, style="dim")
    for entry in path.top[:8]:
        table.add_row(entry.kind, entry.name, _time(entry.ms), _percent(entry.share), f"{entry.count} x")
    return table


def table_of(*columns: str) -> Table:
    """A plain table of right-aligned numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    return table


def print_section(console: Console, title: str, note: str, body: Table) -> None:
    """A titled table, set in."""
    console.print()
    head = Text().append(title, style="bold").append(f"  {note}" if note else "", style="dim")
    console.print(Padding(head, (0, _INDENT), expand=False))
    console.print(Padding(body, (0, _INDENT, 0, 2 * _INDENT), expand=False))


def print_line(console: Console, title: str, said: str, *, style: str = "", spaced: bool = True) -> None:
    """A title and what is said under it, on one line where it fits."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True, min_width=_TITLE_WIDTH)
    grid.add_column(style=style)
    # Between a number and its unit no line may break; files keep the plain space, for those who search them.
    grid.add_row(title, Text(_UNITS.sub("\u00a0", said) if console.is_terminal else said))
    if spaced:
        console.print()
    console.print(Padding(grid, (0, _INDENT), expand=False))


def _time(value: float) -> str:
    """Milliseconds with as many digits as matter."""
    return f"{value:,.3f}" if value < 100 else f"{value:,.1f}"


def _between(low: float, high: float) -> str:
    return _time(low) if low == high else f"{_time(low)} to {_time(high)}"


def _signed(share: float) -> str:
    return f"{100 * share:+.2f} %"


def _percent(share: float) -> str:
    if 0 < share < 0.005:
        return "<1 %"
    return f"{100 * share:.0f} %"
