"""What an op on the pretended device returns: the shapes that PyTorch's meta functions say, on tensors of the device.

Most of PyTorch's meta functions are Python and take a tenth of a millisecond. What they answer to ops that do not view their
arguments depends on shapes, strides, dtypes and plain arguments alone: while answers are `remembered`, as for steps of many
equal layers, none is asked the same twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch.library import Library

from steptime._capture.layouts import laid_out
from steptime._capture.tensors import LISTS, META, as_meta, is_pretended, on_device, tensors_of

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
# By op and arguments, how to answer again; None where that is not known. Nothing is kept without.
_memory: ContextVar[dict[Any, _NewTensors | _Given | None] | None] = ContextVar("answers", default=None)

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


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, here: bool = False) -> Any:
    """The op on meta tensors; what it writes to and returns is the tensor it was given. The observer sees nothing of it.

    `here`: all its tensors are known to be of the device.
    """
    kind = _kinds.get(id(func)) or _kind(func)
    torch._C._autograd._enable_record_function(False)
    try:
        if kind is _Kind.VIEW and (here or is_pretended(args[0])):
            return viewed(func, args, kwargs)
        memory = _memory.get()
        key, known = _key(func, args, kwargs, here) if memory is not None and kind is _Kind.BY_SHAPES else None, None
        try:
            known = None if memory is None or key is None else memory.get(key)
        except TypeError:  # an argument of no known kind
            key = None
        if memory is None or key is None:
            return _answered(func, args, kwargs)
        if known is not None:
            return known.again(args, kwargs)
        result = _answered(func, args, kwargs)
        if not func._schema.is_mutable or key == _key(func, args, kwargs, here):  # none of its arguments has another shape now
            memory[key] = _answer_to(args, kwargs, result)
        return result
    finally:
        torch._C._autograd._enable_record_function(True)


def viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view, or several, of the first argument."""
    kernel = _VIEWS.get(id(func))
    if kernel is not None:
        return func._op_dk(kernel, *args, **kwargs)
    source = as_meta(args[0])
    made = func(source, *args[1:], **kwargs)
    if isinstance(made, LISTS):
        return type(made)([on_device(each) for each in made])
    return args[0] if made is source else on_device(made)


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

    if not torch._C._should_allow_numbers_as_tensors(func._opname):
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
    """A number in place of a tensor, which a mode is shown for a tensor that stands for a number, as a tensor again.

    Ops of arithmetic take the number itself: it then widens no dtype, as PyTorch's rules of promotion say.
    """
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
    """While it lasts, no meta function is asked the same twice, whatever rank asks."""
    token = _memory.set({} if (memory := _memory.get()) is None else memory)
    try:
        yield
    finally:
        _memory.reset(token)


class _Kind(Enum):
    """What an answer depends on."""

    VIEW = auto()  # what is viewed, by itself cheap enough to ask for
    BY_SHAPES = auto()  # shapes, strides, dtypes and plain arguments
    ANY = auto()


# They change where the numbers of a tensor are, or how many.
_MOVES = ("resize", "set_", "_resize_output", "_copy_from", "swap")


# Views that are made without a look at the device: their kernels serve any tensor, and leave its dispatch keys as they are.
_VIEWS = {
    id(torch.ops.aten.view.default): DispatchKey.Meta,
    id(torch.ops.aten.as_strided.default): DispatchKey.Meta,
    id(torch.ops.aten.detach.default): DispatchKey.CompositeExplicitAutograd,
    id(torch.ops.aten.alias.default): DispatchKey.CompositeExplicitAutograd,
}
_kinds: dict[int, _Kind] = {}  # by identity: PyTorch keeps its ops for good, and hashes them in Python


def is_view(func: Any) -> bool:
    """Whether an op views its first argument, and is not one that PyTorch makes of whatever others are needed."""
    return _kind(func) is _Kind.VIEW and not func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def _kind(func: Any) -> _Kind:
    kind = _kinds.get(id(func))
    if kind is None:
        kind = _kinds[id(func)] = _new_kind(func)
    return kind


def _new_kind(func: Any) -> _Kind:
    schema = func._schema
    if func.namespace != "aten":
        return _Kind.ANY
    aliased = [each for each in schema.arguments if each.alias_info is not None]
    viewed = bool(schema.returns) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
    )
    if viewed:
        tensors = [each for each in schema.arguments if "Tensor" in str(each.type)]
        plain = len(tensors) == 1 and aliased == tensors == [schema.arguments[0]] and not aliased[0].alias_info.is_write
        return _Kind.VIEW if plain else _Kind.ANY
    if not all(str(each.type) == "Tensor" for each in schema.returns) or any(not each.alias_info.is_write for each in aliased):
        return _Kind.ANY
    moved = torch.Tag.inplace_view in func.tags or schema.name.removeprefix("aten::").startswith(_MOVES)
    return _Kind.ANY if moved or not (schema.returns or aliased) else _Kind.BY_SHAPES


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], here: bool) -> Any:
    """What an answer depends on; None where an argument is of no known kind. (Ops are kept by `_kind`.)"""
    try:
        named = tuple([(name, _part(value)) for name, value in kwargs.items()]) if kwargs else ()
        switches = (torch.get_default_dtype(), torch._C._get_cudnn_enabled())
        places = here or tuple([is_pretended(each) for each in tensors_of(args, kwargs)])
        return (id(func), tuple([_part(value) for value in args]), named, places, switches)
    except TypeError:
        return None


def _part(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, LISTS):
        return tuple(map(_part, value))
    # 1, 1.0 and True are equal, and mean different dtypes.
    return (type(value), value) if isinstance(value, _NUMBERS) else value


@dataclass(frozen=True, slots=True)
class _NewTensors:
    """An answer that is new tensors of the device."""

    several: bool
    parts: tuple[_Part, ...]

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same answer to other arguments."""
        del args, kwargs
        made = tuple([on_device(_empty(shape, strides, dtype=dtype, device=META)) for shape, strides, dtype in self.parts])
        return made if self.several else made[0]


_empty = torch.empty_strided


@dataclass(frozen=True, slots=True)
class _Given:
    """An answer that is one of the arguments, by its place or its name; or, without either, nothing."""

    place: int | str | None

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same answer to other arguments."""
        if isinstance(self.place, int):
            return args[self.place]
        return None if self.place is None else kwargs[self.place]


def _answer_to(args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> _NewTensors | _Given | None:
    """How to make an answer again; None where it is more than new tensors of the device, or what was given."""
    if answer is None:
        return _Given(None)
    given: list[int | str] = [at for at, each in enumerate(args) if each is answer]
    given += [name for name, each in kwargs.items() if each is answer]
    if given:
        return _Given(given[0])
    several = isinstance(answer, tuple | list)
    result = tuple(answer) if several else (answer,)
    for each in result:
        if not isinstance(each, torch.Tensor) or type(each) is not torch.Tensor or not is_pretended(each):
            return None
        if each.layout is not torch.strided or each.storage_offset():
            return None
    storages = {each.untyped_storage()._cdata for each in result}
    if len(storages) < len(result) or any(each.untyped_storage()._cdata in storages for each in tensors_of(args, kwargs)):
        return None
    return _NewTensors(several, tuple((tuple(each.shape), each.stride(), each.dtype) for each in result))


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
