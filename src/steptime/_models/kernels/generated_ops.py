"""From ops that are generated kernels to questions: which tensor each argument of a kernel is, and when it was touched last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.forms.generated.numbers import generated_call
from steptime._models.kernels.question import Question
from steptime._ops.generated import GeneratedKernel
from steptime._ops.table import memory_bytes
from steptime._program.program import Tensor, Value, tensors_in
from steptime._units import dtype_bytes

# Names of arguments that are written alone, and read alone (torch/_inductor/codegen/common.py); the rest are both.
_WRITTEN, _READ = "out_ptr", "in_ptr"
_KEPT = 1 << 14


def tensors_of(kernel: GeneratedKernel, inputs: Sequence[Value]) -> list[Tensor | None]:
    """The tensor of each argument of a kernel; None where it is not recorded.

    Captured ops have what is read, what is written and a text; recorded ones all tensors in order.
    """
    if len(inputs) == 3 and isinstance(inputs[0], tuple) and isinstance(inputs[1], tuple):
        reads, writes = iter(tensors_in(inputs[0])), iter(tensors_in(inputs[1]))
        return [_next(name, reads, writes) for name, _ in kernel.arguments]
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.device != "cpu" and tensor.numel > 0]
    return [*tensors, *(None for _ in kernel.arguments)][: len(kernel.arguments)]


def _next(name: str, reads: Iterator[Tensor], writes: Iterator[Tensor]) -> Tensor | None:
    read = None if name.startswith(_WRITTEN) else next(reads, None)
    written = None if name.startswith(_READ) else next(writes, None)
    return read or written


def question_of(name: str, kernel: GeneratedKernel, tensors: Sequence[Tensor | None], ages: Sequence[int]) -> Question:
    """What to ask about a launch; launches alike share it."""
    arguments = [
        TensorArg((0 if tensor is None else memory_bytes(tensor) // max(dtype_bytes(dtype), 1),), dtype)
        for tensor, (_, dtype) in zip(tensors, kernel.arguments, strict=True)
    ]
    return _question(generated_call(name, kernel.text(), arguments, ages))


@lru_cache(maxsize=_KEPT)
def _question(call: Call) -> Question:
    return Question(call)
