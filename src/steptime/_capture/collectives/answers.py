"""`remembered`: answers to ops that were asked before with tensors alike, for steps of many equal layers.

Most of PyTorch's meta functions are Python and take a tenth of a millisecond. What they answer to ops that neither view nor
write their arguments depends on shapes, strides, dtypes and plain arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from steptime._capture import answers
from steptime._capture.tensors import META, is_pretended, on_device

Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

_empty = torch.ops.aten.empty_strided.default
_record = torch._C._autograd._enable_record_function


@contextmanager
def remembered() -> Iterator[None]:
    """While it lasts, no meta function is asked the same twice."""
    memory: dict[Any, tuple[bool, tuple[Made, ...]] | None] = {}
    ask = answers.answer

    def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = _key(func, args, kwargs) if _depends_on_shapes(func) else None
        if key is None:
            return ask(func, args, kwargs)
        known = memory.get(key)
        if known is not None:
            return _made(*known)
        result = ask(func, args, kwargs)
        if key not in memory:
            memory[key] = _kept(result)
        return result

    with patch.object(answers, "answer", answer):
        yield


@cache
def _depends_on_shapes(func: Any) -> bool:
    """Whether an op makes new tensors, and of tensors alone: nothing is a view, written or drawn up from values."""
    schema = func._schema
    aliased = any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    tensors = all(str(each.type) == "Tensor" for each in schema.returns)
    return bool(func.namespace == "aten" and schema.returns and tensors and not aliased)


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an answer depends on; None where an argument is of no known kind."""
    try:
        key = (func, tuple(map(_part, args)), tuple((name, _part(value)) for name, value in kwargs.items()))
        hash(key)
    except TypeError:
        return None
    return key


def _part(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError
        return (value.shape, value.stride(), value.dtype, is_pretended(value))
    if isinstance(value, list | tuple):
        return tuple(map(_part, value))
    # 1, 1.0 and True are equal, and mean different dtypes.
    return (type(value), value) if isinstance(value, int | float) else value


def _kept(found: Any) -> tuple[bool, tuple[Made, ...]] | None:
    """How to make the answer again; None where it is more than new tensors of the device."""
    several = isinstance(found, tuple | list)
    result = tuple(found) if several else (found,)
    for each in result:
        if not isinstance(each, torch.Tensor) or type(each) is not torch.Tensor or not is_pretended(each):
            return None
        if each.layout is not torch.strided or each.storage_offset():
            return None
    if len({each.untyped_storage()._cdata for each in result}) < len(result):
        return None
    return several, tuple((tuple(each.shape), each.stride(), each.dtype) for each in result)


def _made(several: bool, parts: tuple[Made, ...]) -> Any:
    _record(False)
    try:
        result = tuple(on_device(_empty(shape, strides, dtype=dtype, device=META)) for shape, strides, dtype in parts)
    finally:
        _record(True)
    return result if several else result[0]
