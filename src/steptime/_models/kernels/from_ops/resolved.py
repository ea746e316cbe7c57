"""Calls behind traced ops, each distinct one made once: ops that differ in nothing but the identity of tensors share it."""

from __future__ import annotations

from dataclasses import dataclass, field

from steptime._models.kernels.call import Argument, Call
from steptime._models.kernels.from_ops.arguments import call_arguments
from steptime._models.kernels.question import Question
from steptime._models.kernels.work import computed_in
from steptime._ops.catalogue import Overload, overload_of
from steptime._program.program import Signature, Tensor, Value

# Distinct calls that are kept; a step has some hundreds.
_MOST = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """A distinct call without what was written before it, which differs from one place in a step to another."""

    overload: Overload
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    _questions: dict[tuple[tuple[int, ...], bool], Question] = field(default_factory=dict)

    def question(self, written: tuple[int, ...], *, warm: bool) -> Question:
        """What to ask about the call where these arguments are written just before a step makes it."""
        result = self._questions.get((written, warm))
        if result is None:
            call = Call(self.overload.op, self.args, self.kwargs, written)
            tf32 = computed_in(call.op, call.dtype) == "tf32"
            result = self._questions[written, warm] = Question(call, tf32=tf32, warm=warm)
        return result


_kept: dict[object, Resolved | None] = {}


def resolved(name: str, signature: Signature, *, ordered: bool = False) -> Resolved | None:
    """The call that an op with these arguments is; None where no known overload takes them.

    `ordered` says that the index along a dimension counts.
    """
    derived = (Resolved, name, ordered)
    if derived in signature.derived:
        known: Resolved | None = signature.derived[derived]
        return known
    values = signature.inputs
    key = (name, ordered, *map(_plain, values))
    if key not in _kept:
        if len(_kept) >= _MOST:
            _kept.clear()
        overload = overload_of(name, values)
        _kept[key] = None if overload is None else Resolved(overload, *call_arguments(overload, values, ordered=ordered))
    call = signature.derived[derived] = _kept[key]
    return call


def _plain(value: Value) -> object:
    """What tells arguments of different calls apart, and no more."""
    if value.__class__ is Tensor:
        return value.shape, value.dtype, value.strides, value.device == "cpu"
    if value.__class__ is tuple:
        return tuple(map(_plain, value))
    # 1, 1.0 and True are equal as keys.
    return value.__class__, value
