"""What the ops of a program launch on a device and how long each launch takes there, by the device's models.

Compute asks the kernel models and lookups the lookup models; an op of which neither knows anything moves its tensors at the
speed of memory, as a labelled fallback. Nothing that launches is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steptime._lookups.workload import WorkloadLookups
from steptime._models.estimate import Estimate, Source
from steptime._models.kernels.call import precision_of
from steptime._models.kernels.from_ops import COMPUTE, LOOKUP, UNKNOWN, IssuedWork, questions_of
from steptime._models.kernels.question import LaunchTime
from steptime._models.lookups.contention import MemoryUse
from steptime._ops.catalogue import op_kind
from steptime._ops.operations import operations_of
from steptime._ops.table import on_device, op_table
from steptime._platforms.device import FACTOR, Device, KernelEstimate, guess
from steptime._program.one_step import OneStep, RecordedKernel
from steptime._program.program import Program
from steptime._sim.modelled.lookup_work import LookupWork, lookup_answers, lookup_questions
from steptime._units import dtype_bytes
from steptime.errors import UnsupportedError

# Matrix products of these are cuBLAS's persistent kernels on Hopper, which the overlap model slows most.
_PERSISTENT_PRECISIONS = ("bfloat16", "float16")
_MATRIX_PRODUCT, _PERSISTENT = "gemm", "nvjet gemm"
_Call = tuple[tuple[LaunchTime, ...], Estimate, str, int]
"""Of `OpWork`, what does not depend on the op: launches, estimate, group and what is read back."""


@dataclass(frozen=True, slots=True)
class OpWork:
    """The launches of one op. `group` says which estimates err together: those of one model about one size."""

    op: int
    launches: tuple[LaunchTime, ...]
    estimate: Estimate  # of all launches together
    group: str
    read_back: int = -1  # place of the launch of which the host waits for the end, to read a value
    memory: MemoryUse | None = None  # of a lookup beside others


@dataclass(frozen=True)
class DeviceWork:
    """All launches of a program but its collectives, in order of their ops."""

    works: tuple[OpWork, ...]
    warnings: tuple[str, ...] = ()

    def launches(self, ops: int) -> list[float]:
        """How many launches each op makes itself."""
        counts = np.zeros(ops)
        for work in self.works:
            counts[work.op] += len(work.launches)
        result: list[float] = counts.tolist()
        return result


def device_work(
    steps: Sequence[OneStep], device: Device, lookups: WorkloadLookups | None = None, *, strict: bool = False
) -> list[DeviceWork]:
    """The launches of each program on a device; `lookups` say what ranks look up. All programs ask together.

    Kernels that were recorded of ops that no model knows (compiled ones, a user's own) keep their recorded time.
    """
    programs = [each.program for each in steps]
    issued = [
        questions_of(step.program, cached_bytes=device.cached_bytes, launches_recorded=bool(step.kernels)) for step in steps
    ]
    asked = [work.question for works in issued for work in works if work.question is not None]
    answered = device.estimates(asked, strict=strict)
    answers = iter(answered)
    ranks = {} if lookups is None else lookups.ranks
    tables = [
        lookup_questions(program, [work for work in works if work.kind == LOOKUP], ranks.get(program.rank))
        for program, works in zip(programs, issued, strict=True)
    ]
    every = [lookup for table in tables for lookup in table.asked]
    looked_up = iter(lookup_answers(every, device, strict=strict) if every else ())
    results: list[DeviceWork] = []
    known_calls: dict[tuple[Any, ...], _Call] = {}
    for step, works, rank_tables in zip(steps, issued, tables, strict=True):
        program = step.program
        compute = [_compute(work, next(answers), known_calls) for work in works if work.kind == COMPUTE]
        kept = _kept(step, {work.op for work in works if work.kind != UNKNOWN}, device)
        known = {work.op for work in kept}
        unknown = [_unknown(program, work, device) for work in works if work.kind == UNKNOWN and work.op not in known]
        if strict and unknown:
            raise UnsupportedError(
                f"{program.names[int(program.ops.name[unknown[0].op])]} has no model on {device.limits.name} (rank "
                f"{program.rank}, {len(unknown)} such calls); drop --strict for a roofline of its arguments"
            )
        tables_work = rank_tables.work([next(looked_up) for _ in rank_tables.asked], device)
        results.append(_together(program, compute + kept, unknown, tables_work, _said(step, kept)))
    return results


# A profiler makes kernels a few percent longer than they are, seldom shorter.
_SAME_DEVICE = (0.9, 1.02)
# Of kernels recorded on another device nothing more is known than how long they took there.
_OTHER_DEVICE = (1.0 / FACTOR, FACTOR)


def _kept(step: OneStep, answered: set[int], device: Device) -> list[OpWork]:
    """Recorded kernels of ops that nothing answers, nor anything around them: measured on this device, else a guess."""
    here = device.limits.whole.split("-", maxsplit=1)[0].upper() in step.program.device_name.upper()
    low, high = _SAME_DEVICE if here else _OTHER_DEVICE
    source = Source.MEASURED if here else Source.FALLBACK
    parents = step.program.ops.parent
    by_op: dict[int, list[RecordedKernel]] = defaultdict(list)
    for kernel in step.kernels:
        at = kernel.op
        while at >= 0 and (kernel.outside or at not in answered):
            at = int(parents[at])
        if at < 0 <= kernel.op:
            by_op[kernel.op].append(kernel)
    results = []
    for op, kernels in sorted(by_op.items()):
        time_ns = float(sum(kernel.time_ns for kernel in kernels))
        launches = tuple(LaunchTime(kernel.name, float(kernel.time_ns)) for kernel in kernels)
        estimate = Estimate(time_ns, low * time_ns, high * time_ns, source, inside=here)
        # One recording, one profiler: they err together.
        results.append(OpWork(op, launches, estimate, "recorded"))
    return results


def _said(step: OneStep, kept: Sequence[OpWork]) -> list[str]:
    if not kept:
        return []
    program = step.program
    names = Counter(program.names[int(program.ops.name[work.op])] for work in kept)
    most = ", ".join(f"{name} ({count})" for name, count in names.most_common(3))
    where = f" on {program.device_name}" if program.device_name else ""
    return [f"kernels of ops without a model keep the time they were recorded with{where}: {most}"]


def _together(
    program: Program, compute: list[OpWork], unknown: list[OpWork], lookups: LookupWork, said: Sequence[str]
) -> DeviceWork:
    tables = [
        OpWork(item.op, item.launches, item.estimate, f"lookup {item.direction}", item.read_back, item.memory)
        for item in lookups.ops
        if item.launches
    ]
    works = sorted([*compute, *unknown, *tables], key=lambda work: work.op)
    return DeviceWork(tuple(works), (*lookups.warnings, *said, *_guesses(program, unknown, works)))


def _guesses(program: Program, unknown: Sequence[OpWork], works: Sequence[OpWork]) -> list[str]:
    """What to say of ops that are guessed: how many there are, and how much of the kernels' time they take."""
    arguments = op_table(program).arguments
    blind = [work for work in unknown if not arguments[work.op].inputs and not arguments[work.op].outputs]
    total_ns = sum(work.estimate.time_ns for work in works) or 1.0
    messages = []
    for guessed, what, how in (
        ([work for work in unknown if work not in blind], "no model knows", "a roofline of their arguments stands for them"),
        (
            blind,
            "no usable arguments are recorded of",
            "each is taken as the shortest kernel: record their shapes",
        ),
    ):
        if guessed:
            names = Counter(program.names[int(program.ops.name[work.op])] for work in guessed)
            most = ", ".join(f"{name} ({count})" for name, count in names.most_common(5))
            share = sum(work.estimate.time_ns for work in guessed) / total_ns
            messages.append(f"rank {program.rank}: {what} {len(guessed)} ops, {share:.1%} of the kernels' time ({most}); {how}")
    return messages


def _compute(work: IssuedWork, answer: KernelEstimate, known: dict[tuple[Any, ...], _Call]) -> OpWork:
    """The launches of a call; ops and ranks that call alike share a question, and what follows from its answer."""
    key = (id(work.question), id(answer), work.name, work.moved)
    if key not in known:
        known[key] = _call(work, answer)
    return OpWork(work.op, *known[key])


def _call(work: IssuedWork, answer: KernelEstimate) -> _Call:
    question = work.question
    assert question is not None
    launches = tuple(LaunchTime(launch.kernel, launch.time_ns * work.moved) for launch in answer.launches)
    if any(launch.kernel == _MATRIX_PRODUCT for launch in launches):
        launches = _as_persistent(launches, precision_of(question.call, question.tf32))
    given, moved = answer.estimate, work.moved
    estimate = Estimate(given.time_ns * moved, given.low_ns * moved, given.high_ns * moved, given.source, given.inside)
    read_back = len(launches) - 1 if op_kind(work.name).reads_back else -1
    group = f"{answer.family} {_size_class(given.time_ns)} {question.call.op}"
    return launches, estimate, group, read_back


def _as_persistent(launches: tuple[LaunchTime, ...], precision: str) -> tuple[LaunchTime, ...]:
    if precision not in _PERSISTENT_PRECISIONS:
        return launches
    return tuple(replace(each, kernel=_PERSISTENT) if each.kernel == _MATRIX_PRODUCT else each for each in launches)


def _size_class(time_ns: float) -> int:
    """Calls within a factor of two err alike."""
    return int(np.log2(max(time_ns, 1.0)))


def _unknown(program: Program, work: IssuedWork, device: Device) -> OpWork:
    """An op that no model knows: what it computes and moves at least, by its arguments."""
    table = op_table(program)
    arguments = table.arguments[work.op]
    tensors = [tensor for tensor in arguments.inputs + arguments.outputs if on_device(tensor)]
    nbytes = sum(tensor.numel * dtype_bytes(tensor.dtype) for tensor in tensors)
    flop = operations_of(work.name.partition(".")[0], table.signatures[work.op].inputs, arguments.inputs)
    dtype = next((tensor.dtype for tensor in tensors if "float" in tensor.dtype), tensors[0].dtype if tensors else "float32")
    estimate = guess(device.limits, flop, float(nbytes), dtype)
    return OpWork(work.op, (LaunchTime(work.name, estimate.time_ns),), estimate, f"unknown {work.name}")
