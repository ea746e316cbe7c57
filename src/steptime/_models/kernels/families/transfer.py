"""Copies between host and device, from and to pinned and pageable memory."""

from __future__ import annotations

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import Rng, chance, log_int, mixture, pick
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches.transfer import launches

_DTYPES = ("float32", "int64", "bfloat16", "uint8")
# Most batches are below a few MiB; images in single precision reach some 64.
_MOST_BYTES = {"pinned": 64 << 20, "pageable": 16 << 20}


def _tensor(rng: Rng, place: str) -> TensorArg:
    dtype = pick(rng, _DTYPES)
    element = {"float32": 4, "int64": 8, "bfloat16": 2, "uint8": 1}[dtype]
    return TensorArg((log_int(rng, 1, _MOST_BYTES[place] // element),), dtype, high=0 if "float" in dtype else 200)


def _to_device(rng: Rng) -> Call:
    place = pick(rng, ("pinned", "pageable"), (0.65, 0.35))
    there = _tensor(rng, place)
    here = TensorArg(there.shape, there.dtype, high=there.high, device=place)
    return Call("aten::copy_.default", (there, here, place == "pinned" and chance(rng, 0.8)), written=())


def _to_host(rng: Rng) -> Call:
    place = pick(rng, ("pinned", "pageable"), (0.5, 0.5))
    there = _tensor(rng, place)
    here = TensorArg(there.shape, there.dtype, high=there.high, device=place)
    return Call("aten::copy_.default", (here, there, place == "pinned" and chance(rng, 0.8)), written=(1,))


def _number(rng: Rng) -> Call:
    """`Tensor.item()`: one number, and the host waits for it."""
    shape = pick(rng, ((), (1,)))
    return Call("aten::_local_scalar_dense.default", (TensorArg(shape, pick(rng, _DTYPES), high=200),))


# On the device `copy_` is the family of copies' op; which family a call is in, the places of its tensors decide.
FAMILY = Family(
    name="transfer",
    ops=("aten::_local_scalar_dense.default",),
    sweep=mixture((3, _to_device), (2, _to_host), (0.1, _number)),
    weight=2.5,
    rules=launches,
)
