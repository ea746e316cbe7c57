"""Answers for people: what was read, the step time, where it goes, why, and what to doubt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from steptime._models.memory.fit import fullest
from steptime._program.host_code import HOST_CODE
from steptime._program.program import Program
from steptime._program.workload import Workload
from steptime._report.alike import folded
from steptime._report.answers import Replayed
from steptime._report.layout import (
    body_width,
    grid,
    literal,
    print_heading,
    print_line,
    print_notices,
    print_numbers,
    print_section,
    print_title,
    width_of,
)
from steptime._report.verdict import Verdict, verdict_of
from steptime._report.words import (
    between_ms,
    busy_words,
    device_words,
    fact_lines,
    iteration_figures,
    path_ranks_words,
    percent,
    signed_percent,
    source_words,
    span_words,
    step_words,
    time_ms,
)
from steptime._sim.explain.activity import RankSummary
from steptime._sim.explain.critical_path import PathSummary
from steptime._sim.prediction import Iterations, PredictedStep
from steptime._units import ms, size_words

# More kinds of ranks than this are shown by their extremes.
RANKS_SHOWN = 8
# Entries of the critical path that are shown.
PATH_SHOWN = 8
# Replay error from which a step stands out: the most that any case may have.
LARGE_ERROR = 0.03
# Share of a step from which host code outside ops has a line.
WORTH_SAYING = 0.02
# Share of the busy time from which a family has a line of its own.
_WORTH_A_LINE = 0.005

_NAME_AT_LEAST = 8  # columns that a name on the critical path gets
_BAR_AT_MOST = 40
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")

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


def print_prediction(console: Console, prediction: PredictedStep, between: Callable[[], None] | None = None) -> None:
    """The report of `steptime predict`; what is printed `between` comes before the details."""
    workload = prediction.workload
    print_header(console, "predict", workload)
    print_verdict(console, "Step time", prediction.step_time_ms, verdict_of(prediction), span_words(prediction))
    _print_facts(console, prediction)
    if between is not None:
        between()
    if prediction.iterations is not None:
        _iterations(console, prediction.iterations, prediction.step_time_ms)
    _explanation(console, prediction, "not known: ranks are missing" if workload.absent else "none")


def _print_facts(console: Console, prediction: PredictedStep) -> None:
    """What was asked and how fast it is, a line each where something is known."""
    fits = verdict_of(prediction).fits is not False
    for title, words in fact_lines(prediction):
        if words and (fits or title in ("Workload", "Machine")):
            print_line(console, title, words, spaced=False)
    if prediction.host_code_ms and prediction.host_code_ms >= WORTH_SAYING * prediction.step_time_ms:
        text = f"{time_ms(prediction.host_code_ms)} ms per step outside ops: {HOST_CODE}"
        print_line(console, "Host", text, spaced=False)


def print_replay(console: Console, report: Replayed) -> None:
    """The report of `steptime replay`."""
    print_header(console, "replay", report.prediction.workload)
    measured = f"recorded {time_ms(report.measured_step_ms)} ms, error {signed_percent(report.error)}"
    _step_time(console, "Step time", report.prediction.step_time_ms, f"{report.verdict.regime}; {measured}", style="bold")
    print_line(console, "Bound by", report.prediction.bound_by, spaced=False)
    print_section(console, "Steps", "ms; from the end of the step before to the end of its last work on any rank")
    rows = []
    for step in report.steps:
        error = Text(signed_percent(step.error), style="bold red" if abs(step.error) > LARGE_ERROR else "")
        rows.append((str(step.step), time_ms(ms(step.predicted_ns)), time_ms(ms(step.measured_ns)), error))
    print_numbers(console, ("step", "replayed", "recorded", "error"), rows)
    if report.unprofiled is not None:
        seen = report.unprofiled
        text = (
            f"{time_ms(seen.step_ms)} ms measured without a profiler ({between_ms(seen.low_ms, seen.high_ms)}); "
            f"this recording repeats every {time_ms(seen.as_recorded_ms)} ms ({signed_percent(seen.as_recorded_error)}), "
            f"{time_ms(seen.deflated_ms)} ms ({signed_percent(seen.deflated_error)}) with what the profiler cost "
            "taken out"
        )
        print_line(console, "Unprofiled", text)
    _explanation(console, report.prediction, "none")


def print_header(console: Console, command: str, workload: Workload) -> None:
    """One line: what was read."""
    programs = workload.programs
    ranks = f"{len(workload.running)} of {workload.world_size} ranks" if workload.world_size > 1 else "1 rank"
    print_heading(console, command, workload.name, ranks, device_words([p.device_name for p in programs]), *_recorded(programs))


def _recorded(programs: Sequence[Program]) -> tuple[str, ...]:
    """How much was recorded, or that it never ran."""
    if not any(program.recorded for program in programs):
        return ("never run", f"{sum(len(program.ops) for program in programs):,} ops")
    steps = max(len(program.steps) for program in programs)
    return (f"{steps} step{'s' if steps != 1 else ''}", f"{sum(len(program.works) for program in programs):,} device events")


def _step_time(console: Console, title: str, step_ms: float, beside: str, style: str = "dim") -> None:
    line = Text().append(f"{title}  ", style="bold").append(step_words(step_ms), style="bold green")
    print_title(console, line.append(f"   {beside}", style=style))


def print_verdict(console: Console, title: str, step_ms: float, verdict: Verdict, interval: str) -> None:
    """The first lines of an answer. What does not fit has no step time, only one that it would have."""
    if verdict.fits is False:
        assert verdict.fit is not None
        print_title(console, Text().append(verdict.fit.text[:1].upper() + verdict.fit.text[1:], style="bold red"))
        for number, each in enumerate(verdict.helps):
            print_line(console, "" if number else "Would help", each.text, spaced=False)
        print_line(console, "Would take", f"{step_words(step_ms)} per step if there were room, {interval}", spaced=False)
        _print_caveats(console, verdict)
        return
    _step_time(console, title, step_ms, verdict.headline, style="bold")
    print_verdict_lines(console, verdict, interval)


def _print_caveats(console: Console, verdict: Verdict) -> None:
    for each in verdict.caveats:
        print_line(console, "Caveat", each, style="yellow", spaced=False)


def print_verdict_lines(console: Console, verdict: Verdict, interval: str) -> None:
    """What changes the meaning of the headline, what binds, how full the memory is, how sure that is."""
    _print_caveats(console, verdict)
    print_line(console, "Bound by", verdict.bound_by, spaced=False)
    if verdict.fit is not None and verdict.fit.fits:
        print_line(console, "Memory", verdict.fit.room, spaced=False)
    if verdict.unknown:
        print_line(console, "Memory", f"unknown: {verdict.unknown}", spaced=False)
    print_line(console, "Certainty", f"{interval}: {verdict.certainty.why}", spaced=False)


def _iterations(console: Console, iterations: Iterations, recorded_ms: float) -> None:
    """How the step time is distributed, and whose lookups make the slowest iteration."""
    times = iterations.step_ms
    text = f"ms per step with the lookups of {len(times)} iterations; the recorded step stands for the mean iteration"
    print_section(console, "Iterations", text)
    heads = ("mean", "standard\ndeviation", "smallest", "quantile\n10 %", "quantile\n50 %", "quantile\n90 %", "largest")
    print_numbers(console, heads, [iteration_figures(iterations)])
    if time_ms(max(times) - min(times)) == time_ms(0.0):
        print_line(console, "Lookups", "hidden behind other work: their rows make no step longer or shorter", spaced=False)
        return
    rank, alone_ms = max(iterations.alone_ms.items(), key=lambda item: item[1])
    line = f"iteration {iterations.slowest}: {time_ms(max(*times, recorded_ms) - recorded_ms)} ms longer than the recorded step"
    if alone_ms > 0:
        line += f"; with the lookups of rank {rank} alone {time_ms(alone_ms)} ms longer"
    print_line(console, "Slowest", line, spaced=False)


def _explanation(console: Console, prediction: PredictedStep, nobody: str) -> None:
    print_section(console, "Ranks", "ms per step")
    print_numbers(console, ("rank", *(name for name, _ in _RANK_COLUMNS)), list(_ranks(prediction)))
    what = "ms per step, mean over ranks; communication behind computation is not counted"
    print_section(console, "Device busy with", what, _breakdown(console, prediction.breakdown))
    path = prediction.critical_path
    print_section(console, "Critical path", _path_line(path), _path(console, path))
    straggler = prediction.straggler
    if straggler is not None:
        text = f"rank {straggler.rank}: the others together wait {time_ms(straggler.caused_ms)} ms per step for it, "
        print_line(console, "Straggler", text + f"{percent(straggler.share)} of all waiting for peers")
    elif len(prediction.ranks) > 1:
        print_line(console, "Straggler", nobody)
    print_line(console, "Coverage", f"device time is {source_words(prediction.coverage)}", spaced=len(prediction.ranks) < 2)
    if prediction.first_step_ms is not None:
        print_line(console, "First step", f"{step_words(prediction.first_step_ms)}, from empty queues", spaced=False)
    if prediction.memory["peak_bytes"] is not None:
        print_line(console, "Allocated", _memory(prediction.memory), spaced=False)
    print_notices(console, prediction.notices)


def _memory(memory: Mapping[str, Any]) -> str:
    """The rank that needs most: in all, as the allocator counts, and what fills it."""
    most = fullest(memory["ranks"])
    parts = sorted(most["parts"].items(), key=lambda part: -part[1])
    filled = ", ".join(f"{kind.replace('_', ' ')} {size_words(nbytes)}" for kind, nbytes in parts[:4])
    which = f" on rank {most['rank']}" if len(memory["ranks"]) > 1 else ""
    sizes = f"{size_words(most['allocated_bytes'])}, reserved {size_words(most['reserved_bytes'])}"
    return f"{sizes}{which}: {filled}"


def _ranks(prediction: PredictedStep) -> Iterator[list[str]]:
    groups = folded(prediction, _rank_cells)
    if len(groups) <= RANKS_SHOWN:
        for alike in groups:
            yield [alike.label, *_rank_cells(alike.summary)]
        return
    for label, summary in (("least", min), ("median", median), ("most", max)):
        yield [label, *(time_ms(summary([value(r) for r in prediction.ranks])) for _, value in _RANK_COLUMNS)]


def _rank_cells(rank: RankSummary) -> tuple[str, ...]:
    return tuple(time_ms(value(rank)) for _, value in _RANK_COLUMNS)


def _breakdown(console: Console, breakdown: Mapping[str, float]) -> Table:
    total = sum(breakdown.values()) or 1.0
    fine = console.encoding.lower().startswith("utf")
    large = {busy_words(family): busy_ms for family, busy_ms in breakdown.items() if busy_ms >= _WORTH_A_LINE * total}
    small = [busy_ms for busy_ms in breakdown.values() if busy_ms < _WORTH_A_LINE * total]
    shown = large | ({f"{len(small)} others": sum(small)} if small else {})
    rows = []
    for family, busy_ms in shown.items():
        rows.append((literal(family), Text(time_ms(busy_ms)), Text(percent(busy_ms / total), style="dim")))
    room = max(min(_BAR_AT_MOST, body_width(console) - width_of(rows)), 0)
    table = grid("left", "right", "right", "left")
    for row, busy_ms in zip(rows, shown.values(), strict=True):
        table.add_row(*row, Text(_bar(room * busy_ms / total, fine=fine), style="cyan"))
    return table


def _bar(columns: float, *, fine: bool) -> str:
    """A bar so long, to an eighth of a character where the terminal can draw it."""
    if not fine:
        return "#" * round(columns)
    full, eighths = divmod(round(8 * columns), 8)
    return "█" * full + _EIGHTHS[eighths]


def _path_line(path: PathSummary) -> str:
    kinds = ", ".join(f"{k.kind} {percent(k.share)}" for k in path.kinds if k.share >= 0.005) + "; x: ops per step"
    return f"{time_ms(path.length_ms)} ms per step: {kinds}" + (f"; {path_ranks_words(path)}" if len(path.ranks) > 1 else "")


def _path(console: Console, path: PathSummary) -> Table:
    rows = []
    for entry in path.top[:PATH_SHOWN]:
        dim = Text(entry.kind, "dim"), Text(percent(entry.share), "dim"), Text(f"{entry.count} x", "dim")
        rows.append((dim[0], Text(time_ms(entry.ms)), *dim[1:]))
    room = max(body_width(console) - width_of(rows), _NAME_AT_LEAST)
    table = grid("left", "left", "right", "right", "right")
    for (kind, *numbers), entry in zip(rows, path.top, strict=False):
        name = literal(entry.name)
        name.truncate(room, overflow="ellipsis")
        table.add_row(kind, name, *numbers)
    return table
