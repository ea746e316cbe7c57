"""Error tables: as text and as JSON with stable keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from steptime._report.json import SCHEMA_VERSION, Document
from steptime._report.layout import literal, print_line, print_numbers, print_section, print_title, print_warnings
from steptime_lab.validate.engine import Group, Summary, Validation

_HEADS = ("", "rows", "GMAE", "MAPE", "p90", "max", "inside\n90 %", "noise\nfloor")
_WORST = 8  # cases that are named
# A fact that is larger counts something.
_COUNTS = 2.0
_BESIDE = 2  # baselines that fit beside the errors; more have a table of their own


def validation_document(found: Validation) -> Document:
    """What `validate --json` writes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "set": found.name,
        "summary": _summary(found.whole.summary),
        "baselines": {name: _summary(item) for name, item in found.whole.baselines.items()},
        "parts": {  # the name that groups have had in the JSON from the first
            name: {**_summary(group.summary), "baselines": {other: _summary(item) for other, item in group.baselines.items()}}
            for name, group in found.groups.items()
        },
        "facts": dict(found.facts),
        "cases": [
            {
                "name": case.name,
                "predicted": case.predicted,
                "measured": case.measured,
                "error": case.error,
                "spread": case.spread,
            }
            for case in found.cases
        ],
        "warnings": list(found.warnings),
    }


def print_validation(console: Console, found: Validation, *, full: bool = False) -> None:
    """The report of `steptime validate`: every group of the cases, or only those that are no groups of groups."""
    title = Text().append(f"steptime validate {found.name}", style="bold").append(" · ", style="dim")
    print_title(console, title.append_text(literal(found.title)))
    baselines = list(found.whole.baselines)
    beside = baselines if len(baselines) <= _BESIDE else []
    heads = (*_HEADS, *(f"GMAE of\n{name}" for name in beside))
    shown = {name: group for name, group in found.groups.items() if full or "," not in name}
    rows = [_row("all", found.whole, beside), *(_row(name, group, beside) for name, group in shown.items())]
    print_section(console, "Errors", "predicted against measured; GMAE is a geometric mean")
    text = [index for index in range(len(heads)) if index == 0 or any(row[index] for row in rows)]
    print_numbers(console, [heads[index] for index in text], [[row[index] for index in text] for row in rows])
    if not beside and baselines:
        print_section(console, "Instead", "other forms on the same cases")
        others = [(name, Group(item)) for name, item in found.whole.baselines.items()]
        print_numbers(console, _HEADS[:6], [_row(name, group, [])[:6] for name, group in others])
        _print_instead(console, shown, baselines)
    _print_worst(console, found.groups)
    for name, value in found.facts.items():
        if "/" not in name:
            print_line(console, name.replace("_", " "), _fact(name, value), spaced=False)
    for note in found.notes:
        print_line(console, "Note", note, style="dim", spaced=False)
    print_warnings(console, found.warnings)


def _print_instead(console: Console, groups: Mapping[str, Group], baselines: Sequence[str]) -> None:
    """GMAE of every other form on the parts of which they all know all cases."""
    known = {name: group for name, group in groups.items() if set(baselines) <= set(group.baselines)}
    if known:
        heads = ("GMAE", "this", *(name.replace(" ", "\n", 1) for name in baselines))
        rows = [
            [name, *(_percent(item.gmae) for item in (group.summary, *(group.baselines[other] for other in baselines)))]
            for name, group in known.items()
        ]
        print_numbers(console, heads, rows)


def _summary(one: Summary) -> Document:
    return {**asdict(one), "geomean": one.gmae}


def _row(name: str, group: Group, baselines: Sequence[str]) -> list[str]:
    item = group.summary
    told = (item.gmae, item.mape, item.p90, item.max, item.interval_coverage, item.noise_floor)
    beside = (group.baselines[other].gmae if other in group.baselines else None for other in baselines)
    return [name, f"{item.rows:,}", *(_percent(value) for value in (*told, *beside))]


def _fact(name: str, value: float) -> str:
    """A ratio where its name says so; else a share, or a count where it is far more than all."""
    if name.startswith("times_"):
        return f"{value:.2f} x"
    return f"{100 * value:.2f} %" if value < _COUNTS else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if value < 10 else f"{1 + value:,.0f} x"


def _print_worst(console: Console, groups: Mapping[str, Group]) -> None:
    """The largest error of each of the groups that have the largest ones."""
    order = sorted(groups.items(), key=lambda item: -item[1].summary.max)
    text = list(dict.fromkeys(group.summary.worst for _, group in order))[:_WORST]
    if text:
        print_section(console, "Worst", "the largest errors, by op and shapes", Text("\n").join(literal(line) for line in text))
