"""The attention behind a call: sizes, masks and which kernels it asks for. A call that cannot be is said in one line."""

from __future__ import annotations

from dataclasses import dataclass

from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime.errors import InputError

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
_DTYPES = {FLASH: _HALVES, CUDNN: _HALVES, EFFICIENT: (*_HALVES, "float32"), MATH: (*_HALVES, "float32", "float64")}


@dataclass(frozen=True, slots=True)
class Heads:
    """Scaled dot-product attention with everything its time depends on."""

    kind: str
    backward: bool
    batch: int
    heads: int
    queries: int
    keys: int
    dim: int
    dtype: str
    causal: bool
    dropout: bool
    bias: bool
    asked: int  # of a backward call: how many gradients
    stride: int  # elements from one query to the next: three times the heads' where query, key and value are one layer's output
    spaced: bool  # whether heads lie apart in memory, as after a transpose
    written: tuple[str, ...]  # query, key, value, gradient: which of them a step has just written


def heads_of(call: Call) -> Heads:
    """The attention of a call; InputError where shapes, dtypes or arguments do not belong together."""
    backward = _BACKWARD + _SUFFIX in call.op
    kind = _KINDS.get(call.op.removeprefix(_PREFIX).removesuffix(_SUFFIX).removesuffix(_BACKWARD), "")
    if not call.op.startswith(_PREFIX) or (kind, backward) not in _PLACES:
        raise InputError(f"{call.op} is no attention that is modelled: flash, cudnn, efficient or math was expected")
    first = 1 if backward else 0
    query, key, value = (_tensor(call, first + index) for index in range(3))
    shape = query.shape
    if key.shape[:2] != shape[:2] or value.shape[:3] != key.shape[:3] or key.shape[3] != shape[3]:
        raise InputError(
            f"{call.op} of queries {_sizes(query)}, keys {_sizes(key)}, values {_sizes(value)}: they do not fit together"
        )
    if backward and _tensor(call, 0).shape[:3] != shape[:3]:
        raise InputError(f"{call.op} of a gradient {_sizes(_tensor(call, 0))} for queries {_sizes(query)}")
    if query.dtype not in _DTYPES[kind] or {key.dtype, value.dtype} != {query.dtype}:
        raise InputError(
            f"{call.op} of {query.dtype}, {key.dtype}, {value.dtype}: one of {', '.join(_DTYPES[kind])} was expected"
        )
    dropout, causal = (_plain(call, index) for index in _PLACES[kind, backward])
    names = ("gradient", "query", "key", "value") if backward else ("query", "key", "value")
    bias = _BIASES.get((kind, backward))
    return Heads(
        kind=kind,
        backward=backward,
        batch=shape[0],
        heads=shape[1],
        queries=shape[2],
        keys=key.shape[2],
        dim=shape[3],
        dtype=query.dtype,
        causal=bool(causal),
        dropout=isinstance(dropout, int | float) and dropout > 0,
        bias=bias is not None and isinstance(_plain(call, bias), TensorArg),
        asked=_asked(call) if kind == EFFICIENT and backward else 3,
        stride=query.strides[2] if query.strides is not None else shape[3],
        spaced=query.strides is not None and query.strides[2] != shape[3],
        written=tuple(names[index] for index in call.written if index < len(names)),
    )


def _asked(call: Call) -> int:
    truths = _plain(call, 10)
    return sum(bool(truth) for truth in truths[:3]) if isinstance(truths, tuple) else 3


def _plain(call: Call, place: int) -> Argument:
    """An argument that may have been left out: its default is nothing."""
    return call.args[place] if place < len(call.args) else None


def _tensor(call: Call, place: int) -> TensorArg:
    value = _plain(call, place)
    if not isinstance(value, TensorArg) or len(value.shape) != 4 or min(value.shape) < 1:
        shape = _sizes(value) if isinstance(value, TensorArg) else repr(value)
        raise InputError(f"{call.op} has {shape} as argument {place}: a tensor of batch, heads, length and dim was expected")
    return value


def _sizes(tensor: TensorArg) -> str:
    return "x".join(str(length) for length in tensor.shape)
