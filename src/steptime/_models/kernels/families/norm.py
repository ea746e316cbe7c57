"""Layer, batch, group and RMS norm, forward and backward, as CUDA eager mode dispatches them.

Batch norm goes to cuDNN for images in single precision and float16, to PyTorch's own kernels for bfloat16 and for rows.
"""

from __future__ import annotations

import math

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import (
    HALVES,
    SEQUENCES,
    USUAL_BYTES,
    Rng,
    Shape,
    chance,
    channels_last,
    floating,
    log_int,
    mixture,
    pick,
    size,
    tokens,
    width,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches.norm import launches

_MOST_ELEMENTS = USUAL_BYTES // 4
_BATCH_NORM_EPS = 1e-5
_MOMENTUM = 0.1


def _rows(rng: Rng) -> tuple[Shape, int]:
    """The axes in front and the features of an activation that is normalised over its features."""
    features = width(rng, 16, 16384)
    front: Shape = (log_int(rng, 1, 64), pick(rng, SEQUENCES)) if chance(rng, 0.6) else (tokens(rng),)
    return (front, features) if math.prod(front) * features <= _MOST_ELEMENTS else ((log_int(rng, 1, 1024),), features)


def _layer_norm(rng: Rng) -> Call:
    (front, features), dtype = _rows(rng), floating(rng)
    weight = TensorArg((features,), dtype)
    return Call("aten::native_layer_norm.default", (TensorArg((*front, features), dtype), (features,), weight, weight, 1e-5))


def _layer_norm_backward(rng: Rng) -> Call:
    (front, features), dtype = _rows(rng), floating(rng)
    x, weight = TensorArg((*front, features), dtype), TensorArg((features,), dtype)
    mean, rstd = TensorArg((*front, 1)), TensorArg((*front, 1), values="positive")
    arguments = (x, x, (features,), mean, rstd, weight, weight, (True, True, True))
    return Call("aten::native_layer_norm_backward.default", arguments)


def _rms_norm(rng: Rng) -> Call:
    (front, features), dtype = _rows(rng), floating(rng)
    arguments = (TensorArg((*front, features), dtype), (features,), TensorArg((features,), dtype), 1e-6)
    return Call("aten::_fused_rms_norm.default", arguments)


def _rms_norm_backward(rng: Rng) -> Call:
    (front, features), dtype = _rows(rng), floating(rng)
    x, rstd = TensorArg((*front, features), dtype), TensorArg((*front, 1), values="positive")
    arguments = (x, x, (features,), rstd, TensorArg((features,), dtype), (True, True))
    return Call("aten::_fused_rms_norm_backward.default", arguments)


def _images(rng: Rng) -> Shape:
    """Shapes behind the convolutions of ResNet and Inception, and others."""
    side = pick(rng, (7, 8, 14, 17, 28, 35, 56, 73, 112)) if chance(rng, 0.8) else log_int(rng, 4, 147)
    channels = pick(rng, (64, 128, 192, 256, 320, 384, 512, 768, 1024, 2048)) if chance(rng, 0.6) else size(rng, 8, 2048)
    most = max(1, _MOST_ELEMENTS // (channels * side * side))
    return log_int(rng, 1, min(256, most)), channels, side, side


def _statistics(channels: int) -> tuple[TensorArg, TensorArg]:
    """Running or saved mean and variance."""
    return TensorArg((channels,)), TensorArg((channels,), values="positive")


def _cudnn_batch_norm(rng: Rng) -> Call:
    shape, dtype = _images(rng), pick(rng, ("float32", "float16"), (0.7, 0.3))
    x = channels_last(shape, dtype) if chance(rng, 0.4) else TensorArg(shape, dtype)
    weight = TensorArg((shape[1],))
    arguments = (x, weight, weight, *_statistics(shape[1]), True, _MOMENTUM, _BATCH_NORM_EPS)
    return Call("aten::cudnn_batch_norm.default", arguments)


def _cudnn_batch_norm_backward(rng: Rng) -> Call:
    """N, C, H, W in this order of memory only: cuDNN then reserves nothing that its backward has to be given."""
    shape, dtype = _images(rng), pick(rng, ("float32", "float16"), (0.7, 0.3))
    x, weight, reserved = TensorArg(shape, dtype), TensorArg((shape[1],)), TensorArg((0,), "uint8", high=2)
    arguments = (x, x, weight, *_statistics(shape[1]), *_statistics(shape[1]), _BATCH_NORM_EPS, reserved)
    return Call("aten::cudnn_batch_norm_backward.default", arguments, written=(1,))


def _native_input(rng: Rng) -> tuple[TensorArg, str]:
    """The input and the dtype of weights and statistics: autocast leaves those in single precision."""
    if chance(rng, 0.4):
        dtype = floating(rng)
        features = size(rng, 8, 8192)
        return TensorArg((log_int(rng, 16, min(65536, _MOST_ELEMENTS // features)), features), dtype), "float32"
    shape, dtype = _images(rng), pick(rng, HALVES, (0.8, 0.2))
    x = channels_last(shape, dtype) if chance(rng, 0.5) else TensorArg(shape, dtype)
    return x, "float32" if chance(rng, 0.7) else dtype


def _native_batch_norm(rng: Rng) -> Call:
    x, parameters = _native_input(rng)
    weight = TensorArg((x.shape[1],), parameters)
    running = TensorArg((x.shape[1],), parameters), TensorArg((x.shape[1],), parameters, values="positive")
    return Call("aten::native_batch_norm.default", (x, weight, weight, *running, True, _MOMENTUM, _BATCH_NORM_EPS))


def _native_batch_norm_backward(rng: Rng) -> Call:
    x, parameters = _native_input(rng)
    weight = TensorArg((x.shape[1],), parameters)
    running = TensorArg((x.shape[1],), parameters), TensorArg((x.shape[1],), parameters, values="positive")
    arguments = (x, x, weight, *running, *_statistics(x.shape[1]), True, _BATCH_NORM_EPS, (True, True, True))
    return Call("aten::native_batch_norm_backward.default", arguments)


def _groups(rng: Rng) -> tuple[TensorArg, int]:
    batch, channels, *image = _images(rng)
    groups = pick(rng, [count for count in (1, 8, 16, 32) if channels % count == 0])
    return TensorArg((batch, channels, *image), floating(rng)), groups


def _group_norm(rng: Rng) -> Call:
    x, groups = _groups(rng)
    batch, channels, *image = x.shape
    weight = TensorArg((channels,), x.dtype)
    return Call("aten::native_group_norm.default", (x, weight, weight, batch, channels, math.prod(image), groups, 1e-5))


def _group_norm_backward(rng: Rng) -> Call:
    x, groups = _groups(rng)
    batch, channels, *image = x.shape
    mean, rstd = TensorArg((batch, groups), x.dtype), TensorArg((batch, groups), x.dtype, values="positive")
    sizes = (batch, channels, math.prod(image), groups)
    arguments = (x, x, mean, rstd, TensorArg((channels,), x.dtype), *sizes, (True, True, True))
    return Call("aten::native_group_norm_backward.default", arguments)


FAMILY = Family(
    name="norm",
    ops=(
        *("aten::native_layer_norm.default", "aten::native_layer_norm_backward.default"),
        *("aten::_fused_rms_norm.default", "aten::_fused_rms_norm_backward.default"),
        *("aten::cudnn_batch_norm.default", "aten::cudnn_batch_norm_backward.default"),
        *("aten::native_batch_norm.default", "aten::native_batch_norm_backward.default"),
        *("aten::native_group_norm.default", "aten::native_group_norm_backward.default"),
    ),
    sweep=mixture(
        *((1.5, _layer_norm), (1.5, _layer_norm_backward), (0.8, _rms_norm), (0.8, _rms_norm_backward)),
        *((1, _cudnn_batch_norm), (1, _cudnn_batch_norm_backward), (1, _native_batch_norm), (1, _native_batch_norm_backward)),
        *((0.6, _group_norm), (0.6, _group_norm_backward)),
    ),
    weight=8.0,
    rules=launches,
)
