"""What the ops of a program launch on a device and how long each launch takes there, by the device's models.

Compute asks the kernel models and lookups the lookup models; an op of which neither knows anything moves its tensors at the
speed of memory, as a labelled fallback. Nothing that launches is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from steptime._lookups.workload import WorkloadLookups
from steptime._models.estimate import Estimate, Source
from steptime._models.kernels.call import Call, computed_in, precision_of
from steptime._models.kernels.from_ops import COMPUTE, LOOKUP, RECURRENT, UNKNOWN, IssuedWork, questions_of
from steptime._models.kernels.question import LaunchTime
from steptime._models.kernels.recurrent import WITHIN, Recurrent, StepPart, cell_parts
from steptime._models.power.model import KernelDraw
from steptime._notices import Basis, Caveat
from steptime._ops.catalogue import op_kind
from steptime._ops.generated_calls import moved_by_op
from steptime._ops.operations import PRODUCTS, operations_of
from steptime._ops.table import on_device, op_table
from steptime._platforms.device import Device, KernelEstimate, guess
from steptime._platforms.recorded_kernels import CarriedKernels
from steptime._program.one_step import OneStep, RecordedKernel
from steptime._program.program import Program, Signature
from steptime._sim.modelled.issue import DeviceWork, OpWork
from steptime._sim.modelled.lookup_work import lookup_answers, lookup_questions, scaled
from steptime._units import dtype_bytes
from steptime.errors import UnsupportedError

# Matrix products of these are cuBLAS's persistent kernels on Hopper, which the overlap model slows most.
_PERSISTENT_PRECISIONS = ("bfloat16", "float16")
_MATRIX_PRODUCT, _PERSISTENT = "gemm", "nvjet gemm"
# Share of the kernels' time from which a guess is worth a warning.
_WORTH_WARNING = 0.01
_MULTIPLYING = (*PRODUCTS, "aten::convolution", "aten::_scaled_dot_product")
_Call = tuple[tuple[LaunchTime, ...], Estimate, str, int, KernelDraw | None]
"""Of `OpWork`, what does not depend on the op: launches, estimate, group, what is read back and what is drawn."""


def device_work(
    steps: Sequence[OneStep], device: Device, lookups: WorkloadLookups | None = None, *, strict: bool = False
) -> list[DeviceWork]:
    """The launches of each program on a device; `lookups` say what ranks look up. All programs ask together.

    Kernels that were recorded of ops that no model knows (compiled ones, a user's own) keep their recorded time, or are carried
    from the device of the recording to this one (`CarriedKernels`).
    """
    issued = [
        questions_of(step.program, cached_bytes=device.cached_bytes, launches_recorded=step.whole or bool(step.kernels))
        for step in steps
    ]
    questions = [work.question for works in issued for work in works if work.question is not None]
    answers = iter(device.estimates(questions, strict=strict))
    ranks = {} if lookups is None else lookups.ranks
    tables = [
        lookup_questions(step.program, [work for work in works if work.kind == LOOKUP], ranks.get(step.program.rank))
        for step, works in zip(steps, issued, strict=True)
    ]
    table_questions = [lookup for of_rank in tables for lookup in of_rank.questions]
    table_answers = iter(lookup_answers(table_questions, device, strict=strict) if table_questions else ())
    results: list[DeviceWork] = []
    known_calls: dict[tuple[Any, ...], _Call] = {}
    for step, works, of_rank in zip(steps, issued, tables, strict=True):
        program = step.program
        compute = [_compute(work, next(answers), known_calls) for work in works if work.kind == COMPUTE]
        recorded = _recorded(step, {work.op for work in works if work.kind not in (UNKNOWN, RECURRENT)}, device)
        known = {work.op for work in recorded}
        compute += _recurrent(program, [work for work in works if work.kind == RECURRENT and work.op not in known], device)
        guessed = [] if step.whole else [work for work in works if work.kind == UNKNOWN and work.op not in known]
        unknown = [_unknown(program, work, device) for work in guessed]
        if strict and unknown:
            raise UnsupportedError(
                f"{program.names[int(program.ops.name[unknown[0].op])]} has no model on {device.limits.name} (rank "
                f"{program.rank}, {len(unknown)} such calls); drop --strict for a roofline of its arguments"
            )
        looked_up = of_rank.work([next(table_answers) for _ in of_rank.questions], device)
        every = sorted([*compute, *recorded, *unknown, *looked_up.works], key=lambda work: work.op)
        warnings = (
            *looked_up.warnings,
            *_other_precisions(works, device),
            *_keeps_recorded(program, recorded, device),
            *_guesses(program, unknown, every),
            *_unmeasured_switches(program, every),
            *_added_up(works),
        )
        results.append(DeviceWork(tuple(every), warnings))
    return results


def _other_precisions(works: Sequence[IssuedWork], device: Device) -> list[str]:
    """What to say of products in a precision that the device has not."""
    limits = device.limits
    asked = [work.question for work in works if work.question is not None and work.question.call.op.startswith(_MULTIPLYING)]
    missing = Counter(
        precision for each in asked if (precision := precision_of(each.call, each.tf32)) not in limits.peak_flop_per_s
    )
    for each in asked:
        limits.check_format(each.call.dtype, each.call.op)
    return [
        Caveat(f"{limits.name} has no {precision}: {count} products and the like at the rate of {limits.rated(precision)}")
        for precision, count in sorted(missing.items())
    ]


def _recorded(step: OneStep, answered: set[int], device: Device) -> list[OpWork]:
    """Recorded kernels of ops that nothing answers, nor anything around them: measured on this device, or carried to it."""
    carried = CarriedKernels.of(step.program.device_name, device.limits)
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
        moved = moved_by_op(step.program, op) if len(kernels) == 1 and not kernels[0].outside else ()
        each = [carried.estimate(kernel.name, float(kernel.time_ns), moved) for kernel in kernels]
        launches = tuple(LaunchTime(kernel.name, one.time_ns) for kernel, one in zip(kernels, each, strict=True))
        # One recording, one profiler, two devices: they err together.
        time_ns, low_ns, high_ns = (
            sum(values) for values in zip(*((one.time_ns, one.low_ns, one.high_ns) for one in each), strict=True)
        )
        estimate = Estimate(time_ns, low_ns, high_ns, each[0].source, inside=each[0].inside)
        results.append(OpWork(op, launches, estimate, "recorded"))
    return results


def _keeps_recorded(program: Program, recorded: Sequence[OpWork], device: Device) -> list[str]:
    if not recorded:
        return []
    where = f" on {program.device_name}" if program.device_name else ""
    most = _most_common(program, recorded, 3)
    if recorded[0].estimate.source is Source.ANALYTIC:
        name = device.limits.name
        return [Basis(f"kernels of ops without a model, recorded{where}, carried to {name} by the limits of both: {most}")]
    return [Basis(f"kernels of ops without a model, by the time they were recorded with{where}: {most}")]


def _most_common(program: Program, works: Sequence[OpWork], count: int) -> str:
    names = Counter(program.names[int(program.ops.name[work.op])] for work in works)
    return ", ".join(f"{name} ({number})" for name, number in names.most_common(count))


def _guesses(program: Program, unknown: Sequence[OpWork], works: Sequence[OpWork]) -> Iterator[str]:
    """What to say of ops that are guessed: how many there are, and how much of the kernels' time they take."""
    arguments = op_table(program).arguments
    blind = [work for work in unknown if not arguments[work.op].inputs and not arguments[work.op].outputs]
    total_ns = sum(work.estimate.time_ns for work in works) or 1.0
    for guessed, what, how in (
        ([work for work in unknown if work not in blind], "no model knows", "a roofline of their arguments stands for them"),
        (blind, "no usable arguments are recorded of", "each is taken as the shortest kernel: record their shapes"),
    ):
        if guessed:
            most = _most_common(program, guessed, 5)
            share = sum(work.estimate.time_ns for work in guessed) / total_ns
            yield _weighed(share, f"{what} ops of {100 * share:.1f} % of the kernels' time ({most}); {how}")


def _weighed(share: float, text: str) -> str:
    """A warning where it is about much of the kernels' time."""
    return text if share >= _WORTH_WARNING else Basis(text)


# Switches that choose kernels of which no row was measured, and what is known of these.
_UNMEASURED = {
    "benchmark": (
        "cuDNN's kernels without the search for its fastest ones (torch.backends.cudnn.benchmark) for ops that take",
        "they may take less time",
    ),
    "other_library": (
        "another library than usual is asked for (cuDNN switched off, or a preferred BLAS) by ops that take",
        "measured are the usual ones, so that they may take longer than predicted, convolutions several times",
    ),
    "deterministic": (
        "deterministic kernels are asked for by ops that take",
        "measured are PyTorch's usual ones, so that they may take longer than predicted",
    ),
}


def _unmeasured_switches(program: Program, works: Sequence[OpWork]) -> Iterator[str]:
    """What to say of ops for which a script switched on what models know nothing of: how much of the time they take."""
    signatures = op_table(program).signatures
    total_ns = sum(work.estimate.time_ns for work in works) or 1.0
    for switch, (what, known) in _UNMEASURED.items():
        concerned = [work for work in works if getattr(signatures[work.op].switches, switch)]
        if concerned:
            share = sum(work.estimate.time_ns for work in concerned) / total_ns
            most = _most_common(program, concerned, 3)
            text = f"{what} {100 * share:.1f} % of the kernels' time ({most}): {known}"
            yield Basis(text) if switch == "benchmark" else _weighed(share, text)


def _compute(work: IssuedWork, answer: KernelEstimate, known: dict[tuple[Any, ...], _Call]) -> OpWork:
    """The launches of a call; ops and ranks that call alike share a question, and what follows from its answer."""
    key = (id(work.question), id(answer), work.name, work.moved)
    if key not in known:
        known[key] = _call(work, answer)
    launches, estimate, group, read_back, draw = known[key]
    return OpWork(work.op, launches, estimate, group, read_back, draw=draw)


def _call(work: IssuedWork, answer: KernelEstimate) -> _Call:
    question = work.question
    assert question is not None
    launches = tuple(LaunchTime(launch.kernel, launch.time_ns * work.moved) for launch in answer.launches)
    products = any(launch.kernel == _MATRIX_PRODUCT for launch in launches)
    if products and precision_of(question.call, question.tf32) in _PERSISTENT_PRECISIONS:
        launches = tuple(replace(each, kernel=_PERSISTENT) if each.kernel == _MATRIX_PRODUCT else each for each in launches)
    read_back = len(launches) - 1 if op_kind(work.name).reads_back or _waits(question.call) else -1
    size_class = int(np.log2(max(answer.estimate.time_ns, 1.0)))  # calls within a factor of two err alike
    draw = None if answer.draw is None else answer.draw.scaled(work.moved)
    return launches, scaled(answer.estimate, work.moved), f"{answer.family} {size_class} {question.call.op}", read_back, draw


def _recurrent(program: Program, works: Sequence[IssuedWork], device: Device) -> list[OpWork]:
    """Recurrent layers, added up of products and gates as they follow each other."""
    table = op_table(program)
    parts = [_recurrent_parts(work, table.signatures[work.op], device) for work in works]
    asked = [part.question for each, _ in parts for part in each if part.question is not None]
    answers = iter(device.estimates(asked))
    results = []
    for work, (each, within) in zip(works, parts, strict=True):
        launches: list[LaunchTime] = []
        for part in each:
            product = part.question is not None and part.question.call.op.startswith("aten::mm")
            time_ns = part.time_ns if part.question is None else part.factor * next(answers).estimate.time_ns
            launches += [LaunchTime(_MATRIX_PRODUCT if product else "recurrent gates", time_ns)] * part.calls
        if not launches:
            results.append(_unknown(program, work, device))
            continue
        total_ns = sum(launch.time_ns for launch in launches)
        estimate = Estimate(total_ns, total_ns / within, total_ns * within, Source.ANALYTIC, inside=False)
        results.append(OpWork(work.op, tuple(launches), estimate, "recurrent"))
    return results


def _recurrent_parts(work: IssuedWork, signature: Signature, device: Device) -> tuple[list[StepPart], float]:
    """What is added up, and what the sum may be off by to either side."""
    if "cell" in work.name:
        return cell_parts(signature.inputs), WITHIN["backward" in work.name]
    layer = Recurrent.of(work.name, signature.inputs, tf32=signature.switches.tf32)
    return ([], 1.0) if layer is None else (layer.parts(device.limits), layer.within)


def _added_up(works: Sequence[IssuedWork]) -> list[str]:
    """What to say of recurrent layers."""
    count = sum(work.kind == RECURRENT for work in works)
    if not count:
        return []
    within = f"forward within a factor of {WITHIN[False]:g}, backward of {WITHIN[True]:g}"
    return [Basis(f"{count} calls of recurrent layers or cells, added up of products and gates: {within}")]


def _waits(call: Call) -> bool:
    """Whether the host waits for a copy between its memory and the device's: unless its is pinned and it asks not to."""
    plain, given = op_kind(call.op).plain, dict(call.kwargs)
    if plain == "_to_copy" and given.get("device") == "cpu":
        return not given.get("non_blocking")
    return plain in ("_to_copy", "copy_") and any(tensor.device == "pageable" for tensor in call.tensors())


def _unknown(program: Program, work: IssuedWork, device: Device) -> OpWork:
    """An op that no model knows: what it computes and moves at least, by its arguments."""
    table = op_table(program)
    arguments = table.arguments[work.op]
    tensors = [tensor for tensor in arguments.inputs + arguments.outputs if on_device(tensor)]
    nbytes = sum(tensor.numel * dtype_bytes(tensor.dtype) for tensor in tensors)
    flop = operations_of(work.name.partition(".")[0], table.signatures[work.op].inputs, arguments.inputs)
    dtype = next((tensor.dtype for tensor in tensors if "float" in tensor.dtype), tensors[0].dtype if tensors else "float32")
    precision = computed_in(work.name, dtype, table.signatures[work.op].switches.tf32)
    estimate = guess(device.limits, flop, float(nbytes), precision)
    back = 0 if op_kind(work.name).reads_back else -1
    return OpWork(work.op, (LaunchTime(work.name, estimate.time_ns),), estimate, f"unknown {work.name}", back)
