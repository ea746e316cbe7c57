"""Records the op calls of a training step as data: below autograd and autocast, where ops launch what the device runs."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg, contiguous
from steptime._ops.catalogue import Integers, OpKind, Role, op_kind
from steptime._units import MIB

# What lies in cache for sure when a call comes: what was written within so many bytes before it (L2 of an H200: 50 MB).
_WRITTEN_WITHIN_BYTES = 32 * MIB
_REMEMBERED = 64


class NotDataError(TypeError):
    """An argument that a call cannot hold: a sparse tensor, a complex number, an object."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A call without what was written before it, and whether it touched a GPU."""

    call: Call
    on_gpu: bool


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets every op run as it is and counts its calls. `device_only`: leaves out views and allocations."""

    def __init__(self, *, device_only: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unsupported: Counter[str] = Counter()
        self._device_only = device_only
        self._counts: Counter[_Seen] = Counter()
        self._written: dict[_Seen, Counter[tuple[int, ...]]] = defaultdict(Counter)
        self._fresh: OrderedDict[int, int] = OrderedDict()  # address of storage -> bytes written when it was written last
        self._bytes_written = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the op, then notes it."""
        del types
        named = dict(kwargs or {})
        recorded = func.namespace == "aten" and not (self._device_only and _leaves_device_alone(func))
        seen = self._seen(func, args, named) if recorded else None
        written = self._just_written(args)
        result = func(*args, **named)
        if seen is not None:
            on_gpu = seen.on_gpu or any(tensor.is_cuda for tensor in _tensors((result,)))
            noted = _Seen(seen.call, on_gpu)
            self._counts[noted] += 1
            self._written[noted][written] += 1
            self._note_writes(func, args, named, result)
        return result

    def calls(self) -> dict[Call, int]:
        """How often each distinct call was made, in the order they first came; on a GPU only those that touched it."""
        gpu = any(seen.on_gpu for seen in self._counts)
        result: Counter[Call] = Counter()
        for seen, count in self._counts.items():
            if seen.on_gpu or not gpu:
                result[replace(seen.call, written=self._written[seen].most_common(1)[0][0])] += count
        return dict(result)

    def _seen(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Seen | None:
        name = f"{func._schema.name}.{func._overloadname}"
        on_gpu = any(tensor.is_cuda for tensor in _tensors((*args, *kwargs.values())))
        on_gpu = on_gpu or getattr(kwargs.get("device"), "type", "") == "cuda"
        try:
            call = Call(
                op=name,
                args=tuple(_as_data(value, func, args, index, on_gpu) for index, value in enumerate(args)),
                kwargs=tuple(sorted((key, _as_data(value, func, args, key, on_gpu)) for key, value in kwargs.items())),
            )
        except NotDataError:
            self.unsupported[name] += 1
            return None
        return _Seen(call, on_gpu)

    def _just_written(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The positions of arguments that lie in cache because an op wrote them a moment ago."""
        return tuple(
            index
            for index, value in enumerate(args)
            if any(
                self._bytes_written - self._fresh.get(_address(tensor), -_WRITTEN_WITHIN_BYTES) < _WRITTEN_WITHIN_BYTES
                for tensor in _tensors((value,))
            )
        )

    def _note_writes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        mutated = [
            args[index] if index < len(args) else kwargs.get(argument.name)
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in _tensors((result, *mutated)):
            self._bytes_written += tensor.numel() * tensor.element_size()
            self._fresh[_address(tensor)] = self._bytes_written
            self._fresh.move_to_end(_address(tensor))
        while len(self._fresh) > _REMEMBERED:
            self._fresh.popitem(last=False)


def record_calls(step: Callable[[], None], *, device_only: bool = True) -> dict[Call, int]:
    """The distinct op calls of one step, backward and optimiser included, and how often it makes each."""
    recorder = OpRecorder(device_only=device_only)
    # A dispatch mode belongs to a thread: the backward pass has to run on this one.
    with torch.autograd.set_multithreading_enabled(False), recorder:
        step()
    return recorder.calls()


def _leaves_device_alone(func: Any) -> bool:
    if op_kind(func._schema.name).role is Role.NOTHING:
        return True
    # A view: what it returns is its argument's memory, and it writes none of it.
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _as_data(value: Any, func: Any, args: Sequence[Any], place: int | str, on_gpu: bool) -> Argument:
    if isinstance(value, torch.Tensor):
        return _tensor_as_data(value, func, args, place, on_gpu)
    if isinstance(value, list | tuple):
        return tuple(_as_data(item, func, args, place, on_gpu) for item in value)
    if isinstance(value, torch.dtype):
        return DtypeArg(str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return "device" if value.type == "cuda" or not on_gpu else "cpu"
    if isinstance(value, torch.memory_format | torch.layout):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Generator):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise NotDataError(f"{func}: an argument of type {type(value).__name__}")


def _tensor_as_data(tensor: torch.Tensor, func: Any, args: Sequence[Any], place: int | str, on_gpu: bool) -> TensorArg:
    if tensor.layout != torch.strided:
        raise NotDataError(f"{func}: a {tensor.layout} tensor")
    shape = tuple(tensor.shape)
    strides = tuple(tensor.stride())
    plain = tensor.is_contiguous() or strides == contiguous(shape)
    where = "device" if tensor.is_cuda or not on_gpu else "pinned" if tensor.is_pinned() else "pageable"
    kind = op_kind(func._schema.name)
    values, high = "normal", 0
    if tensor.dtype == torch.bool:
        values = "mask"
    elif not tensor.is_floating_point() and not tensor.is_complex():
        values, high = _integers(tensor, kind, args, place)
    elif kind.probabilities:
        values = "unit"
    return TensorArg(shape, str(tensor.dtype).removeprefix("torch."), None if plain else strides, high, where, values)


def _integers(tensor: torch.Tensor, op: OpKind, args: Sequence[Any], place: int | str) -> tuple[str, int]:
    """Which integers an op takes at a place: what it indexes where that is known, else those that were there."""
    match op.integers(place):
        case Integers.OFFSETS:
            return "offsets", int(args[1].numel())
        case Integers.ROWS:
            return "normal", int(args[0].shape[0])
        case Integers.COUNTED:
            return "normal", int(args[2])
        case Integers.ALONG:
            return "normal", int(args[0].shape[args[1]]) if args[0].dim() else 1
        case Integers.CLASSES if tensor.dim() > 0:
            classes = args[1] if op.plain.endswith("_backward") else args[0]
            return "normal", int(classes.shape[-1 if classes.dim() < 3 else 1])
    if "index" in op.plain and tensor.dim() == 1:
        triangle = _below_diagonal(tensor)
        if triangle is not None:
            return triangle
    try:
        return "normal", max(1, int(tensor.max()) + 1) if tensor.numel() else 1
    except (RuntimeError, NotImplementedError):
        # Unsigned words of a random generator's state.
        return "normal", 2


def _below_diagonal(tensor: torch.Tensor) -> tuple[str, int] | None:
    """Whether these are the rows or the columns below the diagonal of a square, as DLRM takes its interactions."""
    side = (1 + math.isqrt(1 + 8 * tensor.numel())) // 2
    if side < 3 or side * (side - 1) != 2 * tensor.numel():
        return None
    row, column = torch.tril_indices(side, side, -1, dtype=tensor.dtype, device=tensor.device)
    if torch.equal(tensor, row):
        return "lower_row", side
    return ("lower_column", side) if torch.equal(tensor, column) else None
