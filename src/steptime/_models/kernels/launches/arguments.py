"""Arguments of a call as launch rules need them: tensors as operands, numbers as numbers, one clear error for anything else."""

from __future__ import annotations

from functools import cache

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg
from steptime._models.kernels.launches import Operand, operand
from steptime.errors import InputError


@cache
def base_name(op: str) -> str:
    """The name of an op without namespace and overload: `add_` of `aten::add_.Tensor`."""
    return op.rsplit("::", maxsplit=1)[-1].split(".", maxsplit=1)[0]


def overload(op: str) -> str:
    """The overload of an op: `Tensor` of `aten::add_.Tensor`."""
    return op.rsplit(".", maxsplit=1)[-1]


def value(call: Call, index: int, default: Argument = None) -> Argument:
    """A positional argument, or what it is when not given."""
    return call.args[index] if index < len(call.args) else default


def keyword(call: Call, name: str, default: Argument = None) -> Argument:
    """A keyword argument, or what it is when not given."""
    return next((item for entry, item in call.kwargs if entry == name), default)


def tensor(call: Call, index: int) -> Operand:
    """The tensor at a position."""
    given = value(call, index)
    if not isinstance(given, TensorArg):
        raise InputError(f"{call.op}: argument {index} is {given!r}, expected a tensor")
    return operand(given, index)


def optional_tensor(call: Call, index: int) -> Operand | None:
    """The tensor at a position; None where another thing or nothing is given."""
    given = value(call, index)
    return operand(given, index) if isinstance(given, TensorArg) else None


def tensors(call: Call) -> list[Operand]:
    """The tensors among the positional arguments, without those in lists."""
    return [operand(arg, index) for index, arg in enumerate(call.args) if isinstance(arg, TensorArg)]


def tensor_list(call: Call, index: int) -> list[Operand]:
    """The list of tensors at a position."""
    given = value(call, index)
    if not isinstance(given, tuple) or not all(isinstance(item, TensorArg) for item in given):
        raise InputError(f"{call.op}: argument {index} is {given!r}, expected a list of tensors")
    return [operand(item, index) for item in given if isinstance(item, TensorArg)]


def integer(call: Call, index: int, default: int | None = None) -> int:
    """The whole number at a position."""
    given = value(call, index, default)
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise InputError(f"{call.op}: argument {index} is {given!r}, expected a number")
    return int(given)


def integers(call: Call, index: int) -> tuple[int, ...]:
    """The whole numbers at a position: a list, a single number, or none."""
    given = value(call, index)
    if given is None:
        return ()
    many = given if isinstance(given, tuple) else (given,)
    if not all(isinstance(item, int) for item in many):
        raise InputError(f"{call.op}: argument {index} is {given!r}, expected whole numbers")
    return tuple(int(item) for item in many if isinstance(item, int))


def flag(call: Call, index: int, default: bool = False) -> bool:
    """The truth value at a position."""
    return bool(value(call, index, default))


def dtype_at(call: Call, index: int, default: str) -> str:
    """The dtype given at a position, or the default."""
    given = value(call, index)
    return given.name if isinstance(given, DtypeArg) else default


def dtype_keyword(call: Call, default: str) -> str:
    """The dtype given by keyword, or the default."""
    given = keyword(call, "dtype")
    return given.name if isinstance(given, DtypeArg) else default
