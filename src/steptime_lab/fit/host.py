"""Fits a `HostModel` on measured host costs. Steps are never looked at: nothing is tuned to a workload."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.host.model import Burst, HostCost, HostModel, OpCost, ProfilerCost
from steptime._ops.catalogue import HostClass, op_kind
from steptime._program.program import Program
from steptime.errors import InputError
from steptime_lab.fit.host_recorded import between_forward_ns, first_call

Row = Mapping[str, Any]
Times = npt.NDArray[np.float64]

CALIBRATION = "calibration"
# Speed 1 is the fast state: most bursts of a run lie near it or near the slow one, and a few below both are luck.
FAST_PERCENTILE = 10.0
# Of the backward thread nobody knows the speed during a burst; of ten bursts spread over five passes the fastest two are
# fast in nearly every row.
BACKWARD_PERCENTILE = 15.0
# No call is launching alone: what an op does before it launches is at least this part of its time.
LEAST_CPU = 0.1
# Forms whose node in the backward pass is one measured op, so that the rest of its time is the engine's.
NODES = {
    "neg": "aten::neg", "transpose": "aten::transpose", "relu": "aten::threshold_backward", "gelu": "aten::gelu_backward",
    "sigmoid": "aten::sigmoid_backward", "tanh": "aten::tanh_backward", "dropout": "aten::native_dropout_backward",
    "log_softmax": "aten::_log_softmax_backward_data", "view": "aten::view",
}  # fmt: skip
# Kinds whose time passes in the backward thread, at a speed that the reference beside them does not tell.
BACKWARD_KINDS = ("backward_call", "accumulate_grad")
MAIN_KINDS = (
    "between_forward", "module_call", "optimizer_step", "optimizer_step_fixed", "zero_grad", "zero_grad_fixed", "clip_grad",
    "clip_grad_fixed", "table_batched", "item", "event_record", "stream_wait",
    "synchronize", "copy", "autocast",
)  # fmt: skip
# Launches of one call, where it makes a known number.
LAUNCHING = {"collective_call": 1.0, "table_batched": 1.0}
# Kinds of what calibrations ask for whose time is mostly the CPU's, and the launches of one: the node of a linear layer
# multiplies twice, sums, and adds to the gradients of weight and bias.
CALIBRATED = {
    "op": 0.0, "op_autograd": 1.0, "backward_node": 5.0, "optimizer_step": 0.0, "module_call": 0.0, "alloc": 0.0,
    "op_without_launch": 0.0,
}  # fmt: skip
# Hardly more than its binding: a tensor of the same memory that needs no gradient.
CHEAPEST = "aten::detach"
# What only several ranks do.
TOGETHER_KINDS = ("collective_call", "ddp_forward_fixed", "ddp_backward", "ddp_backward_fixed", "ddp_bucket")
# Under which profiler shipped traces were recorded.
TRACED_WITH = "cpu_cuda"
# Kinds whose time is taken as it is; those that are differences of two others scatter too much for a ratio.
STRETCHED = (
    "op", "op_autograd", "op_no_grad", "backward_node", "optimizer_step", "zero_grad", "alloc", "launch", "op_without_launch",
    "module_call", "table_batched", "copy", "item", "event_record", "stream_wait", "synchronize",
)  # fmt: skip
PROFILERS = ("cuda", "cpu_cuda", "execution_trace", "after")
_RECIPE = ("cpu", "os_kernel", "python", "torch", "cuda", "driver", "nccl", "date", "machine", "command")


def fit(rows: Iterable[Row], traces: Iterable[Program] = ()) -> HostModel:
    """The model of the host whose rows these are: those of one rank alone, with the reference calls beside each burst.

    `traces`: programs recorded by a profiler, for what only whole steps tell (`recorded`).
    """
    every = list(rows)
    swept = [row for row in every if row["source"] != CALIBRATION]
    alone = [row for row in swept if row["share"] == 1]
    off = [row for row in alone if row["profiler"] == "off" and row["reference_cpu_ns"]]
    together = [row for row in swept if row["share"] > 1 and row["profiler"] == "off" and row["reference_cpu_ns"]]
    if not off:
        raise InputError("no unprofiled host costs with reference times to fit on; run steptime measure host")
    pace = _pace(off)
    ops = _ops(off, _launches(alone), pace)
    bindings = [cost.cpu_ns for name, cost in ops.items() if name == CHEAPEST]
    # A single rank has nobody to meet; its rows serve where no others were measured.
    shared = {**_mechanisms(off, TOGETHER_KINDS, pace), **_mechanisms(together, TOGETHER_KINDS, pace)}
    called = {name: cost for name, cost in shared.items() if name.startswith("collective_call ")}
    classes = _classes(ops, called)
    around = {**_mechanisms(off, MAIN_KINDS, pace), **_backward(off, ops, pace), **_forms(off, pace), **shared}
    around["between forward"] = around.get("between_forward sequential_relu", HostCost())
    first = off[0]
    model = HostModel(
        recipe={name: str(first[name]) for name in _RECIPE if first.get(name) is not None},
        reference_cpu_ns=pace.cpu_ns,
        reference_launch_ns=pace.without_ns + pace.launch_ns,
        launch_ns=pace.launch_ns,
        binding_ns=bindings[0] if bindings else 0.0,
        ops=dict(sorted(ops.items())),
        classes=classes,
        around=dict(sorted((name, cost) for name, cost in around.items())),
        bursts=usual_bursts([row for row in every if row["source"] == CALIBRATION] or off, _launches(alone), pace),
        profilers={name: _profiler(alone, name) for name in PROFILERS if any(row["profiler"] == name for row in alone)},
    )
    return _with_traces(model, list(traces))


def _with_traces(model: HostModel, traces: Sequence[Program]) -> HostModel:
    """The model with what recorded steps tell besides."""
    if not traces or TRACED_WITH not in model.profilers:
        return model
    model = replace(model, first_call=first_call(traces))
    # Nothing between ops, so that their own cost is what the trace's ops are compared with.
    bare = replace(model, around={**model.around, "between forward": HostCost()})
    between = between_forward_ns(traces, bare, model.profilers[TRACED_WITH])
    if between is None:
        return model
    return replace(model, around={**model.around, "between forward": HostCost(between)})


@dataclass(frozen=True)
class Pace:
    """What the reference calls take at speed 1, and so the speed around every burst."""

    cpu_ns: float
    without_ns: float  # the launching reference less its launch
    launch_ns: float

    def of(self, row: Row) -> tuple[Times, Times]:
        """Factors of CPU work and of launches around each of a row's times."""
        cpu = np.asarray(row["reference_cpu_ns"], dtype=np.float64) / self.cpu_ns
        launch = (np.asarray(row["reference_launch_ns"], dtype=np.float64) - cpu * self.without_ns) / self.launch_ns
        return cpu, np.maximum(launch, 0.5)


def _pace(off: Sequence[Row]) -> Pace:
    cpu_ns = float(np.percentile(np.concatenate([row["reference_cpu_ns"] for row in off]), FAST_PERCENTILE))
    launch_ns = float(np.percentile(np.concatenate([row["reference_launch_ns"] for row in off]), FAST_PERCENTILE))
    without = [row for row in off if row["kind"] == "op_without_launch"]
    if not without:
        raise InputError("no host row measured an op without a launch; run steptime measure host")
    result = np.concatenate([np.asarray(row["times_ns"]) / np.asarray(row["reference_cpu_ns"]) for row in without])
    without_ns = float(np.median(result)) * cpu_ns
    return Pace(cpu_ns, without_ns, launch_ns - without_ns)


def name_of(op: str) -> str:
    """The op's name without its overload."""
    return op.partition(".")[0]


def _launches(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """How much each call launched, where a recording told."""
    known = [row for row in rows if row["kind"] == "op" and row["launches"] is not None]
    return {(row["op"], row["call"]): float(row["launches"]) for row in known}


def _ops(off: Sequence[Row], launches: Mapping[tuple[str, str], float], pace: Pace) -> dict[str, OpCost]:
    extra_ns = _dispatch_ns(off)
    usual: dict[str, list[float]] = defaultdict(list)
    for (op, _), count in launches.items():
        usual[name_of(op)].append(count)
    result: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    bound: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for row in off:
        if row["kind"] not in ("op", "op_python"):
            continue
        name = name_of(row["op"])
        guess = (
            float(np.median(usual[name]))
            if usual[name]
            else float(op_kind(name).host_class in (HostClass.LAUNCH, HostClass.FOREACH))
        )
        count = launches.get((row["op"], row["call"]), guess)
        cpu, launch = pace.of(row)
        times = np.asarray(row["times_ns"], dtype=np.float64)
        own = float(np.median(np.maximum(times - count * pace.launch_ns * launch, LEAST_CPU * times) / cpu))
        if row["kind"] == "op":
            result[name].append((_tensors(row["call"]), max(0.0, own - extra_ns), count))
        else:
            bound[name].append((_tensors(row["call"]), own, count))
    return {name: _op(name, bound.get(name) or seen) for name, seen in result.items()}


def _op(name: str, seen: Sequence[tuple[int, float, float]]) -> OpCost:
    tensors, cpu, launches = (np.array(column, dtype=np.float64) for column in zip(*seen, strict=True))
    count = float(np.median(launches))
    if op_kind(name).host_class != HostClass.FOREACH:
        return OpCost(float(np.median(cpu)), 0.0, count, len(seen))
    # Lists are long in every row, so that a line through them would give the fixed part by extrapolation alone.
    return OpCost(0.0, float(np.median(cpu / tensors)), count, len(seen))


def _dispatch_ns(off: Sequence[Row]) -> float:
    """What calling through `torch.ops` costs more than the function that people call: that of the same calls both ways."""
    both: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in off:
        if row["kind"] in ("op", "op_python"):
            both[row["op"], row["call"]][row["kind"]] = float(np.min(row["times_ns"]))
    extra = [times["op"] - times["op_python"] for times in both.values() if len(times) == 2]
    return float(np.median(extra)) if extra else 0.0


def _tensors(call: str) -> int:
    """Tensors in the longest list among a call's arguments; 1 without lists."""
    lists = [value for value in json.loads(call)["args"] if isinstance(value, list)] if call else []
    return max([1, *(len(value) for value in lists if value and isinstance(value[0], dict))])


def _classes(ops: Mapping[str, OpCost], collectives: Mapping[str, HostCost]) -> dict[str, OpCost]:
    """Medians over the ops of a class; where none was measured, over ops that launch."""
    called = [cost.cpu_ns for cost in collectives.values()]
    result: dict[str, OpCost] = {}
    for name in (HostClass.LAUNCH, HostClass.VIEW, HostClass.ALLOCATION, HostClass.FOREACH, HostClass.COLLECTIVE):
        members = [cost for op, cost in ops.items() if op_kind(op).host_class == name]
        if name == HostClass.LAUNCH:
            members = [cost for cost in members if cost.launches == 1] or members
        if name == HostClass.COLLECTIVE and called:
            result[name] = OpCost(float(np.median(called)), 0.0, 1.0, len(called))
        elif members:
            columns = ([each.cpu_ns, each.per_tensor_ns, each.launches] for each in members)
            cpu, tensor, count = np.median(np.array(list(columns)), axis=0)
            result[name] = OpCost(float(cpu), float(tensor), float(count), sum(each.rows for each in members))
        else:
            result[name] = result.get(HostClass.LAUNCH, OpCost(0.0))
    return {name: result[name] for name in HostClass}


def _mechanisms(off: Sequence[Row], kinds: Sequence[str], pace: Pace) -> dict[str, HostCost]:
    """Costs of the main thread, by kind and op; rows of the same one are taken together."""
    result: dict[str, list[Times]] = defaultdict(list)
    for row in off:
        if row["kind"] in kinds:
            cpu, launch = pace.of(row)
            count = LAUNCHING.get(row["kind"], 0.0)
            own = (np.asarray(row["times_ns"], dtype=np.float64) - count * pace.launch_ns * launch) / cpu
            result[f"{row['kind']} {row['op']}"].append(own)
    # Slopes are differences of single passes, a few of which lie far off: no mean.
    return {
        name: HostCost(
            max(0.0, float(np.median(np.concatenate(own)))), LAUNCHING.get(name.partition(" ")[0], 0.0) * pace.launch_ns
        )
        for name, own in result.items()
    }


def _forms(off: Sequence[Row], pace: Pace) -> dict[str, HostCost]:
    """What recording a graph adds to a call from Python: the median over functional forms."""
    medians: dict[str, dict[str, float]] = defaultdict(dict)
    for row in off:
        if row["kind"] in ("op_autograd", "op_no_grad"):
            medians[row["op"]][row["kind"]] = float(np.median(np.asarray(row["times_ns"]) / pace.of(row)[0]))
    extra = [each["op_autograd"] - each["op_no_grad"] for each in medians.values() if len(each) == 2]
    result = {"record graph": HostCost(max(0.0, float(np.median(extra))))} if extra else {}
    if "op_autograd" in (plain := medians.get("python_function", {})):
        result["python_function forward"] = HostCost(plain["op_autograd"])
    return result


def _backward(off: Sequence[Row], ops: Mapping[str, OpCost], pace: Pace) -> dict[str, HostCost]:
    """Costs of the backward thread: the engine per node, gradients taken over, DDP's hooks, starting it all."""
    nodes = [row for row in off if row["kind"] == "backward_node"]
    fast = {row["op"]: float(np.percentile(row["times_ns"], BACKWARD_PERCENTILE)) for row in nodes}
    if not fast:
        return {}
    slowness = float(np.median([np.median(row["times_ns"]) / fast[row["op"]] for row in nodes if fast[row["op"]] > 0]))
    known = [(fast[form], ops[op]) for form, op in NODES.items() if form in fast and op in ops]
    engine = [time_ns - op.cpu_ns - op.launches * pace.launch_ns for time_ns, op in known]
    result = {"engine node": HostCost(max(0.0, float(np.median(engine))))} if engine else {}
    # Differences of single passes scatter too much for their fast end: their middle, at the usual slowness of the thread.
    for kind in BACKWARD_KINDS:
        for row in off:
            if row["kind"] == kind:
                result[f"{kind} {row['op']}"] = HostCost(max(0.0, float(np.median(row["times_ns"])) / slowness))
    calls = [result.pop(name).cpu_ns for name in list(result) if name.startswith("backward_call ")]
    if calls:
        result["backward_call all"] = HostCost(float(np.median(calls)))
    return result


def usual_bursts(calibrations: Sequence[Row], launches: Mapping[tuple[str, str], float], pace: Pace) -> dict[str, Burst]:
    """What the costs that calibrations ask for take on a usual machine: per machine the median, over machines their mean."""
    times: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in calibrations:
        if row["kind"] in CALIBRATED:
            times[row["kind"], row["op"], row["call"]][str(row.get("machine"))] += row["times_ns"]
    result = {}
    for (kind, op, call), by_machine in sorted(times.items()):
        count = (
            CALIBRATED[kind]
            if kind != "op"
            else launches.get((op, call), float(op_kind(name_of(op)).host_class == HostClass.LAUNCH))
        )
        medians = [float(np.median(item)) for item in by_machine.values()]
        usual = float(np.exp(np.mean(np.log(np.maximum(medians, 1.0)))))
        result[f"{kind} {op}"] = Burst(usual, count * pace.launch_ns)
    return result


def _profiler(rows: Sequence[Row], profiler: str) -> ProfilerCost:
    """What it adds, from the fastest bursts of the same costs with and without it: its own reference is inflated too."""
    fastest: dict[str, dict[tuple[str, str, str], float]] = {"off": {}, profiler: {}}
    for row in rows:
        if row["profiler"] in fastest and row["reference_cpu_ns"]:
            key = (row["kind"], row["op"], row["call"])
            fastest[row["profiler"]][key] = float(np.percentile(row["times_ns"], BACKWARD_PERCENTILE))
    ratios: dict[str, list[float]] = defaultdict(list)
    for key, time_ns in fastest[profiler].items():
        plain = fastest["off"].get(key, 0.0)
        if plain > 0 and time_ns > 0 and key[0] in STRETCHED:
            ratios[key[0]].append(time_ns / plain)
    added = {
        kind: fastest[profiler].get((kind, "neg_out", ""), 0.0) - fastest["off"].get((kind, "neg_out", ""), 0.0)
        for kind in ("op_without_launch", "launch")
    }
    return ProfilerCost(
        per_op_ns=max(0.0, added["op_without_launch"]),
        per_launch_ns=max(0.0, added["launch"]),
        stretch={kind: round(float(np.median(item)), 4) for kind, item in sorted(ratios.items())},
    )
