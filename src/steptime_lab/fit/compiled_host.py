"""Fits what the host spends on compiled steps: one linear law over compiled functions whose frames and calls are counted.

A row says in `call` how often each cost is in it, by the names of `CompiledCosts`, and how many launches are. External calls
are among the counts by their names in ATen: what they cost here is found beside the rest and not kept, since ops have costs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from steptime._models.host.model import HostCost
from steptime.errors import InputError
from steptime_lab.fit.engine.terms import fit_terms

Row = Mapping[str, Any]
_ATEN = "aten::"
# Replays are launches as well: of each, one launch.
_LAUNCHED = "replay"


def compiled_costs(rows: Sequence[Row], cpu_ns: Callable[[Row, float], float], launch_ns: float) -> dict[str, HostCost]:
    """Costs by name; `cpu_ns` says what a row's launches leave of its time at speed 1."""
    if not rows:
        return {}
    counted = [_counted(row) for row in rows]
    names = sorted({name for counts, _ in counted for name in counts})
    terms = np.array([[float(counts.get(name, 0.0)) for name in names] for counts, _ in counted])
    times = np.array([cpu_ns(row, launches) for row, (_, launches) in zip(rows, counted, strict=True)])
    found = dict(zip(names, fit_terms(terms, times).tolist(), strict=True))
    return {
        name: HostCost(cost, launch_ns if name == _LAUNCHED else 0.0)
        for name, cost in found.items() if not name.startswith(_ATEN)
    }  # fmt: skip


def _counted(row: Row) -> tuple[Mapping[str, float], float]:
    try:
        call = json.loads(row["call"])
        return call["counts"], float(call["launches"])
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"a row of compiled {row['op']} has the call {row['call'][:40]!r}; expected JSON with counts and launches"
        ) from None
