"""An optimiser's step made another way: one fused kernel over all parameters, or ops over lists of them.

Host and device time of the step change as models say of the two ways: fewer ops and launches, less memory moved.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from steptime._models.host.model import STEP
from steptime._models.kernels.traced_call import traced_call
from steptime._ops.catalogue import op_kind
from steptime._program.program import Program, Signature, Tensor, Value, tensors_in
from steptime._sim.core.timing import Cohort
from steptime._whatif.draws import with_errors
from steptime._whatif.edits import Mask, Rows, scaled_works, without_works
from steptime._whatif.grammar import Change
from steptime._whatif.grammar import error as refusal
from steptime._whatif.models import Models, log_error

_STEP = re.compile(r"Optimizer\.step#(\w+)\.step")
_KINDS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Adagrad": "adagrad"}
_LOOP = "for_loop"
_MOMENTUM = ("mul_", "_foreach_mul_")
# What the loop over parameters calls once for each.
_ONCE = {"sgd": "add_", "sgd_momentum": "mul_", "adam": "addcdiv_", "adamw": "addcdiv_", "adagrad": "addcdiv_"}
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_RATE = 0.001
# Arguments: a parameter or what is like it, a number, a number for each parameter.
_LIKE, _NUMBER, _NUMBERS = "like", "number", "numbers"
Op = tuple[str, tuple[Value, ...]]


@dataclass(frozen=True)
class Step:
    """One optimiser's step in a program: what it is, how it goes over its parameters, and what it launches."""

    kind: str
    way: str  # fused | foreach | for_loop
    decays: bool  # whether gradients get a part of the weights first, by an op of its own
    shapes: tuple[tuple[int, ...], ...]
    ops: Rows  # all within it, itself first


def steps_of(program: Program) -> Iterator[Step]:
    """The steps of optimisers whose ways and parameters are known."""
    ops = program.ops
    labels = {row: found[1] for row, name in enumerate(program.names) if (found := _STEP.fullmatch(name))}
    for row in np.flatnonzero(np.isin(ops.name, list(labels))).tolist():
        kind = _KINDS.get(labels[int(ops.name[row])])
        step = None if kind is None else _read(program, kind, _inside(program, row))
        if step is not None and step.shapes:
            yield step


def _inside(program: Program, row: int) -> Rows:
    parents = program.ops.parent
    within = {row}
    for at in range(row + 1, len(parents)):
        if int(parents[at]) in within:
            within.add(at)
        elif program.ops.start_ns[at] > program.ops.end_ns[row] >= 0:
            break
    return np.array(sorted(within), dtype=np.int64)


def _read(program: Program, kind: str, inside: Rows) -> Step:
    called: dict[str, list[Signature]] = {}
    for row in inside.tolist():
        at = int(program.ops.signature[row])
        if at >= 0:
            called.setdefault(op_kind(program.names[program.ops.name[row]]).plain, []).append(program.signatures[at])
    if kind == "sgd" and any(name in called for name in _MOMENTUM):
        kind = "sgd_momentum"
    decays = "add" in called or "_foreach_add" in called
    for way in ("fused", "foreach"):
        lists = [
            each.inputs[0] for name, every in called.items() if name.startswith(f"_{way}_") for each in every if each.inputs
        ]
        if lists:
            every_list = [_shapes(values) for values in lists]
            shapes = max(every_list, key=lambda shapes: sum(math.prod(shape) for shape in shapes))
            return Step(kind, way, decays, shapes or tuple(gradient_shapes(program, int(program.ops.step[inside[0]]))), inside)
    ones = [_shapes(each.inputs[0]) for each in called.get(_ONCE[kind], ()) if each.inputs]
    return Step(kind, _LOOP, decays, tuple(shape for shapes in ones for shape in shapes), inside)


def gradient_shapes(program: Program, step: int | None = None) -> Iterator[tuple[int, ...]]:
    """Shapes of the gradients of a step or of all: Kineto leaves out what is in long lists."""
    ops = program.ops
    names = [row for row, name in enumerate(program.names) if name == _ACCUMULATE]
    of_step = np.ones(len(ops), dtype=bool) if step is None else ops.step == step
    for at in ops.signature[np.isin(ops.name, names) & of_step & (ops.signature >= 0)].tolist():
        yield from _shapes(program.signatures[at].inputs[:1])[:1]


def _shapes(value: Value) -> tuple[tuple[int, ...], ...]:
    return tuple(tensor.shape for tensor in tensors_in((value,)))


def made(change: Change, cohort: Cohort, models: Models) -> Cohort:
    """The cohort with every optimiser's step made the way that is asked for."""
    known: dict[tuple[object, ...], tuple[list[float], float, float, float]] = {}
    for step in list(steps_of(cohort.program)):
        key = (step.kind, step.way, step.decays, step.shapes)
        if key not in known:
            (launches, error), (before, _) = (_launches_ns(step, way, models) for way in (change.choice, step.way))
            host = _host_ns(step, change.choice, models) / _host_ns(step, step.way, models)
            known[key] = launches, sum(launches) / sum(before), host, error
        if step.way != change.choice:
            cohort = _replaced(cohort, step, *known[key])
    return cohort


def check(change: Change, cohorts: Sequence[Cohort]) -> None:
    """An error where no optimiser's step is there that could be made another way."""
    steps = [step for cohort in cohorts for step in steps_of(cohort.program)]
    if not steps:
        known = ", ".join(_KINDS)
        raise refusal(change.text, f"no step of an optimiser whose parameters' shapes are recorded; known are {known}")
    if all(step.way == change.choice for step in steps):
        raise refusal(change.text, f"the optimiser's step is {change.choice} already")


def _host_ns(step: Step, way: str, models: Models) -> float:
    return STEP.time_ns(models.host.mechanism("optimizer_step", f"{step.kind}_{way}", len(step.shapes)))


def _launches_ns(step: Step, way: str, models: Models) -> tuple[list[float], float]:
    """What every launch of a step takes on the device, and the error of the longest op's logarithm."""
    calls = []
    for name, values in _StepOps(step).ops(way):
        call = traced_call(f"aten::{name}", Signature(values))
        assert call is not None, name
        calls.append(call.question((), warm=False))
    answers = models.device.estimates(calls)
    longest = max((answer.estimate for answer in answers), key=lambda estimate: estimate.time_ns)
    return [launch.time_ns for answer in answers for launch in answer.launches], log_error(longest)


class _StepOps:
    """The ops of an optimiser's step on the device, with their arguments; no time depends on its coefficients."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._like = tuple(Tensor(shape, "float32") for shape in step.shapes)

    def ops(self, way: str) -> list[Op]:
        """Those of one way."""
        if way == "fused":
            return self._fused()
        written = list(self._written())
        if way == "foreach":
            return [(f"_foreach_{name}", tuple(self._lists(each) for each in values)) for name, values in written]
        return [
            (name, tuple(tensor if each is _LIKE else _RATE for each in values))
            for tensor in self._like
            for name, values in written
        ]

    def _lists(self, value: str | float) -> Value:
        if value is _LIKE:
            return self._like
        return (_RATE,) * len(self._like) if value is _NUMBERS else _RATE

    def _written(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """What is done to each parameter, its gradient and its state: names of ops without what they go over."""
        kind = self._step.kind
        if kind.startswith("sgd"):
            if self._step.decays:
                yield "add", (_LIKE, _LIKE, _NUMBER)
            if kind == "sgd_momentum":
                yield from (("mul_", (_LIKE, _NUMBER)), ("add_", (_LIKE, _LIKE, _NUMBER)))
            yield "add_", (_LIKE, _LIKE, _NUMBER)
        elif kind == "adagrad":
            yield from (("addcmul_", (_LIKE, _LIKE, _LIKE, _NUMBER)), ("sqrt", (_LIKE,)), ("add_", (_LIKE, _NUMBER)))
            yield from (("mul", (_LIKE, _NUMBERS)), ("addcdiv_", (_LIKE, _LIKE, _LIKE, _NUMBER)))
        else:
            if kind == "adamw":
                yield "mul_", (_LIKE, _NUMBER)
            yield from (("lerp_", (_LIKE, _LIKE, _NUMBER)), ("mul_", (_LIKE, _NUMBER)))
            yield from (("addcmul_", (_LIKE, _LIKE, _LIKE, _NUMBER)), ("sqrt", (_LIKE,)), ("div_", (_LIKE, _NUMBERS)))
            yield from (("add_", (_LIKE, _NUMBER)), ("addcdiv_", (_LIKE, _LIKE, _LIKE, _NUMBERS)))

    def _fused(self) -> list[Op]:
        like, kind = self._like, self._step.kind
        counts = (Tensor((), "float32"),) * len(like)
        if kind.startswith("sgd"):
            momentum = 0.9 if kind == "sgd_momentum" else 0.0
            rest = (0.0, momentum, _RATE, 0.0, False, False, False, None, None)
            return [("_fused_sgd_", (like, like, like if momentum else (), *rest))]
        if kind == "adagrad":
            return [("_fused_adagrad_", (like, like, like, counts, _RATE, 0.0, 0.0, 0.0, False, None, None))]
        rest_of_adam = (_RATE, 0.9, 0.999, 0.0, 0.0, False, False, None, None)
        return [("_foreach_add_", (counts, 1)), (f"_fused_{kind}_", (like, like, like, like, (), counts, *rest_of_adam))]


def _replaced(cohort: Cohort, step: Step, launches: Sequence[float], device: float, host: float, error: float) -> Cohort:
    """The step's first works stand for the new launches, the others are gone; its host work is so many times as long."""
    program, timing = cohort.program, cohort.timing
    within = np.zeros(len(program.ops) + 1, dtype=bool)
    within[step.ops] = True
    calls = within[program.calls.op]
    works = np.append(calls, False)[program.works.call]
    rows = np.flatnonzero(works)
    kept, gone = rows[: len(launches)], works.copy()
    gone[kept] = False
    spent = [float(np.mean(values[calls], axis=(1, 2)).sum()) for values in (timing.gap_ns, timing.call_ns)]
    total = float(np.mean(timing.duration_ns[rows], axis=(1, 2)).sum())
    result = without_works(cohort, gone)
    if len(kept):
        share = np.array(launches[: len(kept)]) / sum(launches[: len(kept)])
        own = np.mean(timing.duration_ns[kept], axis=(1, 2))
        factors = np.ones(len(program.works))
        factors[kept] = device * total * share / np.maximum(own, 1.0)
        of_kept = _mask(kept, len(program.works))
        result = with_errors(scaled_works(result, of_kept, factors), np.where(of_kept, error, 0.0))
    left = float(np.mean(result.timing.call_ns[calls], axis=(1, 2)).sum())
    gaps = max(host * sum(spent) - left, 0.0) / max(spent[0], 1.0)
    gap_ns = np.rint(np.where(calls[:, None, None], timing.gap_ns * gaps, timing.gap_ns)).astype(np.int64)
    return replace(result, timing=replace(result.timing, gap_ns=gap_ns))


def _mask(rows: Rows, count: int) -> Mask:
    result = np.zeros(count, dtype=bool)
    result[rows] = True
    return result
