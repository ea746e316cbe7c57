"""What copies on the device launch: of one tensor, of a list, with or without a new dtype."""

from __future__ import annotations

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.launches import Launch, Operand, fresh, transfer
from steptime._models.kernels.launches.arguments import base_name, dtype_keyword, keyword, tensor, tensor_list, value
from steptime._models.kernels.launches.chunks import over_lists
from steptime._models.kernels.launches.copies import copies, empty_like
from steptime.errors import InputError


def launches(call: Call) -> list[Launch]:
    """The kernels or copies of one op of the family."""
    name = base_name(call.op)
    if name == "copy_":
        target, source = tensor(call, 0), tensor(call, 1)
        return copies(target, source) if target.device == source.device == "device" else transfer.launches(call)
    if name == "clone":
        x = tensor(call, 0)
        return copies(_target(call, x), x)
    if name == "_to_copy":
        x = tensor(call, 0)
        given = value(call, 0)
        # From the host, or to it, the bytes cross first; a conversion is the host's or comes on top.
        if isinstance(given, TensorArg) and keyword(call, "device", x.device) != x.device:
            arrived = TensorArg(x.shape, x.dtype, device="device" if x.device != "device" else "pageable")
            return transfer.launches(Call("aten::copy_.default", (arrived, given)))
        return copies(_target(call, x), x)
    if name == "_foreach_copy_":
        targets, sources = tensor_list(call, 0), tensor_list(call, 1)
        return over_lists(targets, depth=2, reads=sources[:1], writes=[fresh((), targets[0].dtype)])
    raise InputError(f"{call.op}: no rule says what it launches")


def _target(call: Call, x: Operand) -> Operand:
    dtype = dtype_keyword(call, x.dtype)
    if keyword(call, "memory_format") == "contiguous_format":
        return fresh(x.shape, dtype)
    return empty_like(x, dtype)
