"""Draws docs/pictures/fabric_*.svg: time over bytes of every collective on every shipped fabric, measured and as fitted.

    python scripts/fabric_pictures.py [--data TABLES] [--rows CSV] [--out FOLDER]

Measured points of loopback come with the package. Those of the other fabrics are in published tables that do not
(`public_fabrics.py` says which): without them only curves can be drawn, and then only into a FOLDER of their own, so that
pictures with points stay. Open dots were fitted to, full ones were not.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
from public_fabrics import ROWS, SHARED, SITES, Tables, described

from steptime._hardware.fabric import NETWORK, fabric_names, first_ranks, read_fabric
from steptime._models.collectives.fitting import Points, best_points, swept
from steptime._models.collectives.message import KINDS, Messages
from steptime._models.collectives.tier import TierModel, saved
from steptime._models.engine.splits import TEST
from steptime._platforms.fabric import Fabric
from steptime._platforms.own_fabric import tier_points
from steptime_lab.measurements.shipped import shipped

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
FAMILIES = {
    "loopback": ("loopback", "loopback-2x2"),
    "nvlink": ("a100-nvlink", "h100-nvlink", "h200-nvlink", "b200-nvlink", "gb200-nvlink"),
    "pairwise": ("a100-pairwise-nvlink", "h100-pairwise-nvlink", "a40-pairwise-nvlink"),
    "two_nodes": ("h100-2-nodes", "h100-2-nodes-2025"),
}
TITLES = {
    "loopback": "Ranks on parts of one GPU, TCP over loopback, measured for this project",
    "nvlink": "NVLink nodes, from published tables",
    "pairwise": "Boxes with NVLink between pairs or none, from published tables",
    "two_nodes": "Two nodes of 8 H100, from published tables",
}
LOOPBACK = FAMILIES["loopback"]

Floats = npt.NDArray[np.float64]

WIDTH, LEFT, ACROSS = 1000, 66, 4
PANEL_WIDTH, PANEL_HEIGHT, GAP = 206, 150, 26
CLOSE = 2.5
ROW_HEIGHT, HEAD, HEADING = PANEL_HEIGHT + 58, 92, 34
# Of rank counts; colours of Okabe and Ito, which the colour-blind tell apart.
COLOURS = {2: "#0072b2", 4: "#d55e00", 8: "#009e73", 16: "#cc79a7", 72: "#555555"}
EXTRAPOLATED = (8, 72)  # drawn where ranks beyond the measured ones exist
TIMES = {1e4: "10 us", 1e5: "100 us", 1e6: "1 ms", 1e7: "10 ms", 1e8: "100 ms", 1e9: "1 s"}
SIZES = {0: "1 B", 10: "1 KiB", 20: "1 MiB", 30: "1 GiB"}
BETWEEN = {5: "32 B", 15: "32 KiB", 25: "32 MiB"}  # said too where there is room for one of the others only
SMALL = 'font-size="11"'


@dataclass(frozen=True)
class Series:
    """One rank count: bytes and ns of the curve, and of what was measured."""

    ranks: int
    curve: tuple[Floats, Floats]
    dashed: bool = False
    points: tuple[Floats, Floats] = (np.zeros(0), np.zeros(0))
    unseen: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))


@dataclass(frozen=True)
class Panel:
    """One kind on one tier."""

    title: str
    series: Sequence[Series]


@dataclass(frozen=True)
class Drawn:
    """One fabric."""

    fabric: Fabric
    panels: Sequence[Panel]

    @property
    def rows(self) -> int:
        return -(-len(self.panels) // ACROSS)


def sizes_of(smallest: float, largest: float) -> Floats:
    return np.exp2(np.linspace(math.log2(smallest), math.log2(largest), 96))


def panels_of(fabric: Fabric, measured: Mapping[str, Points]) -> list[Panel]:
    """Every kind of every tier; the tier is said where there are several."""
    found = []
    for tier in fabric.limits.tiers:
        model = fabric.tiers[tier.name]
        assert isinstance(model, TierModel)
        where = f", {said_of(tier.name)}" if len(fabric.tiers) > 1 else ""
        points = measured.get(tier.name)
        for kind in KINDS:
            if model.measured_ranks(kind):
                series = kind_series(model, kind, tier.ranks, points)
                if tier.kind == NETWORK:  # its curves see all rows
                    series = [replace(one, unseen=np.zeros_like(one.unseen)) for one in series]
                found.append(Panel(kind + where, series))
        if points is not None and points.uneven.any():
            found.append(Panel("all_to_all, uneven, as even", uneven_series(model, points)))
    return found


def said_of(tier: str) -> str:
    return "a rank per node" if tier == NETWORK else f"within a {tier}"


def kind_series(model: TierModel, kind: str, most: int, points: Points | None) -> list[Series]:
    counts = model.measured_ranks(kind)
    ends = [(model.curves[kind, count].smallest_bytes, model.curves[kind, count].largest_bytes) for count in counts]
    found = []
    for count in (*counts, *(more for more in EXTRAPOLATED if counts[-1] < more <= most and len(counts) > 1)):
        span = ends[counts.index(count)] if count in counts else ends[-1]
        sizes = sizes_of(*span)
        known = model.curves.get((kind, count))
        curve = sizes, model.times(Messages.even(kind, count, sizes)).ns if known is None else known.ns(sizes)
        if points is None:
            found.append(Series(count, curve, count not in counts))
            continue
        here = (np.array(points.kind) == kind) & (points.ranks == count) & ~points.uneven
        own = points.take(here)
        found.append(Series(count, curve, count not in counts, (own.bytes, own.ns), own.split == TEST))
    return found


def uneven_series(model: TierModel, points: Points) -> list[Series]:
    """Over the bytes of the even exchange whose busiest rank moves as much, less what idle peers save."""
    found = []
    for count in model.measured_ranks("all_to_all"):
        own = points.take((points.ranks == count) & points.uneven)
        if len(own):
            times = own.ns / saved(own.messages) ** model.idle_power
            load = own.messages.load
            sizes = sizes_of(float(load.min()), float(load.max()))
            curve = sizes, model.curves["all_to_all", count].ns(sizes)
            found.append(Series(count, curve, points=(load, times), unseen=own.split == TEST))
    return found


def spanning_panel(fabric: Fabric, tables: Tables | None) -> Panel:
    """All_to_all over both nodes, which no curve was fitted to."""
    site = next(site for site in SITES if site.name == fabric.limits.name)
    found = []
    for ranks in (8, 16):
        group = first_ranks(fabric.limits, ranks, ranks // 2)
        sizes = sizes_of(1 << 20, 1 << 34)
        curve = sizes, fabric.times(Messages.even("all_to_all", ranks, sizes), group).ns
        cells: dict[int, list[float]] = {}
        for one in () if tables is None else tables.multi:
            if (one.kind, one.ranks, one.nodes) == ("all_to_all", ranks, 2) and site.network in one.source:
                cells.setdefault(one.bytes, []).append(one.ns)
        points = np.array(list(cells), dtype=np.float64), np.array([median(some) for some in cells.values()])
        found.append(Series(ranks, curve, True, points, np.ones(len(cells), dtype=np.bool_)))
    return Panel("all_to_all, 8 and 16 of both nodes", found)


def loopback_points(name: str) -> dict[str, Points]:
    return {"loopback": best_points(swept(shipped("collectives").to_pylist(), name))[0]}


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{" " if more else ""}{more}>{escape(words)}</text>'


def line(points: Sequence[tuple[float, float]], colour: str, width: float, dashes: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'


@dataclass(frozen=True)
class Scale:
    """Logarithms of bytes and ns that all panels of a fabric share."""

    bytes: tuple[float, float]
    ns: tuple[float, float]

    @classmethod
    def of(cls, drawn: Drawn) -> Scale:
        series = [one for panel in drawn.panels for one in panel.series]
        sizes = np.concatenate([values for one in series for values in (one.curve[0], one.points[0])])
        times = np.concatenate([values for one in series for values in (one.curve[1], one.points[1])])
        low, high = math.log10(times.min()), math.log10(times.max())
        margin = 0.04 * (high - low)
        return cls((math.log2(max(sizes.min(), 1)) - 0.5, math.log2(sizes.max()) + 0.5), (low - margin, high + margin))

    def at(self, left: float, bottom: float, size: float, ns: float) -> tuple[float, float]:
        across = (math.log2(max(size, 1)) - self.bytes[0]) / (self.bytes[1] - self.bytes[0])
        up = (math.log10(ns) - self.ns[0]) / (self.ns[1] - self.ns[0])
        return left + across * PANEL_WIDTH, bottom - up * PANEL_HEIGHT


def drawn_panel(panel: Panel, scale: Scale, left: float, top: float, first: bool) -> Iterator[str]:
    bottom = top + PANEL_HEIGHT
    yield text(left, top - 6, panel.title, 'font-weight="bold"')
    for ns, said in TIMES.items():
        if scale.ns[0] <= math.log10(ns) <= scale.ns[1]:
            _, y = scale.at(left, bottom, 1, ns)
            yield line([(left, y), (left + PANEL_WIDTH, y)], "#dddddd", 1)
            if first:
                yield text(left - 6, y + 4, said, f'text-anchor="end" {SMALL}')
    said_sizes = SIZES if sum(scale.bytes[0] <= power <= scale.bytes[1] for power in SIZES) > 1 else SIZES | BETWEEN
    for power in range(0, 36, 5):
        if scale.bytes[0] <= power <= scale.bytes[1]:
            x, _ = scale.at(left, bottom, 2.0**power, 10 ** scale.ns[0])
            yield line([(x, top), (x, bottom)], "#dddddd" if power in said_sizes else "#eeeeee", 1)
            if power in said_sizes:
                yield text(x, bottom + 14, said_sizes[power], f'text-anchor="middle" {SMALL}')
    yield line([(left, top), (left, bottom), (left + PANEL_WIDTH, bottom)], "black", 1.2)
    for one in panel.series:
        yield from drawn_points(one, scale, left, bottom)
    for one in panel.series:
        points = [scale.at(left, bottom, *pair) for pair in zip(*(values.tolist() for values in one.curve), strict=True)]
        yield line(points, COLOURS[one.ranks], 1.8, "6 3" if one.dashed else "")


def drawn_points(one: Series, scale: Scale, left: float, bottom: float) -> Iterator[str]:
    for unseen in (False, True):
        chosen = one.unseen == unseen
        if chosen.any():
            yield f'<g fill="{COLOURS[one.ranks] if unseen else "white"}" stroke="{COLOURS[one.ranks]}" stroke-width="0.8">'
            pairs = zip(one.points[0][chosen].tolist(), one.points[1][chosen].tolist(), strict=True)
            places = [scale.at(left, bottom, size, ns) for size, ns in pairs]
            # Of tables with a row for every size, one of those that would lie on each other.
            for x, y in {(round(x / CLOSE), round(y / CLOSE)): (x, y) for x, y in places}.values():
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>'
            yield "</g>"


def legend(drawn: Sequence[Drawn]) -> Iterator[str]:
    series = [one for fabric in drawn for panel in fabric.panels for one in panel.series]
    x, y = float(LEFT), 60.0
    for count in sorted({one.ranks for one in series}):
        yield line([(x, y), (x + 26, y)], COLOURS[count], 2.4)
        yield text(x + 32, y + 4, f"{count} ranks")
        x += 100
    if any(one.dashed for one in series):
        yield line([(x, y), (x + 26, y)], "black", 1.8, "6 3")
        yield text(x + 32, y + 4, "not fitted: other ranks, or put together from tiers")
        x += 325
    if any(len(one.points[0]) for one in series):
        for filled, said in (("white", "fitted to"), ("black", "not fitted to")):
            yield f'<circle cx="{x + 6:.1f}" cy="{y:.1f}" r="3" fill="{filled}" stroke="black"/>'
            yield text(x + 16, y + 4, said)
            x += 82


def picture(title: str, drawn: Sequence[Drawn]) -> str:
    """All fabrics of a family, one below another."""
    height = HEAD + sum(HEADING + one.rows * ROW_HEIGHT for one in drawn)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(LEFT, 28, title, 'font-size="16" font-weight="bold"'),
        text(LEFT, 46, "time of one collective by itself over the bytes of a rank's larger buffer, both logarithmic", SMALL),
        *legend(drawn),
    ]
    top = float(HEAD)
    for one in drawn:
        lines.append(text(LEFT, top + 12, f"{one.fabric.limits.name}: {one.fabric.limits.title}", 'font-size="14"'))
        top += HEADING
        scale = Scale.of(one)
        for place, panel in enumerate(one.panels):
            left = LEFT + place % ACROSS * (PANEL_WIDTH + GAP)
            lines += drawn_panel(panel, scale, left, top + place // ACROSS * ROW_HEIGHT + 10, place % ACROSS == 0)
        top += one.rows * ROW_HEIGHT
    return "\n".join([*lines, "</svg>"]) + "\n"


def drawn_family(family: str, tables: Tables | None) -> list[Drawn]:
    measured: dict[str, Mapping[str, Points]] = {}
    if family == "loopback":
        measured = {name: loopback_points(name) for name in LOOPBACK}
    elif tables is not None:
        # Rows of the other table are fitted and not shown.
        unshown = set(tables.rows)
        shown = {one.limits: [point for point in one.points if point not in unshown] for one in described(tables)}
        measured = {limits.name: tier_points(limits, points) for limits, points in shown.items() if points}
    found = []
    for name in FAMILIES[family]:
        fabric = Fabric.load(name)
        panels = panels_of(fabric, measured.get(name, {}))
        if any(site.name == name for site in SITES):
            panels.append(spanning_panel(fabric, tables))
        found.append(Drawn(fabric, panels))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "collectives", help="folder of the published tables")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the other table")
    parser.add_argument("--out", type=Path, default=PICTURES, help="where the pictures go")
    options = parser.parse_args()
    timed = {name for name in fabric_names() if read_fabric(name).models is not None}
    missing = timed - {name for names in FAMILIES.values() for name in names}
    assert not missing, f"no picture has {', '.join(sorted(missing))}"
    tables = Tables.read(options.data, options.rows) if options.data.is_dir() and options.rows.is_file() else None
    options.out.mkdir(parents=True, exist_ok=True)
    for family, title in TITLES.items():
        if tables is None and family != "loopback" and options.out == PICTURES:
            print(f"skipped: {family}, the published tables are not at {options.data}; --out draws curves alone")
            continue
        file = options.out / f"fabric_{family}.svg"
        file.write_text(picture(title, drawn_family(family, tables)), encoding="utf-8")
        print(f"{file.name}: {len(FAMILIES[family])} fabrics, {file.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
