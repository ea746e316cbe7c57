"""A plan as one page: a single file without a script and without a network, with a bar of where every layout's step goes."""

from __future__ import annotations

from steptime._plan.evaluate import Played
from steptime._plan.parts import AGAIN, BACKWARD, BUBBLE, FORWARD, IDLE, OPTIMIZER, WIRES
from steptime._report.html.markup import Markup, bar, swatch, table, tag
from steptime._report.html.static import section, static_page
from steptime._report.html.summary import cost_facts, verdict_summary
from steptime._report.plan import SHOWN, Planned
from steptime._report.plan_text import (
    FRONT_NOTE,
    alike_words,
    difference_cells,
    difference_words,
    front_cells,
    part_cells,
    searched_words,
    speed_words,
    sure_words,
)
from steptime._report.words import percent, time_ms
from steptime._units import ms, size_words

_LINKS = ("Where its step goes", "Best layouts", "Time against memory", "Search")
# Part of a step to a class of the style sheet.
_STYLES = {
    FORWARD: "matmul", BACKWARD: "attention", AGAIN: "normalization", OPTIMIZER: "optimizer",
    **dict.fromkeys(WIRES, "communication"), BUBBLE: "other", IDLE: "idle",
}  # fmt: skip


def plan_page(planned: Planned) -> str:
    """The page as text, the same for the same answer but for the seconds it took."""
    return static_page("plan", planned.found.model.title, "layout", _sections(planned), _LINKS)


def _sections(planned: Planned) -> list[Markup]:
    found = planned.found
    sections = [
        tag("section", _summary(planned), id="summary", aria_label="Summary"),
        section("Where its step goes", "of the busiest stage", table("Parts", ("Part", "ms", "Share"), part_cells(found.best))),
    ]
    if planned.comparison is not None:
        longer = table("Parts of the difference", ("Part", "ms longer"), difference_cells(planned))
        sections.append(section("Why it beats the second", difference_words(planned), longer))
    named = [(str(each.layout), *cells[1:]) for each, cells in zip(found.front, front_cells(planned), strict=True)]
    front = table("Fastest first", ("Layout", "Step, ms", "Memory"), named)
    return [
        *sections,
        section("Best layouts", "and where their steps go", _legend(planned), _layouts(planned)),
        section("Time against memory", FRONT_NOTE, front),
        section("Search", "", tag("p", searched_words(planned))),
    ]


def _summary(planned: Planned) -> Markup:
    found, best = planned.found, planned.found.best
    inputs = {
        "Model": found.model.title,
        "Platform": f"{found.gpus} GPUs of {planned.platform}",
        "Batch": f"{found.model.batch:,}",
        "Sequence": f"{found.model.sequence:,}",
        "Precision": found.model.precision,
        "Numerics": alike_words(planned),
    }
    verdict = planned.verdict
    room = {} if verdict.fit is None else {"Memory": verdict.fit.room}
    result = {"Speed": ", ".join(speed_words(planned, best)), **room}
    result |= {**dict(cost_facts(planned.cost(best))), "Winner": sure_words(planned)}
    return verdict_summary(
        verdict,
        planned.step_time_ms,
        planned.interval_ms,
        inputs=inputs,
        result=result,
        notices=planned.notices,
        winner=f"Best layout: {best.layout}",
    )


def _legend(planned: Planned) -> Markup:
    """Of the parts that the shown layouts have."""
    there = {name for each in planned.found.played[:SHOWN] for name, value in each.parts_ns.items() if value > 0}
    shown = ((name, style) for name, style in _STYLES.items() if name in there)
    return tag("p", *(tag("span", swatch(style), f" {name} ") for name, style in shown), class_="legend")


def _layouts(planned: Planned) -> Markup:
    found = planned.found
    longest = max(each.step_ns for each in found.played[:SHOWN])
    rows = [
        (str(each.layout), _bar(each, longest), time_ms(ms(each.step_ns)), size_words(each.peak_bytes), percent(chance))
        for each, chance in zip(found.played[:SHOWN], found.p_fastest, strict=False)
    ]
    return table("Fastest first", ("Layout", "Step", "ms", "Memory", "P(fastest)"), rows)


def _bar(played: Played, longest: float) -> Markup:
    parts = [(value / longest, _STYLES[name]) for name, value in played.parts_ns.items()]
    return bar(parts, f"{played.layout}: {time_ms(ms(played.step_ns))} ms")
