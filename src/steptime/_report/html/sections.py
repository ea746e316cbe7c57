"""What a page says in words and numbers below its summary: where time goes, memory, iterations, coverage.

All of it is there without a script, so that it can be read aloud, searched and printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from steptime._models.memory.lifetimes import MemoryKind
from steptime._report.alike import Alike, folded, ranges
from steptime._report.html.markup import Markup, bar, join, swatch, table, tag
from steptime._report.words import OUT_OF_RANGE, busy_words, iteration_figures, path_ranks_words, percent, time_ms
from steptime._sim.explain.activity import RankSummary
from steptime._sim.explain.critical_path import PathSummary
from steptime._sim.prediction import Iterations, PredictedStep
from steptime._units import size_words

# More ranks than this are shown by their extremes.
RANKS_LISTED = 128


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


def ranks(prediction: PredictedStep) -> Markup:
    """What every rank's device does during its step; ranks of which the same is shown are one row."""
    groups = folded(prediction, lambda rank: tuple(map(time_ms, _times(rank))))
    summaries = [alike.summary for alike in groups] if len(groups) <= RANKS_LISTED else prediction.ranks
    longest = max((rank.step_ms for rank in summaries), default=1.0) or 1.0
    heads = ("Rank", "", "step", "compute", "exposed comm.", "idle", "waiting for peers", "idle for the host", "host blocked")
    columns = list(zip(*map(_times, summaries), strict=True))
    if len(groups) <= RANKS_LISTED:
        named = [(alike.label, _rank_bar(alike, longest)) for alike in groups]
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


def _rank_bar(alike: Alike, longest: float) -> Markup:
    rank = alike.summary
    parts = (("compute", rank.compute_ms), ("exposed", rank.exposed_communication_ms), ("idle", rank.idle_ms))
    text = ", ".join(f"{name} {percent(value / (rank.step_ms or 1.0))}" for name, value in parts)
    return bar([(value / longest, name) for name, value in parts], f"rank {alike.label}: {text}")


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
    heads = ("Name", "Kind", "ms", "share", "ops per step")
    listed = table("The names the critical path spends most on", heads, rows, words=(0, 1))
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


def memory_section(prediction: PredictedStep) -> Markup:
    """The section, or nothing where nothing is known of ranks."""
    memory, workload = prediction.memory, prediction.workload
    ranks: Sequence[Mapping[str, Any]] = sorted(
        memory.get("ranks") or (), key=lambda rank: (-int(rank["peak_bytes"]), int(rank["rank"]))
    )
    if not ranks:
        return Markup()
    shown = sorted(ranks[:_RANKS_LISTED], key=lambda rank: int(rank["rank"]))
    whole = max(int(ranks[0]["peak_bytes"]), 1)
    there = [kind.value for kind in MemoryKind if any(kind.value in rank["parts"] for rank in shown)]
    legend = [tag("span", swatch(f"part {_memory_style(kind)}"), kind.replace("_", " ")) for kind in (*there, _BESIDE)]
    rows = [(ranges(workload.run_by(int(rank["rank"]))), _bar(rank, there, whole), *_sizes(rank)) for rank in shown]
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
