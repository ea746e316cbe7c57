"""The machine-readable form of every answer: stable keys, same bytes for the same input, never NaN."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from steptime._models.power.card import StepPower
from steptime._report.cost import cost_document, cost_of
from steptime._report.verdict import verdict_of
from steptime._sim.prediction import Iterations, PredictedStep

# Changes when a key is removed or changes its meaning; new keys may appear without.
SCHEMA_VERSION = 1

# Milliseconds to the nanosecond; shares as exact as anyone needs.
_DIGITS = 6
# A step costs millionths of a dollar or thousands.
_COST, _COST_DIGITS = "cost_", 6
# Sums of thousands of kernels' energies: the last digits are those of the order of additions, which libraries choose.
_DIGITS_OF = {"power_w": 4, "energy_j": 4}

Document = dict[str, Any]


def dumps(document: Document) -> str:
    """The document as JSON text, with a line end."""
    return json.dumps(rounded(document), indent=2, allow_nan=False) + "\n"


def prediction_document(prediction: PredictedStep) -> Document:
    """What `predict --json` writes; `iterations` is there where lookups of iterations were given."""
    path = prediction.critical_path
    iterations = {} if prediction.iterations is None else {"iterations": iterations_document(prediction.iterations)}
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict_of(prediction).to_dict(),
        "step_time_ms": prediction.step_time_ms,
        "platform": prediction.platform,
        "interval_ms": list(prediction.interval_ms),
        "draws_ms": list(prediction.draws_ms),
        "situation": prediction.situation,
        "profiled": prediction.profiled,
        "host_code_ms": prediction.host_code_ms,
        **_asked(prediction),
        "first_step_ms": prediction.first_step_ms,
        "recorded_step_ms": prediction.recorded_step_ms,
        "bound_by": prediction.bound_by,
        "ranks": [asdict(rank) for rank in prediction.ranks],
        "breakdown": dict(prediction.breakdown),
        "critical_path": {
            "length_ms": path.length_ms,
            "kinds": [asdict(kind) for kind in path.kinds],
            "ranks": [asdict(rank) for rank in path.ranks],
            "top": [asdict(entry) for entry in path.top],
        },
        "straggler": None if prediction.straggler is None else asdict(prediction.straggler),
        "memory": dict(prediction.memory),
        "coverage": dict(prediction.coverage),
        **prediction.notices.to_dict(),
        **iterations,
    }


def _asked(prediction: PredictedStep) -> Document:
    """What was asked and what people compare; None where it is not known."""
    workload = prediction.workload
    known = workload.description
    return {
        "workload": workload.name or None,
        "batch": known.batch,
        "sequence": known.sequence,
        "precision": prediction.precision,
        "numerics": None if known.numerics is None else dict(known.numerics),
        "parallelism": None if known.parallelism is None else dict(known.parallelism),
        "parameters": known.parameters,
        "active_parameters": known.active_parameters,
        "samples_per_s": prediction.samples_per_s,
        "tokens_per_s": prediction.tokens_per_s,
        "flop": prediction.flop,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        **power_document(prediction.power),
        **cost_document(cost_of(prediction)),
    }


def power_document(power: StepPower | None) -> Document:
    """Means over the cards, energy of all of them in one step; None where nobody knows what they draw."""
    if power is None:
        return dict.fromkeys(("power_w", "clock_hz", "energy_j", "power_cap_w", "power_capped"))
    return {
        "power_w": power.power_w,
        "clock_hz": power.clock_hz,
        "energy_j": power.energy_j,
        "power_cap_w": power.cap_w,
        "power_capped": power.capped,
    }


def iterations_document(iterations: Iterations) -> Document:
    """How the step time is distributed over iterations, and which rank's lookups make the slowest one slow."""
    return {
        "count": len(iterations.step_ms),
        "mean_ms": iterations.mean_ms,
        "std_ms": iterations.std_ms,
        "p10_ms": iterations.quantile_ms(0.1),
        "p50_ms": iterations.quantile_ms(0.5),
        "p90_ms": iterations.quantile_ms(0.9),
        "min_ms": min(iterations.step_ms),
        "max_ms": max(iterations.step_ms),
        "per_iteration_ms": list(iterations.step_ms),
        "slowest": iterations.slowest,
        "slowest_by_rank_ms": {str(rank): more for rank, more in iterations.alone_ms.items()},
    }


def rounded(value: Any, name: str = "") -> Any:
    """Plain values with their numbers as exact as anyone needs; `name` is the key that they stand under."""
    if isinstance(value, float):
        small = name.startswith(_COST)  # digits that matter, however small the amount
        return float(f"{value:.{_COST_DIGITS}g}") if small else round(value, _DIGITS_OF.get(name, _DIGITS))
    if isinstance(value, dict):
        return {key: rounded(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, name) for item in value]
    return value
