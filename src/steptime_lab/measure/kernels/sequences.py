"""Calls of layers over sequences and fields: long and dilated filters, recurrent layers both ways, Fourier transforms."""

from __future__ import annotations

import math

from steptime._models.kernels.call import TensorArg
from steptime._models.kernels.sweep import USUAL_BYTES, USUAL_ELEMENTS, Draw, Drawn, KernelSweep
from steptime._units import dtype_bytes
from steptime_lab.measure.kernels.layers import BACKWARD, FORWARD, layer_of
from steptime_lab.measure.kernels.layouts import sliced

_WIDTHS = (64, 128, 192, 256, 384, 512, 768, 1024)


def _draw_long(draw: Draw) -> Drawn | None:
    """A line with a long filter: position embeddings of sound, modules of conformers, causal filters."""
    channels, tap = draw.pick(_WIDTHS), draw.pick((15, 31, 64, 128))
    groups = draw.pick((1, draw.pick((2, 4, 8, 16, 32)), channels), (0.3, 0.45, 0.25))
    geometry = ((draw.log_int(64, 8192),), (tap,), 1, draw.pick((1, 2), (0.9, 0.1)), groups, channels, channels)
    return _turned(draw, layer_of(draw, geometry, work=1.0 if groups == 1 else 0.1))


def _draw_temporal(draw: Draw) -> Drawn | None:
    """A line with a short filter whose taps lie apart, as temporal convolutions double them from layer to layer."""
    inputs, dilation = draw.pick(_WIDTHS), draw.pick((1, 2, 4, 8, 16, 32, 64, 128))
    outputs = inputs if draw.chance(0.7) else draw.pick(_WIDTHS)
    return layer_of(draw, ((draw.log_int(128, 4096),), (draw.pick((2, 3, 3, 5)),), 1, dilation, 1, inputs, outputs))


def _turned(draw: Draw, drawn: Drawn | None) -> Drawn | None:
    """Features next to each other in memory, as after a transposition."""
    if drawn is None or not draw.chance(0.3):
        return drawn
    x = drawn["x"]
    assert isinstance(x, TensorArg)
    return {**drawn, "x": x.channels_last()}


def _draw_grouped(draw: Draw) -> Drawn | None:
    """Layers of ResNeXt and of its kin: as many outputs as inputs."""
    side, groups = draw.pick((7, 14, 28, 56)), draw.pick((2, 4, 8, 16, 32, 64))
    channels = groups * draw.pick((4, 8, 16, 24, 32, 48, 64))
    return layer_of(
        draw, ((side,) * 2, (draw.pick((3, 3, 3, 5)),) * 2, draw.pick((1, 2), (0.8, 0.2)), 1, groups, channels, channels)
    )


def _draw_wide(draw: Draw) -> Drawn | None:
    """Layers of wide residual networks and of U-Nets: multiples of 160 or 96."""
    side, widths = draw.pick((8, 16, 32, 64)), (96, 160, 192, 288, 320, 480, 640, 960)
    inputs = draw.pick(widths)
    outputs = inputs if draw.chance(0.6) else draw.pick(widths)
    tap = draw.pick((1, 3, 3))
    return layer_of(draw, ((side,) * 2, (tap,) * 2, draw.pick((1, 2), (0.85, 0.15)), 1, 1, inputs, outputs), last=0.3)


def _draw_large(draw: Draw) -> Drawn | None:
    """Layers of VGG: large images of large batches, mostly with channels last."""
    side, inputs, outputs = draw.pick(
        (
            *((224, 3, 64), (224, 64, 64), (112, 64, 128), (112, 128, 128), (56, 128, 256), (56, 256, 256)),
            *((28, 256, 512), (28, 512, 512), (14, 512, 512), (128, 64, 64), (128, 64, 128)),
        )
    )
    tap = draw.pick((1, 3), (0.25, 0.75))
    return layer_of(draw, ((side,) * 2, (tap,) * 2, 1, 1, 1, inputs, outputs), last=0.7, most_bytes=1.9 * USUAL_BYTES)


_LAYERS = ((3, _draw_long), (1.5, _draw_temporal), (2, _draw_grouped), (1.5, _draw_wide), (1, _draw_large))
FILTERS = KernelSweep(
    *((share, drawing, form) for share, drawing in _LAYERS for form in (FORWARD, BACKWARD.format(False))),
)

# Gates of cuDNN's modes: rectified, tanh, LSTM, GRU.
_GATES = (1, 1, 4, 3)
_MOST_STEPS, _MOST_KEPT_BYTES = 1500, 200e6
# Numbers kept for the backward pass, for every gate and hidden feature.
_KEPT = 2


def _draw_recurrent(draw: Draw) -> Drawn | None:
    """Layers of cuDNN whose weights lie in one buffer, as `flatten_parameters` leaves them."""
    mode = draw.pick((0, 1, 2, 3), (0.08, 0.12, 0.45, 0.35))
    layers, ways, gates = draw.pick((1, 2, 3, 4), (0.4, 0.3, 0.2, 0.1)), draw.pick((1, 2), (0.6, 0.4)), _GATES[mode]
    steps, batch = draw.log_int(16, 512), 8 * draw.log_int(1, 64)
    inputs, hidden = draw.pick((64, 128, 256, 512, 1024)), draw.pick((64, 128, 200, 256, 512, 650, 768, 1024, 1500, 2048))
    dtype = draw.floating()
    weights: list[TensorArg] = []
    for layer in range(layers):
        width = inputs if layer == 0 else ways * hidden
        each = ((gates * hidden, width), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,))
        weights += [TensorArg(shape, dtype) for _ in range(ways) for shape in each]
    numbers, rows = sum(weight.numel for weight in weights), steps * batch
    kept = layers * ways * rows * hidden * (gates + _KEPT) * dtype_bytes(dtype)
    if steps * layers * ways > _MOST_STEPS or kept > _MOST_KEPT_BYTES or 2.0 * rows * numbers > 4e11 or numbers > 1 << 25:
        return None
    first = draw.chance(0.5)
    shape = (batch, steps) if first else (steps, batch)
    state = TensorArg((layers * ways, batch, hidden), dtype)
    return {
        "x": TensorArg((*shape, inputs), dtype),
        "out": TensorArg((*shape, ways * hidden), dtype),
        "weights": tuple(weights),
        "buffer": TensorArg((numbers,), dtype),
        "hidden_state": state,
        "cell": state if mode == 2 else None,
        "mode": mode,
        "hidden": hidden,
        "layers": layers,
        "first": first,
        "both": ways == 2,
        "reserve": TensorArg((kept,), "uint8", values="reserve"),
    }


RECURRENT = KernelSweep(
    (
        *(2, _draw_recurrent),
        "_cudnn_rnn(*x, weights, 4, buffer, hidden_state, cell, mode, hidden, 0, layers, first, 0.0, True, both, [], None)",
    ),
    (
        *(3, _draw_recurrent),
        "_cudnn_rnn_backward(x, weights, 4, buffer, hidden_state, cell, out, *out, None, None, mode, hidden, 0, layers, first,"
        " 0.0, True, both, [], None, reserve, [True, False, False, True])",
    ),
)

# Powers of two, products of small primes, and primes.
_LENGTHS = (16, 32, 60, 64, 85, 96, 100, 127, 128, 224, 256, 400, 512, 1000, 1024, 2048, 4096, 6000, 16384)


def _draw_field(draw: Draw) -> Drawn | None:
    """Channels of lines, planes or volumes, transformed along their last axes or along one of them."""
    axes = draw.pick((1, 2, 3), (0.4, 0.45, 0.15))
    places = tuple(draw.pick(_LENGTHS if axes == 1 else _LENGTHS[: 13 if axes == 2 else 7]) for _ in range(axes))
    if draw.chance(0.5):
        places = (places[0],) * axes
    channels = draw.pick((1, 3, 16, 32, 64, 128))
    samples = min(draw.log_int(1, 256), USUAL_ELEMENTS // 4 // (channels * math.prod(places)))
    if samples < 1:
        return None
    front, half = (samples, channels), (*places[:-1], places[-1] // 2 + 1)
    every = tuple(range(2, 2 + axes))
    return {
        "x": TensorArg((*front, *places)),
        "spectrum": TensorArg((*front, *places), "complex64"),
        "half": TensorArg((*front, *half), "complex64"),
        "axes": every if draw.chance(0.8) else (draw.pick(every),),
        "every": every,
        "last": places[-1],
        "scaled": draw.pick((0, 0, 1, 2)),
        "forward": draw.chance(0.5),
    }


def _draw_spectrum(draw: Draw) -> Drawn | None:
    """Spectra, the few modes of them that are kept, and their weights."""
    side, channels, samples = draw.pick((32, 64, 85, 128, 256)), draw.pick((16, 20, 32, 64)), draw.log_int(1, 64)
    modes, half = min(draw.pick((8, 12, 16, 24)), side // 2), side // 2 + 1
    samples = min(samples, USUAL_ELEMENTS // 4 // (channels * side * half))
    if samples < 1:
        return None
    whole = TensorArg((samples, channels, side, half), "complex64")
    kept = TensorArg((samples, channels, modes, modes), "complex64")
    places = modes * modes
    weights = TensorArg((channels, channels, places), "complex64")
    return {
        "whole": whole,
        "kept": kept,
        "part": sliced(kept, whole),
        "fewer": sliced(TensorArg((samples, channels, side, half - 2), "complex64"), whole),
        "left": TensorArg((places, samples, channels), "complex64"),
        "right": weights.permuted(2, 0, 1),
        "turned": TensorArg((places, samples, channels), "complex64").transposed(),
        "real": TensorArg((samples, channels, side, half)),
    }


TRANSFORMS = KernelSweep(
    (
        *(3, _draw_field, "_fft_r2c(*x, axes, scaled, True)", "_fft_c2c(*spectrum, axes, scaled, forward)"),
        "_fft_c2r(*half, every, scaled, last)",
    ),
    (
        *(2, _draw_spectrum, "mul.Tensor(*whole, whole)", "add_.Tensor(*whole, whole)", "mul.Tensor(*fewer, 2)"),
        *("copy_(part, *kept)", "clone(*part)", "copy_(whole, *whole)", "fill_.Scalar(whole, 0)", "mul.Tensor(*whole, real)"),
        *("add.Tensor(*whole, whole)", "mul_.Tensor(*fewer, 2)", "_conj_physical(*whole)", "abs(*whole)"),
    ),
    (0.7, _draw_spectrum, "bmm(*left, right)", "bmm(*turned, left)"),
)
