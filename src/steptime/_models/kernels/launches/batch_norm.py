"""Launches of batch norms: cuDNN's, a block per channel or all channels side by side, and ATen's own with its grids."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steptime._models.kernels.call import contiguous
from steptime._models.kernels.launches import Gpu, GpuCall, Launch, Operand, Rules, fresh, hot
from steptime._models.kernels.launches.arguments import tensor
from steptime._models.kernels.launches.copies import memset
from steptime._models.kernels.launches.pointwise import cleared
from steptime.errors import InputError

# Values of a channel that cuDNN keeps on chip, so that it reads them once. Seen in the measured rows: forward between 25,088
# and 31,974, backward between 13,475 and 15,484; pairs of halves, for an even plane, take twice as many (forward at least
# 37,632, backward between 24,500 and 52,528).
_KEPT_FORWARD, _KEPT_BACKWARD = 28_672, 14_336
# ATen's batch norm: threads of a block, of a warp; rows that a thread of a channels-last kernel takes at once, most blocks
# along rows and the fewest that are worth a second stage.
_THREADS, _WARP, _ROWS_AT_ONCE, _MOST_STAGED, _LEAST_STAGED = 512, 32, 16, 128, 8
# ATen's normalising kernel: threads of a block at least, blocks at most.
_NORMALISING_THREADS, _NORMALISING_BLOCKS = 64, 262_144


@dataclass(frozen=True, slots=True)
class _Images:
    """What a batch norm works on: samples, channels, elements of a plane, and whether channels lie side by side."""

    samples: int
    channels: int
    plane: int
    last: bool
    gpu: Gpu

    @property
    def rows(self) -> int:
        """Elements of a channel."""
        return self.samples * self.plane

    @property
    def facts(self) -> dict[str, float]:
        """Sizes and alignment."""
        return {
            "rows": self.rows,
            "columns": self.channels,
            "samples": self.samples,
            "plane": self.plane,
            "waves": self.channels / self.gpu.sms,
            "aligned_4": self.plane % 4 == 0,
            "aligned_8": self.plane % 8 == 0,
            "odd_channels": self.channels % 4 != 0,
            "last": self.last,
        }


def _images(call: GpuCall, x: Operand) -> _Images:
    if len(x.shape) < 2 or x.numel == 0:
        raise InputError(f"{call.op}: input {x.shape} has no samples and channels")
    last = x.strides[1] == 1 and x.strides != contiguous(x.shape)
    return _Images(x.shape[0], x.shape[1], math.prod(x.shape[2:]), last, call.gpu)


def _by_channel(kernel: str, reads: tuple[Operand, ...], result: Operand, images: _Images, path: str = "") -> Launch:
    """A block per channel."""
    channels = float(images.channels)
    grids = (
        (channels, float(images.rows)),
        (channels, float(images.samples)),
        (channels, float(images.samples * math.ceil(images.plane / _THREADS))),
        (channels, 1.0),
    )
    return Launch(kernel, reads[0].numel, reads, (result,), images.facts, grids, path, reads[0].dtype)


def _once(kernel: str, x: Operand, images: _Images, kept: int) -> str:
    """The name of the kernel that reads once, if a channel fits; else empty."""
    pairs = x.dtype == "float16" and images.plane % 2 == 0
    if images.rows > (2 * kept if pairs else kept):
        return ""
    return kernel + "_1C11_singleread" + ("_spec" if pairs else "")


def _cudnn(call: GpuCall) -> list[Launch]:
    x = tensor(call, 0)
    images, result = _images(call, x), fresh(x.shape, x.dtype)
    if images.last:
        grids = (
            (images.channels / _WARP, images.rows / 128),
            (images.channels / 64, float(images.rows)),
            (images.rows / 16 * max(1.0, images.channels / 128), 1.0),
        )
        kernel = Launch("batchnorm_fwtr_nhwc_semiPersist", x.numel, (x,), (result,), images.facts, grids, "", x.dtype)
        return [memset(4 * images.channels), kernel]
    name = _once("bn_fw_tr", x, images, _KEPT_FORWARD) or "bn_fw_tr_1C11_kernel_NCHW"
    return [_by_channel(name, (x,), result, images)]


def _cudnn_backward(call: GpuCall) -> list[Launch]:
    x, gradient = tensor(call, 0), tensor(call, 1)
    images = _images(call, x)
    name = _once("bn_bw", x, images, _KEPT_BACKWARD) or "bn_bw_1C11_kernel_new"
    return [_by_channel(name, (x, gradient), fresh(x.shape, x.dtype), images)]


@dataclass(frozen=True, slots=True)
class _Staged:
    """Grid of a channels-last kernel: blocks across channels and along rows, threads of a block along rows."""

    across: int
    along: int
    height: int


def _power(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


def _staged(images: _Images) -> _Staged:
    """ATen's choice for sums over rows; several blocks along rows meet at semaphores, which are zeroed first."""
    width = min(_power(images.channels), _WARP)
    height = min(_power(math.ceil(images.rows / _ROWS_AT_ONCE)), _THREADS // width)
    if width * height != _THREADS:
        width = min(_power(images.channels), _THREADS // height)
    along = min(math.ceil(images.rows / (height * _ROWS_AT_ONCE)), _MOST_STAGED)
    return _Staged(math.ceil(images.channels / width), along if along >= _LEAST_STAGED else 1, height)


def _last(kernel: str, reads: tuple[Operand, ...], writes: tuple[Operand, ...], images: _Images, tag: str) -> Launch:
    """A kernel over rows of channels."""
    staged = _staged(images)
    blocks = float(staged.across * staged.along)
    facts = images.facts | {"blocks": blocks, "along": staged.along, "height": staged.height}
    grids = (
        (blocks, images.rows / (staged.height * staged.along)),
        (blocks, 1.0),
        (images.rows / 16 * max(1.0, images.channels / 128), 1.0),
        (images.channels / _WARP, float(staged.along)),
    )
    path = "staged" if staged.along > 1 else ""
    return Launch(kernel, reads[0].numel, reads, writes, facts, grids, path, tag)


def _semaphores(images: _Images) -> list[Launch]:
    staged = _staged(images)
    return [cleared(fresh((staged.across * staged.along,), "int32"))] if staged.along > 1 else []


def _width(elements: int) -> int:
    """Threads along a plane: the least of ATen's sizes that covers it."""
    return next((size for size in (32, 64, 128, 256) if elements <= size), _THREADS)


def _own(kernel: str, reads: tuple[Operand, ...], writes: tuple[Operand, ...], images: _Images, tag: str) -> Launch:
    """A block per channel: threads along the plane, and along samples where the plane leaves some."""
    width = _width(images.plane)
    serial = math.ceil(images.samples / (_THREADS // width)) * math.ceil(images.plane / width)
    channels = float(images.channels)
    grids = (
        (channels, float(images.rows)),
        (channels, float(images.samples)),
        (channels, float(serial)),
        (channels, 1.0),
    )
    return Launch(kernel, reads[0].numel, reads, writes, images.facts, grids, "", tag)


def _normalising(x: Operand, result: Operand, images: _Images, tag: str) -> Launch:
    width = max(_width(images.plane // 4), min(_width(images.plane), _NORMALISING_THREADS))
    height = max(1, _NORMALISING_THREADS // width)
    along = max(1, min(_NORMALISING_BLOCKS // images.channels, math.ceil(images.samples / height)))
    serial = math.ceil(images.samples / (height * along)) * math.ceil(images.plane / width)
    blocks = float(images.channels * along)
    grids = (
        # Blocks are of 64 to 512 threads: so many SMs they fill.
        (blocks * width * height / images.gpu.threads_per_sm, float(serial)),
        (blocks, float(serial)),
        (float(images.channels), float(images.rows)),
        (float(images.channels * images.samples), 1.0),
    )
    return Launch("batch_norm_transform_input_kernel", x.numel, (x,), (result,), images.facts, grids, "", tag)


def _native(call: GpuCall) -> list[Launch]:
    x = tensor(call, 0)
    images, result, again = _images(call, x), fresh(x.shape, x.dtype), hot(x.shape, x.dtype, x.nbytes)
    tag = x.dtype + tensor(call, 1).dtype
    running = Launch(
        "unrolled_elementwise_kernel_for_multi_outputs",
        images.channels,
        facts={"columns": images.channels},
        grids=((images.channels / 1024, 1.0),),
        tag=tensor(call, 3).dtype,
    )
    if images.last or images.plane == 1:
        sums = _last("batch_norm_collect_statistics_channels_last_kernel", (x,), (), images, tag)
        normalised = _last("batch_norm_transform_input_channels_last_kernel", (again,), (result,), images, tag)
        return [*_semaphores(images), sums, running, normalised]
    sums = _own("batch_norm_collect_statistics_kernel", (x,), (), images, tag)
    return [sums, running, _normalising(again, result, images, tag)]


def _native_backward(call: GpuCall) -> list[Launch]:
    gradient, x = tensor(call, 0), tensor(call, 1)
    images, result = _images(call, x), fresh(x.shape, x.dtype)
    tag = x.dtype + tensor(call, 2).dtype
    if images.last or images.plane == 1:
        again = tuple(hot(item.shape, item.dtype, 2 * x.nbytes) for item in (gradient, x))
        sums = _last("batch_norm_backward_reduce_channels_last_kernel", (gradient, x), (), images, tag)
        applied = _last("batch_norm_backward_elemt_channels_last_kernel", again, (result,), images, tag)
        return [*_semaphores(images), sums, applied]
    return [_own("batch_norm_backward_kernel", (gradient, x), (result,), images, tag)]


BATCH_NORM: dict[str, Rules] = {
    "aten::cudnn_batch_norm.default": _cudnn,
    "aten::cudnn_batch_norm_backward.default": _cudnn_backward,
    "aten::native_batch_norm.default": _native,
    "aten::native_batch_norm_backward.default": _native_backward,
}
