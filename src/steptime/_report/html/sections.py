"""What a page says in words and numbers: the step time and what bounds it, where time goes, memory, iterations, coverage.

All of it is there without a script, so that it can be read aloud, searched and printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from steptime._models.memory.lifetimes import MemoryKind
from steptime._program.host_code import HOST_CODE
from steptime._report.html.markup import Markup, bar, join, swatch, table, tag
from steptime._report.words import (
    OUT_OF_RANGE,
    asked_facts,
    busy_words,
    device_words,
    iteration_figures,
    merged_warnings,
    path_ranks_words,
    percent,
    size_words,
    speed_facts,
    time_ms,
)
from steptime._sim.explain.activity import RankSummary
from steptime._sim.explain.critical_path import PathSummary
from steptime._sim.prediction import Iterations, PredictedStep

# More ranks than this are shown by their extremes.
RANKS_LISTED = 128


def summary(prediction: PredictedStep, facts: Mapping[str, str]) -> Markup:
    """The step time with its interval, what bounds it, what it is the step of, and what to doubt."""
    return join(
        (
            tag("div", step_number(prediction.step_time_ms), _interval(prediction), class_="headline"),
            *bound_and_facts(prediction.bound_by, {**dict(_facts(prediction)), **facts}, prediction.warnings),
        )
    )


def step_number(step_ms: float) -> Markup:
    """The step time, large."""
    return tag("p", tag("strong", time_ms(step_ms)), tag("span", "ms per step", class_="unit"), class_="step")


def bound_and_facts(bound_by: str, facts: Mapping[str, str], warnings: Sequence[str]) -> list[Markup]:
    """What bounds a step, what is known of it, and what to doubt."""
    regime, colon, evidence = bound_by.partition(":")
    return [
        tag("p", tag("strong", regime[:1].upper() + regime[1:]), colon + evidence, class_="bound"),
        tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()), class_="facts"),
        warning_list(warnings),
    ]


def _interval(prediction: PredictedStep) -> Markup:
    """The interval as a line with the step time on it."""
    low, high = prediction.interval_ms
    if high <= low:
        return Markup()
    here = (prediction.step_time_ms - low) / (high - low)
    line = bar([(1.0, "span")], f"from {time_ms(low)} to {time_ms(high)} ms")
    mark = tag("rect", x=f"{100 * here:.3f}%", width="3", height="100%", class_="here")
    dot = tag("svg", mark, class_="mark", aria_hidden="true")
    recorded_range = prediction.platform is None and prediction.profiled
    text = "range with the recorded steps, ms" if recorded_range else "90 % interval, ms"
    ends = tag("p", tag("span", time_ms(low)), tag("span", text), tag("span", time_ms(high)), class_="ends")
    return tag("div", tag("div", line, dot, class_="line"), ends, class_="interval")


def _facts(prediction: PredictedStep) -> Iterator[tuple[str, str]]:
    workload = prediction.workload
    devices = device_words([program.device_name for program in workload.programs])
    if prediction.platform is not None:
        yield "Platform", prediction.platform
    elif devices:
        yield "Device, as recorded", devices
    ranks = len(prediction.ranks)
    yield "Ranks", str(ranks) if ranks == workload.world_size else f"{ranks} of {workload.world_size}"
    yield from ((fact.name, fact.value) for fact in (*asked_facts(prediction), *speed_facts(prediction)))
    steps = max(len(p.steps) for p in workload.programs)
    if steps:
        yield "Steps drawn", str(steps)
    if any(program.recorded for program in workload.programs):
        yield "Profiler", "left in, as recorded" if prediction.profiled else "taken out"
    if prediction.host_code_ms:
        yield HOST_CODE, f"{time_ms(prediction.host_code_ms)} ms"
    if prediction.first_step_ms is not None:
        yield "From empty queues", f"{time_ms(prediction.first_step_ms)} ms"
    memory = memory_words(prediction.memory)
    if memory:
        yield "Memory of a rank, at most", memory
    straggler = prediction.straggler
    if straggler is not None:
        yield "Straggler", f"rank {straggler.rank}: others wait {time_ms(straggler.caused_ms)} ms for it"


def warning_list(warnings: Sequence[str]) -> Markup:
    """Every warning once; those that differ in numbers only, as one."""
    text = merged_warnings(warnings)
    if not text:
        return Markup()
    return tag("ul", *(tag("li", item) for item in text), class_="warnings", aria_label="Warnings")


def _column(values: Iterable[float]) -> list[str]:
    """Milliseconds below each other: as many digits as matter, the same for all."""
    times = list(values)
    most = max(times, default=0.0)
    digits = 3 if most < 100 else 2 if most < 10_000 else 1
    return [f"{value:,.{digits}f}" for value in times]


def families(breakdown: Mapping[str, float]) -> Markup:
    """Families by the time the device is busy with them."""
    total, most = sum(breakdown.values()) or 1.0, max(breakdown.values(), default=1.0) or 1.0
    rows = []
    for (family, busy_ms), shown in zip(breakdown.items(), _column(breakdown.values()), strict=True):
        name = busy_words(family)
        share = f"{100 * busy_ms / total:.1f} %"
        named = join((swatch(f"family {family}"), name))
        rows.append((named, shown, share, bar([(busy_ms / most, f"family {family}")], f"{name}: {share}")))
    heads = ("Family", "ms", "share", "")
    return table("Device busy time by family, milliseconds per step, mean over ranks", heads, rows, words=(0, 3))


def ranks(summaries: Sequence[RankSummary]) -> Markup:
    """What every rank's device does during its step."""
    longest = max((rank.step_ms for rank in summaries), default=1.0) or 1.0
    heads = ("Rank", "", "step", "compute", "exposed comm.", "idle", "waiting for peers", "idle for the host", "host blocked")
    columns = list(zip(*map(_times, summaries), strict=True))
    if len(summaries) <= RANKS_LISTED:
        named = [(str(rank.rank), _rank_bar(rank, longest)) for rank in summaries]
    else:
        columns = [(min(column), median(column), max(column)) for column in columns]
        named = [(name, Markup()) for name in ("least", "median", "most")]
    rows = [(*names, *row) for names, row in zip(named, zip(*map(_column, columns), strict=True), strict=True)]
    keys = (("compute", "Compute"), ("exposed", "Exposed communication"), ("idle", "Idle"))
    legend = tag("p", *(tag("span", swatch(style), name) for style, name in keys), class_="legend")
    return join((legend, table("What every rank does, milliseconds per step", heads, rows, words=(0, 1))))


def _times(rank: RankSummary) -> tuple[float, ...]:
    return (
        rank.step_ms,
        rank.compute_ms,
        rank.exposed_communication_ms,
        rank.idle_ms,
        rank.waiting_ms,
        rank.host_bound_fraction * rank.step_ms,
        rank.host_blocked_ms,
    )


def _rank_bar(rank: RankSummary, longest: float) -> Markup:
    parts = (("compute", rank.compute_ms), ("exposed", rank.exposed_communication_ms), ("idle", rank.idle_ms))
    text = ", ".join(f"{name} {percent(value / (rank.step_ms or 1.0))}" for name, value in parts)
    return bar([(value / longest, name) for name, value in parts], f"rank {rank.rank}: {text}")


def critical_path(path: PathSummary) -> Markup:
    """What kinds of time the critical path consists of, whose, and the names it spends most on."""
    shown = [kind for kind in path.kinds if kind.share >= 0.0005]
    whole = bar([(kind.share, f"reason {_style(kind.kind)}") for kind in shown], "kinds of time on the critical path")
    legend = [
        tag("span", swatch(f"reason {_style(k.kind)}"), k.kind, tag("span", percent(k.share), class_="number")) for k in shown
    ]
    text = f"{time_ms(path.length_ms)} ms per step" + (f"; {path_ranks_words(path)}" if len(path.ranks) > 1 else "")
    rows = [
        (
            tag("button", entry.name, type="button", class_="find", data_find=entry.name),
            entry.kind,
            shown,
            percent(entry.share),
            f"{entry.count} x",
        )
        for entry, shown in zip(path.top, _column(item.ms for item in path.top), strict=True)
    ]
    listed = table("The names the critical path spends most on", ("Name", "Kind", "ms", "share", "count"), rows, words=(0, 1))
    return join((tag("p", text, class_="note"), whole, tag("p", *legend, class_="legend"), listed))


def _style(kind: str) -> str:
    return kind.replace(" ", "-")


def coverage(shares: Mapping[str, float]) -> Markup:
    """From which sources the device time is, and how much of it is beyond what models were fitted on."""
    sources = {source: share for source, share in shares.items() if source != OUT_OF_RANGE}
    parts = [_covered(sources, "device time by source")]
    if OUT_OF_RANGE in shares:
        beyond = shares[OUT_OF_RANGE]
        parts.append(tag("p", "Beyond what models were fitted on:", class_="note"))
        parts.append(_covered({"out of range": beyond, "inside": 1.0 - beyond}, "device time out of range"))
    return join(parts)


def _covered(shares: Mapping[str, float], label: str) -> Markup:
    text = [
        tag("span", swatch(f"source {_style(source)}"), source, tag("span", f"{100 * share:.1f} %", class_="number"))
        for source, share in shares.items()
    ]
    whole = bar([(share, f"source {_style(source)}") for source, share in shares.items()], label)
    return join((whole, tag("p", *text, class_="legend")))


# As many ranks as a person compares; those that need most come first where there are more.
_RANKS_LISTED = 32
# What a process takes of its device besides what the allocator has handed out at the peak, and its name in the style sheet.
_BESIDE, _BESIDE_STYLE = "context, NCCL, spare blocks", "beside"


def memory_words(memory: Mapping[str, Any]) -> str:
    """The largest rank's peak, of what its device has; nothing where nothing is known."""
    peak, capacity = memory.get("peak_bytes"), memory.get("capacity_bytes")
    if peak is None:
        return ""
    return size_words(peak) if capacity is None else f"{size_words(peak)} of {size_words(capacity)}"


def memory_section(memory: Mapping[str, Any]) -> Markup:
    """The section, or nothing where nothing is known of ranks."""
    ranks: Sequence[Mapping[str, Any]] = sorted(
        memory.get("ranks") or (), key=lambda rank: (-int(rank["peak_bytes"]), int(rank["rank"]))
    )
    if not ranks:
        return Markup()
    shown = sorted(ranks[:_RANKS_LISTED], key=lambda rank: int(rank["rank"]))
    whole = max(int(ranks[0]["peak_bytes"]), 1)
    there = [kind.value for kind in MemoryKind if any(kind.value in rank["parts"] for rank in shown)]
    legend = [tag("span", swatch(f"part {_memory_style(kind)}"), kind.replace("_", " ")) for kind in (*there, _BESIDE)]
    rows = [(str(rank["rank"]), _bar(rank, there, whole), *_sizes(rank)) for rank in shown]
    heads = ("Rank", "", "in all", "reserved", "allocated")
    text = f"of {size_words(int(memory['capacity_bytes']))} a rank"
    title = tag("h2", "Memory ", tag("small", text + ", at the peak of a step"), id="memory-title")
    listed = table("Device memory of ranks at their peak", heads, rows, words=(0, 1))
    note = f"The {len(shown)} ranks that need most, of {len(ranks)} that differ." if len(shown) < len(ranks) else ""
    parts = (title, tag("p", *legend, class_="legend"), listed, tag("p", note, class_="note") if note else Markup())
    return tag("section", join(parts), id="memory", aria_labelledby="memory-title")


def _sizes(rank: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(size_words(int(rank[key])) for key in ("peak_bytes", "reserved_bytes", "allocated_bytes"))


def _bar(rank: Mapping[str, Any], kinds: Sequence[str], whole: int) -> Markup:
    parts = {kind: int(rank["parts"].get(kind, 0)) for kind in kinds}
    parts[_BESIDE] = max(int(rank["peak_bytes"]) - sum(parts.values()), 0)
    text = ", ".join(f"{kind.replace('_', ' ')} {size_words(size)}" for kind, size in parts.items() if size)
    return bar([(size / whole, f"part {_memory_style(kind)}") for kind, size in parts.items()], f"rank {rank['rank']}: {text}")


def _memory_style(kind: str) -> str:
    return _BESIDE_STYLE if kind == _BESIDE else kind.replace("_", "-")


# As many columns as can be told apart at the width of a table.
_COLUMNS = 40


def iterations_section(iterations: Iterations | None) -> Markup:
    """The section, or nothing where nobody asked how iterations differ."""
    if iterations is None:
        return Markup()
    times = iterations.step_ms
    heads = ("Iterations", "mean", "standard deviation", "smallest", "10 %", "50 %", "90 %", "largest")
    numbers = table("Step time over iterations", heads, [(f"{len(times):,}", *iteration_figures(iterations))])
    title = tag("h2", "Iterations ", tag("small", "ms per step with what each looks up"), id="iterations-title")
    parts = (title, _histogram(times), numbers, tag("p", _slowest(iterations), class_="note"))
    return tag("section", *parts, id="iterations", aria_labelledby="iterations-title")


def _slowest(iterations: Iterations) -> str:
    text = f"The slowest is iteration {iterations.slowest}"
    rank, alone_ms = max(iterations.alone_ms.items(), key=lambda item: item[1], default=(0, 0.0))
    return text + (f"; with the lookups of rank {rank} alone {time_ms(alone_ms)} ms longer." if alone_ms > 0 else ".")


def _histogram(times: tuple[float, ...]) -> Markup:
    low, high = min(times), max(times)
    if high <= low:
        return Markup()
    counts, _ = np.histogram(times, bins=_COLUMNS, range=(low, high))
    heights = counts / counts.max()
    columns = [
        tag("rect", x=f"{100 * i / _COLUMNS:.3f}%", width=f"{90 / _COLUMNS:.3f}%", y=f"{100 * (1 - height):.3f}%",
            height=f"{100 * height:.3f}%", class_="compute")
        for i, height in enumerate(heights.tolist())
    ]  # fmt: skip
    drawn = tag(
        "svg", *columns, class_="histogram", role="img", aria_label=f"step times from {time_ms(low)} to {time_ms(high)} ms"
    )
    ends = tag("p", tag("span", time_ms(low)), tag("span", time_ms(high)), class_="ends")
    return tag("div", join((drawn, ends)), class_="spread")
