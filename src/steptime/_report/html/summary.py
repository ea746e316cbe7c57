"""The first part of a page: the verdict, the step with its interval, what was asked, how fast it is, and what to doubt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from steptime._notices import Notices
from steptime._program.host_code import HOST_CODE
from steptime._report.cost import Cost, cost_of
from steptime._report.html.markup import Markup, bar, join, tag
from steptime._report.verdict import Verdict, verdict_of
from steptime._report.words import (
    INTERVAL,
    NO_INTERVAL,
    RECORDED_RANGE,
    Fact,
    asked_facts,
    device_words,
    in_unit,
    power_words,
    speed_facts,
    step_words,
    time_ms,
)
from steptime._sim.prediction import PredictedStep

INPUTS, RESULT, IF_ROOM = "Inputs", "Result", "If there were room"

Facts = Mapping[str, str]
_UNITS = re.compile(r"(?<=\d) (?=%|ms\b|[KMGT]iB\b)")


def summary(prediction: PredictedStep, facts: Facts | None = None) -> Markup:
    """Of a prediction; `facts` are said beside its own."""
    verdict = verdict_of(prediction)
    result = {**dict(_result(prediction)), **(facts or {})}
    return verdict_summary(
        verdict,
        prediction.step_time_ms,
        prediction.interval_ms,
        inputs=dict(_inputs(prediction)),
        result=result,
        notices=prediction.notices,
        recorded_range=prediction.platform is None and prediction.profiled,
    )


def verdict_summary(
    verdict: Verdict,
    step_ms: float,
    interval_ms: tuple[float, float],
    *,
    inputs: Facts,
    result: Facts,
    notices: Notices,
    recorded_range: bool = False,
    winner: str = "",
) -> Markup:
    """The same for every kind of answer about a step; `winner` is what a search found."""
    low, high, unit = in_unit(*interval_ms)
    span = f"{RECORDED_RANGE if recorded_range else INTERVAL} {low if low == high else f'{low}-{high}'} {unit}"
    if not verdict.certainty.claimed:
        span = NO_INTERVAL
    caveats = join([tag("p", tag("strong", "Caveat"), held(f": {each}"), class_="caveat") for each in verdict.caveats])
    if verdict.fits is False:
        parts = [short(verdict, step_ms, span), caveats]
    else:
        line = interval(step_ms, interval_ms, RECORDED_RANGE if recorded_range else INTERVAL)
        line = line if verdict.certainty.claimed else Markup()
        number = tag("div", step_number(step_ms), line, class_="headline")
        sure = tag("p", tag("strong", "How sure"), held(f": {span}; {verdict.certainty.why}"), class_="sure")
        found = tag("p", winner, class_="winner") if winner else Markup()
        room = (
            tag("p", tag("strong", "Memory"), held(f": unknown; {verdict.unknown}"), class_="sure")
            if verdict.unknown
            else Markup()
        )
        parts = [chips(verdict), found, number, caveats, bound(verdict.bound_by), sure, room]
    groups = facts_group(INPUTS, inputs), facts_group(IF_ROOM if verdict.fits is False else RESULT, result)
    return join((*parts, *groups, notice_list(notices)))


def chips(verdict: Verdict) -> Markup:
    """The verdict in three words."""
    regime = verdict.regime[:1].upper() + verdict.regime[1:]
    said = [(regime, "chip"), (verdict.certainty.span, "chip")]
    if verdict.fit is not None:
        said.insert(0, (verdict.fit.words.capitalize(), "chip tight" if verdict.fit.tight else "chip good"))
    elif verdict.room:
        said.insert(0, (verdict.room.capitalize(), "chip tight"))
    return tag("p", *(tag("span", text, class_=style) for text, style in said), class_="chips", id="verdict")


def short(verdict: Verdict, step_ms: float, span: str) -> Markup:
    """What does not fit: by how much, where, what fills it, what would help; and only then what it would take."""
    assert verdict.fit is not None
    where = "" if verdict.fit.rank is None else f" on rank {verdict.fit.rank}"
    helps = tag("ul", *(tag("li", held(each.text)) for each in verdict.helps), class_="helps") if verdict.helps else Markup()
    return tag(
        "div",
        tag("p", tag("strong", held(f"Does not fit by {verdict.fit.short}")), tag("span", where, class_="unit"), class_="step"),
        tag("p", held(f"It {verdict.fit.filled}.")),
        *((tag("h2", "What would help"), helps) if verdict.helps else ()),
        tag("p", f"With room it would take {step_words(step_ms)} per step ({span}).", class_="note"),
        class_="short",
        id="verdict",
    )


def step_number(step_ms: float) -> Markup:
    """The step time, large."""
    number, unit = step_words(step_ms).split()
    return tag("p", tag("strong", number), tag("span", f"{unit} per step", class_="unit"), class_="step")


def interval(step_ms: float, interval_ms: tuple[float, float], title: str) -> Markup:
    """The interval as a line with the step time on it."""
    low, high = interval_ms
    if high <= low:
        return Markup()
    here = (step_ms - low) / (high - low)
    first, last, unit = in_unit(low, high)
    line = bar([(1.0, "span")], f"from {first} to {last} {unit}")
    mark = tag("rect", x=f"{100 * here:.3f}%", width="3", height="100%", class_="here")
    dot = tag("svg", mark, class_="mark", aria_hidden="true")
    ends = tag("p", tag("span", first), tag("span", f"{title}, {unit}"), tag("span", last), class_="ends")
    return tag("div", tag("div", line, dot, class_="line"), ends, class_="interval")


def bound(bound_by: str) -> Markup:
    """What bounds a step, and why."""
    regime, colon, evidence = bound_by.partition(":")
    return tag("p", tag("strong", regime[:1].upper() + regime[1:]), held(colon + evidence), class_="bound")


def held(text: str) -> str:
    """Text whose lines never part a number from its unit."""
    return _UNITS.sub("\u00a0", text)


def facts_group(title: str, facts: Facts) -> Markup:
    """Facts under a small title."""
    if not facts:
        return Markup()
    listed = tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()), class_="facts")
    return tag("div", tag("h2", title), listed, class_="group-of-facts")


def notice_list(notices: Notices) -> Markup:
    """Warnings, and folded what the answer is based on; caveats stand with the headline."""
    warnings, basis = (join([tag("li", item) for item in texts]) for texts in notices[1:])
    shown = tag("ul", warnings, class_="warnings", aria_label="Warnings") if warnings else Markup()
    return join((shown, tag("details", tag("summary", "Based on"), tag("ul", basis), class_="basis") if basis else Markup()))


def cost_facts(cost: Cost | None) -> Iterator[tuple[str, str]]:
    """What steps cost, where a price was given."""
    if cost is not None:
        yield "Cost", cost.text


def _inputs(prediction: PredictedStep) -> Iterator[tuple[str, str]]:
    workload = prediction.workload
    yield "Workload", workload.name or "workload"
    devices = device_words([program.device_name for program in workload.programs])
    if prediction.platform is not None:
        yield "Platform", prediction.platform
    elif devices:
        yield "Device, as recorded", devices
    running = len(workload.running)
    yield "Ranks", f"{running:,}" if running == workload.world_size else f"{running:,} of {workload.world_size:,}"
    yield from _named(asked_facts(prediction))
    if any(program.recorded for program in workload.programs):
        yield "Profiler", "left in, as recorded" if prediction.profiled else "taken out"


def _result(prediction: PredictedStep) -> Iterator[tuple[str, str]]:
    yield from _named(speed_facts(prediction))
    if prediction.power is not None:
        yield "Power", power_words(prediction.power)
    yield from cost_facts(cost_of(prediction))
    fit = verdict_of(prediction).fit
    if fit is not None:
        yield "Memory", fit.room
    if prediction.host_code_ms:
        yield HOST_CODE, f"{time_ms(prediction.host_code_ms)} ms"
    if prediction.first_step_ms is not None:
        yield "First step", step_words(prediction.first_step_ms)
    straggler = prediction.straggler
    if straggler is not None:
        yield "Straggler", f"rank {straggler.rank}: others wait {time_ms(straggler.caused_ms)} ms for it"


def _named(facts: Iterator[Fact]) -> Iterator[tuple[str, str]]:
    return ((fact.name, fact.value) for fact in facts)
