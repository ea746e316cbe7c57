"""Laws of the host model: costs are found at whatever speed they were measured, and a step costs all that is in it, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.host_time import Part, host_time

from steptime._models.host.model import STEP, HostCost, HostModel, ProfilerCost, Speed, read_host
from steptime._ops.catalogue import HostClass, op_kind
from steptime._program.program import Calls, Ops, Phase, Program, Signature, Stream, Tensor, Thread, Works
from steptime.errors import InputError
from steptime_lab.fit.host import CALIBRATION, LAUNCHING, between_forward_ns, first_call, fit
from steptime_lab.measurements.shipped import shipped

# What is true of the made-up host: nanoseconds at speed 1.
VIEW_NS, WITHOUT_NS, LAUNCH_NS, ENGINE_NS = 1000.0, 800.0, 4000.0, 2500.0
OPS = {"aten::mm": (6000.0, 1), "aten::view": (1500.0, 0), "aten::neg": (2000.0, 1), "aten::detach": (400.0, 0),
       "aten::empty": (1800.0, 0), "aten::sort": (9000.0, 3)}  # fmt: skip
STATES = (1.0, 2.0, 1.0, 2.1, 1.02)
ENGINE = "autograd::engine::evaluate_function: "


def row(kind: str, op: str, times_ns: Sequence[float], **more: Any) -> dict[str, Any]:
    """A row of one process whose host changed its speed between bursts."""
    launch = [1.0 + 0.27 * (state - 1.0) for state in STATES]
    return {
        "kind": kind, "op": op, "call": "", "source": "sweep", "phase": "other", "profiler": "off", "launches": None,
        "share": 1, "times_ns": list(times_ns), "reference_cpu_ns": [VIEW_NS * state for state in STATES],
        "reference_launch_ns": [WITHOUT_NS * s + LAUNCH_NS * f for s, f in zip(STATES, launch, strict=True)],
        "cpu": "made up", "date": "2026-11-15", **more,
    }  # fmt: skip


def burst(cpu_ns: float, launches: float = 0.0, states: Sequence[float] = STATES) -> list[float]:
    return [cpu_ns * state + launches * LAUNCH_NS * (1.0 + 0.27 * (state - 1.0)) for state in states]


def rows() -> list[dict[str, Any]]:
    found = [row("op_without_launch", "neg_out", burst(WITHOUT_NS)), row("launch", "neg_out", burst(0.0, 1))]
    for op, (cpu_ns, launches) in OPS.items():
        call = f'{{"op":"{op}.default","args":[]}}'
        found.append(row("op_python", f"{op}.default", burst(cpu_ns, launches), call=call))
        found.append(row("op", f"{op}.default", burst(cpu_ns + 1000.0, launches), call=call))
        counted = {"call": call, "profiler": "cuda", "launches": float(launches)}
        found.append(row("op", f"{op}.default", burst(cpu_ns + 1500.0, launches), **counted))
    found += [row(kind, op, burst(cost)) for kind, op, cost in (
        ("between_forward", "sequential_relu", 1600.0), ("module_call", "nested", 1500.0),
        ("stream_wait", "stream_wait", 2500.0), ("optimizer_step", "adam_foreach", 6000.0),
        ("optimizer_step_fixed", "adam_foreach", 120e3), ("optimizer_step", "sgd_foreach", 800.0),
        ("optimizer_step_fixed", "sgd_foreach", 30e3), ("zero_grad", "to_none", 500.0), ("zero_grad_fixed", "to_none", 16e3),
        ("accumulate_grad", "take", 5000.0), ("backward_call", "neg", 150e3),
        ("op_autograd", "neg", 8000.0), ("op_no_grad", "neg", 6800.0), ("op_autograd", "python_function", 5400.0),
        ("ddp_forward_fixed", "ddp", 90e3), ("ddp_backward", "ddp", 11e3), ("ddp_bucket", "ddp", 35e3),
    )]  # fmt: skip
    found.append(row("backward_node", "neg", burst(2000.0 + ENGINE_NS, 1)))
    found.append(row("table_batched", "forward_sgd", burst(14e3, 1)))
    found.append(row("collective_call", "all_reduce", burst(22e3, 1)))
    found += [{**each, "source": "calibration"} for each in found if each["kind"] in ("module_call", "launch")]
    return found


@pytest.fixture(name="model", scope="module")
def fitted() -> HostModel:
    return fit(rows())


def program(nodes: Sequence[tuple[str, int]], *, listed: int = 0) -> Program:
    """Nodes: (name, parent); phases as their outermost ancestor says; lists of so many tensors as arguments."""
    names = tuple(dict.fromkeys(name for name, _ in nodes))
    phases: list[Phase] = []
    for name, parent in nodes:
        own = Phase.BACKWARD if name.startswith(ENGINE) else Phase.OPTIMIZER if name.startswith("Optim") else Phase.FORWARD
        phases.append(phases[parent] if parent >= 0 else own)
    count = len(nodes)
    never, none = np.full(count, -1), np.full(count, -1)
    tensors = tuple(Tensor((4,), "float32", device="cuda:0") for _ in range(listed))
    return Program(
        rank=0, world_size=1, names=names, threads=(Thread(1, "main"), Thread(2, "backward")), streams=(Stream(0),),
        ops=Ops.from_columns({
            "name": [names.index(name) for name, _ in nodes], "thread": [int(phase == Phase.BACKWARD) for phase in phases],
            "start_ns": never, "end_ns": never, "parent": [parent for _, parent in nodes], "step": np.zeros(count),
            "phase": phases, "sequence": none, "signature": np.zeros(count), "node": none,
        }),
        calls=Calls.from_columns({}), works=Works.from_columns({}),
        signatures=(Signature((tensors,) if listed else ()),), steps=(0,),
    )  # fmt: skip


def total(model: HostModel, nodes: Sequence[tuple[str, int]], launches: dict[str, float] | None = None) -> float:
    return host_time(program(nodes), model, launches).total_ns(Speed())


@pytest.mark.parametrize("name", OPS)
def test_an_ops_cost_is_found_whatever_speed_the_host_had_in_its_bursts(model: HostModel, name: str) -> None:
    cpu_ns, launches = OPS[name]
    assert model.ops[name].cpu_ns == pytest.approx(cpu_ns, rel=0.03)
    assert model.ops[name].launches == launches
    assert model.launch_ns == pytest.approx(LAUNCH_NS, rel=0.03)


def test_the_engines_part_of_a_node_is_what_its_op_leaves(model: HostModel) -> None:
    assert model.mechanism("engine", "node").cpu_ns == pytest.approx(ENGINE_NS, rel=0.1)


def test_recording_a_graph_is_what_a_call_costs_more_with_it(model: HostModel) -> None:
    assert model.mechanism("record", "graph").cpu_ns == pytest.approx(1200.0, rel=0.02)


def test_usual_bursts_are_medians_of_machines_with_their_launches() -> None:
    calibrated = [each for each in rows() if each["source"] == "calibration"]
    slow = [{**each, "machine": "slow", "times_ns": [4.0 * time for time in each["times_ns"]]} for each in calibrated]
    one, both = fit(rows()).bursts, fit([*rows(), *slow]).bursts
    assert one.keys() == both.keys() == {"module_call nested"}
    assert one["module_call nested"].launch_ns == 0.0
    assert both["module_call nested"].time_ns == pytest.approx(2.0 * one["module_call nested"].time_ns)


def test_a_host_that_nobody_calibrated_is_compared_with_its_sweep() -> None:
    swept = [each for each in rows() if each["source"] != "calibration"]
    assert {"module_call nested", "op_autograd neg"} <= fit(swept).bursts.keys()


def test_no_rows_are_one_clear_error() -> None:
    with pytest.raises(InputError, match="measure host"):
        fit([])


def test_fitting_twice_gives_the_same_bytes(model: HostModel, tmp_path: Path) -> None:
    model.save(tmp_path / "a.json")
    fit(rows()).save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_what_is_saved_is_loaded(model: HostModel, tmp_path: Path) -> None:
    model.save(tmp_path / "host.json")
    assert HostModel.load(tmp_path / "host.json") == model


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 99}', '{"schema_version": 1, "ops": 3}', "[]"])
def test_a_damaged_file_is_one_clear_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        HostModel.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_host_that_is_not_shipped_is_told_with_those_that_are() -> None:
    with pytest.raises(InputError, match="xeon-h200"):
        read_host("abacus")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::as_strided", HostClass.VIEW),
        ("aten::_foreach_mul_", HostClass.FOREACH),
        ("c10d::allreduce_", HostClass.COLLECTIVE),
        ("aten::cosh", HostClass.LAUNCH),
    ],
)
def test_an_op_that_was_never_seen_has_the_class_of_its_name(name: str, kind: str) -> None:
    assert op_kind(name).host_class == kind


def test_an_op_that_was_never_seen_costs_as_its_class_and_is_said(model: HostModel) -> None:
    found = host_time(program([("aten::cosh", -1)]), model)
    assert found.costs[Phase.FORWARD, Part.OPS].cpu_ns > 0
    assert "aten::cosh" in found.warnings[0]
    assert host_time(program([("aten::mm", -1)]), model).warnings == ()


def test_a_wrapper_costs_what_it_wraps_and_an_op_around_itself_is_counted_once(model: HostModel) -> None:
    plain = total(model, [("aten::mm", -1)])
    # Inside another op a call saves its Python binding.
    assert plain - model.binding_ns <= total(model, [("aten::linear", -1), ("aten::mm", 0)]) <= plain
    assert total(model, [("aten::mm", -1), ("aten::mm", 0)]) <= plain


@given(st.lists(st.sampled_from([*OPS, "aten::cosh", "aten::linear"]), min_size=1, max_size=12), st.sampled_from(sorted(OPS)))
def test_one_op_more_never_makes_a_step_cheaper(names: list[str], more: str) -> None:
    model = read_host("xeon-h200")
    assert total(model, [(name, -1) for name in [*names, more]]) >= total(model, [(name, -1) for name in names])


def test_every_launch_that_is_given_is_counted(model: HostModel) -> None:
    nodes = [("aten::linear", -1), ("aten::mm", 0), ("aten::mm", -1), (ENGINE + "SortBackward0", -1), ("aten::sort", 3)]
    nodes += [("aten::mm", -1), ("aten::mm", 5)]
    found = host_time(program(nodes), model, {"aten::mm": 5.0, "aten::sort": 13.0})
    assert found.launches == pytest.approx(18.0)
    launched = sum(cost.launch_ns for (_, part), cost in found.costs.items() if part is Part.LAUNCHES)
    assert launched == pytest.approx(18.0 * model.launch_ns)


def test_a_launch_from_python_costs_more_than_one_from_an_op(model: HostModel) -> None:
    names = ("LookupFunctionBackward", "MmBackward0")
    python, builtin = (total(model, [(ENGINE + name, -1), (name, 0)], {name: 1.0}) for name in names)
    assert python > builtin + 10e3


def test_the_first_call_of_an_op_in_a_step_is_cold() -> None:
    model = read_host("xeon-h200")
    one, two, three = (total(model, [("aten::mm", -1)] * count) for count in (1, 2, 3))
    assert one > two - one
    assert three - two == pytest.approx(two - one)


def test_an_optimiser_costs_by_its_parameters_whatever_ops_it_is_made_of(model: HostModel) -> None:
    nodes = [("Optimizer.step#Adam.step", -1), ("aten::_foreach_add_", 0), ("aten::_foreach_sqrt", 0)]
    costs = [host_time(program(nodes, listed=count), model).total_ns(Speed()) for count in (10, 110)]
    assert costs[1] - costs[0] == pytest.approx(100 * model.mechanism("optimizer_step", "adam_foreach").cpu_ns)


def test_an_optimiser_that_was_never_measured_is_said(model: HostModel) -> None:
    found = host_time(program([("Optimizer.step#Lion.step", -1), ("aten::_foreach_add_", 0)], listed=4), model)
    assert "Lion" in found.warnings[0]


def test_data_parallel_hooks_cost_per_gradient_and_per_bucket(model: HostModel) -> None:
    leaf = [(ENGINE + "torch::autograd::AccumulateGrad", -1), ("torch::autograd::AccumulateGrad", 0)]
    hook = [*leaf, ("torch::distributed::reducer::mul_out", 0), ("c10d::allreduce_", 0)]
    added = total(model, hook) - total(model, leaf)
    expected = model.mechanism("ddp_backward", "ddp") + model.mechanism("ddp_bucket", "ddp")
    assert added == pytest.approx(expected.cpu_ns + expected.launch_ns)


def test_a_slower_host_takes_longer_and_its_launches_less_so() -> None:
    cost = HostCost(100.0, 100.0)
    assert 200.0 < STEP.time_ns(cost) < STEP.cpu * 200.0
    assert Speed().time_ns(cost) == 200.0


def test_a_program_without_ops_is_one_clear_error(model: HostModel) -> None:
    with pytest.raises(InputError, match="no ops"):
        host_time(program([]), model)


def test_first_calls_are_compared_with_later_ones_of_the_same_op_in_the_same_step() -> None:
    plain = program([("aten::mm", -1)] * 8)
    ends = np.array([170, 110, *[100] * 6])
    timed = plain.ops.replace(start_ns=np.zeros(8, dtype=np.int64), end_ns=ends)
    assert first_call([replace(plain, ops=timed)]) == pytest.approx(1.7)
    assert first_call([]) == 1.0


@pytest.mark.parametrize("slow", [1.0, 2.3])
@pytest.mark.parametrize(("op", "before"), [("aten::view", "view"), ("aten::empty", "forward")])
def test_python_between_ops_is_found_in_a_trace_at_whatever_speed_it_ran(
    model: HostModel, slow: float, op: str, before: str
) -> None:
    profiler, between_ns, count = ProfilerCost(2000.0, 0.0), 7000.0, 20
    plain = program([(op, -1)] * count)
    cost = host_time(plain, model).costs[Phase.FORWARD, Part.OPS]
    own_ns = (cost.cpu_ns + cost.launch_ns) / count
    bare = replace(model, around={**model.around, "between forward": HostCost(), "record graph": HostCost()})
    took = round(slow * (own_ns + profiler.per_op_ns))
    # Half of what the profiler adds lies outside the op's record.
    start = np.arange(count) * (took + round(slow * (between_ns + profiler.per_op_ns / 2)))
    timed = replace(plain, ops=plain.ops.replace(start_ns=start, end_ns=start + took))
    assert between_forward_ns([timed], bare, profiler) == {before: pytest.approx(between_ns, rel=0.01)}
    assert between_forward_ns([], bare, profiler) == {}


def test_the_shipped_host_knows_every_profiler_and_says_where_it_is_from() -> None:
    model = read_host("xeon-h200")
    assert {"cuda", "cpu_cuda", "execution_trace"} <= set(model.profilers)
    assert model.profilers["execution_trace"].per_op_ns > model.profilers["cpu_cuda"].per_op_ns > 0
    assert {"cpu", "torch", "date", "command"} <= set(model.recipe)
    assert model.first_call > 1.0


def _slower(row: dict[str, Any], model: HostModel) -> tuple[float, float] | None:
    """How many times as long the reference and a row's cost take in the slow state as in the fast one."""
    beside = np.array(row["reference_cpu_ns"]) / model.reference_cpu_ns
    fast, slow = beside < 1.35, beside > 1.8
    if min(fast.sum(), slow.sum()) < 2:
        return None
    times = np.array(row["times_ns"], dtype=np.float64)
    return float(np.median(beside[slow]) / np.median(beside[fast])), float(np.median(times[slow]) / np.median(times[fast]))


def test_costs_with_launches_inside_slow_down_less_than_the_cpu_as_their_rows_did() -> None:
    model, seen = read_host("xeon-h200"), {}
    for row in shipped("host").to_pylist():
        swept = row["source"] != CALIBRATION and row["profiler"] == "off" and row["reference_cpu_ns"] and row["share"] == 1
        name = f"{row['kind']} {row['op']}"
        if swept and name in LAUNCHING and (slower := _slower(row, model)) is not None:
            cpu, seen[name] = slower
            cost, speed = model.around[name], Speed.of_cpu(cpu)
            assert speed.time_ns(cost) / (cost.cpu_ns + cost.launch_ns) == pytest.approx(seen[name], abs=0.35), name
    assert {"optimizer_step adam_for_loop", "optimizer_step rowwise_adagrad_sparse"} <= set(seen)


def test_the_shipped_host_is_what_the_shipped_rows_give() -> None:
    model, again = read_host("xeon-h200"), fit(shipped("host").to_pylist())
    assert again.ops == model.ops
    assert again.launch_ns == model.launch_ns
