"""Ops in loops: what the CPU spends on one call of an op, through the dispatcher and through Python's own binding."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg
from steptime_lab.measure.host.bench import Probe
from steptime_lab.measure.host.issued import Issued
from steptime_lab.measure.host.representative import op_probe
from steptime_lab.measure.op_calls import draw, named, operator, torch_dtype

_NAME = re.compile(r"aten::([A-Za-z_]\w*)(?:\.(\w+))?")


def binding_of(name: str) -> Callable[..., Any] | None:
    """The Python function that people call for this op; None where they cannot."""
    match = _NAME.fullmatch(name)
    # Indexing has no function of its own; what is called `index` is another thing.
    if not match or match[1] == "index" or match[2] in ("out", "grad_input"):
        return None
    inplace = match[1].endswith("_") and not match[1].startswith("_")
    places = (torch.Tensor,) if inplace else (torch, torch._C._nn, torch.Tensor)
    for place in places:
        result = getattr(place, match[1], None)
        if callable(result):
            function: Callable[..., Any] = result
            return function
    return None


def arguments(call: Call, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments."""
    return (
        [_value(arg, device) for arg in call.args],
        {name: named(name, arg, device) if isinstance(arg, str) else _value(arg, device) for name, arg in call.kwargs},
    )


def _value(argument: Argument, device: torch.device) -> Any:
    if isinstance(argument, TensorArg):
        return tensor(argument, device)
    if isinstance(argument, DtypeArg):
        return torch_dtype(argument.name)
    if isinstance(argument, tuple):
        return [_value(item, device) for item in argument]
    return argument


def tensor(given: TensorArg, device: torch.device) -> torch.Tensor:
    """A tensor of that shape, dtype and layout. Integers are 0: valid as an index, an offset and a class of anything."""
    dtype = torch_dtype(given.dtype)
    place = device if given.device == "device" else torch.device("cpu")
    storage = torch.zeros(max(1, given.extent), dtype=dtype, device=place)
    if given.device == "pinned" and device.type == "cuda":
        storage = storage.pin_memory()
    if dtype is torch.bool:
        storage.bernoulli_(0.5)
    elif dtype.is_floating_point:
        draw(storage, given.values)
    if given.strides is None:
        return storage[: given.numel].view(given.shape)
    return storage.as_strided(given.shape, given.strides)


Lookup = Callable[[str], Callable[..., Any] | None]

# Sizes of their arguments depend on each other in ways that shrinking breaks and kernels do not check.
AT_RECORDED_SIZES = ("attention", "convolution", "pool", "embedding_bag", "upsample", "batch_norm", "group_norm", "ctc", "rnn")


def op_probes(issued: Iterable[Issued]) -> Iterator[Probe]:
    """`op`: the call through `torch.ops.aten`, at small sizes where it runs at them."""
    return _probes("op", issued, operator)


def python_probes(issued: Iterable[Issued]) -> Iterator[Probe]:
    """`op_python`: the same through the function that people call, where there is one."""
    return _probes("op_python", (item for item in issued if binding_of(item.small.op) is not None), binding_of)


def _probes(kind: str, issued: Iterable[Issued], lookup: Lookup) -> Iterator[Probe]:
    for item in issued:
        at_recorded = _probe(kind, item.recorded, item.source, lookup)
        if item.small == item.recorded or any(word in item.small.op for word in AT_RECORDED_SIZES):
            yield at_recorded
        else:
            yield _probe(kind, item.small, item.source, lookup, otherwise=at_recorded)


def _probe(kind: str, call: Call, source: str, lookup: Lookup, otherwise: Probe | None = None) -> Probe:
    return op_probe(kind, call, lookup, partial(arguments, call), source=source, otherwise=otherwise)
