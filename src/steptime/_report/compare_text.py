"""The report of `steptime compare`, as text and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from steptime._report.compare import ComparedAnswers
from steptime._report.cost import money
from steptime._report.diff import diff_sections, print_parts
from steptime._report.html.markup import Markup, table, tag
from steptime._report.html.static import section, static_page
from steptime._report.html.summary import notice_list
from steptime._report.layout import print_heading, print_line, print_notices, print_numbers, print_section
from steptime._report.sweep import AgainstFirst, value_words
from steptime._report.sweep_text import around_words, cost_head, memory_words, print_table
from steptime._report.words import percent, rate, time_ms

_SHOWN = 60
_VALUE_AT_MOST = 36
# Beside numbers, what nobody can tell apart from errors.
_UNSURE = "?"


def print_comparison(console: Console, answer: ComparedAnswers) -> None:
    """All of it: the verdict, the numbers, what differs, and for two why."""
    print_heading(console, "compare", f"{len(answer.items):,} answers")
    print_line(console, "Verdict", verdict_words(answer), style="bold")
    what = "time of a sample" if answer.per_sample else "step time"
    note = f"{what} against the first; {_UNSURE} the difference may be error"
    print_section(console, "Answers", note)
    print_table(console, *_cells(answer))
    heads, rows = _inputs(answer)
    if rows:
        print_section(console, "What differs", "between their inputs")
        print_numbers(console, heads, rows)
    if answer.diff is not None:
        print_parts(console, answer.diff)
    print_notices(console, answer.notices)


def verdict_words(answer: ComparedAnswers) -> str:
    """Which is fastest, by how much, and whether that is more than errors."""
    fitting = [at for at, each in enumerate(answer.items) if each.fits is not False]
    if not fitting:
        return "none of them fits"
    ratio = [each.ratio for each in answer.differences]
    best = min(fitting, key=lambda at: ratio[at])
    unfit = len(answer.items) - len(fitting)
    beside = f"; {unfit} {'do' if unfit > 1 else 'does'} not fit" if unfit else ""
    beside += "".join(f"; {each}" for each in answer.warnings)
    less_time = f"% less time per {'sample' if answer.per_sample else 'step'} than"
    others = [at for at in fitting if at != best]
    if not others:
        return f"{answer.names[best]} is the only one that fits{beside}"
    if len(answer.items) == 2:
        other = 1 - best
        found = answer.differences[1]
        less = 1 - ratio[best] / ratio[other]
        if less < 5e-4:
            return f"{answer.names[0]} and {answer.names[1]} take the same time{beside}"
        sure = percent(found.p_faster if best == 1 else 1 - found.p_faster)
        by = f"{answer.names[best]} takes {100 * less:.1f} {less_time} {answer.names[other]}"
        more = (
            "more than the errors of both"
            if found.certain
            else f"within their errors: it is the faster one with a chance of {sure}"
        )
        return f"{by}, {more}{beside}"
    first = answer.differences[best]
    if best == 0:
        close = [answer.names[at] for at in others if not answer.differences[at].certain]
        tied = f"; within errors of it: {', '.join(close[:4])}" if close else ", by more than the uncertainty"
        return f"{answer.names[0]} is fastest{tied}{beside}"
    sure = "by more than the uncertainty" if first.certain else f"with a chance of {percent(first.p_faster)}"
    return f"{answer.names[best]} is fastest, {100 * (1 - first.ratio):.1f} {less_time} {answer.names[0]} {sure}{beside}"


def difference_words(found: AgainstFirst) -> str:
    """How much longer or shorter, and whether that is more than errors."""
    return f"{100 * (found.ratio - 1):+.1f} %" + _UNSURE * (not found.certain)


def _cells(answer: ComparedAnswers) -> tuple[list[str], list[list[str]]]:
    tokens = any(each.tokens_per_s is not None for each in answer.items)
    heads = ["answer", "step\nms", "90 %\ninterval", "tokens/s" if tokens else "samples/s", "MFU", "memory"]
    heads += [cost_head(answer.items[0]), "against\nthe first", "90 % of\nthat"]
    rows = []
    for at, (name, each, found) in enumerate(zip(answer.names, answer.items, answer.differences, strict=True)):
        if at >= _SHOWN:
            break
        speed = each.tokens_per_s if tokens else each.samples_per_s
        mfu = each.document.get("mfu")
        low, high = (100 * (value - 1) for value in found.interval)
        row = [name, time_ms(each.step_time_ms), around_words(each), "" if speed is None else rate(speed)]
        row += ["" if mfu is None else f"{100 * mfu:.1f} %", memory_words(each), "" if each.cost is None else money(each.cost)]
        rows.append([*row, difference_words(found) if at else "", f"{low:+.0f} {high:+.0f} %" if at else ""])
    shown = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    return [heads[at] for at in shown], [[row[at] for at in shown] for row in rows]


def _inputs(answer: ComparedAnswers) -> tuple[list[str], list[list[str]]]:
    """A row for every input that differs, a column for every answer."""
    heads = [
        "input",
        *(name if len(name) <= _VALUE_AT_MOST else f"{name[: _VALUE_AT_MOST - 1]}…" for name in answer.names[:_SHOWN]),
    ]
    rows = [[key, *(_value(value) for value in values[:_SHOWN])] for key, values in answer.differs.items() if key != "source"]
    return heads, rows


def _value(value: Any) -> str:
    text = "-" if value is None else f"{value:,}" if type(value) is int else value_words(value)
    return text if len(text) <= _VALUE_AT_MOST else f"{text[: _VALUE_AT_MOST - 1]}…"


def compare_page(answer: ComparedAnswers) -> str:
    """The page as text, the same for the same answers."""
    return static_page("compare", f"{len(answer.items):,} answers", "comparison", compare_sections(answer))


def compare_sections(answer: ComparedAnswers) -> list[Markup]:
    """What the page says: which is fastest, all answers, what differs, and of two where the difference comes from."""
    heads, rows = _cells(answer)
    inputs, values = _inputs(answer)
    sections = [
        tag("section", tag("p", tag("strong", verdict_words(answer)), class_="bound"), id="summary", aria_label="Summary"),
        section("Answers", f"against the first; {_UNSURE} the difference may be error", table("Answers", _flat(heads), rows)),
    ]
    if values:
        sections.append(section("What differs", "between their inputs", table("What differs", inputs, values)))
    if answer.diff is not None:
        sections += diff_sections(answer.diff.difference)
    return [*sections, notice_list(answer.notices)]


def _flat(heads: Sequence[str]) -> list[str]:
    return [head.replace("\n", " ") for head in heads]
