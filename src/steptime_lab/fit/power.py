"""From rows of `measure power` to a `PowerModel`: energies and gamma from loops, elasticities from kernels at two clocks.

Mixes have no part in it; the report says how far off they are. What one card cannot tell (how cards differ, what links draw,
how warm another room is) stays what is assumed below.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._hardware.device import DeviceLimits
from steptime._measurements.recipe import Recipe
from steptime._measurements.store import read
from steptime._models.kernels.call import Call
from steptime._models.kernels.question import Question
from steptime._models.power.features import kernel_draw
from steptime._models.power.model import PowerModel
from steptime._platforms.device import Device
from steptime.errors import InputError
from steptime_lab.measurements.sets import POWER

Floats = npt.NDArray[np.float64]

_LOOPS, _MIX = ("duty", "steady", "anchor"), "mix"
# Zeros draw half of what numbers do: a diagnostic.
_ZEROS = "zeros"
# Where fits begin and how sure that is: energies as of published estimates for such processes (Horowitz, ISSCC 2014, scaled),
# powers of families by what the first measured card drew. Loops tell most of them; families without one keep theirs.
_PRIOR_FLOP_PJ = {"bfloat16": 1.0, "float16": 1.0, "tf32": 2.0, "float32": 9.0, "float8": 0.6}
_PRIOR_ACTIVE_W = {"matmul": 80.0, "convolution": 80.0, "attention": 600.0, "copy": 120.0, "fill": 60.0, "other": 250.0}
_LOOPED = ("activation", "norm", "softmax", "reduction", "elementwise", "dropout", "optimizer")
_PRIOR_OTHERS = {"gamma": (1.7, 0.4), "memory_byte_j": (70e-12, 25e-12)}
# Fewer loops, or loops that heat the card, tell less than the priors.
_LEAST_LOOPS, _LEAST_STEADY = 15, 5
# Clocks this far apart tell an elasticity.
_OTHER_CLOCK = 1.04
# Of the clock that tensor cores have, what only the peak explains.
_HELD_BACK = 0.96
# Not fitted: a card is warm when it draws much, so that loops cannot tell leakage from energy. An H200 at its cap that warmed
# from 61.7 to 64.3 degrees within a minute lowered its clock by 0.65 %, which saves some 8 W (`large_steps.py`, 2026-11-16).
_LEAKAGE_W_PER_K = 3.0
# Cards go on warming after the seconds of a loop: at 692 W to 64 degrees where loops end at 57 (same source).
_WARMED_THROUGH = 1.28
_FLOP_SPREAD, _ACTIVE_SPREAD = 0.5, 0.6
# What a power reading is off by, and what else a loop is.
_ROW_ERROR = 0.02
# Of the clock of a product: they are many, and of shapes that the energy of an operation does not tell apart.
_CLOCK_ERROR = 0.1
# Elasticities of families: few calls of each were timed.
_PRIOR_ELASTICITY, _ELASTICITY_SPREAD, _ELASTICITY_ERROR = 0.6, 0.25, 0.1
# Cards of one kind differ, and so do rooms and what operands hold: beside what the fit leaves. Between GPUs of one kind under
# one load published studies find some 5 % (Sinha et al., "Not All GPUs Are Created Equal", SC 2022).
_CARDS_DIFFER = 0.05
# Of a collective in flight: SMs that poll (measured: 6 W for all), memory and links that move 0.4 TB/s at 150 pJ per byte.
_COLLECTIVE_W = 60.0


@dataclass(frozen=True, eq=False)
class Loop:
    """A row of a loop with the calls of a round."""

    name: str
    kind: str
    power_w: float
    temperature_c: float
    period_ns: float
    busy_ns: float
    clocks: tuple[float, ...]  # per call: of its SMs, as a fraction of the highest
    asked: float  # by the driver
    calls: tuple[tuple[Question, str, float, float], ...]  # family, how often, alone_ns
    resident: bool


def fit_power(folder: Path, device: DeviceLimits, timed_by: Device) -> tuple[PowerModel, dict[str, float]]:
    """The model of a folder's rows, and how far off mixes are (logarithm of predicted over measured power)."""
    rows = read(folder, POWER).to_pylist()
    loops = [_loop(row, device, timed_by) for row in rows if row["kind"] in (*_LOOPS, _MIX) and _calls_only(row)]
    rests = {row["block"]: row for row in rows if row["kind"] == "rest"}
    steady = sum(row["kind"] in ("steady", _MIX) and row["temperature_c"] is not None for row in rows)
    if len(loops) < _LEAST_LOOPS or steady < _LEAST_STEADY or "rest" not in rests:
        raise InputError(
            f"{folder}: {len(loops)} loops ({steady} without pauses) among its power rows, expected {_LEAST_LOOPS} "
            f"({_LEAST_STEADY}) and a rest; `steptime measure power` measures them"
        )
    start = _start(device, rows, rests)
    fitted = [loop for loop in loops if loop.kind != _MIX and _ZEROS not in loop.name.replace("half_zeros", "")]
    model = _energies(start, fitted, _products(rows, timed_by), device)
    model = replace(model, elasticity=_elasticities(model, rows, device, timed_by))
    left = {loop.name: _residual(model, loop, device) for loop in loops if loop.kind == _MIX}
    held_out = np.sqrt(np.mean(np.square(list(left.values())))) if left else 0.05
    return replace(model, error=float(np.hypot(held_out, _CARDS_DIFFER))), left


def loop_errors(folder: Path, timed_by: Device) -> dict[str, float]:
    """By mix of kernels, none of which has a part in the fit: logarithm of the device's power model over what was drawn."""
    model, rows = timed_by.power, read(folder, POWER).to_pylist()
    mixes = [_loop(row, timed_by.limits, timed_by) for row in rows if row["kind"] == _MIX and _calls_only(row)]
    return {} if model is None else {loop.name: _residual(model, loop, timed_by.limits) for loop in mixes}


def _start(device: DeviceLimits, rows: Sequence[Mapping[str, Any]], rests: Mapping[str, Mapping[str, Any]]) -> PowerModel:
    """What is read off rows without a fit."""
    open_, closed = rests["rest"], rests.get("closed", rests["rest"])
    steady = [row for row in rows if row["kind"] in ("steady", _MIX) and row["temperature_c"] is not None]
    limit_w = float(open_["limit_w"] or (device.power_w.value if device.power_w else 0.0))
    capped = [row["power_w"] / limit_w for row in steady if (row["capped"] or 0.0) > 0.9]
    slope, inlet = np.polyfit([row["power_w"] for row in steady], [row["temperature_c"] for row in steady], 1)
    recipe = {name: open_[name] for name in Recipe.__dataclass_fields__}
    return PowerModel(
        device=device.name,
        cap_w=limit_w,
        rest_w=float(open_["power_w"]),
        closed_w=float(closed["power_w"]),
        leakage_w_per_k=_LEAKAGE_W_PER_K,
        reference_c=float(open_["temperature_c"]),
        inlet_c=float(inlet),
        kelvin_per_w=_WARMED_THROUGH * float(slope),
        gamma=_PRIOR_OTHERS["gamma"][0],
        tensor_clock=_tensor_clock(rows),
        peak=_peak(rows, limit_w, open_),
        held=float(np.median(capped)) if capped else 1.0,
        memory_byte_j=_PRIOR_OTHERS["memory_byte_j"][0],
        collective_w=_COLLECTIVE_W,
        flop_j={name: 1e-12 * value for name, value in _PRIOR_FLOP_PJ.items()},
        active_w={**_PRIOR_ACTIVE_W, **dict.fromkeys(_LOOPED, _PRIOR_ACTIVE_W["other"])},
        elasticity={"other": _PRIOR_ELASTICITY},
        error=0.0,
        recipe={**recipe, "uuid": str(open_["uuid"]), "rows": len(rows)},
    )


def _tensor_clock(rows: Sequence[Mapping[str, Any]]) -> float:
    """Of products under the cap, which draw less than the peak: what SMs count of what the driver asks for."""
    ratios = [
        row["clock_mhz"] / row["clock_reading_mhz"]
        for row in rows
        if row["kind"] == "steady" and (row["capped"] or 0.0) > 0.9 and row["clock_mhz"] < 0.97 * row["clock_reading_mhz"]
    ]
    return float(np.median(ratios)) if ratios else 1.0


def _peak(rows: Sequence[Mapping[str, Any]], limit_w: float, rest: Mapping[str, Any]) -> float:
    """What products draw while they run beside pauses, of the cap, where their SMs are slower than tensor cores make them."""
    drawn, slower = [], _HELD_BACK * _tensor_clock(rows)
    for row in rows:
        if row["kind"] in ("duty", "anchor") and row["pause_cycles"]:
            duty = _duty(row)
            leaked = _LEAKAGE_W_PER_K * (row["temperature_c"] - rest["temperature_c"])
            if (row["clock_mhz"] / row["clock_reading_mhz"] - (1 - duty)) / duty < slower:
                drawn.append((row["power_w"] - leaked - rest["power_w"] * (1 - duty)) / duty)
    return float(np.median(drawn)) / limit_w if drawn else 2.0


def _duty(row: Mapping[str, Any]) -> float:
    pause_ns = row["pause_cycles"] / (row["clock_reading_mhz"] * 1e6) * 1e9
    return float(1.0 - pause_ns / row["time_ns"])


def _calls_only(row: Mapping[str, Any]) -> bool:
    return all("call" in piece for piece in json.loads(row["pieces"]))


def _loop(row: Mapping[str, Any], device: DeviceLimits, timed_by: Device) -> Loop:
    pieces = json.loads(row["pieces"])
    questions = [_question(piece) for piece in pieces]
    estimates = timed_by.estimates(questions)
    families = [estimate.family or "matmul" for estimate in estimates]
    duty, asked = _duty(row), row["clock_reading_mhz"] * 1e6 / device.clock_hz.value
    running = (row["clock_mhz"] / row["clock_reading_mhz"] - (1 - duty)) / duty * asked
    alone = [estimate.estimate.time_ns for estimate in estimates]
    if len(pieces) == 1:
        alone = [row["time_ns"] * duty / pieces[0]["count"]]
    return Loop(
        row["block"], row["kind"], row["power_w"], row["temperature_c"], row["time_ns"], row["time_ns"] * duty,
        tuple(running if len(pieces) == 1 else 0.0 for _ in pieces), asked,
        tuple((q, f, piece["count"], t) for q, f, piece, t in zip(questions, families, pieces, alone, strict=True)),
        bool(pieces[0]["resident"]),
    )  # fmt: skip


def _question(piece: Mapping[str, Any]) -> Question:
    call = Call.from_json(json.dumps(piece["call"]))
    if call.op.startswith("aten::_scaled_mm"):
        # The same product, without scales.
        call = replace(call, op="aten::mm.default", args=call.args[:2], kwargs=())
    return Question(call, tf32=bool(piece["tf32"]))


def _residual(model: PowerModel, loop: Loop, device: DeviceLimits) -> float:
    """Logarithm of what the model says a loop draws over what it drew."""
    joule = 0.0
    for (question, family, count, alone_ns), clock in zip(loop.calls, loop.clocks, strict=True):
        draw = kernel_draw(model, question, family, alone_ns, device)
        running = clock or (model.tensor_clock if draw.tensor else 1.0) * loop.asked
        memory_j = 0.0 if loop.resident else draw.memory_j
        joule += count * (draw.core_j * running**model.gamma + memory_j)
    leaked = model.leakage_w_per_k * (loop.temperature_c - model.reference_c)
    return float(np.log((model.rest_w + leaked + joule / (loop.period_ns * 1e-9)) / loop.power_w))


def _products(rows: Sequence[Mapping[str, Any]], timed_by: Device) -> list[tuple[Question, float, float]]:
    """Products that were timed from rest on: ns, and the clock that their SMs counted, of the highest."""
    found = []
    for row in rows:
        if row["kind"] == "light":
            (piece,) = json.loads(row["pieces"])
            found.append((_question(piece), row["time_ns"], row["clock_mhz"] * 1e6 / timed_by.limits.clock_hz.value))
    estimates = timed_by.estimates([question for question, _, _ in found])
    return [each for each, estimate in zip(found, estimates, strict=True) if estimate.family == "matmul"]


def _energies(
    start: PowerModel, loops: Sequence[Loop], products: Sequence[tuple[Question, float, float]], device: DeviceLimits
) -> PowerModel:
    from scipy.optimize import least_squares

    shapes = [
        *((name, 0) for name in _PRIOR_OTHERS),
        *(("flop_j", p) for p in start.flop_j),
        *(("active_w", f) for f in start.active_w),
    ]
    middle = np.array([getattr(start, a)[b] if b else getattr(start, a) for a, b in shapes])
    spread = np.array([
        (_FLOP_SPREAD if a == "flop_j" else _ACTIVE_SPREAD) if b else _PRIOR_OTHERS[a][1] / _PRIOR_OTHERS[a][0]
        for a, b in shapes
    ])  # fmt: skip

    def model_of(logs: Floats) -> PowerModel:
        values = middle * np.exp(logs)
        changed: dict[str, Any] = {"flop_j": {}, "active_w": {}}
        for (name, key), value in zip(shapes, values.tolist(), strict=True):
            if key:
                changed[name][key] = value
            else:
                changed[name] = value
        return replace(start, **changed)

    def errors(logs: Floats) -> Floats:
        model = model_of(logs)
        rows = [_residual(model, loop, device) / _ROW_ERROR for loop in loops]
        clocks = [
            np.log(kernel_draw(model, question, "matmul", time_ns, device).isolated / clock) / _CLOCK_ERROR
            for question, time_ns, clock in products
        ]
        return np.array([*rows, *clocks, *(logs / spread)])

    # Some loops are of another kind (copies by the engine, what stays in L2): they must not move what the others agree on.
    return model_of(least_squares(errors, np.zeros(len(shapes)), loss="soft_l1").x)


def _at_two_clocks(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float, float]]:
    """By the text of a call: ns at the higher clock, and logarithms of the ratio of its times and of its clocks."""
    seen: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for row in rows:
        if row["kind"] in ("load", "light"):
            seen[row["pieces"]][row["kind"]] = (row["time_ns"], row["clock_mhz"])
        elif row["kind"] in ("duty", "steady") and _calls_only(row) and len(pieces := json.loads(row["pieces"])) == 1:
            duty = _duty(row)
            running = (row["clock_mhz"] / row["clock_reading_mhz"] - (1 - duty)) / duty * row["clock_reading_mhz"]
            seen[row["pieces"]][row["kind"]] = (row["time_ns"] * duty / pieces[0]["count"], running)
    results = {}
    for text, pair in seen.items():
        for high, low in (("light", "load"), ("duty", "steady")):
            if high in pair and low in pair and pair[high][1] > _OTHER_CLOCK * pair[low][1]:
                ratio = np.log(pair[low][0] / pair[high][0]), np.log(pair[high][1] / pair[low][1])
                results[text] = (pair[high][0], float(ratio[0]), float(ratio[1]))
    return results


def _elasticities(
    model: PowerModel, rows: Sequence[Mapping[str, Any]], device: DeviceLimits, timed_by: Device
) -> dict[str, float]:
    """By family, from calls at two clocks, divided by what memory leaves of it; long calls tell more."""
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    whole = replace(model, elasticity={"other": 1.0})
    for text, (time_ns, slower, clocks) in _at_two_clocks(rows).items():
        (piece,) = json.loads(text)
        question = _question(piece)
        (estimate,) = timed_by.estimates([question])
        free = kernel_draw(whole, question, estimate.family, time_ns, device).elasticity
        found[estimate.family].append((free, slower / clocks, np.sqrt(time_ns * 1e-6)))
    results = {"other": _PRIOR_ELASTICITY}
    weight = (_ELASTICITY_ERROR / _ELASTICITY_SPREAD) ** 2
    for family, points in sorted(found.items()):
        free, shown, longer = np.array(points).T
        value = ((free * longer) @ shown + weight * _PRIOR_ELASTICITY) / ((free * longer) @ free + weight)
        results[family] = float(np.clip(value, 0.0, 1.0))
    return results


def too_elastic(folder: Path) -> list[str]:
    """Calls that a lower clock slows by more than the clock: an error of another kind."""
    pairs = _at_two_clocks(read(folder, POWER).to_pylist()).items()
    return [
        f"{json.loads(text)[0]['call']['op']} ({slower / clocks:.2f})"
        for text, (_, slower, clocks) in pairs
        if slower > 1.1 * clocks
    ]
