"""What a call launches, by the rules of its family."""

from __future__ import annotations

from functools import lru_cache

from steptime._models.kernels.call import Call
from steptime._models.kernels.family import families, family_of
from steptime._models.kernels.launches import Launch
from steptime._models.kernels.question import OTHERS, Question
from steptime._units import dtype_bytes
from steptime.errors import InputError

# Calls whose launches are kept: several steps' worth of distinct ones.
_KEPT = 20_000
# What rules may run into on arguments that are not what an op takes.
_ODD_ARGUMENTS = (IndexError, TypeError, ValueError, ZeroDivisionError, KeyError, AttributeError, OverflowError)


@lru_cache(maxsize=_KEPT)
def launches_of(call: Call) -> tuple[Launch, ...]:
    """What a call launches, by the rules of its family. Raises InputError where there are none or the call cannot be."""
    family = family_of(call.op)
    rules = families()[family].rules if family else None
    if rules is None:
        raise InputError(f"{call.op}: no rules say what it launches")
    for shape, dtype in {(tensor.shape, tensor.dtype) for tensor in call.tensors()}:
        if not dtype_bytes(dtype):
            raise InputError(f"{call.op}: dtype {dtype!r} is unknown")
        if min(shape, default=0) < 0:
            raise InputError(f"{call.op}: a tensor of shape {list(shape)} cannot be")
    try:
        found = rules(call)
    except _ODD_ARGUMENTS as error:
        raise InputError(f"{call.op}: its arguments are not what the op takes ({error})") from error
    # A kernel over no elements is not launched.
    return tuple(launch for launch in found if launch.elements > 0)


def checked(question: Question) -> None:
    """Raises InputError for settings that cannot be."""
    if question.share < 1:
        raise InputError(f"{question.call.op}: share {question.share} of a GPU, expected 1 or more")
    if question.others not in OTHERS:
        raise InputError(f"{question.call.op}: others {question.others!r}, expected one of {', '.join(OTHERS)}")
