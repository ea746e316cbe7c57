"""A fabric that was just made: where it lies, what it is, and how far its curves are off; as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from steptime._models.error import gmae
from steptime._platforms.own_fabric import LeftOut, OwnFabric
from steptime._report.json import SCHEMA_VERSION, Document
from steptime._report.layout import literal, print_line, print_numbers, print_section, print_title
from steptime._report.text import print_warnings

_HEADS = ("", "tier", "ranks", "rows", "GMAE", "MAPE", "p90", "max")


def own_fabric_document(made: OwnFabric, file: Path) -> Document:
    """What `fabric --json` writes."""
    limits = made.limits
    return {
        "schema_version": SCHEMA_VERSION,
        "name": limits.name,
        "title": limits.title,
        "file": str(file),
        "source": "analytic" if limits.models is None else "fitted",
        "gpus_per_node": limits.gpus_per_node,
        "nodes": limits.nodes,
        "tiers": [asdict(tier) for tier in limits.tiers],
        "rows": made.rows,
        "errors": [
            {
                "kind": item.kind,
                "tier": item.tier,
                "ranks": list(item.ranks),
                "rows": len(item.errors),
                **dict(zip(("gmae", "mape", "p90", "max"), _told(item), strict=True)),
            }
            for item in made.left_out
        ],
        "warnings": list(made.warnings),
    }


def print_own_fabric(console: Console, made: OwnFabric, file: Path) -> None:
    """Errors, then what to do with it."""
    limits = made.limits
    title = Text().append("steptime fabric", style="bold").append(" · ", style="dim")
    print_title(console, title.append_text(literal(f"{limits.name} · {limits.title}")))
    if limits.models is None:
        print_line(console, "Analytic", "from a data sheet: nothing was measured, intervals are a factor of 2 either way")
    elif made.left_out:
        print_section(console, "Errors", "of rows left out in turn, a fifth at a time; GMAE is a geometric mean")
        print_numbers(console, _HEADS, _rows(made.left_out))
        print_line(console, "Curves", f"through all {made.rows:,} rows")
    else:
        print_line(console, "Errors", f"not known: {made.rows} rows are too few to leave any out")
    for tier in limits.tiers:
        bandwidth, latency = tier.bandwidth_bytes_per_s.value / 1e9, tier.latency_ns.value / 1e3
        text = f"{tier.name}, {tier.kind} of {tier.ranks} ranks: {bandwidth:,.4g} GB/s of a rank one way, {latency:,.3g} us"
        print_line(console, "Tier", text, spaced=False)
    print_line(console, "Written", f"{file}  (shown by: steptime platforms {file})", spaced=False)
    print_warnings(console, made.warnings)


def _rows(left_out: Sequence[LeftOut]) -> list[list[str]]:
    return [
        [
            item.kind,
            item.tier,
            ", ".join(map(str, item.ranks)),
            f"{len(item.errors):,}",
            *(f"{100 * told:.1f} %" for told in _told(item)),
        ]
        for item in left_out
    ]


def _told(one: LeftOut) -> tuple[float, float, float, float]:
    """GMAE, MAPE, p90, max."""
    errors = np.abs(one.errors)
    return gmae(errors.tolist()), float(errors.mean()), float(np.quantile(errors, 0.9)), float(errors.max())
