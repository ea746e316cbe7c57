"""Fits what the host spends on compiled steps: tiny steps that wait for their host, timed eager and compiled in turns.

Both forms are captured as a user's script would be. The eager one says how fast the host was in that process, since its
costs are known. What the compiled one took beyond ops that are known, too, is divided among frames, tensors and kernels by how
often each is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steptime._models.engine.stored import Floats
from steptime._models.host.columns import host_columns
from steptime._models.host.compiled import FRAMES, KIND
from steptime._models.host.model import STEP, HostCost, HostModel
from steptime._program.program import Program
from steptime_lab.fit.engine import fitting_library

Row = Mapping[str, Any]
# Case and form to what was captured of it.
Captured = Callable[[str, str], Program]

_EAGER, _COMPILED = "eager", "compiled"
# Launching a graph costs the CPU's part of a launch besides.
_REPLAY = "replay"
_TENSORS = tuple(f"{frame}_{which}" for frame in ("region", "function", "backward") for which in ("taken", "given"))
NAMES = (*FRAMES.values(), *_TENSORS, "kernel", "argument", "empty", _REPLAY, "replay_kernel")
"""Of all costs of compiled steps."""

# Where rows cannot tell two costs apart, they are drawn to these: what bursts of compiled functions of known counts took by
# themselves (H200, torch 2.11, 2026-11-18), of backward passes and graphs about as much as of forward ones. A row that is off
# by `_NOISE` counts as much as a cost that is off by half.
_ABOUT_NS = {
    "region": 18e3, "function": 18e3, "backward": 25e3, "graph": 15e3, "region_taken": 800, "function_taken": 700,
    "backward_taken": 700, "region_given": 200, "function_given": 500, "backward_given": 500, "kernel": 1600, "argument": 400,
    "empty": 1000, "replay": 200, "replay_kernel": 0,
}  # fmt: skip
_HALF, _LEAST_NS, _NOISE = 0.5, 100.0, 0.08
# Of how fast the eager form was against all others', the part (of its logarithm) that holds for the compiled one: they are
# timed in turns, but costs of ops are off, too. Between 0.5 and 1 the rows are met equally well, without it worse.
_SHARED = 0.7
_ONE_NS = 1e6
_NOTHING_NS = 1.0


@dataclass(frozen=True)
class _Pair:
    """One case: what both forms took, and what of it known costs are."""

    eager_ns: float
    compiled_ns: float
    eager_known_ns: float
    compiled_known_ns: float
    counts: Floats  # of `NAMES`, in the compiled form


def with_compiled_costs(model: HostModel, rows: Iterable[Row], captured: Captured) -> HostModel:
    """The model with costs of compiled steps; `rows` are of the measured set `compiled`, of cases that are for this."""
    by_case: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        by_case[row["name"]][row["form"]] = row
    pairs = [
        _pair(model, each[_EAGER]["time_ns"], each[_COMPILED]["time_ns"], captured(name, _EAGER), captured(name, _COMPILED))
        for name, each in sorted(by_case.items())
        if set(each) == {_EAGER, _COMPILED}
    ]
    if not pairs:
        return model
    return _with(model, dict(zip(NAMES, _divided(pairs).tolist(), strict=True)))


def _with(model: HostModel, costs: Mapping[str, float]) -> HostModel:
    own = {f"{KIND} {name}": HostCost(cost, model.launch_ns if name == _REPLAY else 0.0) for name, cost in costs.items()}
    others = {name: cost for name, cost in model.around.items() if not name.startswith(f"{KIND} ")}
    return replace(model, around=dict(sorted({**others, **own}.items())))


def _pair(model: HostModel, eager_ns: float, compiled_ns: float, eager: Program, compiled: Program) -> _Pair:
    nothing = dict.fromkeys(NAMES, 0.0)
    known_ns = spent_ns(_with(model, nothing), compiled)
    with_one = [spent_ns(_with(model, {**nothing, name: _ONE_NS}), compiled) for name in NAMES]
    counts = (np.array(with_one) - known_ns) / _ONE_NS
    return _Pair(eager_ns, compiled_ns, spent_ns(model, eager), known_ns, counts)


def spent_ns(model: HostModel, program: Program) -> float:
    """What the host spends on the last step of a program that nothing but itself holds up."""
    columns = host_columns(program, model)
    last = columns.step == columns.step.max(initial=0)
    return STEP.time_ns(HostCost(float(columns.cpu_ns[last].sum()), float(columns.launch_ns[last].sum())))


def _divided(pairs: list[_Pair]) -> Floats:
    """Costs that are not below zero, by least squares of relative errors."""
    slower = np.log([pair.eager_ns / pair.eager_known_ns for pair in pairs])
    slower = np.exp(_SHARED * slower + (1.0 - _SHARED) * slower.mean())
    took = np.array([pair.compiled_ns for pair in pairs])
    left = took - slower * np.array([pair.compiled_known_ns for pair in pairs])
    weights = 1.0 / (_NOISE * took)
    terms = np.array([pair.counts for pair in pairs]) * slower[:, None]
    about = np.array([_ABOUT_NS[name] for name in NAMES], dtype=np.float64)
    drawn = 1.0 / np.maximum(_HALF * about, _LEAST_NS)
    optimize = fitting_library("scipy.optimize")
    found = optimize.lsq_linear(
        np.vstack([terms * weights[:, None], np.diag(drawn)]), np.concatenate([left * weights, about * drawn]), (0.0, np.inf)
    )
    return np.where(found.x < _NOTHING_NS, 0.0, found.x)
