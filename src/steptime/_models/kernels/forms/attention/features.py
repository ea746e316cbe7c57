"""What an attention call costs by the book, and the sizes that say how far off the book is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from steptime._models.engine.stored import Floats
from steptime._models.kernels.forms.attention.heads import CUDNN, EFFICIENT, FLASH, MATH, Heads
from steptime._models.kernels.question import OTHERS, Question
from steptime._units import dtype_bytes

_LAUNCH_NS = 2000.0  # seen in the smallest rows
_TRIPS = 12.0  # how often the plain form reads or writes the scores, counted from its launches


@dataclass(frozen=True)
class AttentionConstants:
    """Of the device: its size, what memory reaches, and flop per ns of one SM by kind of kernel and direction."""

    sms: float
    l2_bytes: float
    bytes_per_ns: float  # read and write mixed
    flash_forward: float
    flash_backward: float
    cudnn_forward: float
    cudnn_backward: float
    efficient_forward: float
    efficient_backward: float
    efficient_single_forward: float
    efficient_single_backward: float
    math_forward: float

    def rate(self, heads: Heads, single: bool) -> float:
        """Flop per ns of one SM in the largest measured calls of a kind."""
        kind = f"{heads.kind}_single" if heads.kind == EFFICIENT and single else heads.kind
        rate: float = getattr(self, f"{kind}_{'backward' if heads.backward else 'forward'}")
        return rate


def _tile(heads: Heads, single: bool) -> tuple[int, int]:
    """How many rows a block holds and how many of the other side it takes at a time, as the names of the kernels say."""
    small = heads.dim <= 64
    if heads.kind == FLASH and heads.backward:
        return (128, 128) if small else (128, 64) if heads.dim <= 128 else (64, 64)
    if heads.kind == FLASH:
        narrow = 64 if heads.dropout else 128
        return (128, narrow if small else narrow // 2 if heads.dim > 96 else 64) if heads.dim <= 128 else (64, 64)
    if heads.kind == EFFICIENT and heads.backward:
        return (64, 64) if small else (64, 128) if single else (128, 128)
    if heads.kind == EFFICIENT:
        return (64, 64) if small else (64, 128)
    return (64, 64) if heads.backward or heads.kind == MATH else (128, 128)


@lru_cache(maxsize=1 << 16)
def _numbers(heads: Heads, device: AttentionConstants) -> tuple[float, ...]:
    single = dtype_bytes(heads.dtype) > 2
    tile = (*_tile(heads, single), device.rate(heads, single))
    return (
        *(heads.batch, heads.heads, heads.queries, heads.keys, heads.dim, dtype_bytes(heads.dtype), heads.stride, heads.asked),
        *tile,
        *(heads.causal, heads.dropout, heads.bias, heads.spaced, heads.backward, heads.dtype == "bfloat16"),
        *(heads.kind == FLASH, heads.kind == CUDNN, heads.kind == EFFICIENT, heads.kind == MATH),
        sum(name in heads.written for name in ("query", "gradient")),
        sum(name in heads.written for name in ("key", "value")),
    )


def table(calls: Sequence[Heads], questions: Sequence[Question], device: AttentionConstants) -> tuple[Floats, Floats]:
    """Features, shape (calls, features), and the time by the book in ns, of which a model learns the ratio."""
    numbers = np.array([_numbers(heads, device) for heads in calls], dtype=np.float64).reshape(-1, 23).T
    batch, heads, queries, keys, dim, element, stride, asked, high, wide, rate = numbers[:11]
    causal, dropout, bias, spaced, backward, bfloat16 = numbers[11:17]
    kinds, (written_queries, written_keys) = numbers[17:21], numbers[21:]
    share = np.array([question.share for question in questions], dtype=np.float64)
    others = np.array([OTHERS.index(question.others) for question in questions], dtype=np.float64)
    warm = np.array([question.warm for question in questions], dtype=np.float64)
    sms, bandwidth = np.maximum(1.0, device.sms / share), device.bytes_per_ns / np.where(others == 2, share, 1.0)
    pairs, log = batch * heads, np.log
    # A backward block walks over queries and holds keys, and does five products where a forward one does two.
    held, walked = np.where(backward > 0, keys, queries), np.where(backward > 0, queries, keys)
    padded = np.ceil(dim / 32) * 32
    part = np.where(causal > 0, 0.5 + 0.5 * np.minimum(1.0, high / np.maximum(walked, 1.0)), 1.0)
    steps = np.ceil(walked / wide)
    step_ns = np.where(backward > 0, 2.5, 1.0) * 4 * high * wide * padded / rate
    blocks = pairs * np.ceil(held / high)
    waves = blocks / sms
    compute = np.maximum(steps * step_ns, waves * steps * part * step_ns)
    rounds = np.ceil(blocks / (2 * sms))  # of blocks over the SMs, two on each
    rounded = np.maximum(1.0, np.ceil(waves)) * steps * part * step_ns
    side, other = pairs * queries * dim * element, pairs * keys * dim * element
    nbytes = np.where(backward > 0, 4 * side + 4 * other, 2 * side + 2 * other) + np.where(
        bias > 0, batch * queries * keys * element, 0
    )
    scores = pairs * queries * keys * 4.0
    memory = (nbytes + np.where(kinds[3] > 0, _TRIPS * scores, 0.0)) / bandwidth
    base = _LAUNCH_NS * np.where(kinds[3] > 0, 12.0, 1.0) + np.maximum(compute, memory) + 1000.0 * backward
    hot = (
        warm
        * (written_queries * np.minimum(side, device.l2_bytes) + written_keys * np.minimum(other, device.l2_bytes))
        / nbytes
    )
    flop = 4 * pairs * queries * keys * dim * part
    columns = [
        *(log(base), log(batch), log(heads), log(queries), log(keys), dim, element, log(stride), stride / (heads * dim), asked),
        *(causal, dropout, bias, spaced, backward, bfloat16, *kinds, warm, hot, share, others, log(pairs), log(queries / keys)),
        *(log(pairs * queries), log(pairs * keys), log(flop), log(nbytes), log(scores), log(steps), log(blocks)),
        *(log(waves), np.where(waves < 40, np.ceil(waves) / waves, 1.0), log(compute / base), log(rounded / base)),
        *(log(memory / base), padded / dim, queries % 64 == 0, keys % 64 == 0, keys % 8 == 0, log(steps * step_ns / base)),
        *(queries / (np.ceil(queries / 128) * 128), keys / (np.ceil(keys / 128) * 128), queries, keys, flop / nbytes),
        *(high, wide, log(rounds * steps * part * step_ns / base), rounds),
    ]
    return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1), base
