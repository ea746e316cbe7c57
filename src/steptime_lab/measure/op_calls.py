"""Calls made ready to run many times, on memory that is filled once and lent out as views, each further on than the last.

A view is cheap (about 2 us) and, because the place moves on through gigabytes before it comes round again, cold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg, contiguous
from steptime._units import MIB
from steptime.errors import InputError

# cudaMalloc's own alignment: a kernel chosen for its operands' alignment is the one a fresh tensor would get.
ALIGNMENT_BYTES = 256

# Of the device memory that one rank has; the rest is for outputs, workspaces and index tensors.
_OF_MEMORY = 0.3
_CPU_BYTES = 64 * MIB
# What copies from and to the host need at most; pinning more costs seconds.
_HOST_BYTES = 1024 * MIB

# Shares of the arena by (dtype, values, whether ops write to it); any other region gets the last one.
_SHARES = {
    ("float32", "normal", False): 0.30,
    ("float32", "normal", True): 0.25,
    ("bfloat16", "normal", False): 0.15,
    ("float16", "normal", False): 0.10,
}
_OTHER_SHARE = 0.05

# How many host values are drawn; the rest repeats them, for drawing a gigabyte on one core takes seconds.
_HOST_DRAWN = 1 << 22


# Floats of eight bits multiply alike, however their bits are divided.
_EIGHT_BITS = "float8"


class DoesNotFitError(RuntimeError):
    """A call's tensors are larger than the region they would be views of."""


@dataclass
class Region:
    """Memory of one dtype and one kind of values. `place` is the next free element."""

    flat: torch.Tensor
    size: int
    place: int = 0

    def reserve(self, elements: int) -> None:
        """Goes back to the start where so many elements do not fit behind the place; views taken next do not overlap."""
        if self.place + elements > self.size:
            self.place = 0

    def take(self, shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> torch.Tensor:
        """A view at the place, which moves on by `step` elements."""
        place = self.place
        self.place = place + step
        return self.flat.as_strided(shape, strides, place)


@dataclass
class Arena:
    """Regions are made when they are first needed. `nbytes` is what they may take together, roughly."""

    device: torch.device
    nbytes: int
    seed: int = 0
    host_bytes: int = _HOST_BYTES
    _regions: dict[tuple[str, str, str, bool], Region] = field(default_factory=dict)

    @classmethod
    def on(cls, device: torch.device, share: int, seed: int = 0) -> Arena:
        """As large as suits a device of which this rank has one of `share` parts."""
        if device.type != "cuda":
            return cls(device, _CPU_BYTES, seed, host_bytes=_CPU_BYTES // 4)
        total = torch.cuda.mem_get_info(device)[1]
        return cls(device, int(_OF_MEMORY * total / share), seed, host_bytes=_HOST_BYTES // share)

    def region(self, tensor: TensorArg, *, mutable: bool) -> Region:
        """Where views for this floating tensor come from. What ops write is kept apart from what they only read."""
        mutable = mutable and tensor.device == "device"
        key = (tensor.dtype, tensor.values, tensor.device, mutable)
        if key not in self._regions:
            self._regions[key] = self._make(tensor, mutable)
        return self._regions[key]

    def refill(self) -> None:
        """Draws anew what ops have written over; otherwise it drifts to zeros, infinities and less power."""
        for (_, values, _, mutable), region in self._regions.items():
            if mutable:
                draw(region.flat, values)

    def _make(self, tensor: TensorArg, mutable: bool) -> Region:
        dtype = torch_dtype(tensor.dtype)
        on_device = tensor.device == "device"
        share = _SHARES.get((tensor.dtype, tensor.values, mutable), _OTHER_SHARE)
        size = int(share * self.nbytes if on_device else self.host_bytes) // dtype.itemsize
        if on_device:
            flat = torch.empty(size, dtype=dtype, device=self.device)
            draw(flat, tensor.values)
            return Region(flat, size)
        pinned = tensor.device == "pinned" and self.device.type == "cuda"
        flat = torch.empty(size, dtype=dtype, pin_memory=pinned)
        drawn = min(size, _HOST_DRAWN)
        draw(flat[:drawn], tensor.values)
        for start in range(drawn, size, drawn):
            flat[start : start + drawn] = flat[: min(drawn, size - start)]
        return Region(flat, size)


def draw(flat: torch.Tensor, values: str) -> None:
    """Fills a floating tensor with random values of a kind."""
    if values == "zeros":
        flat.zero_()
        return
    if values == "unit":
        flat.uniform_(0.0, 1.0)
        return
    if flat.dtype.itemsize == 1:
        # No kernel draws these.
        flat.copy_(torch.empty(flat.shape, dtype=torch.bfloat16, device=flat.device).normal_())
        return
    flat.normal_()
    if values == "half_zeros":
        # As after a rectifier.
        flat.clamp_(min=0.0)
    if values == "positive":
        # Away from 0: what is divided by a variance or put under a root stays finite.
        flat.abs_().add_(0.01)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name."""
    result = torch.float8_e4m3fn if name == _EIGHT_BITS else getattr(torch, name, None)
    if not isinstance(result, torch.dtype):
        raise TypeError(f"no dtype is called {name!r}")
    return result


def step_of(tensor: TensorArg) -> int:
    """Elements from one view to the next, aligned."""
    granule = max(1, ALIGNMENT_BYTES // torch_dtype(tensor.dtype).itemsize)
    return -(-tensor.extent // granule) * granule


# Ops that reach beyond their tensors: into files, or into the memory that they are views of.
_REFUSED = frozenset({"from_file", "resize_", "resize_as_", "_resize_output_", "set_"})

# Indices of the elements below a square's diagonal, as the interaction of a DLRM takes them.
_BELOW_DIAGONAL = ("lower_row", "lower_column")

# Values of a tensor that only the forward pass can fill.
RESERVE = "reserve"

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
        self._kept = [i for i, value in enumerate(call.args) if isinstance(value, TensorArg) and value.values == RESERVE]
        self._kwargs = {
            name: named(name, value, arena.device) if isinstance(value, str) else self._slot(value, mutable.get(name, False))
            for name, value in call.kwargs
        }
        self._moving = [(i, slot) for i, slot in enumerate(self._args) if isinstance(slot, _View | _List)]
        self._moving_kwargs = [(name, slot) for name, slot in self._kwargs.items() if isinstance(slot, _View | _List)]
        if any(needed > self._regions[key].size for key, needed in self._needs.items()):
            raise DoesNotFitError("does not fit the arena")
        self._written = [index for index in call.written if index < len(call.args) and _on_device(call.args[index])]
        for index in self._kept:
            self._args[index] = _reserve_of(self.op, self.fresh()[0])

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

    def _slot(self, value: Argument, mutable: bool) -> Any:
        if isinstance(value, DtypeArg):
            return torch_dtype(value.name)
        if isinstance(value, tuple):
            slots = [self._slot(item, mutable) for item in value]
            return _List(slots) if any(isinstance(slot, _View) for slot in slots) else slots
        if not isinstance(value, TensorArg) or value.values == RESERVE:
            return value
        if not torch_dtype(value.dtype).is_floating_point:
            return fixed(value, self._arena.device)
        region = self._arena.region(value, mutable=mutable)
        self._regions[id(region)] = region
        self._needs[id(region)] += step_of(value)
        return _View(value, region)


def _reserve_of(op: Any, args: list[Any]) -> torch.Tensor:
    """What the forward pass of a recurrent layer keeps for the backward pass with these arguments."""
    if op is not torch.ops.aten._cudnn_rnn_backward.default:
        raise InputError(f"{op}: no forward pass of it is known that would keep anything")
    kept: torch.Tensor = torch.ops.aten._cudnn_rnn.default(*args[:6], *args[10:20])[3]
    return kept


def named(name: str, value: str, device: torch.device) -> Any:
    """What a word means as the argument of that name: a device, a layout or a memory format, else the word."""
    if name == "device":
        return device if value == "device" else torch.device("cpu")
    return getattr(torch, value) if name in ("memory_format", "layout") else value


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
    if tensor.values == "ends":
        return (torch.arange(1, count + 1, dtype=torch.int64, device=device) * (tensor.high // count)).to(dtype)
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
