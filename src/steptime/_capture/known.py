"""Values of the device that follow from what a script itself wrote down: ids, lengths, masks, positions.

Such a tensor keeps its numbers on the CPU beside the storage that has none, and ops on known tensors are computed there as
well, views and writes included. So a check on an attention mask gets its true answer, and the shape of what a mask picks out is
the true one. What comes of a model's weights, or is drawn, is not known; nor are large tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from steptime._capture.refusals import unknown_shape, user_line
from steptime._capture.routing import ROUTES, balanced, classes, skew
from steptime._capture.tensors import META, is_pretended, on_device, tensors_in

# Of a storage. Whole numbers and truth values are what scripts decide by, and floats that are computed of known numbers of the
# device (masks to be added); of other floats, rates and the like.
_MOST_BYTES, _MOST_BYTES_OF_FLOATS = 1 << 23, 1 << 16
_MOST_BYTES_ROUTED = 1 << 27  # of what follows from which expert each token goes to
_ROOM = 256  # storages that are kept before those are looked for that are gone
_WEAK_STORAGE: Any = StorageWeakRef
_aten: Any = torch.ops.aten
# They make a tensor out of numbers in their arguments.
_WRITTEN = frozenset(
    f"aten::{name}"
    for name in (
        "arange", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "eye",
        "linspace", "scalar_tensor", "tril_indices", "triu_indices",
    )
)  # fmt: skip
_ANY_SOURCE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")

TRUTHS = (torch.bool, torch.uint8)
INDEXED = frozenset((_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default))
"""Ops that take indices, among them masks."""


def fills(args: tuple[Any, ...]) -> bool:
    """Whether a number of the host is put where a mask is true: filled in, without a look at where that is.

    (native/TensorAdvancedIndexing.cpp, canDispatchToMaskedFill.)
    """
    number = len(args) > 2 and not is_pretended(args[2]) and args[2].numel() == 1
    return number and not (len(args) > 3 and args[3]) and sum(each is not None for each in args[1]) == 1


def where_true(indices: Any) -> list[torch.Tensor | None]:
    """Indices with whole numbers in place of masks (native/IndexingUtils.h, expandTensors)."""
    result: list[torch.Tensor | None] = []
    for each in indices:
        if each is None or each.dtype not in TRUTHS:
            result.append(each)
        else:
            result.extend(_aten.nonzero(each).unbind(1))
    return result


_address: Any = torch._C._storage_address  # type: ignore[attr-defined]
_PUTS = frozenset((_aten.index_put_.default, _aten._index_put_impl_.default))
OVERWRITES = frozenset((_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default))


class Known:
    """The numbers of known tensors, by the storage that stands for them on the device."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Any, torch.UntypedStorage]] = {}
        self._room = _ROOM
        self._routed: dict[int, str] = {}  # storages whose numbers follow from a balanced choice, and what is said of it
        self.said: dict[str, None] = {}

    def route(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Takes what picks of few classes, by numbers that are not known, to pick each as often."""
        picked = _listed(result)[ROUTES[func]]
        count, along = classes(func, args, kwargs, picked)
        if not count or self.values(picked) is not None or picked.numel() * picked.itemsize > _MOST_BYTES_ROUTED:
            return
        each = picked.numel() / count
        fullest = f", the fullest {skew():g} times that" if skew() > 1 else ""
        text = f"chooses among {count} by values of the device, taken as balanced: {each:,.0f} each{fullest} (--expert-skew)"
        self._routed[picked.untyped_storage()._cdata] = f"{user_line() or 'PyTorch'} {text}"
        self._keep(picked, balanced(picked, count, along))

    def _route_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What is said of the choice that numbers among the arguments follow from; empty: of none."""
        if not self._routed:
            return ""
        storages = (tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs)) if is_pretended(tensor))
        return next((self._routed[storage] for storage in storages if storage in self._routed), "")

    def _say(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        said = self._route_of(args, kwargs)
        if said:
            self.said[said] = None

    def values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor with the same shape and its numbers, over the memory that all its views share; None: not known."""
        if not is_pretended(tensor):
            return tensor
        entry = self._numbers.get(tensor.untyped_storage()._cdata)
        if entry is None or entry[0].expired():
            return None
        flat = torch.empty(0, dtype=tensor.dtype)
        return flat.set_(entry[1], tensor.storage_offset(), tensor.shape, tensor.stride())

    def forget(self, tensor: torch.Tensor) -> None:
        """What is written to a tensor is not known any more."""
        for kept in (self._numbers, self._routed):
            kept.pop(tensor.untyped_storage()._cdata, None)

    def concerns(self, tensors: Sequence[torch.Tensor], *, here: bool, written: bool) -> bool:
        """Whether the numbers of all of these could be known, or those of one that may be written to are.

        `here`: all of them are of the device.
        """
        if not tensors:
            return False
        if not (here or is_pretended(tensors[0])):
            return True
        return any(_address(each) in self._numbers for each in (tensors if written else tensors[:1]))

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keeps the numbers of what an op made or wrote, where those it took are known; forgets what it wrote where not."""
        if func in OVERWRITES:
            if self._overwritten(func, args, result):
                routed = self._route_of(args[1:], {})
                if routed:
                    self._routed[result.untyped_storage()._cdata] = routed
                return
            if not self._routed and is_pretended(result) and _address(result) not in self._numbers:
                return  # nothing was known of it, and nothing is
        if func in _PUTS and self._put_somewhere(func, args):
            return
        if not self._computable(func, args, kwargs, result):
            for tensor in _written(func, args, kwargs):
                self.forget(tensor)
            return
        try:
            made = self.computed(func, args, kwargs)
        except (RuntimeError, NotImplementedError, IndexError):
            made = None
        pairs = zip(_listed(result), _listed(made), strict=False) if made is not None else ()
        routed = self._route_of(args, kwargs)
        for tensor, values in pairs:
            self._keep(tensor, values)
            if routed:
                self._routed[tensor.untyped_storage()._cdata] = routed

    def arrive(self, sent: torch.Tensor, received: torch.Tensor, made: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """Keeps what ranks that do the same send each other, where this rank's part is known; None: nobody can tell."""
        values = None if made is None or not is_pretended(received) else self.values(sent)
        routed = self._route_of((sent,), {})
        self.forget(received)
        if values is None or made is None or not _small(received):
            return
        torch._C._autograd._enable_record_function(False)
        try:
            self._keep(received, made(values))
        finally:
            torch._C._autograd._enable_record_function(True)
        if routed:
            self._routed[received.untyped_storage()._cdata] = routed

    def _put_somewhere(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Takes known numbers that are put by an index which is not known to be put at as many different places."""
        target, indices, values, *more = args
        index = indices[0] if len(indices) == 1 else None
        if index is None or index.dtype in TRUTHS or self.values(target) is None or self.values(index) is not None:
            return False
        if any(more) or index.numel() > target.shape[0] or not self.knows((values,), {}):
            return False
        places = _some_of(target.shape[0], index.numel()).reshape(index.shape)
        self.computed(func, (target, [places], values), {})
        text = f"puts {index.numel():,} numbers where values of the device say, taken as different places"
        self.said[f"{user_line() or 'PyTorch'} {text}"] = None
        return True

    def _overwritten(self, func: Any, args: tuple[Any, ...], result: torch.Tensor) -> bool:
        """Keeps what is written over a whole storage, whatever was there before."""
        if not _small(result, derived=any(map(is_pretended, tensors_in(args[1:])))):
            return False
        whole = result.numel() * result.itemsize == result.untyped_storage().nbytes()
        if not whole or not is_pretended(result) or not self.knows(args[1:], {}):
            return False
        self.forget(result)
        value = 0 if func is _aten.zero_.default else _each(args[1], self._real)
        self._keep(result, value.expand(result.shape) if isinstance(value, torch.Tensor) else torch.full(result.shape, value))
        return True

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op on the numbers. The observer sees nothing of it."""
        given = {key: torch.device("cpu") if key == "device" else _each(value, self._real) for key, value in kwargs.items()}
        torch._C._autograd._enable_record_function(False)
        try:
            numbers = [_each(value, self._real) for value in args]
            if func is _aten.histc.default and not numbers[0].is_floating_point():  # counts of classes, on CUDA alone
                return func(numbers[0].float(), *numbers[1:], **given).to(numbers[0].dtype)
            return func(*numbers, **given)
        finally:
            torch._C._autograd._enable_record_function(True)

    def knows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the numbers of all tensors among the arguments are known."""
        known = self._numbers
        for tensor in tensors_in((args, kwargs)):
            if is_pretended(tensor) and tensor.untyped_storage()._cdata not in known:
                return False
        return all(self.values(tensor) is not None for tensor in tensors_in((args, kwargs)))

    def told(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What an op that hands numbers to the host says, if they are known: one value; else nothing."""
        if not self.knows(args, kwargs):
            return ()
        told = self.computed(func, args, kwargs)
        if isinstance(told, torch.Tensor) and told.numel() > 1:  # one number of a metric sends nothing to experts
            self._say(args, kwargs)
        return (told,)

    def picked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """What an op makes whose shape depends on numbers, and whether they were known; else everything is picked."""
        known = self.knows(args, kwargs)
        most = _MOST.get(func._schema.name)
        if not known and most is None:
            raise unknown_shape(func)
        made = self.computed(func, args, kwargs) if known or most is None else most(*args, **kwargs)
        certain = known or func in _CERTAIN
        result = _each(
            made, lambda each: on_device(torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=META))
        )
        if known:
            self._say(args, kwargs)
            routed = self._route_of(args, kwargs)
            for tensor, values in zip(_listed(result), _listed(made), strict=True):
                self._keep(tensor, values)
                if routed:
                    self._routed[tensor.untyped_storage()._cdata] = routed
        return result, certain

    def _computable(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        name = func._schema.name
        read = {key: value for key, value in kwargs.items() if key != "out"}
        most = _MOST_BYTES_ROUTED if self._route_of(args, kwargs) else 0
        derived = name not in _WRITTEN and any(map(is_pretended, tensors_in((args, kwargs))))
        if any(not isinstance(each, torch.Tensor) or not _small(each, most, derived=derived) for each in _listed(result)):
            return False
        if name in _WRITTEN:
            return name.removeprefix("aten::") in _ANY_SOURCE or self.knows(args, read)
        taken = tensors_in((args, kwargs))
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        return not seeded and any(True for _ in taken) and self.knows(args, read)

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self.values(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype) if values is None else values

    def _keep(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if not is_pretended(tensor) or self.values(tensor) is not None:
            return  # a view of, or written to, what is kept already
        if values.shape != tensor.shape:
            return
        kept = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        flat: Any = torch.empty(0, dtype=tensor.dtype)
        flat.set_(kept, tensor.storage_offset(), tensor.shape, tensor.stride()).copy_(values)
        if len(self._numbers) >= self._room:
            self._numbers = {key: entry for key, entry in self._numbers.items() if not entry[0].expired()}
            self._room = 2 * len(self._numbers) + _ROOM
            self._routed = {key: said for key, said in self._routed.items() if key in self._numbers}
        self._numbers[storage._cdata] = (_WEAK_STORAGE(storage), kept)


def _small(tensor: torch.Tensor, at_most: int = 0, *, derived: bool = False) -> bool:
    floats = (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and not derived
    most = _MOST_BYTES_OF_FLOATS if floats else max(_MOST_BYTES, at_most)
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() <= most


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    places, names = _write_places(func)
    values = [args[place] for place in places if place < len(args)]
    more = [kwargs[name] for name in names if name in kwargs]
    return [tensor for tensor in tensors_in((values, more)) if is_pretended(tensor)]


@cache
def _write_places(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The arguments that an op writes to: places of those without names, names of the others."""
    aliased = [(place, each) for place, each in enumerate(func._schema.arguments) if each.alias_info is not None]
    names = tuple(each.name for _, each in aliased if each.kwarg_only)
    return tuple(place for place, each in aliased if each.alias_info.is_write), names


def writes_numbers(func: Any) -> bool:
    """Whether an op makes a tensor out of numbers in its arguments."""
    return func._schema.name in _WRITTEN


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_each(each, change) for each in value)
    return None if isinstance(value, torch.Generator) else value


def _some_of(rows: int, count: int) -> torch.Tensor:
    """So many different rows, others for other counts. The observer sees nothing of it."""
    torch._C._autograd._enable_record_function(False)
    try:
        return torch.randperm(rows, generator=torch.Generator().manual_seed(count))[:count]
    finally:
        torch._C._autograd._enable_record_function(True)


def _rows(count: int, *more: int) -> torch.Tensor:
    return torch.empty(count, *more, dtype=torch.int64, device=META)


def _all_selected(source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    count = math.prod(torch.broadcast_shapes(source.shape, mask.shape))  # type: ignore[no-untyped-call]
    return torch.empty(count, dtype=source.dtype, device=META)


def _all_unique(source: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = source.numel()
    return torch.empty(count, dtype=source.dtype, device=META), _rows(count), _rows(count)


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, _: Any, lengths: Any, *__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, and a state for every step and every place around the symbols of the longest target (native/cuda/LossCTC.cu)."""
    steps, batch = log_probs.shape[:2]
    if isinstance(lengths, torch.Tensor) and is_pretended(lengths):
        longest = targets.shape[-1] if targets.dim() > 1 else targets.numel() // batch
    else:
        longest = int(max(lengths))
    losses = torch.empty(batch, dtype=log_probs.dtype, device=META)
    return losses, torch.empty(batch, steps, 2 * longest + 1, dtype=log_probs.dtype, device=META)


_CERTAIN = frozenset((_aten._ctc_loss.default, _aten._ctc_loss.Tensor))  # their shapes follow from lengths
# What an op makes where everything is picked that could be.
_MOST: dict[str, Callable[..., Any]] = {
    "aten::_ctc_loss": _ctc_loss,
    "aten::nonzero": lambda source: _rows(source.numel(), source.dim()),
    "aten::masked_select": _all_selected,
    "aten::_unique2": _all_unique,
    "aten::unique_consecutive": _all_unique,
    "aten::bincount": lambda *args: _rows(max((*args[2:], 1))),
    "torchvision::nms": lambda boxes, *_: _rows(boxes.shape[0]),
}


def picks(func: Any) -> bool:
    """Whether the shape of what an op makes depends on numbers."""
    return func._schema.name in _MOST or (torch.Tag.dynamic_output_shape in func.tags and func not in INDEXED)
