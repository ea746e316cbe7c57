"""Copies and fills on the device: the copy engine's for dense bytes, element-wise kernels for anything else."""

from __future__ import annotations

from dataclasses import replace

from steptime._models.kernels.launches import Launch, Operand, fresh
from steptime._models.kernels.launches.iteration import iterate
from steptime._models.kernels.launches.names import MEMCPY, MEMSET, STRIDED, UNROLLED, VECTORIZED
from steptime._models.kernels.launches.pointwise import pointwise

_COPY_BLOCK = 1024  # bytes; only the order of magnitude matters, the weight is fitted


def memcpy(source: Operand, target: Operand) -> Launch:
    """Dense bytes copied within the device. Sizes that are no multiple of 16 bytes take another kernel."""
    nbytes = source.nbytes
    facts = {"aligned_4": nbytes % 4 == 0, "aligned_16": nbytes % 16 == 0, "aligned_64": nbytes % 64 == 0}
    path = "aligned" if facts["aligned_16"] else "unaligned"
    return Launch(MEMCPY, nbytes, (source,), (target,), facts, ((nbytes / _COPY_BLOCK, 1.0),), path)


def memset(nbytes: int) -> Launch:
    """Bytes set to a value by the driver."""
    return Launch(MEMSET, nbytes, (), (fresh((nbytes,), "uint8"),), {}, ((nbytes / _COPY_BLOCK, 1.0),))


def copies(target: Operand, source: Operand) -> list[Launch]:
    """What copies `source` into `target`, both on the device, converting where dtypes differ."""
    if target.dtype == source.dtype:
        walk = iterate(target.shape, (target, source))
        dense = len(walk.sizes) == 1 and all(stride[0] == target.item_bytes for stride in walk.strides)
        if dense or target.numel == 1:
            return [memcpy(source, target)]
        return [pointwise((source,), target, tag=source.dtype, existing=True, kernel=STRIDED)]
    launch = pointwise((source,), target, tag=f"{source.dtype}>{target.dtype}", casts=True, existing=True)
    # ATen narrows float32 to either half in a vectorised kernel; no other conversion has one.
    if launch.kernel == UNROLLED and source.dtype == "float32" and target.dtype in ("bfloat16", "float16"):
        launch = replace(launch, kernel=VECTORIZED, path="narrowing")
    return [launch]


def empty_like(one: Operand, dtype: str = "") -> Operand:
    """The new tensor that ATen makes to hold a copy: of the same strides where those are dense, else row-major."""
    result = fresh(one.shape, dtype or one.dtype)
    return replace(result, strides=one.strides) if one.dense else result
