"""How the step time differs between iterations: a histogram, its numbers, and whose lookups make the slowest one slow."""

from __future__ import annotations

import numpy as np

from steptime._report.html.markup import Markup, join, table, tag
from steptime._report.layout import time_ms
from steptime._sim.prediction import Iterations

# As many columns as can be told apart at the width of a table.
_COLUMNS = 40


def iterations_section(iterations: Iterations | None) -> Markup:
    """The section, or nothing where nobody asked how iterations differ."""
    if iterations is None:
        return Markup()
    times = iterations.step_ms
    levels = [iterations.quantile_ms(level) for level in (0.1, 0.5, 0.9)]
    shown = (iterations.mean_ms, iterations.std_ms, min(times), *levels, max(times))
    heads = ("Iterations", "mean", "standard deviation", "smallest", "10 %", "50 %", "90 %", "largest")
    numbers = table("Step time over iterations", heads, [(f"{len(times):,}", *map(time_ms, shown))])
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
