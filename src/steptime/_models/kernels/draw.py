"""What sweeps are drawn with: sizes as real models have them, dtypes, layouts, and a mixture of draws as one sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from steptime._models.kernels.call import Argument, Call, TensorArg, contiguous
from steptime._units import MIB, dtype_bytes

T = TypeVar("T")
Rng = np.random.Generator
Shape = tuple[int, ...]
# One call at random; None where the drawn sizes make none that is worth its GPU time.
Draw = Callable[[Rng], Call | None]

# Arguments of one call; its outputs are never larger than that again, so that everything stays below 2 GiB.
MOST_BYTES = 800 * MIB
# The largest single activation; a kernel that reads and writes it lasts a fifth of a millisecond on an H200.
USUAL_BYTES = 320 * MIB

FLOATS = ("float32", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")
_FLOAT_SHARES = (0.45, 0.35, 0.2)

# Hidden sizes of BERT, GPT-2, XLNet, T5 and Llama models of all sizes.
HIDDEN = (128, 256, 312, 384, 512, 768, 1024, 1280, 1536, 1600, 2048, 2560, 3072, 4096, 5120)
# GPT-2, BERT, Llama 2, T5, XLNet; the last three are GPT-2's, BERT's and Whisper's rounded up for alignment.
VOCABULARIES = (50257, 30522, 32000, 32128, 50304, 30528, 51872)
SEQUENCES = (64, 128, 197, 256, 384, 512, 1024, 2048)


def pick(rng: Rng, choices: Sequence[T], shares: Sequence[float] | None = None) -> T:
    """One of the choices."""
    if shares is None:
        return choices[int(rng.integers(len(choices)))]
    edges = np.cumsum(shares)
    return choices[min(int(np.searchsorted(edges, rng.random() * edges[-1], side="right")), len(choices) - 1)]


def chance(rng: Rng, share: float) -> bool:
    """True in this share of draws."""
    return bool(rng.random() < share)


def log_int(rng: Rng, low: int, high: int) -> int:
    """An integer, log-uniform from low to high, both included."""
    return min(high, max(low, int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))))


def size(rng: Rng, low: int, high: int) -> int:
    """A dimension: mostly a multiple of 8 to 128, else a power of two, else whatever comes (odd ones too)."""
    value = log_int(rng, low, high)
    kind = rng.random()
    if kind < 0.3:
        return value
    step = 2 ** round(math.log2(value)) if kind < 0.5 else pick(rng, (8, 16, 32, 64, 128))
    return min(high, max(low, step * max(1, round(value / step))))


def width(rng: Rng, low: int = 8, high: int = 8192) -> int:
    """A feature dimension: a model's hidden size, four times one, or any size."""
    if chance(rng, 0.4):
        named = pick(rng, HIDDEN) * pick(rng, (1, 1, 3, 4))
        if low <= named <= high:
            return named
    return size(rng, low, high)


def tokens(rng: Rng, high: int = 32768) -> int:
    """Rows of an activation: samples times sequence, or samples alone."""
    if chance(rng, 0.5):
        rows = pick(rng, SEQUENCES) * log_int(rng, 1, 64)
        if rows <= high:
            return rows
    return size(rng, 16, high)


def floating(rng: Rng) -> str:
    """A dtype of activations: single precision most, then bfloat16, then half."""
    return pick(rng, FLOATS, _FLOAT_SHARES)


def activation_shape(rng: Rng, most_elements: int = USUAL_BYTES // 4) -> Shape:
    """The shape of an activation or gradient: rows of features, sequences, heads or images, or a flat buffer."""
    kind = rng.random()
    if kind < 0.35:
        shape: Shape = (tokens(rng), width(rng))
    elif kind < 0.6:
        shape = (log_int(rng, 1, 128), pick(rng, SEQUENCES), width(rng))
    elif kind < 0.75:
        side = pick(rng, (7, 14, 17, 28, 35, 56, 112))
        shape = (log_int(rng, 1, 256), size(rng, 16, 1024), side, side)
    elif kind < 0.85:
        sequence = pick(rng, SEQUENCES)
        shape = (log_int(rng, 1, 64), pick(rng, (4, 8, 12, 16, 20)), sequence, sequence)
    else:
        shape = (log_int(rng, 256, most_elements),)
    return shape if math.prod(shape) <= most_elements else (log_int(rng, 1024, most_elements),)


def activation(rng: Rng, values: str = "normal") -> TensorArg:
    """An activation or gradient."""
    return TensorArg(activation_shape(rng), floating(rng), values=values)


def permuted(tensor: TensorArg, order: Sequence[int]) -> TensorArg:
    """The view that `Tensor.permute` gives."""
    strides = tensor.strides or contiguous(tensor.shape)
    return TensorArg(tuple(tensor.shape[axis] for axis in order), tensor.dtype, tuple(strides[axis] for axis in order))


def transposed(tensor: TensorArg) -> TensorArg:
    """The view with the last two axes exchanged."""
    *front, last, final = range(len(tensor.shape))
    return permuted(tensor, (*front, final, last))


def channels_last(shape: Shape, dtype: str) -> TensorArg:
    """N, C, H, W in the order of memory N, H, W, C."""
    batch, channels, height, columns = shape
    return permuted(TensorArg((batch, height, columns, channels), dtype), (0, 3, 1, 2))


def indices(shape: Shape, high: int) -> TensorArg:
    """64-bit integers from 0 to high - 1."""
    return TensorArg(shape, "int64", high=high)


def scalar(dtype: str = "float32", values: str = "normal") -> TensorArg:
    """A tensor of one element and no axis."""
    return TensorArg((), dtype, values=values)


def options(**named: Argument) -> tuple[tuple[str, Argument], ...]:
    """Keyword arguments as a call has them."""
    return tuple(sorted(named.items()))


def fits(call: Call, *outputs: tuple[Shape, str], most_bytes: int = MOST_BYTES) -> Call | None:
    """The call where its arguments, and its outputs where they are given, take no more than this; else None."""
    out_bytes = sum(math.prod(shape) * dtype_bytes(dtype) for shape, dtype in outputs)
    return call if max(call.nbytes, out_bytes) <= most_bytes else None


def mixture(*draws: tuple[float, Draw]) -> Callable[[Rng, int], Iterator[Call]]:
    """A sweep of distinct calls to which each draw contributes in proportion to its share, spread evenly over the sweep."""

    def sweep(rng: Rng, count: int) -> Iterator[Call]:
        total = sum(share for share, _ in draws)
        credit = [0.0] * len(draws)
        seen: set[Call] = set()
        for _ in range(40 * count):
            if len(seen) >= count:
                return
            for index, (share, _) in enumerate(draws):
                credit[index] += share / total
            chosen = max(range(len(draws)), key=credit.__getitem__)
            call = draws[chosen][1](rng)
            if call is None:
                for index, (share, _) in enumerate(draws):
                    credit[index] -= share / total
                continue
            credit[chosen] -= 1.0
            if call not in seen:
                seen.add(call)
                yield call

    return sweep
