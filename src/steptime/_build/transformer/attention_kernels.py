"""The fused kernels behind `scaled_dot_product_attention` as PyTorch records them, both ways, with what they reserve.

Queries, keys and values come as [batch, heads, sequence, head width]. A kernel writes its forward pass into a result that was
made before, and says what its backward takes besides the heads and that result: the statistics of the scores' rows come first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from steptime._build.emit.emitter import DTYPE_NUMBERS, Emitter, compact_strides
from steptime._build.emit.tape import Gradients
from steptime._build.emit.writer import strides_of
from steptime._program.program import Tensor, Value

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values
# What the memory-efficient backward reserves beside gradients: a sum per element in fp32, and counters per block of keys
# (seen in the recorded steps of GPT-2 and BERT: 3,148,800 bytes for 8 x 12 x 128 x 64, 12,595,200 for 512 tokens).
_KEYS_PER_BLOCK, _BYTES_PER_BLOCK = 128, 32
_STATISTICS_ROWS = 32  # the memory-efficient kernel pads what it keeps of each row of scores to a multiple of these
_NO_MASK, _CAUSAL_MASK = 0, 1


class Attention(NamedTuple):
    """What is said of a fused attention besides its heads."""

    kernels: str  # cudnn | flash | efficient
    causal: bool
    dropout: float
    mask: Tensor | None  # bool, [batch, 1, sequence, sequence]
    sequence_first: bool = False  # heads come as [sequence, batch, heads, head width]
    exchange: str = ""  # how ranks that share sequences see each other's keys and values; empty where none do
    grouped: bool = False  # the kernels take keys and values of fewer heads than queries
    window: int = 0  # how many keys a query sees at most, itself and those before it; 0: all
    in_place: bool = False  # rounds over ranks that share sequences add to one result in its own precision


class Computed(NamedTuple):
    """What a kernel leaves behind of its forward pass."""

    node: str  # what autograd calls its backward
    kept: tuple[Tensor, ...]
    backward: Callable[[Tensor, Sequence[Tensor]], Gradients]  # of the result's gradient and of heads, result and what is kept


def result_of(emit: Emitter, q: Tensor, v: Tensor, kind: Attention) -> Tensor:
    """The result that a kernel writes, as wide as the values; cuDNN's lies as its queries."""
    like_queries = kind.kernels == "cudnn" and q.shape[3] == v.shape[3]
    shape = (*q.shape[:3], v.shape[3])
    return emit.tensor(shape, q.dtype, strides=compact_strides(q) if like_queries else _by_token(shape))


def _by_token(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of [batch, heads, sequence, head width] with the heads of a token beside each other, as they are read next."""
    _, heads, length, width = shape
    return length * heads * width, width, heads * width, 1


def _cudnn(emit: Emitter, heads: Heads, y: Tensor, bias: Tensor | None, kind: Attention) -> Computed:
    """cuDNN's attention, which PyTorch prefers on Hopper in 16 bits."""
    scale, lengths = heads[0].shape[-1] ** -0.5, (y.shape[2], heads[1].shape[2])
    statistics = emit.tensor((*y.shape[:3], 1))
    seed, offset = emit.tensor((), "int64"), emit.tensor((), "int64")
    result = (y, statistics, None, None, *lengths, seed, offset, None)
    call = (*heads, bias, True, kind.dropout, kind.causal, False, scale)
    with (
        emit.op("_scaled_dot_product_cudnn_attention", call, result, node=True),
        emit.op("_cudnn_attention_forward", (*call[:4], None, None, *lengths, *call[4:]), result),
    ):
        _expanded_to_itself(emit, bias)
        for each in (seed, offset):
            emit.op("empty", ((), DTYPE_NUMBERS["int64"], None, "cuda", None, None), (each,))
        emit.empty_like(heads[0], y)
        emit.empty(statistics)

    def backward(gradient: Tensor, saved: Sequence[Tensor]) -> Gradients:
        q, k, v, output, *known = saved
        results = tuple(emit.tensor(each.shape, each.dtype, strides=compact_strides(each)) for each in (q, k, v))
        rest = (bias, None, None, *lengths, kind.dropout, kind.causal, scale)
        call = (gradient, q, k, v, emit.view(output), *known, *rest)
        with (
            emit.op("_scaled_dot_product_cudnn_attention_backward", call, results),
            emit.op("_cudnn_attention_backward", call, results),
        ):
            _expanded_to_itself(emit, bias)
            for like, result in zip((q, k, v), results, strict=True):
                emit.empty_like(like, result)
        return results

    return Computed("ScaledDotProductCudnnAttentionBackward0", (statistics, seed, offset), backward)


def _expanded_to_itself(emit: Emitter, bias: Tensor | None) -> None:
    if bias is not None:
        emit.expanded(bias, bias.shape, strides_of(bias))


def _flash(emit: Emitter, heads: Heads, y: Tensor, bias: Tensor | None, kind: Attention) -> Computed:
    """Flash attention, PyTorch's choice on Ampere in 16 bits; it takes no mask but the causal one."""
    assert bias is None
    scale, lengths = heads[0].shape[-1] ** -0.5, (y.shape[2], heads[1].shape[2])
    statistics = emit.tensor(y.shape[:3])
    state, unused = emit.tensor((2,), "uint64"), emit.tensor((), "uint64")
    result = (y, statistics, None, None, *lengths, state, unused, None)
    emit.op("_scaled_dot_product_flash_attention", (*heads, kind.dropout, kind.causal, False, scale), result, node=True)

    def backward(gradient: Tensor, saved: Sequence[Tensor]) -> Gradients:
        q, k, v, output, known = saved
        results = tuple(emit.tensor(each.shape, each.dtype, strides=_by_token(each.shape)) for each in (q, k, v))
        rest = (None, None, *lengths, kind.dropout, kind.causal, state, unused, scale)
        emit.op("_scaled_dot_product_flash_attention_backward", (gradient, q, k, v, emit.view(output), known, *rest), results)
        return results

    return Computed("ScaledDotProductFlashAttentionBackward0", (statistics,), backward)


def _efficient(emit: Emitter, heads: Heads, y: Tensor, bias: Tensor | None, kind: Attention) -> Computed:
    """The memory-efficient kernels, the only fused ones in fp32."""
    scale, mask = heads[0].shape[-1] ** -0.5, _CAUSAL_MASK if kind.causal else _NO_MASK
    rows = -(-y.shape[2] // _STATISTICS_ROWS) * _STATISTICS_ROWS
    statistics = emit.tensor((*y.shape[:2], rows))
    where = "cpu" if kind.dropout else None
    seed, offset = emit.tensor((), "int64", device=where), emit.tensor((), "int64", device=where)
    call = (*heads, bias, True, kind.dropout, kind.causal, scale)
    with emit.op("_scaled_dot_product_efficient_attention", call, (y, statistics, seed, offset), node=True):
        by_token = tuple(emit.transposed(each, 1, 2) for each in heads)
        flat = _flat(emit, y)
        inner = (*by_token, bias, None, None, None, None, kind.dropout, mask, True, scale, None, None)
        result = (flat, statistics, seed, offset, y.shape[2], heads[1].shape[2])
        with emit.op("_efficient_attention_forward", inner, result):
            for each in (seed, offset) if kind.dropout else ():
                emit.op("scalar_tensor", (0, DTYPE_NUMBERS["int64"], None, None, None), (each,))
            emit.empty(flat)
            emit.empty(statistics)
        _transposed_into(emit, flat, y)

    def backward(gradient: Tensor, saved: Sequence[Tensor]) -> Gradients:
        q, k, v, output, *known = saved
        arguments, output = (gradient, q, k, v), emit.view(output)
        results = tuple(emit.tensor(each.shape, each.dtype, strides=_by_token(each.shape)) for each in (q, k, v))
        call = (*arguments, bias, output, *known, kind.dropout, (True, True, True, False), kind.causal, scale)
        with emit.op("_scaled_dot_product_efficient_attention_backward", call, (*results, None)):
            by_token = [emit.transposed(each, 1, 2) for each in (*arguments, output)]
            flat = tuple(_flat(emit, each) for each in results)
            rest = (known[0], kind.dropout, *known[1:], mask, False, scale, None, None, False)
            _efficient_backward(emit, by_token, bias, rest, flat)
            for each, result in reversed(list(zip(flat, results, strict=True))):
                _transposed_into(emit, each, result)
        return results

    return Computed("ScaledDotProductEfficientAttentionBackward0", (statistics, seed, offset), backward)


def _efficient_backward(
    emit: Emitter, by_token: Sequence[Tensor], bias: Tensor | None, rest: tuple[Value, ...], results: tuple[Tensor, ...]
) -> None:
    gradient, q, k, v, output = by_token
    call = (gradient, q, k, v, bias, output, None, None, q.shape[2], k.shape[2], *rest)
    with emit.op("_efficient_attention_backward", call, (*results, None)):
        for each in results:
            emit.empty(each)
        _row_sums(emit, gradient, output)
        batch, length, heads, width = k.shape
        blocks = -(-length // _KEYS_PER_BLOCK)
        size = batch * heads * (4 * length * width + _BYTES_PER_BLOCK * blocks)
        emit.zero(emit.empty(emit.tensor((size,), "uint8")))


def _row_sums(emit: Emitter, gradient: Tensor, output: Tensor) -> None:
    """The sum over each head's elements of gradient x output, which backward needs for every row of scores."""
    for each in (output, gradient):
        emit.op("to", (each, DTYPE_NUMBERS["float32"], False, False, None), (each,))
    product = emit.new("mul", (gradient, output))
    total = emit.tensor(gradient.shape[:3], gradient.dtype)
    with emit.op("sum", (product, (-1,), False, None), (total,)):
        emit.strided(total, (*total.shape, 1), (*strides_of(total), 0))
    emit.contiguous(emit.transposed(total, -2, -1))


def _flat(emit: Emitter, x: Tensor) -> Tensor:
    """The memory of [batch, heads, sequence, head width] as [batch, sequence, heads, head width]."""
    batch, heads, length, width = x.shape
    return emit.view(x, (batch, length, heads, width))


def _transposed_into(emit: Emitter, x: Tensor, y: Tensor) -> None:
    with emit.op("transpose", (x, 1, 2), (y,)):
        emit.op("as_strided", (x, y.shape, y.strides, None), (y,))


KERNELS: Mapping[str, Callable[[Emitter, Heads, Tensor, Tensor | None, Attention], Computed]] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
}
