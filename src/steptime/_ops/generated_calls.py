"""What is known of the generated kernel behind an op: what a capture wrote beside it, else what a recording shows.

Kineto records a generated kernel's arguments in the order of its source: tensors that are read and written, then those that
are read, then those that are written, then the sizes of its axes. It does not say where one group ends: the last tensor is
taken as written. Kernels inside CUDA graphs, and recordings without shapes, have a name alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from steptime._ops.families import WorkFamily, op_family
from steptime._ops.generated import (
    FOREACH,
    LOAD,
    PERSISTENT,
    PLAIN,
    POINTWISE,
    REDUCTION,
    STORE,
    TEMPLATE,
    Access,
    AddressTerm,
    GeneratedKernel,
    coarse,
    kind_named,
)
from steptime._program.program import Program, Signature, Tensor, Value, tensors_in
from steptime._units import dtype_bytes
from steptime.errors import InputError

_REDUCES = (REDUCTION, PERSISTENT)
INNER, OUTER = "INNER", "OUTER"  # Inductor's hints of reductions
# Words of a name that stand before those of the ops that are fused.
_FUSED = re.compile(r"^triton_\w*?fused_")
_WORDS = re.compile(r"[a-z]+")
_DERIVED = "generated kernel"
# More iterations than this, and than so many for each element of its tensors, are a mistake: sums of random numbers, which read
# nothing, have fewer.
_ITERATIONS, _FOR_EACH = 1 << 34, 1 << 14


def kernel_called(name: str, signature: Signature) -> GeneratedKernel | None:
    """The generated kernel that an op of this name calls; None where nothing is known of it but its name."""
    known = signature.derived.get(_DERIVED, {})
    if name not in known:
        known = signature.derived.setdefault(_DERIVED, {})
        known[name] = _called(name, signature.inputs)
    kernel: GeneratedKernel | None = known[name]
    return kernel


def moved_by_op(program: Program, op: int) -> tuple[float, ...]:
    """Bytes that the generated kernel of an op reads and writes, least first; none where that is not known, or it is none.

    A recording does not say whether the first tensor is written as well.
    """
    name = "" if op < 0 else program.names[int(program.ops.name[op])]
    number = -1 if op < 0 else int(program.ops.signature[op])
    if number < 0 or op_family(name) is not WorkFamily.GENERATED:
        return ()
    kernel = kernel_called(name, program.signatures[number])
    if kernel is None:
        return ()
    moved, first = moved_bytes(kernel), kernel.accesses[0] if kernel.accesses else None
    if kernel.kind == FOREACH or first is None or first.indirect or first.kind != LOAD or _has_text(program.signatures[number]):
        return (moved,)
    return moved, moved + first.item_bytes * first.elements


def moved_bytes(kernel: GeneratedKernel) -> float:
    """What a kernel reads and writes, each part of a tensor once however often it is loaded."""
    most: dict[tuple[int, bool], float] = {}
    for access in kernel.accesses:
        place = access.argument, access.kind == LOAD
        elements = min(access.elements, kernel.elements) if access.terms else 1
        nbytes = access.item_bytes * access.share * (kernel.elements if access.indirect else elements)
        most[place] = max(most.get(place, 0.0), nbytes)
    return sum(most.values())


def _has_text(signature: Signature) -> bool:
    inputs = signature.inputs
    return len(inputs) == 3 and isinstance(inputs[2], str) and all(isinstance(each, tuple) for each in inputs[:2])


def _called(name: str, inputs: Sequence[Value]) -> GeneratedKernel | None:
    if _has_text(Signature(tuple(inputs))):
        kernel = _checked(GeneratedKernel.read(str(inputs[2])), tensors_in(inputs[:2]))
        if kernel.accesses or kernel.kind == TEMPLATE:
            return kernel
        return coarse(kernel.name, tensors_in(inputs[0:1]), tensors_in(inputs[1:2]), kernel.kind)
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.device != "cpu" and tensor.numel > 0]
    numbers = [value for value in inputs if isinstance(value, int) and not isinstance(value, bool) and value > 0]
    return as_recorded(name, tensors, numbers) if tensors and kind_named(name) != TEMPLATE else None


def _checked(kernel: GeneratedKernel, tensors: Sequence[Tensor]) -> GeneratedKernel:
    """A description that its tensors do not contradict: from any other, times come out that mean nothing."""
    sizes = [tensor.numel for tensor in tensors]
    most = max(_ITERATIONS, _FOR_EACH * sum(sizes))
    if kernel.elements <= most and (kernel.elements or not all(sizes)):
        return kernel
    raise InputError(
        f"{kernel.name}: its description has {kernel.elements:,} iterations, but its tensors have {sum(sizes):,} elements; "
        "the description is damaged, capture the step again"
    )


def as_recorded(name: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> GeneratedKernel:
    """A kernel by what was recorded of its call: its name, its tensors in order and the numbers after them."""
    kind = kind_named(name) or POINTWISE
    largest = max(tensor.numel for tensor in tensors)
    if kind in _REDUCES and len(numbers) >= 2:
        across, along = numbers[-2], numbers[-1]
    else:
        across, along = _iterations(numbers, largest), 1
    run = _run_outside(tensors, across, along) if along > 1 else 0
    terms = [_terms(min(tensor.numel, across * along), across, along, run) for tensor in tensors]
    accesses = tuple(
        Access(
            STORE if at == len(tensors) - 1 else LOAD,
            at,
            dtype_bytes(tensor.dtype) or dtype_bytes("float32"),
            terms[at],
            indirect=at < len(tensors) - 1 and tensor.numel > across * along,
        )
        for at, tensor in enumerate(tensors)
    )
    pointers = [f"in_ptr{at}" for at in range(len(tensors) - 1)] + ["out_ptr0"]
    return GeneratedKernel(
        name,
        kind,
        (("x", across), ("r0", along)) if along > 1 else (("x", across),),
        "" if along <= 1 else OUTER if run else INNER,
        tuple((pointer, tensor.dtype) for pointer, tensor in zip(pointers, tensors, strict=True)),
        accesses,
        ((PLAIN, float(len(_WORDS.findall(_FUSED.sub("", name))) + len(tensors))),),
        int(along > 1),
    )


def _iterations(numbers: Sequence[int], largest: int) -> int:
    """Of a kernel that does not reduce: its axes are the last numbers, as many as fill the largest of its tensors."""
    for count in range(1, min(3, len(numbers)) + 1):
        if math.prod(numbers[-count:]) == largest:
            return largest
    return numbers[-1] if numbers else largest


def _run_outside(tensors: Sequence[Tensor], across: int, along: int) -> int:
    """How many sums lie beside each other in memory where a reduction goes across its rows; 0 where it goes along them."""
    read = next((tensor for tensor in tensors if tensor.numel == across * along), None)
    result = next((tensor for tensor in reversed(tensors) if tensor.numel == across), None)
    if read is None or result is None:
        return 0
    run = _runs(result)[0]
    return run if run in _runs(read) and run not in (1, along) and across % run == 0 else 0


def _runs(tensor: Tensor) -> list[int]:
    """How many elements lie beside each other: of the innermost dimension, of that and the next one, and so on."""
    strides = tensor.strides or tuple(math.prod(tensor.shape[at + 1 :]) for at in range(len(tensor.shape)))
    runs = [1]
    for stride, size in sorted((stride, size) for stride, size in zip(strides, tensor.shape, strict=False) if size > 1):
        if stride != runs[-1]:
            break
        runs.append(stride * size)
    return runs[1:] or runs


def _terms(size: int, across: int, along: int, run: int) -> tuple[AddressTerm, ...]:
    """How so many elements are addressed: all in order, or the same ones again and again."""
    if size <= 1:
        return ()
    if along <= 1 or size == across:
        return (AddressTerm("x", 1, size, 1),)
    if size == along:
        return (AddressTerm("r0", 1, size, 1),)
    if size < along or size % along:
        return (AddressTerm("x", 1, min(size, across), 1),)
    if run and size == across * along:
        inside = (AddressTerm("x", 1, run, 1), AddressTerm("r0", 1, along, run))
        return inside if across == run else (*inside, AddressTerm("x", run, across // run, run * along))
    return (AddressTerm("r0", 1, along, 1), AddressTerm("x", 1, size // along, along))
