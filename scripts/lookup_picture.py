"""Draws docs/pictures/lookups_over_skew.svg: measured time over skew for one set of tables, with what each model says.

Of the series of measured rows (same tables, same sizes, six skews) the one whose times differ most both forward and backward;
one that no model was fitted to goes before. `--unseen` fits models and baselines here, none of them to any series.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from steptime._hardware.device import FOLDER, reference_device
from steptime._models.engine.splits import FIT, VALIDATION
from steptime._models.lookups.fitted import Kind, LookupModels, lookups_file
from steptime._models.lookups.forms import LookupForm
from steptime._models.lookups.question import DIRECTIONS, EMBEDDING_BAG, OPTIMIZERS, TABLE_BATCHED
from steptime.errors import InputError
from steptime_lab.baselines.lookups import BASELINES
from steptime_lab.fit.lookups import HELD_OUT, fit_form, read_lookup_baselines, read_lookups
from steptime_lab.measurements.lookups import MeasuredLookups
from steptime_lab.measurements.shipped import FOLDER as MEASUREMENTS

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "lookups_over_skew.svg"
SKEWS = 6
OURS = "this model"
NAMES = {TABLE_BATCHED: "table-batched lookup", EMBEDDING_BAG: "nn.EmbeddingBag"}
UPDATES = {"none": "", "sgd": " with SGD", "adagrad": " with Adagrad", "rowwise_adagrad": " with row-wise Adagrad"}

WIDTH, HEIGHT = 960, 520
PANEL_WIDTH, PANEL_HEIGHT, PANEL_TOP = 370, 300, 84
PANEL_LEFT = (80, 560)
# Colour, width and dashes; colours of Okabe and Ito, which the colour-blind tell apart.
STYLES = {
    OURS: ("#d55e00", 3.0, ""),
    "published network": ("#0072b2", 1.8, ""),
    "trees on sizes": ("#009e73", 1.8, "7 3"),
    "bytes over bandwidth": ("#555555", 1.8, "2 3"),
    "hit rate of bags": ("#cc79a7", 1.8, "10 3 2 3"),
    "hit rate of rows": ("#b8860b", 1.8, "5 5"),
}
# Of a decade of times; the first that gives a panel enough of them.
TICKS = ((1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))
FEWEST_TICKS = 4
MARGIN = 0.12  # of logarithms of times, above and below


@dataclass(frozen=True)
class Panel:
    """One direction: times over skew, in us."""

    title: str
    skew: Sequence[float]
    measured: Sequence[float]
    fitted: Sequence[bool]  # whether the models were fitted to the row
    lines: Mapping[str, Sequence[float]]


def places_of(measured: MeasuredLookups, series: str) -> npt.NDArray[np.intp]:
    """The cold rows of a series, on a whole GPU."""
    here = (measured.series == series) & ~measured.lookups.warm & (measured.lookups.share == 1)
    return np.flatnonzero(here)


def chosen_series(measured: Mapping[Kind, MeasuredLookups], implementations: Sequence[str]) -> tuple[str, str]:
    """Implementation and name."""
    found: list[tuple[bool, float, str, str]] = []
    for implementation in implementations:
        both = [measured[implementation, direction] for direction in DIRECTIONS]
        for series in sorted(set(both[0].series) - {""}):
            rows = [one.take(places_of(one, series)) for one in both]
            if all(len(one) == SKEWS and same_sizes(one) for one in rows):
                apart = min(float(one.time_ns.max() / one.time_ns.min()) for one in rows)
                unseen = not any((one.split == FIT).any() for one in rows)
                found.append((unseen, apart, implementation, str(series)))
    if not found:
        raise SystemExit(f"no series of {SKEWS} skews among the measured lookups of {', '.join(implementations)}")
    _, _, implementation, series = max(found)
    return implementation, series


def same_sizes(measured: MeasuredLookups) -> bool:
    """Whether rows have equally many lookups; a case that was varied from one of a series may have kept its name."""
    lookups = measured.lookups.sums(measured.lookups.pool.tables.lookups)
    return bool(lookups.max() == lookups.min())


def exponents(table: pa.Table, kind: Kind, series: str) -> dict[float, float]:
    """Of a series, the exponent of skew by the measured time, which tells its rows apart."""
    columns = ["implementation", "direction", "series", "time_ns", "generators"]
    found = {}
    for row in table.select(columns).to_pylist():
        if (row["implementation"], row["direction"], row["series"]) == (*kind, series):
            stream = json.loads(row["generators"][0])
            found[float(row["time_ns"])] = 0.0 if stream["kind"] == "uniform" else float(stream["alpha"])
    return found


def read_forms(file: Path, kind: Kind) -> dict[str, LookupForm]:
    """A fitted model and the baselines in the file beside it."""
    baselines, _ = read_lookup_baselines(file.with_name(f"{file.stem}-baselines.npz"))
    return {OURS: LookupModels.load(file).form(*kind), **{name: forms[kind] for name, forms in baselines.items()}}


def fitted_forms(kind: Kind, measured: MeasuredLookups) -> dict[str, LookupForm]:
    """A model and its baselines, all fitted to what is in no series."""
    rows = measured.of(FIT, VALIDATION)
    rows = rows.take(~HELD_OUT["series"](rows))
    return {
        OURS: fit_form(kind, rows, 0, reference_device()),
        **{name: baseline.fit(rows, 0) for name, baseline in BASELINES.items()},
    }


def panel_of(table: pa.Table, kind: Kind, measured: MeasuredLookups, series: str, models: Path | None) -> Panel:
    """One direction of a series."""
    rows = measured.take(places_of(measured, series))
    by_time = exponents(table, kind, series)
    order = np.argsort([by_time[time_ns] for time_ns in rows.time_ns.tolist()])
    rows = rows.take(order)
    forms = fitted_forms(kind, measured) if models is None else read_forms(models, kind)
    optimizer = OPTIMIZERS[int(rows.lookups.optimizer[0])]
    return Panel(
        title=kind[1] + UPDATES[optimizer],
        skew=[by_time[time_ns] for time_ns in rows.time_ns.tolist()],
        measured=(rows.time_ns / 1e3).tolist(),
        fitted=[models is not None and split == FIT for split in rows.split.tolist()],
        lines={name: (form.times(rows.lookups).time_ns / 1e3).tolist() for name, form in forms.items()},
    )


def tables_of(implementation: str, measured: MeasuredLookups, series: str) -> str:
    """What is looked up, in words."""
    lookups = measured.take(places_of(measured, series)).lookups
    tables = lookups.pool.tables.take(lookups.member[: lookups.starts[1]])

    def span(values: npt.NDArray[np.float64], form: str) -> str:
        low, high = format(values.min(), form), format(values.max(), form)
        return low if low == high else f"{low} to {high}"

    count = "one table" if len(tables) == 1 else f"{len(tables)} tables"
    return (
        f"{NAMES[implementation]}, {count} of {span(tables.rows, ',.0f')} rows of {span(tables.dim, '.0f')} elements, "
        f"{tables.batch[0]:,.0f} samples of {span(tables.pooling, '.3g')} lookups, NVIDIA H200, nothing in cache"
    )


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def line(points: Sequence[tuple[float, float]], colour: str, width: float, dashes: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'


def dot(x: float, y: float, fitted: bool) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{"white" if fitted else "black"}" stroke="black" stroke-width="1.8"/>'
    )


def ticks_between(low: float, high: float) -> list[float]:
    """Round times between two logarithms."""
    found: list[float] = []
    for steps in TICKS:
        every = (step * 10.0**power for power in range(-1, 7) for step in steps)
        found = [tick for tick in every if low <= math.log(tick) <= high]
        if len(found) >= FEWEST_TICKS:
            break
    return found


def drawn_panel(panel: Panel, left: float) -> Iterator[str]:
    """Axes, models, and what was measured on top of them."""
    every = [*panel.measured, *(time for times in panel.lines.values() for time in times)]
    low, high = math.log(min(every)) - MARGIN, math.log(max(every)) + MARGIN
    bottom, last = PANEL_TOP + PANEL_HEIGHT, max(panel.skew)

    def at(skew: float, time: float) -> tuple[float, float]:
        across = (skew / last * 0.94 + 0.03) * PANEL_WIDTH
        return left + across, bottom - (math.log(time) - low) / (high - low) * PANEL_HEIGHT

    yield text(left, PANEL_TOP - 10, panel.title, 'font-weight="bold"')
    for tick in ticks_between(low, high):
        _, y = at(0, tick)
        yield line([(left, y), (left + PANEL_WIDTH, y)], "#dddddd", 1)
        yield text(left - 8, y + 4, f"{tick:,g}", 'text-anchor="end"')
    for skew in panel.skew:
        x, _ = at(skew, panel.measured[0])
        yield line([(x, bottom), (x, bottom + 5)], "black", 1)
        yield text(x, bottom + 20, f"{skew:g}", 'text-anchor="middle"')
    yield line([(left, PANEL_TOP), (left, bottom), (left + PANEL_WIDTH, bottom)], "black", 1.2)
    middle = PANEL_TOP + PANEL_HEIGHT / 2
    yield text(
        left - 62, middle, "device time, us (logarithmic)", f'text-anchor="middle" transform="rotate(-90 {left - 62} {middle})"'
    )
    words = "exponent of the Zipf distribution of rows (0: uniform)"
    yield text(left + PANEL_WIDTH / 2, bottom + 42, words, 'text-anchor="middle"')
    for name, times in reversed(list(panel.lines.items())):
        yield line([at(*point) for point in zip(panel.skew, times, strict=True)], *STYLES[name])
    for skew, time, fitted in zip(panel.skew, panel.measured, panel.fitted, strict=True):
        yield dot(*at(skew, time), fitted)


def legend(panels: Sequence[Panel]) -> Iterator[str]:
    """Under the panels, four in a row."""
    entries = [("measured, not fitted to", "")]
    if any(any(panel.fitted) for panel in panels):
        entries.append(("measured, fitted to", "fitted"))
    entries += [(name, name) for name in STYLES if name in panels[0].lines]
    for place, (words, name) in enumerate(entries):
        x, y = 60 + 220 * (place % 4), HEIGHT - 58 + 26 * (place // 4)
        yield line([(x, y), (x + 34, y)], *STYLES[name]) if name in STYLES else dot(x + 17, y, name == "fitted")
        yield text(x + 42, y + 4, words)


def picture(panels: Sequence[Panel], tables: str) -> str:
    """The file's text, on white whatever it is shown on."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="black">',
        "<title>Measured time of one embedding lookup over the skew of its indices, and what each model predicts</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(20, 26, "The same tables and sizes, only the indices differ: measured and predicted times", 'font-size="17"'),
        text(20, 48, tables, 'fill="#444444"'),
    ]
    for panel, left in zip(panels, PANEL_LEFT, strict=True):
        parts += drawn_panel(panel, left)
    return "\n".join([*parts, *legend(panels), "</svg>"]) + "\n"


def main() -> None:
    """Writes the picture, and prints what it shows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--models", type=Path, default=lookups_file(FOLDER, "h200"), help="a file of lookup models, with its baselines beside"
    )
    parser.add_argument("--unseen", action="store_true", help="fit the models here, to no series")
    parser.add_argument("--implementation", choices=list(NAMES), help="draw a series of this one")
    parser.add_argument("--out", type=Path, default=PICTURE)
    chosen = parser.parse_args()
    table, measured = read_lookups(MEASUREMENTS)
    implementation, series = chosen_series(measured, [chosen.implementation] if chosen.implementation else list(NAMES))
    panels = []
    for direction in DIRECTIONS:
        kind = (implementation, direction)
        try:
            panels.append(panel_of(table, kind, measured[kind], series, None if chosen.unseen else chosen.models))
        except InputError as error:
            raise SystemExit(str(error)) from error
        print(f"{series} {panels[-1].title}: models were fitted to {sum(panels[-1].fitted)} of {SKEWS} rows")
        for name, times in {"measured": panels[-1].measured, **panels[-1].lines}.items():
            print(f"  {name:22}" + "".join(f"{time:11,.1f}" for time in times) + " us")
    shown = tables_of(implementation, measured[implementation, DIRECTIONS[0]], series)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(picture(panels, shown), encoding="utf-8")


if __name__ == "__main__":
    main()
