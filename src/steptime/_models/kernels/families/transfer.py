"""Copies between host and device, from and to pinned and pageable memory."""

from __future__ import annotations

from dataclasses import replace

from steptime._models.kernels.call import TensorArg
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import HOT, MEMCPY, GpuCall, Launch, fresh
from steptime._models.kernels.launches.iterator import copies
from steptime._models.kernels.sweep import Draw, Drawn, KernelSweep
from steptime._units import dtype_bytes
from steptime.errors import InputError

_DTYPES = ("float32", "int64", "bfloat16", "uint8")
# Most batches are below a few MiB; images in single precision reach some 64.
_MOST_BYTES = {"pinned": 64 << 20, "pageable": 16 << 20}


def _draw_tensors(draw: Draw) -> Drawn:
    """A tensor on the device, one on the host, and whether the host goes on meanwhile."""
    memory = draw.pick(("pinned", "pageable"), (0.5, 0.5) if draw.form().startswith("copy_(host") else (0.65, 0.35))
    dtype = draw.pick(_DTYPES)
    count = draw.log_int(1, _MOST_BYTES[memory] // dtype_bytes(dtype))
    device = TensorArg((count,), dtype, high=0 if "float" in dtype else 200)
    asynchronous = memory == "pinned" and draw.chance(0.8)
    return {"device": device, "host": replace(device, device=memory), "asynchronous": asynchronous}


# Launches of transfers: one copy by a copy engine, whose path is the direction and the kind of host memory.
# A change of dtype happens on the side that the bytes leave (ATen): on the device it is a kernel before the copy.


def _number(call: GpuCall) -> list[Launch]:
    number = call.tensor(0)
    facts = {"host_bytes": number.item_bytes, "to_host": 1.0}
    return [Launch(MEMCPY, number.item_bytes, (number,), (), facts, ((1.0, 1.0),), "item")]


def between(call: GpuCall) -> list[Launch]:
    """What `copy_` between host and device launches."""
    target, source = call.tensor(0), call.tensor(1)
    if (target.device == "device") == (source.device == "device"):
        raise InputError(f"{call.op}: from {source.device} to {target.device} is no transfer between host and device")
    to_host = target.device != "device"
    memory = target.device if to_host else source.device
    before: list[Launch] = []
    if source.dtype != target.dtype:
        changed = fresh(source.shape, target.dtype)
        before = copies(changed, source) if to_host else []
        source = replace(changed, device=source.device, origin=HOT if to_host else source.origin)
    nbytes = source.nbytes
    facts = {
        "host_bytes": nbytes,
        "pageable_bytes": nbytes if memory == "pageable" else 0.0,
        "to_host": to_host,
        "asynchronous": call.flag(2),
    }
    path = f"{'to_host' if to_host else 'to_device'}-{memory}"
    return [*before, Launch(MEMCPY, nbytes, (source,), (target,), facts, ((nbytes / 1024, 1.0),), path)]


FAMILY = Family(
    name="transfer",
    sweep=KernelSweep(
        (3, _draw_tensors, "copy_(device, host, asynchronous)"),
        (2, _draw_tensors, "copy_(host, *device, asynchronous)"),
        # `Tensor.item()`: one number, and the host waits for it.
        (
            *(0.1, lambda draw: {"x": TensorArg(draw.pick(((), (1,))), draw.pick(_DTYPES), high=200)}),
            "_local_scalar_dense(*x)",
        ),
    ),
    weight=2.5,
    # On the device `copy_` is the family of copies' op; which family a call is in, the places of its tensors decide.
    borrows=("aten::copy_.default",),
    rules={"copy_": between, "_local_scalar_dense": _number},
)
