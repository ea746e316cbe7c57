"""Curves and clouds of points as SVG, without a script: numbers at every mark when it is pointed at, and tables beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steptime._report.html.markup import Markup, join, tag

# Of the drawing, in units of its own.
_WIDTH, _HEIGHT = 460.0, 270.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 14.0, 12.0, 44.0
_TICKS = 5
_MOST_X_TICKS = 8
# Values so far apart are drawn by their logarithms: doubled batches would crowd at one side.
_LOGARITHMIC = 6.0
STYLES = 8
"""Colours of series in `charts.css`; more series have them again, with dashes."""

Words = Callable[[float], str]


@dataclass(frozen=True)
class ChartMark:
    """One point: where, from where to where it may be, whether it is one that can be had, and what it is."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    good: bool = True
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points that belong together, in order."""

    name: str
    marks: tuple[ChartMark, ...]
    style: int = 0
    line: bool = True


@dataclass(frozen=True)
class Axis:
    """What is drawn along one side: its name, how numbers of it read, and whether it begins at zero."""

    name: str
    words: Words
    zero: bool = False


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(each) if self.logarithmic else each for each in (self.low, self.high, value))
        share = 0.5 if high == low else (at - low) / (high - low)
        return self.begin + share * (self.end - self.begin)


def chart(title: str, across: Axis, up: Axis, series: Sequence[Series], *, limit: tuple[float, str] | None = None) -> Markup:
    """A figure of series; `limit` is a line across at some height, and what it is."""
    marks = [mark for each in series for mark in each.marks]
    xs = sorted({mark.x for mark in marks})
    heights = [value for mark in marks for value in (mark.y, mark.low, mark.high) if value is not None]
    x, y = _across(across, xs), _upward(up, heights, None if limit is None else limit[0])
    content = [*_grid(x, y, across, up, xs)]
    if limit is not None and y.low <= limit[0] <= y.high:
        at = f"{y(limit[0]):.1f}"
        content.append(tag("line", x1=f"{_LEFT}", x2=f"{_WIDTH - _RIGHT}", y1=at, y2=at, class_="limit"))
        content.append(tag("text", limit[1], x=f"{_LEFT + 4}", y=f"{y(limit[0]) - 4:.1f}", class_="limit-name"))
    content += [_drawn(each, x, y) for each in series]
    drawing = tag("svg", *content, viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}", class_="chart", role="img", aria_label=title)
    return tag("figure", tag("figcaption", title), drawing)


def legend(series: Sequence[Series]) -> Markup:
    """Names of series beside their colours."""
    return tag("p", *(tag("span", _swatch(each), each.name) for each in series), class_="legend series-names")


def _swatch(series: Series) -> Markup:
    line = tag("line", x1="0", x2="22", y1="5", y2="5", class_=_style(series))
    return tag("svg", line, viewBox="0 0 22 10", class_="series-swatch", aria_hidden="true")


def _style(series: Series) -> str:
    return f"series s{series.style % STYLES}{' again' if series.style >= STYLES else ''}"


def _across(axis: Axis, xs: Sequence[float]) -> _Scale:
    low, high = (0.0 if axis.zero else xs[0]), xs[-1]
    apart = low > 0 and high / low >= _LOGARITHMIC
    inset = 0.0 if axis.zero else 12.0
    return _Scale(low, high, _LEFT + inset, _WIDTH - _RIGHT - inset, apart)


def _upward(axis: Axis, heights: Sequence[float], limit: float | None) -> _Scale:
    high = max(heights)
    if limit is not None and limit <= 2.5 * high:
        high = max(high, limit)
    low = 0.0 if axis.zero else min(heights)
    step = _step((high - low) or abs(high) or 1.0)
    return _Scale(math.floor(low / step) * step, math.ceil(high * 1.0001 / step) * step, _HEIGHT - _BOTTOM, _TOP)


def _step(span: float) -> float:
    """A round distance of ticks."""
    size = 10.0 ** math.floor(math.log10(span / _TICKS))
    return next(size * times for times in (1, 2, 2.5, 5, 10) if size * times * _TICKS >= span)


def _grid(x: _Scale, y: _Scale, across: Axis, up: Axis, xs: Sequence[float]) -> list[Markup]:
    found = []
    step = _step(y.high - y.low)
    for number in range(round((y.high - y.low) / step) + 1):
        value = y.low + number * step
        at = y(value)
        found.append(tag("line", x1=f"{_LEFT}", x2=f"{_WIDTH - _RIGHT}", y1=f"{at:.1f}", y2=f"{at:.1f}", class_="grid"))
        found.append(tag("text", up.words(value), x=f"{_LEFT - 6}", y=f"{at + 4:.1f}", class_="tick end"))
    for value in _x_ticks(x, xs, across):
        found.append(tag("text", across.words(value), x=f"{x(value):.1f}", y=f"{_HEIGHT - _BOTTOM + 16}", class_="tick middle"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    found.append(tag("text", across.name, x=f"{middle:.1f}", y=f"{_HEIGHT - 8}", class_="axis middle"))
    return found


def _x_ticks(x: _Scale, xs: Sequence[float], axis: Axis) -> list[float]:
    if not axis.zero:
        every = -(-len(xs) // _MOST_X_TICKS)
        return list(xs[::every])
    step = _step(x.high - x.low or 1.0)
    return [x.low + number * step for number in range(int((x.high - x.low) / step + 1e-9) + 1)]


def _drawn(series: Series, x: _Scale, y: _Scale) -> Markup:
    parts: list[Markup] = []
    spans = [mark for mark in series.marks if mark.low is not None and mark.high is not None]
    if series.line and len(spans) > 1:
        there = [f"{x(mark.x):.1f},{y(mark.high or 0):.1f}" for mark in spans]
        back = [f"{x(mark.x):.1f},{y(mark.low or 0):.1f}" for mark in reversed(spans)]
        parts.append(tag("polygon", points=" ".join((*there, *back)), class_="band"))
    if series.line and len(series.marks) > 1:
        parts.append(tag("polyline", points=" ".join(f"{x(mark.x):.1f},{y(mark.y):.1f}" for mark in series.marks)))
    for mark in series.marks:
        circle = {"cx": f"{x(mark.x):.1f}", "cy": f"{y(mark.y):.1f}", "r": "3.5"}
        parts.append(tag("circle", tag("title", mark.label), **circle, class_=None if mark.good else "bad"))
    return tag("g", join(parts), class_=_style(series))
