"""Fits a `HostModel` on measured host costs, and on what only recorded steps tell; nothing is tuned to a workload.

Bursts of one call find everything in caches and have no model's Python between them. A profiled trace has both, under its
profiler and at an unknown speed. So only ratios within one trace are read from it: the first call of an op in a step over its
later ones, and the gaps between ops over the ops themselves, whose cost is known from bursts and from what the profiler adds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.host.columns import host_columns
from steptime._models.host.model import Burst, HostCost, HostModel, OpCost, ProfilerCost
from steptime._ops.catalogue import HostClass, op_kind
from steptime._program.program import Phase, Program
from steptime.errors import InputError

Row = Mapping[str, Any]
Times = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

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
_CALL, _GRADIENT = BACKWARD_KINDS = ("backward_call", "accumulate_grad")
# No row says the cost of a pass more exactly than this.
_SURE_NS = 20_000.0
MAIN_KINDS = (
    "between_forward", "module_call", "optimizer_step", "optimizer_step_fixed", "zero_grad", "zero_grad_fixed", "clip_grad",
    "clip_grad_fixed", "table_batched", "item", "event_record", "stream_wait",
    "synchronize", "copy", "autocast",
)  # fmt: skip
# Launches of one call, where it makes a known number: CPU work takes twice as long in the slow state and launches a quarter
# longer. As rows show it: work without launches takes 1.8 times as long there, loops of optimisers and DDP's hooks 1.3 times.
# Counted in torch 2.11 (torch/optim, torch/csrc/distributed/c10d/reducer.cpp): DDP multiplies a gradient into its bucket and
# copies it back; a sparse row-wise Adagrad sorts and sums rows (8, as profiles of steps show) before its 8 ops.
LAUNCHING = {
    "collective_call": 1.0, "table_batched": 1.0, "ddp_backward": 2.0, "ddp_bucket": 1.0,
    "optimizer_step sgd_for_loop": 1.0, "optimizer_step sgd_momentum_for_loop": 3.0, "optimizer_step adagrad_for_loop": 4.0,
    "optimizer_step adam_for_loop": 7.0, "optimizer_step adamw_for_loop": 8.0, "optimizer_step sgd_sparse": 1.0,
    "optimizer_step rowwise_adagrad_sparse": 16.0,
}  # fmt: skip
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
# Calls of an op in one thread of one step before its later ones say what it usually takes; the second is still 10 % slower.
_ENOUGH, _FIRST_LATER = 6, 2
# Half of what a profiler adds per op lies outside the op's own record: it opens before the first time stamp and closes after
# the second. Gaps longer than this are hand-overs to another thread.
_OUTSIDE, _LONGEST_GAP_NS = 0.5, 300_000
_BESIDE = ("reference_cpu_ns", "reference_launch_ns")  # timed beside each repeat
_RECIPE = ("cpu", "os_kernel", "python", "torch", "cuda", "driver", "nccl", "date", "machine", "command")


def fit(rows: Iterable[Row], traces: Iterable[Program] = ()) -> HostModel:
    """The model of the host whose rows these are: those of one rank alone, with the reference calls beside each burst.

    `traces`: programs recorded by a profiler, for what only whole steps tell.
    """
    every = list(rows)
    swept = [row for row in every if row["source"] != CALIBRATION]
    alone = [row for row in swept if row["share"] == 1]
    unprofiled = [row for row in swept if row["profiler"] == "off" and row["reference_cpu_ns"]]
    off, together = ([row for row in unprofiled if (row["share"] == 1) == single] for single in (True, False))
    for row in unprofiled:
        if {len(row[name] or ()) for name in _BESIDE} != {len(row["times_ns"])}:
            raise InputError(
                f"{row['kind']} {row['op']}: expected as many reference times as repeats; run steptime measure host"
            )
    if not off:
        raise InputError("no unprofiled host costs with reference times to fit on; run steptime measure host")
    pace, launches = _pace(off), _launches(alone)
    ops = _ops(off, launches, pace)
    # A single rank has nobody to meet; its rows serve where no others were measured.
    shared = {**_mechanisms(off, TOGETHER_KINDS, pace), **_mechanisms(together, TOGETHER_KINDS, pace)}
    called = {name: cost for name, cost in shared.items() if name.startswith("collective_call ")}
    around = {**_mechanisms(off, MAIN_KINDS, pace), **_backward(off, ops, pace), **_forms(off, pace), **shared}
    around["between forward"] = around.get("between_forward sequential_relu", HostCost())
    model = HostModel(
        recipe={name: str(off[0][name]) for name in _RECIPE if off[0].get(name) is not None},
        reference_cpu_ns=pace.cpu_ns,
        reference_launch_ns=pace.without_ns + pace.launch_ns,
        launch_ns=pace.launch_ns,
        binding_ns=ops[CHEAPEST].cpu_ns if CHEAPEST in ops else 0.0,
        ops=dict(sorted(ops.items())),
        classes=_classes(ops, called),
        around=dict(sorted(around.items())),
        bursts=usual_bursts([row for row in every if row["source"] == CALIBRATION] or off, launches, pace),
        profilers={name: _profiler(alone, name) for name in PROFILERS if any(row["profiler"] == name for row in alone)},
    )
    return _with_traces(model, list(traces))


def _with_traces(model: HostModel, traces: Sequence[Program]) -> HostModel:
    """The model with what recorded steps tell besides."""
    if not traces or TRACED_WITH not in model.profilers:
        return model
    model = replace(model, first_call=first_call(traces))
    # Nothing between ops, so that their own cost is what the trace's ops are compared with.
    bare = replace(model, around={**model.around, "between forward": HostCost(), "between view": HostCost()})
    between = between_forward_ns(traces, bare, model.profilers[TRACED_WITH])
    return replace(model, around={**model.around, **{f"between {before}": HostCost(time) for before, time in between.items()}})


@dataclass(frozen=True)
class Pace:
    """What the reference calls take at speed 1, and so the speed around every burst."""

    cpu_ns: float
    without_ns: float  # the launching reference less its launch
    launch_ns: float

    def cpu_times_ns(self, row: Row, launches: float = 0.0, least: float | None = None) -> Times:
        """Of each of a row's times, what so many launches leave at speed 1; at least a part of it where one is named."""
        cpu = np.asarray(row["reference_cpu_ns"], dtype=np.float64) / self.cpu_ns
        launch = (np.asarray(row["reference_launch_ns"], dtype=np.float64) - cpu * self.without_ns) / self.launch_ns
        times = np.asarray(row["times_ns"], dtype=np.float64)
        left: Times = times - launches * self.launch_ns * np.maximum(launch, 0.5)
        return (left if least is None else np.maximum(left, least * times)) / cpu


def _pace(off: Sequence[Row]) -> Pace:
    cpu_ns, launch_ns = (float(np.percentile(np.concatenate([row[name] for row in off]), FAST_PERCENTILE)) for name in _BESIDE)
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
    swept: dict[str, dict[str, list[tuple[int, float, float]]]] = {kind: defaultdict(list) for kind in ("op", "op_python")}
    for row in off:
        if row["kind"] in swept:
            name = name_of(row["op"])
            launching = op_kind(name).host_class in (HostClass.LAUNCH, HostClass.FOREACH)
            guess = float(np.median(usual[name])) if usual[name] else float(launching)
            count = launches.get((row["op"], row["call"]), guess)
            cpu_ns = float(np.median(pace.cpu_times_ns(row, count, LEAST_CPU)))
            dispatched_ns = max(0.0, cpu_ns - extra_ns) if row["kind"] == "op" else cpu_ns
            swept[row["kind"]][name].append((_tensors(row["call"]), dispatched_ns, count))
    return {name: _op(name, swept["op_python"].get(name) or seen) for name, seen in swept["op"].items()}


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
    try:
        lists = [value for value in json.loads(call)["args"] if isinstance(value, list)] if call else []
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"a host row's call is {call[:40]!r}; expected JSON with args; run steptime measure host") from None
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
    times: dict[str, list[Times]] = defaultdict(list)
    for row in off:
        if row["kind"] in kinds:
            name = f"{row['kind']} {row['op']}"
            times[name].append(pace.cpu_times_ns(row, _launches_of_one(name)))
    launched_ns = {name: _launches_of_one(name) * pace.launch_ns for name in times}
    # Slopes are differences of single passes, a few of which lie far off: no mean.
    medians = {name: max(0.0, float(np.median(np.concatenate(item)))) for name, item in times.items()}
    return {name: HostCost(median, launched_ns[name]) for name, median in medians.items()}


def _launches_of_one(name: str) -> float:
    return LAUNCHING.get(name, LAUNCHING.get(name.partition(" ")[0], 0.0))


def _forms(off: Sequence[Row], pace: Pace) -> dict[str, HostCost]:
    """What recording a graph adds to a call from Python: the median over functional forms."""
    medians: dict[str, dict[str, float]] = defaultdict(dict)
    for row in off:
        if row["kind"] in ("op_autograd", "op_no_grad"):
            medians[row["op"]][row["kind"]] = float(np.median(pace.cpu_times_ns(row)))
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
    for row in off:
        if row["kind"] == _GRADIENT:
            result[f"{_GRADIENT} {row['op']}"] = HostCost(max(0.0, float(np.median(row["times_ns"])) / slowness))
    calls: dict[str, list[Times]] = defaultdict(list)
    for row in off:
        if row["kind"] == _CALL:
            calls[row["op"]].append(np.asarray(row["times_ns"], dtype=np.float64))
    if calls:
        result[f"{_CALL} all"] = HostCost(max(0.0, _intercept_ns([np.concatenate(each) for each in calls.values()]) / slowness))
    return result


def _intercept_ns(times: Sequence[Times]) -> float:
    """What is left of a pass without its nodes, which forms say as a difference: each counts as exactly as it does.

    Where nodes take long it is a small part of what two passes differ by when the thread changes its speed between them.
    """
    middles = np.array([np.median(each) for each in times])
    spreads = np.array([np.subtract(*np.percentile(each, (75, 25))) for each in times])
    return float(np.average(middles, weights=1.0 / np.maximum(spreads, _SURE_NS) ** 2))


def usual_bursts(calibrations: Sequence[Row], launches: Mapping[tuple[str, str], float], pace: Pace) -> dict[str, Burst]:
    """What the costs that calibrations ask for take on a usual machine: per machine the median, over machines their mean."""
    times: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in calibrations:
        if row["kind"] in CALIBRATED:
            times[row["kind"], row["op"], row["call"]][str(row.get("machine"))] += row["times_ns"]
    result = {}
    for (kind, op, call), by_machine in sorted(times.items()):
        launching = float(op_kind(name_of(op)).host_class == HostClass.LAUNCH)
        count = launches.get((op, call), launching) if kind == "op" else CALIBRATED[kind]
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


def first_call(programs: Iterable[Program]) -> float:
    """How many times as long the first call of an op takes in each thread of a step: the median over ops; 1 without any."""
    ratios = []
    for program in programs:
        ops = program.ops
        took: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        columns = (ops.step, ops.thread, ops.name, ops.end_ns - ops.start_ns)
        for step, thread, name, time_ns in zip(*(column.tolist() for column in columns), strict=True):
            took[step, thread, name].append(time_ns)
        for (step, _, _), times in took.items():
            usual = float(np.median(times[_FIRST_LATER:])) if len(times) >= _ENOUGH and step >= 0 else 0.0
            if usual > 0:
                ratios.append(times[0] / usual)
    return float(np.median(ratios)) if ratios else 1.0


def between_forward_ns(programs: Iterable[Program], model: HostModel, profiler: ProfilerCost) -> dict[str, float]:
    """Python before an op of the forward pass at speed 1, a mean over ops: before a `view`, and before others (`forward`)."""
    counts: dict[str, int] = defaultdict(int)
    sums: dict[str, float] = defaultdict(float)
    for program in programs:
        for before, count, time_ns in _between(program, model, profiler):
            counts[before] += count
            sums[before] += time_ns
    return {before: max(0.0, sums[before] / count) for before, count in counts.items() if count}


def _between(program: Program, model: HostModel, profiler: ProfilerCost) -> Iterator[tuple[str, int, float]]:
    """How many gaps a program has before each kind of op, and what they sum up to at speed 1."""
    rows = _outermost(program)
    ops = program.ops
    begins, ends = ops.start_ns[rows], ops.end_ns[rows]
    gaps = begins[1:] - ends[:-1]
    kept = (gaps > 0) & (gaps < _LONGEST_GAP_NS) & (ops.step[rows[1:]] == ops.step[rows[:-1]])
    if not kept.any():
        return
    columns = host_columns(program, model)
    forward = columns.phase == Phase.FORWARD
    inside = _inside(program, rows)
    # Of ops alone: the model has no cost of what lies between them.
    known = float((columns.cpu_ns + columns.launch_ns)[forward].sum())
    known += inside[0] * profiler.per_op_ns + inside[1] * profiler.per_launch_ns
    slow = float((ends - begins).sum()) / known
    names = ops.name[rows[1:]][kept]
    for name in np.unique(names).tolist():
        same = gaps[kept][names == name]
        if len(same) < _ENOUGH:
            continue
        before = "view" if op_kind(program.names[name]).host_class is HostClass.VIEW else "forward"
        # The middle of an op's gaps, and ops that come often: the few long ones are a model's own code, or a pause.
        yield before, len(same), len(same) * (float(np.median(same)) / slow - _OUTSIDE * profiler.per_op_ns)


def _outermost(program: Program) -> Rows:
    """Ops of the forward pass that Python calls: those outside every other op, labels and functions in Python apart."""
    ops = program.ops
    real = np.array(["::" in name for name in program.names], dtype=bool)
    covered = np.zeros(len(ops), dtype=bool)
    for row, parent in enumerate(ops.parent.tolist()):
        covered[row] = parent >= 0 and (covered[parent] or real[ops.name[parent]])
    chosen = real[ops.name] & ~covered & (ops.phase == Phase.FORWARD) & (ops.step >= 0)
    main = [thread.role == "main" for thread in program.threads]
    return np.flatnonzero(chosen & np.array(main, dtype=bool)[ops.thread])


def _inside(program: Program, rows: Rows) -> tuple[int, int]:
    """How many ops and how many calls the given ops hold, themselves included."""
    held = np.zeros(len(program.ops), dtype=bool)
    held[rows] = True
    for row, parent in enumerate(program.ops.parent.tolist()):
        held[row] |= parent >= 0 and bool(held[parent])
    calls = program.calls.op
    return int(held.sum()), int(held[calls[calls >= 0]].sum())
