"""`PreparedCall`: a call made ready to run many times: the op looked up once, fixed arguments built once, views moved on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg, contiguous
from steptime.errors import InputError
from steptime_lab.measure.ops.arena import Arena, DoesNotFitError, Region, draw, step_of, torch_dtype

# Ops that reach beyond their tensors: into files, or into the memory that they are views of.
_REFUSED = frozenset({"from_file", "resize_", "resize_as_", "_resize_output_", "set_"})

# Indices of the elements below a square's diagonal, as the interaction of a DLRM takes them.
_BELOW_DIAGONAL = ("lower_row", "lower_column")

# What an integer tensor holds where the call does not say: small enough for every integer dtype.
_DEFAULT_HIGH = 100


def operator(name: str) -> Any:
    """The overload of that name. Only ops of ATen are looked up."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    if namespace != "aten" or base in _REFUSED or not base.isidentifier():
        raise InputError(f"op {name!r} cannot be measured; only calls of ATen ops can")
    packet = getattr(torch.ops.aten, base, None)
    result = getattr(packet, overload or "default", None)
    if result is None:
        raise InputError(f"this torch ({torch.__version__}) has no op {name!r}")
    return result


class _View:
    """A floating tensor argument: a view of the arena, further on at every run."""

    def __init__(self, tensor: TensorArg, region: Region) -> None:
        self.region = region
        self.shape = tensor.shape
        self.strides = tensor.strides if tensor.strides is not None else contiguous(tensor.shape)
        self.step = step_of(tensor)

    def take(self) -> torch.Tensor:
        return self.region.take(self.shape, self.strides, self.step)


class _List:
    """A list of arguments of which some are views."""

    def __init__(self, slots: list[Any]) -> None:
        self.slots = slots

    def take(self) -> list[Any]:
        return [slot.take() if isinstance(slot, _View) else slot for slot in self.slots]


class PreparedCall:
    """A call ready to run. Raises where the op is unknown or its tensors do not fit the arena."""

    def __init__(self, call: Call, arena: Arena) -> None:
        self.call = call
        self.op: Callable[..., Any] = operator(call.op)
        self._arena = arena
        self._needs: dict[int, int] = defaultdict(int)
        self._regions: dict[int, Region] = {}
        schema = self.op._schema.arguments
        writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema]
        mutable = {argument.name: written for argument, written in zip(schema, writes, strict=True)}
        self._args = [self._slot(value, index < len(writes) and writes[index]) for index, value in enumerate(call.args)]
        self._kwargs = {name: self._keyword(name, value, mutable.get(name, False)) for name, value in call.kwargs}
        self._moving = [(i, slot) for i, slot in enumerate(self._args) if isinstance(slot, _View | _List)]
        self._moving_kwargs = [(name, slot) for name, slot in self._kwargs.items() if isinstance(slot, _View | _List)]
        self._check_fit()
        self._written = [index for index in call.written if index < len(call.args) and _on_device(call.args[index])]

    @property
    def can_be_warm(self) -> bool:
        """Whether there is anything that a producer writes."""
        return bool(self._written)

    def fresh(self) -> tuple[list[Any], dict[str, Any]]:
        """Arguments whose floating tensors are views of memory that was last touched long ago."""
        for key, needed in self._needs.items():
            self._regions[key].reserve(needed)
        args = self._args.copy()
        for index, slot in self._moving:
            args[index] = slot.take()
        if not self._moving_kwargs:
            return args, self._kwargs
        kwargs = self._kwargs.copy()
        for name, slot in self._moving_kwargs:
            kwargs[name] = slot.take()
        return args, kwargs

    def produce(self, args: list[Any]) -> None:
        """Writes what a step would just have written, as the op before this one would: by an element-wise kernel."""
        for index in self._written:
            value = args[index]
            if isinstance(value, torch.Tensor):
                # True: multiplying by it keeps every dtype, bool included.
                _writable(value).mul_(True)
            else:
                torch._foreach_mul_([_writable(item) for item in value if isinstance(item, torch.Tensor)], 1)

    def run(self) -> None:
        """Once, cold; the result is dropped."""
        args, kwargs = self.fresh()
        self.op(*args, **kwargs)

    def _check_fit(self) -> None:
        for key, needed in self._needs.items():
            if needed > self._regions[key].size:
                raise DoesNotFitError("does not fit the arena")

    def _keyword(self, name: str, value: Argument, mutable: bool) -> Any:
        if not isinstance(value, str):
            return self._slot(value, mutable)
        if name == "device":
            return self._arena.device if value == "device" else torch.device("cpu")
        return getattr(torch, value) if name in ("memory_format", "layout") else value

    def _slot(self, value: Argument, mutable: bool) -> Any:
        if isinstance(value, DtypeArg):
            return torch_dtype(value.name)
        if isinstance(value, tuple):
            slots = [self._slot(item, mutable) for item in value]
            return _List(slots) if any(isinstance(slot, _View) for slot in slots) else slots
        if not isinstance(value, TensorArg):
            return value
        if not torch_dtype(value.dtype).is_floating_point:
            return fixed(value, self._arena.device)
        region = self._arena.region(value, mutable=mutable)
        self._regions[id(region)] = region
        self._needs[id(region)] += step_of(value)
        return _View(value, region)


def fixed(tensor: TensorArg, device: torch.device) -> torch.Tensor:
    """An integer, bool or complex tensor, drawn now and kept for all runs of its call."""
    dtype = torch_dtype(tensor.dtype)
    place = device if tensor.device == "device" else torch.device("cpu")
    flat = _drawn(tensor, dtype, max(1, tensor.extent), place)
    if tensor.device == "pinned" and device.type == "cuda":
        flat = flat.pin_memory()
    strides = tensor.strides if tensor.strides is not None else contiguous(tensor.shape)
    return flat.as_strided(tensor.shape, strides)


def _drawn(tensor: TensorArg, dtype: torch.dtype, count: int, device: torch.device) -> torch.Tensor:
    if dtype.is_complex:
        flat = torch.empty(count, dtype=dtype, device=device)
        draw(flat, "normal")
        return flat
    if dtype == torch.bool:
        return torch.rand(count, device=device) < 0.5
    if tensor.values == "offsets":
        # Bags of equal size; `high` is how many indices they share.
        each = max(1, tensor.high // count)
        return torch.arange(0, count * each, each, dtype=torch.int64, device=device).to(dtype)
    if tensor.values == "ordered":
        counted = torch.arange(count, dtype=torch.int64, device=device)
        return (counted % (tensor.high or _DEFAULT_HIGH)).to(dtype)
    if tensor.values in _BELOW_DIAGONAL:
        places = torch.tril_indices(tensor.high, tensor.high, -1, device=device)
        return places[_BELOW_DIAGONAL.index(tensor.values)].to(dtype)
    # Not every integer dtype can be drawn directly.
    return torch.randint(0, tensor.high or _DEFAULT_HIGH, (count,), dtype=torch.int64, device=device).to(dtype)


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or, where elements share memory or leave gaps, the stretch of memory they are in."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor if tensor.numel() in (0, extent) else tensor.as_strided((extent,), (1,))


def _on_device(value: Argument) -> bool:
    if isinstance(value, tuple):
        return any(_on_device(item) for item in value)
    return isinstance(value, TensorArg) and value.device == "device" and value.numel > 0
