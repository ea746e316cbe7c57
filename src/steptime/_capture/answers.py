"""What an op on the pretended device returns: the shapes that PyTorch's meta functions say, on tensors of the device.

Most of PyTorch's meta functions are Python and take a tenth of a millisecond. What they answer to ops that neither view nor
write their arguments depends on shapes, strides, dtypes and plain arguments alone: while answers are `remembered`, as for steps
of many equal layers, none is asked the same twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch.library import Library

from steptime._capture.layouts import laid_out
from steptime._capture.tensors import LISTS, META, as_meta, is_pretended, on_device

# Ops that PyTorch makes of others on devices without a kernel of theirs, and CUDA has one: both CompositeExplicitAutograd and
# CUDA are dispatch keys of theirs in native_functions.yaml (so are all of `_foreach_`). A copy calls a kernel where its entry
# does not say so, `detach` calls itself, `alias` nothing, and the device decides which convolution (native/Convolution.cpp).
_KERNELS = frozenset(
    f"aten::{name}"
    for name in (
        "_chunk_cat", "split_with_sizes_copy", "_grouped_mm", "addr", "all", "any", "convolution_backward", "linalg__powsum",
        "native_group_norm", "native_layer_norm", "copy_", "detach", "alias", "convolution", "_convolution", "_fused_rms_norm",
    )
)  # fmt: skip
# States of the random generator that attention drew from: on the CPU unless a graph is recorded (native/transformers/cuda/
# attention.cu, _efficient_attention_forward).
_ON_CPU: dict[str, tuple[int, ...]] = {"aten::_scaled_dot_product_efficient_attention": (2, 3)}

_Part = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides and dtype of a tensor that an op makes
# By op and arguments, whether it makes several tensors and which; None where it does more. Nothing is kept without.
_memory: ContextVar[dict[Any, tuple[bool, tuple[_Part, ...]] | None] | None] = ContextVar("answers", default=None)

_FACTORIES = frozenset(f"aten::{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn"))
_LARGE_BYTES = 256 << 20
_NUMBERS = (int, float)


@cache
def has_kernel(func: Any) -> bool:
    """Whether CUDA runs an op as one, though PyTorch could make it of others."""
    name: str = func._schema.name
    return name in _KERNELS or "::_foreach_" in name or _made_of_others_elsewhere(func)


def _made_of_others_elsewhere(func: Any) -> bool:
    """Whether PyTorch makes an op of others before autograd sees it, but not on the CPU, nor on CUDA (`silu_backward`)."""
    return all(map(func.has_kernel_for_dispatch_key, (DispatchKey.CompositeImplicitAutograd, DispatchKey.CPU)))


def is_large(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op makes a tensor of floats that is too large to be data of a batch."""
    if func._schema.name not in _FACTORIES or not isinstance(args[0], list | tuple):
        return False
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return dtype.is_floating_point and math.prod(args[0]) * dtype.itemsize >= _LARGE_BYTES


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on meta tensors; what it writes to and returns is the tensor it was given. The observer sees nothing of it."""
    memory = _memory.get()
    key = _key(func, args, kwargs) if memory is not None and _depends_on_shapes(func) else None
    torch._C._autograd._enable_record_function(False)
    try:
        if memory is None or key is None:
            return _answered(func, args, kwargs)
        known = memory.get(key)
        if known is not None:
            return _anew(*known)
        result = _answered(func, args, kwargs)
        memory.setdefault(key, _parts(result))
        return result
    finally:
        torch._C._autograd._enable_record_function(True)


# Steps of optimisers in one kernel that have no meta function: they write over the lists that they are given.
_WRITING = frozenset(("aten::_fused_sgd_", "aten::_fused_adagrad_"))


def _answered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func._schema.name in _WRITING:
        return None
    inner: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def down(tensor: torch.Tensor) -> torch.Tensor:
        if not is_pretended(tensor):
            return tensor
        if id(tensor) not in inner:
            inner[id(tensor)] = (tensor, as_meta(tensor))
        return inner[id(tensor)][1]

    args = tuple(map(_wrapped, args, func._schema.arguments))
    given = _mapped(args, down)
    result = func(*given, **{name: _mapped(value, down) for name, value in kwargs.items()})
    result = laid_out(func._schema.name, given, result)
    originals = {id(meta): tensor for tensor, meta in inner.values()}
    for tensor, meta in inner.values():
        _follow(tensor, meta)

    def up(tensor: torch.Tensor) -> torch.Tensor:
        known = originals.get(id(tensor))
        if known is not None:
            return known
        return on_device(tensor) if tensor.device.type == "meta" else tensor

    built = _mapped(result, up)
    places = _ON_CPU.get(func._schema.name)
    return built if places is None else tuple(_host(each) if index in places else each for index, each in enumerate(built))


def _wrapped(value: Any, argument: Any) -> Any:
    """A number in place of a tensor, which a mode is shown for a tensor that stands for a number, as a tensor again."""
    if isinstance(value, _NUMBERS) and str(argument.type) == "Tensor":
        dtype = torch.get_default_dtype() if isinstance(value, float) else None
        return torch.tensor(value, dtype=dtype, device=META)
    return value


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _follow(tensor: torch.Tensor, meta: torch.Tensor) -> None:
    """Gives a tensor the shape that an op has given it, as a resize does."""
    if tensor.shape != meta.shape or tensor.stride() != meta.stride():
        tensor.data = on_device(meta)


def moved(value: Any) -> Any:
    """The same arguments with all tensors on the device."""

    def up(tensor: torch.Tensor) -> torch.Tensor:
        if is_pretended(tensor) or not tensor.dim():
            return tensor
        return on_device(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META))

    return _mapped(value, up)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same value with its tensors changed; no source of random numbers, which the device that is not there has none of."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, LISTS):
        return type(value)([_mapped(each, change) for each in value])
    return None if isinstance(value, torch.Generator) else value


@contextmanager
def remembered() -> Iterator[None]:
    """While it lasts, no meta function is asked the same twice."""
    token = _memory.set({})
    try:
        yield
    finally:
        _memory.reset(token)


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
    if isinstance(value, LISTS):
        return tuple(map(_part, value))
    # 1, 1.0 and True are equal, and mean different dtypes.
    return (type(value), value) if isinstance(value, _NUMBERS) else value


def _parts(answer: Any) -> tuple[bool, tuple[_Part, ...]] | None:
    """How to make the answer again; None where it is more than new tensors of the device."""
    several = isinstance(answer, tuple | list)
    result = tuple(answer) if several else (answer,)
    for each in result:
        if not isinstance(each, torch.Tensor) or type(each) is not torch.Tensor or not is_pretended(each):
            return None
        if each.layout is not torch.strided or each.storage_offset():
            return None
    if len({each.untyped_storage()._cdata for each in result}) < len(result):
        return None
    return several, tuple((tuple(each.shape), each.stride(), each.dtype) for each in result)


def _anew(several: bool, parts: tuple[_Part, ...]) -> Any:
    empty = torch.ops.aten.empty_strided.default
    result = tuple(on_device(empty(shape, strides, dtype=dtype, device=META)) for shape, strides, dtype in parts)
    return result if several else result[0]


def _fused_rms_norm(
    source: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm, one op on CUDA; elsewhere PyTorch makes it of several before any mode sees it.

    Gives the normed tensor, and one over the root of the mean square of every row, in float32 where the input is narrower.
    """
    del weight, eps
    accurate = torch.float32 if source.dtype in (torch.float16, torch.bfloat16) else source.dtype
    rows = [*source.shape[: source.dim() - len(shape)], *[1] * len(shape)]
    return torch.empty_like(source, memory_format=torch.contiguous_format), source.new_empty(rows, dtype=accurate)


def _ctc_loss_backward(_: torch.Tensor, log_probs: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
    """The gradient of the logarithms, which PyTorch has no meta function for."""
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _without_meta() -> Library:
    """Shapes of ops whose meta functions PyTorch lacks; they hold as long as this object does."""
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in ("_ctc_loss_backward", "_ctc_loss_backward.Tensor"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, _ctc_loss_backward, "Meta")
    result: Library = library
    return result


def _registered() -> Library | None:
    """The registrations, which hold as long as this object does."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CUDA"):
        return None  # a build with CUDA
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for key in ("CUDA", "Meta"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", key):
            # Past `Library.impl`, which wants such ops to decompose.
            library.m.impl("_fused_rms_norm", key, _fused_rms_norm, False)
    result: Library = library
    return result


_REGISTERED = (_registered(), _without_meta())
