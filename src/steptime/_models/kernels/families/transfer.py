"""Copies between host and device, from and to pinned and pageable memory."""

from __future__ import annotations

from dataclasses import replace

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import Rng, chance, log_int, mixture, pick
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import HOT, Launch, Operand, fresh
from steptime._models.kernels.launches.arguments import base_name, dtype_keyword, flag, keyword, tensor
from steptime._models.kernels.launches.copies import copies
from steptime._models.kernels.launches.names import MEMCPY
from steptime.errors import InputError

_DTYPES = ("float32", "int64", "bfloat16", "uint8")
# Most batches are below a few MiB; images in single precision reach some 64.
_MOST_BYTES = {"pinned": 64 << 20, "pageable": 16 << 20}


def _draw_tensor(rng: Rng, place: str) -> TensorArg:
    dtype = pick(rng, _DTYPES)
    element = {"float32": 4, "int64": 8, "bfloat16": 2, "uint8": 1}[dtype]
    return TensorArg((log_int(rng, 1, _MOST_BYTES[place] // element),), dtype, high=0 if "float" in dtype else 200)


def _draw_to_device(rng: Rng) -> Call:
    place = pick(rng, ("pinned", "pageable"), (0.65, 0.35))
    there = _draw_tensor(rng, place)
    here = TensorArg(there.shape, there.dtype, high=there.high, device=place)
    return Call("aten::copy_.default", (there, here, place == "pinned" and chance(rng, 0.8)), written=())


def _draw_to_host(rng: Rng) -> Call:
    place = pick(rng, ("pinned", "pageable"), (0.5, 0.5))
    there = _draw_tensor(rng, place)
    here = TensorArg(there.shape, there.dtype, high=there.high, device=place)
    return Call("aten::copy_.default", (here, there, place == "pinned" and chance(rng, 0.8)), written=(1,))


def _draw_number(rng: Rng) -> Call:
    """`Tensor.item()`: one number, and the host waits for it."""
    shape = pick(rng, ((), (1,)))
    return Call("aten::_local_scalar_dense.default", (TensorArg(shape, pick(rng, _DTYPES), high=200),))


# Launches of transfers: one copy by a copy engine, whose path is the direction and the kind of host memory.
# A change of dtype happens on the side that the bytes leave (ATen): on the device it is a kernel before the copy.


def launches(call: Call) -> list[Launch]:
    """What a copy between host and device, or reading one number, launches."""
    name = base_name(call.op)
    if name == "_local_scalar_dense":
        return [_number(tensor(call, 0))]
    if name == "_to_copy":
        source = tensor(call, 0)
        place = str(keyword(call, "device", source.device))
        target = replace(fresh(source.shape, dtype_keyword(call, source.dtype)), device=place)
        return _between(call, target, source, bool(keyword(call, "non_blocking", False)))
    if name != "copy_":
        raise InputError(f"{call.op}: not an op of the family transfer")
    return _between(call, tensor(call, 0), tensor(call, 1), flag(call, 2))


def _number(number: Operand) -> Launch:
    facts = {"host_bytes": float(number.item_bytes), "to_host": 1.0}
    return Launch(MEMCPY, number.item_bytes, (number,), (), facts, ((1.0, 1.0),), "item")


def _between(call: Call, target: Operand, source: Operand, asynchronous: bool) -> list[Launch]:
    if (target.device == "device") == (source.device == "device"):
        raise InputError(f"{call.op}: from {source.device} to {target.device} is no transfer between host and device")
    to_host = target.device != "device"
    memory = target.device if to_host else source.device
    result = []
    if source.dtype != target.dtype:
        changed = fresh(source.shape, target.dtype)
        result = copies(changed, source) if to_host else []
        source = replace(changed, device=source.device, origin=HOT if to_host else source.origin)
    nbytes = source.nbytes
    facts = {
        "host_bytes": float(nbytes),
        "pageable_bytes": float(nbytes) if memory == "pageable" else 0.0,
        "to_host": float(to_host),
        "asynchronous": float(asynchronous),
    }
    path = f"{'to_host' if to_host else 'to_device'}-{memory}"
    return [*result, Launch(MEMCPY, nbytes, (source,), (target,), facts, ((nbytes / 1024, 1.0),), path)]


# On the device `copy_` is the family of copies' op; which family a call is in, the places of its tensors decide.
FAMILY = Family(
    name="transfer",
    ops=("aten::_local_scalar_dense.default",),
    sweep=mixture((3, _draw_to_device), (2, _draw_to_host), (0.1, _draw_number)),
    weight=2.5,
    rules=launches,
)
