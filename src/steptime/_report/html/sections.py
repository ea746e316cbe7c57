"""What a page says in words and numbers: the step time and what bounds it, where time goes, the critical path, coverage.

All of it is there without a script, so that it can be read aloud, searched and printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from steptime._report.document import OUT_OF_RANGE, asked_facts, merged_warnings, speed_facts
from steptime._report.html.markup import Markup, bar, join, swatch, table, tag
from steptime._report.html.memory import memory_words
from steptime._report.layout import percent, time_ms
from steptime._sim.explain.activity import RankSummary
from steptime._sim.explain.bound import family_words
from steptime._sim.explain.path_summary import PathSummary
from steptime._sim.prediction import PredictedStep

# More ranks than this are shown by their extremes.
RANKS_LISTED = 128


def summary(prediction: PredictedStep, facts: Mapping[str, str]) -> Markup:
    """The step time with its interval, what bounds it, what it is the step of, and what to doubt."""
    number = tag("p", tag("strong", time_ms(prediction.step_time_ms)), tag("span", "ms per step", class_="unit"), class_="step")
    known = (*_facts(prediction), *facts.items())
    text = [tag("div", tag("dt", name), tag("dd", value)) for name, value in known]
    return join(
        (
            tag("div", number, _interval(prediction), class_="headline"),
            tag("p", *_bound(prediction.bound_by), class_="bound"),
            tag("dl", *text, class_="facts"),
            warning_list(prediction.warnings),
        )
    )


def _bound(sentence: str) -> tuple[Markup, str]:
    regime, colon, evidence = sentence.partition(":")
    return tag("strong", regime[:1].upper() + regime[1:]), colon + evidence


def _interval(prediction: PredictedStep) -> Markup:
    """The interval as a line with the step time on it."""
    low, high = prediction.interval_ms
    if high <= low:
        return Markup()
    here = (prediction.step_time_ms - low) / (high - low)
    line = bar([(1.0, "span")], f"from {time_ms(low)} to {time_ms(high)} ms")
    mark = tag("rect", x=f"{100 * here:.3f}%", width="3", height="100%", class_="here")
    dot = tag("svg", mark, class_="mark", aria_hidden="true")
    text = "range with the recorded steps, ms" if prediction.platform is None else "90 % interval, ms"
    ends = tag("p", tag("span", time_ms(low)), tag("span", text), tag("span", time_ms(high)), class_="ends")
    return tag("div", tag("div", line, dot, class_="line"), ends, class_="interval")


def _facts(prediction: PredictedStep) -> Iterator[tuple[str, str]]:
    workload = prediction.workload
    devices = list(dict.fromkeys(p.device_name for p in workload.programs if p.device_name))
    if prediction.platform is not None:
        yield "Platform", prediction.platform
    elif devices:
        yield "Device, as recorded", ", ".join(devices[:2]) + (", ..." if len(devices) > 2 else "")
    ranks = len(prediction.ranks)
    yield "Ranks", str(ranks) if ranks == workload.world_size else f"{ranks} of {workload.world_size}"
    yield from ((fact.name, fact.value) for fact in (*asked_facts(prediction), *speed_facts(prediction)))
    steps = max(len(p.steps) for p in workload.programs)
    if steps:
        yield "Steps drawn", str(steps)
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
    given = list(values)
    most = max(given, default=0.0)
    digits = 3 if most < 100 else 2 if most < 10_000 else 1
    return [f"{value:,.{digits}f}" for value in given]


def families(breakdown: Mapping[str, float]) -> Markup:
    """Families by the time the device is busy with them."""
    total, most = sum(breakdown.values()) or 1.0, max(breakdown.values(), default=1.0) or 1.0
    rows = []
    for (family, busy_ms), shown in zip(breakdown.items(), _column(breakdown.values()), strict=True):
        name = "communication, exposed" if family == "communication" else family_words(family)
        share = f"{100 * busy_ms / total:.1f} %"
        named = join((swatch(f"family {family}"), name))
        rows.append((named, shown, share, bar([(busy_ms / most, f"family {family}")], f"{name}: {share}")))
    heads = ("Family", "ms", "share", "")
    return table("Device busy time by family, milliseconds per step, mean over ranks", heads, rows, words=(0, 3))


def ranks(found: Sequence[RankSummary]) -> Markup:
    """What every rank's device does during its step."""
    longest = max((rank.step_ms for rank in found), default=1.0) or 1.0
    heads = ("Rank", "", "step", "compute", "exposed comm.", "idle", "waiting for peers", "idle for the host", "host blocked")
    columns = list(zip(*map(_times, found), strict=True))
    if len(found) <= RANKS_LISTED:
        named = [(str(rank.rank), _rank_bar(rank, longest)) for rank in found]
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
    owners = ", ".join(f"{percent(r.share)} on rank {r.rank}" for r in path.ranks[:4] if r.share >= 0.005)
    text = f"{time_ms(path.length_ms)} ms per step" + (f"; {owners}" if len(path.ranks) > 1 else "")
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
