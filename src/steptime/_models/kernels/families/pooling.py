"""Pooling of images, forward and backward: maximum, average, adaptive average."""

from __future__ import annotations

from dataclasses import dataclass

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import USUAL_BYTES, Rng, Shape, chance, channels_last, floating, log_int, mixture, pick, size
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches.pooling import launches

_MOST_ELEMENTS = USUAL_BYTES // 4
# (window, stride, padding): ResNet's, Inception's two, and halving.
_WINDOWS = ((3, 2, 1), (3, 2, 0), (3, 1, 1), (2, 2, 0), (5, 3, 0))


@dataclass(frozen=True)
class _Images:
    shape: Shape
    dtype: str
    last: bool

    def tensor(self, *image: int) -> TensorArg:
        """The images, or those of another size."""
        shape = (*self.shape[:2], *image) if image else self.shape
        return channels_last(shape, self.dtype) if self.last else TensorArg(shape, self.dtype)


def _images(rng: Rng) -> _Images:
    side = pick(rng, (7, 8, 14, 17, 28, 35, 56, 71, 112, 147)) if chance(rng, 0.8) else log_int(rng, 7, 160)
    channels = pick(rng, (64, 192, 288, 512, 768, 2048)) if chance(rng, 0.6) else size(rng, 8, 2048)
    batch = log_int(rng, 1, max(1, min(256, _MOST_ELEMENTS // (channels * side * side))))
    return _Images((batch, channels, side, side), floating(rng), chance(rng, 0.35))


def _pooled(side: int, window: int, stride: int, padding: int) -> int:
    return (side + 2 * padding - window) // stride + 1


def _maximum(rng: Rng) -> Call:
    images, (window, stride, padding) = _images(rng), pick(rng, _WINDOWS)
    arguments = (images.tensor(), (window,) * 2, (stride,) * 2, (padding,) * 2, (1, 1), False)
    return Call("aten::max_pool2d_with_indices.default", arguments)


def _maximum_backward(rng: Rng) -> Call:
    images, (window, stride, padding) = _images(rng), pick(rng, _WINDOWS)
    side = images.shape[2]
    result = images.tensor(*(_pooled(side, window, stride, padding),) * 2)
    # The place of each maximum in its plane.
    places = TensorArg(result.shape, "int64", result.strides, high=side * side)
    arguments = (result, images.tensor(), (window,) * 2, (stride,) * 2, (padding,) * 2, (1, 1), False, places)
    return Call("aten::max_pool2d_with_indices_backward.default", arguments)


def _average(rng: Rng) -> Call:
    images, (window, stride, padding) = _images(rng), pick(rng, _WINDOWS)
    arguments = (images.tensor(), (window,) * 2, (stride,) * 2, (padding,) * 2, False, True, None)
    return Call("aten::avg_pool2d.default", arguments)


def _average_backward(rng: Rng) -> Call:
    images, (window, stride, padding) = _images(rng), pick(rng, _WINDOWS)
    result = images.tensor(*(_pooled(images.shape[2], window, stride, padding),) * 2)
    arguments = (result, images.tensor(), (window,) * 2, (stride,) * 2, (padding,) * 2, False, True, None)
    return Call("aten::avg_pool2d_backward.default", arguments)


def _adaptive(rng: Rng) -> Call:
    images, side = _images(rng), pick(rng, (1, 2, 3, 6, 7))
    if chance(rng, 0.5):
        return Call("aten::_adaptive_avg_pool2d.default", (images.tensor(), (side, side)))
    return Call("aten::_adaptive_avg_pool2d_backward.default", (images.tensor(side, side), images.tensor()))


FAMILY = Family(
    name="pooling",
    ops=(
        *("aten::max_pool2d_with_indices.default", "aten::max_pool2d_with_indices_backward.default"),
        *("aten::avg_pool2d.default", "aten::avg_pool2d_backward.default"),
        *("aten::_adaptive_avg_pool2d.default", "aten::_adaptive_avg_pool2d_backward.default"),
    ),
    sweep=mixture((1, _maximum), (1, _maximum_backward), (0.8, _average), (0.8, _average_backward), (1, _adaptive)),
    weight=2.5,
    rules=launches,
)
