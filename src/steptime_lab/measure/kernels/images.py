"""Calls of layers over images that usual networks hardly have: large windows, lines of taps, odd widths, patches."""

from __future__ import annotations

from steptime._models.kernels.call import TensorArg
from steptime._models.kernels.sweep import USUAL_ELEMENTS, Draw, Drawn, KernelSweep
from steptime_lab.measure.kernels.layers import BACKWARD, FORWARD, layer_of

_SIDES = (7, 8, 14, 16, 28, 32, 56, 64)
_WINDOWS = (3, 5, 7, 9, 11, 13, 15, 21, 31)
_WINDOW_SHARES = (0.16, 0.16, 0.16, 0.16, 0.1, 0.08, 0.08, 0.05, 0.05)


def _channels(draw: Draw, low: int = 16, high: int = 1024) -> int:
    """A third divides by eight, which tensor cores load at once; the others by four, by two or by nothing."""
    step = draw.pick((8, 4, 2, 1), (0.34, 0.28, 0.22, 0.16))
    wanted = max(1, draw.log_int(low, high) // step)
    return step * (wanted if step == 8 else wanted | 1)


def _draw_window(draw: Draw) -> Drawn | None:
    """A large window over each channel alone."""
    channels, tap = _channels(draw), draw.pick(_WINDOWS, _WINDOW_SHARES)
    geometry = ((draw.pick(_SIDES),) * 2, (tap,) * 2, draw.pick((1, 2), (0.85, 0.15)), 1, channels, channels, channels)
    return layer_of(draw, geometry, last=0.6)


def _draw_taps_in_line(draw: Draw) -> Drawn | None:
    """A row or a column of taps, as factorised windows have them, of each channel alone or of all."""
    channels, tap = _channels(draw, high=512), draw.pick((3, 5, 7, 11, 21))
    taps = draw.pick(((1, tap), (tap, 1)))
    groups = draw.pick((1, channels))
    return layer_of(draw, ((draw.pick(_SIDES),) * 2, taps, 1, 1, groups, channels, channels))


def _draw_odd_widths(draw: Draw) -> Drawn | None:
    inputs, tap = _channels(draw), draw.pick((1, 3), (0.5, 0.5))
    outputs = inputs if draw.chance(0.5) else _channels(draw)
    stride = draw.pick((1, 2), (0.85, 0.15))
    return layer_of(draw, ((draw.pick((*_SIDES, 112)),) * 2, (tap,) * 2, stride, 1, 1, inputs, outputs))


def _draw_stem(draw: Draw) -> Drawn | None:
    """The first layer: few channels, and patches that touch or windows that overlap."""
    side, outputs = draw.pick((96, 128, 192, 224, 256, 384, 512)), draw.size(16, 1280)
    tap, stride = draw.pick(((3, 1), (3, 2), (7, 2), (4, 4), (8, 8), (14, 14), (16, 16), (32, 32), (7, 4)))
    inputs = draw.pick((1, 3, 4), (0.2, 0.65, 0.15))
    return layer_of(draw, ((side,) * 2, (tap,) * 2, stride, 1, 1, inputs, outputs), padded=tap % 2 == 1)


_LAYERS = ((4, _draw_window), (1, _draw_taps_in_line), (3, _draw_odd_widths), (1, _draw_stem))
WINDOWS = KernelSweep(
    *((share, drawing, form) for share, drawing in _LAYERS for form in (FORWARD, BACKWARD.format(False))),
)


def _draw_patches(draw: Draw) -> Drawn | None:
    """`nn.Unfold` and `nn.Fold`: patches that touch, or windows around every place."""
    tap, image = draw.pick((2, 3, 4, 7, 8, 14, 16)), draw.pick((14, 28, 56, 64, 112, 224))
    stride = tap if draw.chance(0.6) else 1
    padding = 0 if stride == tap else tap // 2
    places = (image + 2 * padding - tap) // stride + 1
    channels = draw.pick((1, 3, 16, 64, 192))
    samples = min(draw.log_int(1, 512), USUAL_ELEMENTS // 4 // max(1, channels * tap * tap * places * places))
    if samples < 1 or places < 1:
        return None
    dtype = draw.floating()
    return {
        "x": TensorArg((samples, channels, image, image), dtype),
        "columns": TensorArg((samples, channels * tap * tap, places * places), dtype),
        "image": (image, image),
        "taps": (tap, tap),
        "one": (1, 1),
        "padding": (padding, padding),
        "stride": (stride, stride),
    }


PATCHES = KernelSweep(
    (
        *(1, _draw_patches),
        *("im2col(*x, taps, one, padding, stride)", "col2im(*columns, image, taps, one, padding, stride)"),
    ),
)
