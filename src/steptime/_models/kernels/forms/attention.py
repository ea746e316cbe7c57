"""Attention: flash, cuDNN, memory-efficient and plain, by the book (tiles of scores over the SMs, bytes) times a learned ratio.

Trees and networks learn the ratio for all kernels together; parts of a GPU are learned on top. Launch lists are those of the
nearest measured call. The plain form is one call here; a traced step has its products and softmax as ops of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from steptime._models.engine.constants import reference_constants
from steptime._models.engine.regression import Blend
from steptime._models.engine.stored import Floats
from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime._models.kernels.forms import settings_of, shape_text
from steptime._models.kernels.forms.lists import Lists, inside_of
from steptime._models.kernels.launches import REDUCE
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime._units import dtype_bytes
from steptime.errors import InputError

WHOLE, PARTS = "whole", "parts"  # of a GPU: the blends of the form
FLASH, CUDNN, EFFICIENT, MATH = "flash", "cudnn", "efficient", "math"

_PREFIX, _SUFFIX, _BACKWARD = "aten::_scaled_dot_product_", ".default", "_backward"
_KINDS = {"flash_attention": FLASH, "cudnn_attention": CUDNN, "efficient_attention": EFFICIENT, "attention_math": MATH}
# Kind and direction -> where dropout and causal stand among the arguments.
_PLACES = {
    (FLASH, False): (3, 4),
    (FLASH, True): (10, 11),
    (CUDNN, False): (5, 6),
    (CUDNN, True): (13, 14),
    (EFFICIENT, False): (5, 6),
    (EFFICIENT, True): (9, 11),
    (MATH, False): (4, 5),
}
# Kind and direction -> where a mask that is added to the scores stands.
_BIASES = {(CUDNN, False): 3, (CUDNN, True): 8, (EFFICIENT, False): 3, (EFFICIENT, True): 4, (MATH, False): 3}
_HALVES = ("float16", "bfloat16")
_LETTERS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
_EFFICIENT_KERNELS, _ANY_WIDTH = "fmha_cutlass", 65536
_DTYPES = {FLASH: _HALVES, CUDNN: _HALVES, EFFICIENT: (*_HALVES, "float32"), MATH: (*_HALVES, "float32", "float64")}


@dataclass(frozen=True, slots=True)
class Heads:
    """Scaled dot-product attention with everything its time depends on."""

    kind: str
    backward: bool
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    dtype: str
    causal: bool
    dropout: bool
    bias: bool
    asked: int  # of a backward call: how many gradients
    stride: int  # elements from one query to the next: three times the heads' where query, key and value are one layer's output
    spaced: bool  # whether heads lie apart in memory, as after a transpose
    written: tuple[str, ...]  # query, key, value, gradient: which of them a step has just written


@lru_cache(maxsize=1 << 16)
def heads_of(call: Call) -> Heads:
    """The attention of a call; InputError where shapes, dtypes or arguments do not belong together."""
    if call.op in _PACKED:
        return _packed(call)
    backward = _BACKWARD + _SUFFIX in call.op
    kind = _KINDS.get(call.op.removeprefix(_PREFIX).removesuffix(_SUFFIX).removesuffix(_BACKWARD), "")
    if not call.op.startswith(_PREFIX) or (kind, backward) not in _PLACES:
        raise InputError(f"{call.op} is no attention that is modelled: flash, cudnn, efficient or math was expected")
    first = 1 if backward else 0
    query, key, value = (_tensor(call, first + index) for index in range(3))
    shape = query.shape
    # Several heads of queries may share one of keys: the products are as many as with keys of their own.
    shared = key.shape[1] > 0 and shape[1] % key.shape[1] == 0
    if key.shape[0] != shape[0] or not shared or value.shape[:3] != key.shape[:3] or key.shape[3] != shape[3]:
        queries, keys, values = (shape_text(tensor.shape) for tensor in (query, key, value))
        raise InputError(f"{call.op} of queries {queries}, keys {keys}, values {values}: they do not fit together")
    if backward and _tensor(call, 0).shape[:3] != shape[:3]:
        raise InputError(f"{call.op} of a gradient {shape_text(_tensor(call, 0).shape)} for queries {shape_text(query.shape)}")
    if query.dtype not in _DTYPES[kind] or {key.dtype, value.dtype} != {query.dtype}:
        raise InputError(
            f"{call.op} of {query.dtype}, {key.dtype}, {value.dtype}: one of {', '.join(_DTYPES[kind])} was expected"
        )
    dropout, causal = (_plain(call, index) for index in _PLACES[kind, backward])
    names = ("gradient", "query", "key", "value") if backward else ("query", "key", "value")
    bias = _BIASES.get((kind, backward))
    truths = _plain(call, 10) if kind == EFFICIENT and backward else None  # which gradients are asked for
    stride = query.strides[2] if query.strides is not None else shape[3]
    if stride == shape[3]:
        # Heads one behind the other, as after rotary embeddings: rows have them side by side, which the same kernels take.
        stride *= shape[1]
    elif query.strides is not None and query.strides[0] < stride:
        # Tokens of all samples side by side, as in `nn.MultiheadAttention`: a sample's row is as wide as in other layouts.
        stride = max(shape[1] * shape[3], stride // shape[0])
    return Heads(
        kind=kind,
        backward=backward,
        batch=shape[0],
        heads=shape[1],
        key_heads=key.shape[1],
        queries=shape[2],
        keys=key.shape[2],
        dim=shape[3],
        value_dim=value.shape[3],
        dtype=query.dtype,
        causal=bool(causal),
        dropout=isinstance(dropout, int | float) and dropout > 0,
        bias=bias is not None and isinstance(_plain(call, bias), TensorArg),
        asked=sum(map(bool, truths[:3])) if isinstance(truths, tuple) else 3,
        stride=stride,
        spaced=stride != shape[3],
        written=tuple(names[index] for index in call.written if index < len(names)),
    )


# Samples of different lengths one after the other: kind, direction, places of where they begin, of the longest, of dropout, of
# causal and of a bias (flash attention takes none).
_PACKED = {
    "aten::_flash_attention_forward.default": (FLASH, False, 3, 5, 7, 8, -1),
    "aten::_flash_attention_backward.default": (FLASH, True, 6, 8, 10, 11, -1),
    "aten::_efficient_attention_forward.default": (EFFICIENT, False, 4, 6, 8, 9, 3),
    "aten::_efficient_attention_backward.default": (EFFICIENT, True, 6, 8, 11, 14, 4),
}


def _packed(call: Call) -> Heads:
    """As many samples of one length. Lengths are taken as spread evenly up to the longest: their squares count."""
    kind, backward, starts, longest, dropout, causal, bias = _PACKED[call.op]
    query, key = (_plain(call, place + backward) for place in range(2))
    if not isinstance(query, TensorArg) or not isinstance(key, TensorArg) or len(query.shape) < 3 or min(query.shape) < 1:
        raise InputError(f"{call.op} has {query!r} as queries: a tensor of tokens, heads and dim was expected")
    begins, most, rate = _plain(call, starts), _plain(call, longest), _plain(call, dropout)
    batch = max(1, begins.numel - 1) if isinstance(begins, TensorArg) else query.shape[0]
    queries, keys = (max(1, round(math.prod(each.shape[:-2]) / batch)) for each in (query, key))
    uneven = max(0.0, (most if isinstance(most, int) else 0) / queries - 1.0)
    keys = max(1, round(keys * (1.0 + min(uneven, 1.0) ** 2 / 3.0)))
    band = _band(call, keys)
    queries, keys = (queries, keys) if band is None else (band, keys) if backward else (queries, band)
    strides = query.strides if query.strides is not None else (query.shape[-2] * query.shape[-1], query.shape[-1], 1)
    return Heads(
        kind=kind,
        backward=backward,
        batch=batch,
        heads=query.shape[-2],
        key_heads=key.shape[-2],
        queries=queries,
        keys=keys,
        dim=query.shape[-1],
        value_dim=query.shape[-1],
        dtype=query.dtype,
        causal=bool(_plain(call, causal)) and band is None,
        dropout=isinstance(rate, int | float) and rate > 0,
        bias=bias >= 0 and isinstance(_plain(call, bias), TensorArg),
        asked=3,
        stride=strides[-3],
        spaced=True,
        written=(),
    )


_ROWS_OF_A_BLOCK = 128


def _band(call: Call, keys: int) -> int | None:
    """Of a sliding window: how many keys (in backward, queries) a block of rows walks over, all of them the same number.

    A window of so many keys before each of a block's rows is that and the block's own length; None where it is no shorter.
    """
    left = dict(call.kwargs).get("window_size_left")
    if not isinstance(left, int) or left < 0 or left + _ROWS_OF_A_BLOCK >= keys:
        return None
    return left + _ROWS_OF_A_BLOCK


def _plain(call: Call, place: int) -> Argument:
    """An argument that may have been left out: its default is nothing."""
    return call.args[place] if place < len(call.args) else None


def _tensor(call: Call, place: int) -> TensorArg:
    value = _plain(call, place)
    if not isinstance(value, TensorArg) or len(value.shape) != 4 or min(value.shape) < 1:
        shape = shape_text(value.shape) if isinstance(value, TensorArg) else repr(value)
        raise InputError(f"{call.op} has {shape} as argument {place}: a tensor of batch, heads, length and dim was expected")
    return value


_SUMS_OF_HEADS = {CUDNN: "fmha_reduce_head", FLASH: REDUCE}
_LAUNCH_NS = 2000.0  # seen in the smallest rows
_SMALL_NS = 1000.0  # of a small kernel
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
    efficient_wide_backward: float
    math_forward: float

    def rate(self, heads: Heads, single: bool) -> float:
        """Flop per ns of one SM in the largest measured calls of a kind."""
        kind = f"{heads.kind}_single" if heads.kind == EFFICIENT and single else heads.kind
        if heads.kind == EFFICIENT and heads.backward and _efficient_tile(heads)[2] == _ANY_WIDTH:
            kind = f"{heads.kind}_wide"
        rate: float = getattr(self, f"{kind}_{'backward' if heads.backward else 'forward'}")
        return rate


def _tile(heads: Heads) -> tuple[int, int]:
    """How many rows a block holds and how many of the other side it takes at a time, as the names of the kernels say."""
    small = heads.dim <= 64
    if heads.kind == FLASH and heads.backward:
        return (128, 128) if small else (128, 64) if heads.dim <= 128 else (64, 64)
    if heads.kind == FLASH:
        narrow = 64 if heads.dropout else 128
        return (128, narrow if small else narrow // 2 if heads.dim > 96 else 64) if heads.dim <= 128 else (64, 64)
    if heads.kind == EFFICIENT:
        queries, keys, _ = _efficient_tile(heads)
        return (keys, queries) if heads.backward else (queries, keys)
    return (64, 64) if heads.backward or heads.kind == MATH else (128, 128)


def _efficient_tile(heads: Heads) -> tuple[int, int, int]:
    """Queries and keys of a block and the widest head that it takes: the first of ATen's kernels that takes the heads.

    mem_eff_attention/kernels/generate_kernels.py, on the capabilities 8.0 and 9.0.
    """
    wide = max(heads.dim, heads.value_dim)
    widths = (32, 64, 128) if heads.backward else (64, 128)
    most = next((width for width in widths if wide <= width), _ANY_WIDTH)
    if not heads.backward:
        return 32 if most == _ANY_WIDTH else 64, 64 if most == 64 else 128, most
    halves = heads.dtype in _HALVES
    return 64 if most <= 64 else 128, 128 if halves and most == 128 else 64, most


def efficient_kernel(heads: Heads) -> str:
    """The name of the memory-efficient kernel that a call runs."""
    queries, keys, most = _efficient_tile(heads)
    name = f"{_EFFICIENT_KERNELS}{'B' if heads.backward else 'F'}_{_LETTERS[heads.dtype]}_aligned_{queries}x{keys}"
    if not heads.backward:
        return f"{name}_{'gmem' if most == _ANY_WIDTH else 'rf'}_sm80"
    # Halves without dropout have kernels that check no bounds, for lengths that blocks divide.
    whole = heads.queries % queries == 0 and heads.keys % keys == 0
    unchecked = heads.dtype in _HALVES and most != _ANY_WIDTH and whole
    return f"{name}_k{most}{'_dropout' if heads.dropout else '_seqaligned' if unchecked else ''}_sm80"


def _mean_dim(heads: Heads) -> float:
    """Half of the products go over the queries' elements, half over the values', and so does half of what is read."""
    return (heads.dim + heads.value_dim) / 2


@lru_cache(maxsize=1 << 16)
def _numbers(heads: Heads, device: AttentionConstants) -> tuple[float, ...]:
    single = dtype_bytes(heads.dtype) > 2
    tile = (*_tile(heads), device.rate(heads, single))
    return (
        *(heads.batch, heads.heads, heads.queries, heads.keys, _mean_dim(heads), dtype_bytes(heads.dtype)),
        *(heads.stride, heads.asked),
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
    settings = settings_of(questions)
    share, others, warm = (column.astype(np.float64) for column in (settings.share, settings.others, settings.warm))
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
    nbytes = np.where(backward > 0, 4.0, 2.0) * (side + other) + np.where(bias > 0, batch * queries * keys * element, 0)
    scores = pairs * queries * keys * 4.0
    memory = (nbytes + np.where(kinds[3] > 0, _TRIPS * scores, 0.0)) / bandwidth
    base = _LAUNCH_NS * np.where(kinds[3] > 0, 12.0, 1.0) + np.maximum(compute, memory) + 1000.0 * backward
    hot_bytes = written_queries * np.minimum(side, device.l2_bytes) + written_keys * np.minimum(other, device.l2_bytes)
    hot = warm * hot_bytes / nbytes
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


@dataclass(frozen=True)
class AttentionForm:
    """The fitted form."""

    blend: dict[str, Blend]  # for the whole GPU, and what shares of one add
    lists: Lists
    low: Floats  # feature -> range of the fitted rows
    high: Floats
    device: AttentionConstants = field(default_factory=partial(reference_constants, "attention", AttentionConstants))

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each question's call launches."""
        if not questions:
            return []
        calls = [heads_of(question.call) for question in questions]
        features, base = table(calls, questions, self.device)
        # Beyond the fitted rows a call is off by as much as at their edge: ratios that grow on are of no call.
        times = base * np.exp(ratios(self.blend, questions, np.clip(features, self.low, self.high)))
        near = self.lists.nearest([kind_of(heads) for heads in calls], coordinates(calls))
        inside = inside_of(features, self.low, self.high) & near.known
        return [
            Answer(
                (*_named(near.launches(index, time, _group(heads)), heads), *_sums_of_heads(heads, self.device)),
                bool(inside[index]),
            )
            for index, (time, heads) in enumerate(zip(times, calls, strict=True))
        ]


def _named(launches: list[LaunchTime], heads: Heads) -> list[LaunchTime]:
    """The launches of the nearest call, with the memory-efficient kernel that heads of this size run."""
    return [
        LaunchTime(efficient_kernel(heads), launch.time_ns) if launch.kernel.startswith(_EFFICIENT_KERNELS) else launch
        for launch in launches
    ]


def _sums_of_heads(heads: Heads, device: AttentionConstants) -> list[LaunchTime]:
    """Gradients of keys and values that several heads share: one for each head, then a sum of either.

    By cuDNN (9.19, H200), and by ATen for flash attention (flash_attn/flash_api.cpp).
    """
    if heads.kind not in _SUMS_OF_HEADS or not heads.backward or heads.key_heads == heads.heads:
        return []
    moved = heads.batch * (heads.heads + heads.key_heads) * heads.keys * dtype_bytes(heads.dtype)
    sizes = (moved * dim for dim in (heads.dim, heads.value_dim))
    return [LaunchTime(_SUMS_OF_HEADS[heads.kind], _SMALL_NS + size / device.bytes_per_ns) for size in sizes]


def ratios(blends: dict[str, Blend], questions: Sequence[Question], features: Floats) -> Floats:
    """Logarithm of how much longer each call takes than by the book."""
    learned = blends[WHOLE].values(features) if WHOLE in blends else np.zeros(len(questions))
    shared = np.asarray([question.share > 1 for question in questions])
    if PARTS in blends and shared.any():
        learned[shared] += blends[PARTS].values(np.column_stack([features, learned])[shared])
    return learned


def _group(heads: Heads) -> str:
    return f"{heads.kind}_{'backward' if heads.backward else 'forward'}"


def kind_of(heads: Heads) -> str:
    """What has to agree for two calls to launch alike."""
    packed = heads.heads * heads.dim == heads.stride
    flags = (heads.causal and heads.kind == MATH, heads.dropout, heads.bias, heads.spaced, packed)
    return f"{_group(heads)} {heads.dtype} {heads.asked} {' '.join(str(int(flag)) for flag in flags)}"


def coordinates(calls: Sequence[Heads]) -> Floats:
    """Where calls lie among those of their kind."""
    return np.array([_point(heads) for heads in calls], dtype=np.float64).reshape(len(calls), -1)


@lru_cache(maxsize=1 << 16)
def _point(heads: Heads) -> tuple[float, ...]:
    sizes = (heads.batch * heads.heads, heads.queries, heads.keys, heads.dim)
    widest = math.log(_efficient_tile(heads)[2]) if heads.kind == EFFICIENT else 0.0
    flags = (2.0 * (heads.keys % 8 == 0), float(heads.causal), 3.0 * (heads.batch == 1))
    return (*(math.log(size) for size in sizes), *flags, widest)


FORM = AttentionForm
