"""A sweep as one page: curves against what was varied, what no variant beats, the best of every platform, all numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from steptime._report.cost import money
from steptime._report.html.charts import Axis, ChartMark, Series, chart, legend
from steptime._report.html.markup import Markup, page_part, table, tag
from steptime._report.html.static import section, static_page
from steptime._report.html.summary import notice_list
from steptime._report.sweep import PLATFORM, Predictions, SweepVariant, settings_words, value_words
from steptime._report.sweep_text import (
    best_lines,
    cost_unit,
    order_words,
    speed_unit,
    table_cells,
    variant_words,
)
from steptime._report.words import quantity, rate
from steptime._units import GIB

# Curves of one figure; of more, those with the best variants are drawn.
_MOST_CURVES = 10
# Of more curves, bands would hide each other: the best one has its own.
_MOST_BANDS = 4
# Rows of the table of all variants; files have more.
_MOST_ROWS = 1000
_MOST_AXES = 3


def sweep_page(answer: Predictions) -> str:
    """The page as text, the same for the same answer."""
    name = str(answer.variants[0].document.get("workload") or "workload")
    return static_page("sweep", name, "sweep", list(_sections(answer)), styles=page_part("charts.css"))


def _sections(answer: Predictions) -> Iterator[Markup]:
    yield tag("section", *_summary(answer), id="summary", aria_label="Summary")
    best = answer.best_by_platform
    if len(best) > 1:
        heads, rows = table_cells(answer, tuple(best.values()))
        yield section("Best of every platform", "that fits", table("Best of every platform", _flat(heads), rows))
    for axis in _numeric(answer)[:_MOST_AXES]:
        yield _curves(answer, axis)
    yield from _fronts(answer)
    ranked = answer.ranked
    note = order_words(answer) + (f"; the first {_MOST_ROWS:,} of {len(ranked):,}" if len(ranked) > _MOST_ROWS else "")
    heads, rows = table_cells(answer, ranked[:_MOST_ROWS])
    yield section("Variants", note, table("All variants", _flat(heads), rows), notice_list(answer.notices))


def _summary(answer: Predictions) -> list[Markup]:
    facts = [tag("div", tag("dt", name), tag("dd", words)) for name, words in best_lines(answer)]
    left = f", {len(answer.left_out):,} left out" if answer.left_out else ""
    fitting = answer.fitting
    words, unit = (rate(fitting[0].tokens_per_s or fitting[0].speed), speed_unit(answer)) if fitting else ("None", "fits")
    count = f" · {len(answer):,} variants{left}"
    number = tag(
        "p", tag("strong", words), tag("span", unit + " at best" * bool(fitting) + count, class_="unit"), class_="step"
    )
    return [number, tag("dl", *facts, class_="facts")]


def _flat(heads: Sequence[str]) -> list[str]:
    return [head.replace("\n", " ").replace(". ", ".") for head in heads]


def _numeric(answer: Predictions) -> list[str]:
    """Settings whose values are numbers, those with most values first."""
    found = {name: values for name, values in answer.varied.items() if all(type(each) in (int, float) for each in values)}
    return sorted(found, key=lambda name: -len(found[name]))


def _curves(answer: Predictions, axis: str) -> Markup:
    """Time, speed, memory and cost against one setting, a curve for all others that are equal."""
    others = [name for name in answer.varied if name != axis]
    groups: dict[str, list[SweepVariant]] = {}
    for each in answer.variants:
        values = {name: each.settings[name] for name in others if name in each.settings}
        groups.setdefault(_curve_name(values), []).append(each)
    ranked = {id(each): place for place, each in enumerate(answer.ranked)}
    names = sorted(groups, key=lambda name: min(ranked[id(each)] for each in groups[name]))
    shown = [name for name in groups if name in names[:_MOST_CURVES]]
    pictures, drawn = [], []
    for measure in _measures(answer):
        drawn = [
            Series(
                name or "as it is",
                tuple(_marks(measure, axis, groups[name], band=len(shown) <= _MOST_BANDS or name == names[0])),
                style,
            )
            for style, name in enumerate(shown)
        ]
        drawn = [each for each in drawn if each.marks]
        if drawn:
            pictures.append(chart(f"{measure.title} by {axis}", Axis(axis, _plain), measure.axis, drawn, limit=measure.limit))
    note = f"the {_MOST_CURVES} best of {len(groups)} curves; " if len(groups) > _MOST_CURVES else ""
    note += "the band, of the best alone," if len(shown) > _MOST_BANDS else "bands"
    note += f" hold{'s' * (len(shown) > _MOST_BANDS)} nine of ten steps; hollow marks do not fit"
    return section(f"By {axis}", note, legend(drawn), tag("div", *pictures, class_="charts"))


def _curve_name(values: Mapping[str, Any]) -> str:
    return ", ".join(
        value_words(value) if name in (PLATFORM, "variant") else f"{name} {value_words(value)}"
        for name, value in values.items()
    )


class _Measure:
    """One number of variants that is drawn."""

    def __init__(self, title: str, axis: Axis, key: str, limit: tuple[float, str] | None = None, unit: float = 1.0) -> None:
        self.title, self.axis, self.key, self.limit, self.unit = title, axis, key, limit, unit

    def of(self, variant: SweepVariant) -> float | None:
        """Its value."""
        value = getattr(variant, self.key)
        return None if value is None else float(value) / self.unit


def _measures(answer: Predictions) -> Iterator[_Measure]:
    first = answer.variants[0]
    yield _Measure("Step time, ms", Axis("ms", _plain, zero=True), "step_time_ms")
    if any(each.tokens_per_s is not None for each in answer.variants):
        yield _Measure("Tokens per second", Axis("tokens/s", quantity, zero=True), "tokens_per_s")
    elif any(each.samples_per_s is not None for each in answer.variants):
        yield _Measure("Samples per second", Axis("samples/s", quantity, zero=True), "samples_per_s")
    if any(each.peak_bytes is not None for each in answer.variants):
        rooms = {each.document["memory"].get("capacity_bytes") for each in answer.variants} - {None}
        limit = (room := rooms.pop() / GIB, f"{room:,.0f} GiB there") if len(rooms) == 1 else None
        yield _Measure("Memory of the fullest rank, GiB", Axis("GiB", _plain, zero=True), "peak_bytes", limit, unit=GIB)
    if any(each.cost is not None for each in answer.variants):
        yield _Measure(f"Cost {cost_unit(first)}", Axis("cost", money, zero=True), "cost")


def _marks(measure: _Measure, axis: str, variants: Sequence[SweepVariant], *, band: bool) -> Iterator[ChartMark]:
    for each in sorted((each for each in variants if axis in each.settings), key=lambda each: each.settings[axis]):
        value = measure.of(each)
        if value is not None:
            low, high = each.interval_ms if band and measure.key == "step_time_ms" else (None, None)
            label = f"{settings_words(each.settings)}: {variant_words(each)}{', does not fit' * (each.fits is False)}"
            yield ChartMark(float(each.settings[axis]), value, low, high, each.fits is not False, label)


def _fronts(answer: Predictions) -> Iterator[Markup]:
    """What is given up for what: speed against memory and cost; variants that no other beats in both are joined."""
    up = Axis(speed_unit(answer), quantity, zero=True)
    kinds = (
        ("memory", Axis("memory of the fullest rank, GiB", _plain, zero=True)),
        ("cost", Axis(f"cost {cost_unit(answer.variants[0])}", money, zero=True)),
    )
    pictures, tables = [], []
    for kind, across in kinds:
        front = answer.front(kind)
        if len(answer) < 2 or not front:
            continue
        everything = Series("fits, and another beats it", tuple(_cloud(answer.fitting, kind)), 5, line=False)
        unfit = Series(
            "does not fit", tuple(_cloud([each for each in answer.variants if each.fits is False], kind)), 4, line=False
        )
        best = Series("no other is faster and " + ("smaller" if kind == "memory" else "cheaper"), tuple(_cloud(front, kind)), 1)
        drawn = [each for each in (everything, unfit, best) if each.marks]
        pictures.append(
            tag("div", chart(f"{speed_unit(answer).capitalize()} against {kind}", across, up, drawn), legend(drawn))
        )
        heads, rows = table_cells(answer, front)
        tables.append(tag("div", tag("h3", f"Speed against {kind}"), table(f"Speed against {kind}", _flat(heads), rows)))
    if pictures:
        yield section("What no variant beats", "", tag("div", *pictures, class_="charts"), *tables)


def _cloud(variants: Sequence[SweepVariant], kind: str) -> Iterator[ChartMark]:
    for each in variants:
        amount = each.cost if kind == "cost" else None if each.peak_bytes is None else each.peak_bytes / GIB
        if amount is not None:
            label = f"{settings_words(each.settings)}: {variant_words(each)}"
            yield ChartMark(float(amount), each.tokens_per_s or each.speed, good=each.fits is not False, label=label)


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}" if value < 100 else rate(value)
