"""Laws of fitting the host of compiled steps: what rows say is found whatever speed a process had, and nothing else moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.models.test_host_columns import MODEL
from tests.models.test_host_compiled import COSTS, HOST, KERNEL, REGION, WRAPPER, with_tensors
from tests.models.test_host_model import ENGINE, program

from steptime._models.host.compiled import KIND
from steptime._program.program import Program
from steptime_lab.fit.compiled_host import spent_ns, with_compiled_costs
from steptime_lab.fit.host import _intercept_ns

_BACKWARD = [(ENGINE + "CompiledFunctionBackward", -1), ("CompiledFunctionBackward", 0), (WRAPPER, 1), (KERNEL, 2)]
# How many calls, kernels of each, arguments of those, and backward passes the made-up steps have; and of each its speed.
_STEPS = tuple(
    (calls, kernels, arguments, backward)
    for calls in (1, 4)
    for kernels in (1, 8, 40)
    for arguments in (1, 6)
    for backward in (0, 1)
)
_SPEEDS = (0.8, 1.0, 1.3)


def compiled(calls: int, kernels: int, arguments: int, backward: int) -> Program:
    nodes: list[tuple[str, int]] = []
    tensors: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for call in range(calls):
        first = len(nodes)
        nodes += [(REGION, -1), ("CompiledFunction", first), (WRAPPER, first + 1)]
        for kernel in range(kernels):
            tensors[len(nodes)] = tuple(range(1, 1 + arguments)), (100 + call * kernels + kernel,)
            nodes.append((KERNEL, first + 2))
    for _ in range(backward):
        first = len(nodes)
        nodes += [(name, parent if parent < 0 else parent + first) for name, parent in _BACKWARD]
    return with_tensors(program(nodes), tensors)


def eager() -> Program:
    return program([("aten::mm", -1)] * 50)


def rows(speeds: tuple[float, ...] = _SPEEDS) -> tuple[list[dict[str, Any]], dict[str, Program]]:
    made, programs = [], {}
    for number, step in enumerate(_STEPS):
        name, slower = f"step {number}", speeds[number % len(speeds)]
        programs[name] = compiled(*step)
        made.append({"name": name, "form": "eager", "time_ns": slower * spent_ns(HOST, eager())})
        made.append({"name": name, "form": "compiled", "time_ns": slower * spent_ns(HOST, programs[name])})
    return made, programs


def fitted(speeds: tuple[float, ...] = _SPEEDS) -> Any:
    made, programs = rows(speeds)
    return with_compiled_costs(MODEL, made, lambda name, form: programs[name] if form == "compiled" else eager())


def test_steps_that_were_not_measured_cost_what_the_host_takes() -> None:
    model = fitted(speeds=(1.0,))
    for step in ((2, 16, 3, 1), (8, 4, 2, 0), (1, 100, 4, 1)):
        assert spent_ns(model, compiled(*step)) == pytest.approx(spent_ns(HOST, compiled(*step)), rel=0.05)


def test_how_fast_each_process_was_is_told_by_its_eager_form() -> None:
    # A part of the difference is not taken over, since costs of ops are off, too.
    mean = float(np.exp(np.mean(np.log(_SPEEDS))))
    model = fitted()
    for step in ((2, 16, 3, 1), (8, 4, 2, 0)):
        assert spent_ns(model, compiled(*step)) == pytest.approx(mean / 1.01 * spent_ns(HOST, compiled(*step)), rel=0.12)


def test_no_cost_is_below_zero_and_no_other_cost_moves() -> None:
    model = fitted()
    own = {name: cost for name, cost in model.around.items() if name.startswith(f"{KIND} ")}
    assert set(own) >= {f"{KIND} {name}" for name in COSTS}
    assert all(cost.cpu_ns >= 0 for cost in own.values())
    assert {name: cost for name, cost in model.around.items() if name not in own} == MODEL.around


def test_without_rows_the_model_stays() -> None:
    assert with_compiled_costs(MODEL, [], lambda *_: eager()) is MODEL
    made, programs = rows()
    alone = [row for row in made if row["form"] == "eager"]
    assert with_compiled_costs(MODEL, alone, lambda name, _: programs[name]) is MODEL


def test_the_cost_of_a_pass_is_read_where_it_is_told_exactly() -> None:
    exact, vague = np.array([95e3, 100e3, 105e3]) * 1.0, np.array([-2e6, 8e5, 3e6])
    assert _intercept_ns([np.repeat(exact, 5) + np.tile([-2e4, 0, 2e4, 1e4, -1e4], 3), vague]) == pytest.approx(100e3, rel=0.05)
