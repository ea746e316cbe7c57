"""The fused kernels of attention behind `scaled_dot_product_attention`, forward and backward, with what they reserve.

Queries, keys and values are [batch, heads, sequence, head width]; a mask comes as what is added to the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from steptime._build.emit.autograd import Gradients
from steptime._build.emit.layers import DTYPE_NUMBERS, contiguous, empty, transposed_pair, zero
from steptime._build.transformer.emit import GroupEmitter, compact_strides
from steptime._build.transformer.tape import StepTape
from steptime._build.transformer.views import given
from steptime._program.program import Tensor, Value

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values
# What the memory-efficient backward reserves beside gradients: a sum per element in fp32, and counters per block of keys
# (seen in the recorded steps of GPT-2 and BERT: 3,148,800 bytes for 8 x 12 x 128 x 64, 12,595,200 for 512 tokens).
_KEYS_PER_BLOCK, _BYTES_PER_BLOCK = 128, 32
_STATISTICS_ROWS = 32  # the memory-efficient kernel pads what it keeps of each row of scores to a multiple of these
_NO_MASK, _CAUSAL_MASK = 0, 1


def cudnn(tape: StepTape, heads: Heads, y: Tensor, bias: Tensor | None, dropout: float, *, causal: bool) -> None:
    """cuDNN's attention, which PyTorch prefers on Hopper in 16 bits."""
    emit, scale, lengths = tape.emit, y.shape[-1] ** -0.5, (y.shape[2], heads[1].shape[2])
    statistics = emit.tensor((*y.shape[:3], 1))
    seed, offset = emit.tensor((), "int64"), emit.tensor((), "int64")
    result = (y, statistics, None, None, *lengths, seed, offset, None)
    text = (*heads, bias, True, dropout, causal, False, scale)
    with (
        emit.around("aten::_scaled_dot_product_cudnn_attention", text, result, sequence=emit.sequence),
        emit.around("aten::_cudnn_attention_forward", (*text[:4], None, None, *lengths, *text[4:]), result),
    ):
        _expanded(emit, bias)
        for each in (seed, offset):
            emit.op("aten::empty", ((), 4, None, "cuda", None, None), (each,))
        _reserved_like(emit, heads[0], y)
        empty(emit, statistics.shape, "float32", made=statistics)
    saved, output = [tape.save(each) for each in heads], tape.save(y)
    kept = [tape.save(each) for each in (statistics, seed, offset)]

    def backward(gradients: Gradients) -> Gradients:
        q, k, v = (each() for each in saved)
        results = tuple(emit.tensor(each.shape, each.dtype, strides=compact_strides(each)) for each in (q, k, v))
        rest = (bias, None, None, *lengths, dropout, causal, scale)
        asked = (given(gradients[0]), q, k, v, emit.view(output()), *(each() for each in kept), *rest)
        with (
            emit.around("aten::_scaled_dot_product_cudnn_attention_backward", asked, results),
            emit.around("aten::_cudnn_attention_backward", asked, results),
        ):
            _expanded(emit, bias)
            for item, gradient in zip((q, k, v), results, strict=True):
                _reserved_like(emit, item, gradient)
        return results

    tape.record("ScaledDotProductCudnnAttentionBackward0", heads, (y,), backward)


def flash(tape: StepTape, heads: Heads, y: Tensor, bias: Tensor | None, dropout: float, *, causal: bool) -> None:
    """Flash attention, PyTorch's choice on Ampere in 16 bits; it takes no mask but the causal one."""
    assert bias is None
    emit, scale, lengths = tape.emit, y.shape[-1] ** -0.5, (y.shape[2], heads[1].shape[2])
    statistics = emit.tensor(y.shape[:3])
    state, unused = emit.tensor((2,), "uint64"), emit.tensor((), "uint64")
    result = (y, statistics, None, None, *lengths, state, unused, None)
    text = (*heads, dropout, causal, False, scale)
    emit.op("aten::_scaled_dot_product_flash_attention", text, result, sequence=emit.sequence)
    saved, output = [tape.save(each) for each in heads], tape.save(y)
    kept = tape.save(statistics)

    def backward(gradients: Gradients) -> Gradients:
        q, k, v = (each() for each in saved)
        results = tuple(emit.tensor(each.shape, each.dtype, strides=_by_token(each)) for each in (q, k, v))
        rest = (None, None, *lengths, dropout, causal, state, unused, scale)
        asked = (given(gradients[0]), q, k, v, emit.view(output()), kept(), *rest)
        emit.op("aten::_scaled_dot_product_flash_attention_backward", asked, results)
        return results

    tape.record("ScaledDotProductFlashAttentionBackward0", heads, (y,), backward)


def efficient(tape: StepTape, heads: Heads, y: Tensor, bias: Tensor | None, dropout: float, *, causal: bool) -> None:
    """The memory-efficient kernels, the only fused ones in fp32."""
    emit, scale = tape.emit, y.shape[-1] ** -0.5
    rows = -(-y.shape[2] // _STATISTICS_ROWS) * _STATISTICS_ROWS
    statistics = emit.tensor((*y.shape[:2], rows))
    where = "cpu" if dropout else None
    seed, offset = emit.tensor((), "int64", device=where), emit.tensor((), "int64", device=where)
    text = (*heads, bias, True, dropout, causal, scale)
    with emit.around(
        "aten::_scaled_dot_product_efficient_attention", text, (y, statistics, seed, offset), sequence=emit.sequence
    ):
        turned = tuple(transposed_pair(emit, each, 1, 2) for each in heads)
        flat = emit.view(y, (y.shape[0], y.shape[2], y.shape[1], y.shape[3]))
        mask = _CAUSAL_MASK if causal else _NO_MASK
        inner = (*turned, bias, None, None, None, None, dropout, mask, True, scale, None, None)
        result = (flat, statistics, seed, offset, y.shape[2], heads[1].shape[2])
        with emit.around("aten::_efficient_attention_forward", inner, result):
            for each in (seed, offset) if dropout else ():
                emit.op("aten::scalar_tensor", (0, 4, None, None, None), (each,))
            empty(emit, flat.shape, flat.dtype, made=flat)
            empty(emit, statistics.shape, "float32", made=statistics)
        _turned_into(emit, flat, y)
    saved, output = [tape.save(each) for each in heads], tape.save(y)
    kept = [tape.save(each) for each in (statistics, seed, offset)]

    def backward(gradients: Gradients) -> Gradients:
        taken = (given(gradients[0]), *(each() for each in saved)), emit.view(output()), [each() for each in kept]
        return _efficient_backward(emit, *taken, (bias, dropout, causal, scale))

    tape.record("ScaledDotProductEfficientAttentionBackward0", heads, (y,), backward)


def _efficient_backward(
    emit: GroupEmitter, taken: tuple[Tensor, ...], output: Tensor, kept: list[Tensor], how: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    bias, dropout, causal, scale = how
    results = tuple(emit.tensor(each.shape, each.dtype, strides=_by_token(each)) for each in taken[1:])
    text = (*taken, bias, output, *kept, dropout, (True, True, True, False), causal, scale)
    with emit.around("aten::_scaled_dot_product_efficient_attention_backward", text, (*results, None)):
        gradient, q, k, v, out = (transposed_pair(emit, each, 1, 2) for each in (*taken, output))
        flat = tuple(emit.view(each, (each.shape[0], each.shape[2], *each.shape[1:4:2])) for each in results)
        heads = (q.shape[2], k.shape[2])
        mask = _CAUSAL_MASK if causal else _NO_MASK
        rest = (None, None, *heads, kept[0], dropout, *kept[1:], mask, False, scale, None, None, False)
        with emit.around("aten::_efficient_attention_backward", (gradient, q, k, v, bias, out, *rest), (*flat, None)):
            for each in flat:
                empty(emit, each.shape, each.dtype, made=each)
            _row_sums(emit, gradient, out)
            _workspace(emit, k)
        for each, item in reversed(list(zip(flat, results, strict=True))):
            _turned_into(emit, each, item)
    return results


def _row_sums(emit: GroupEmitter, gradient: Tensor, out: Tensor) -> None:
    """The sum over each head's elements of gradient x output, which backward needs for every row of scores."""
    for each in (out, gradient):
        emit.op("aten::to", (each, DTYPE_NUMBERS["float32"], False, False, None), (each,))
    product = emit.tensor(gradient.shape, gradient.dtype)
    emit.op("aten::mul", (gradient, out), (product,))
    total = emit.tensor(gradient.shape[:3], gradient.dtype)
    with emit.around("aten::sum", (product, (-1,), False, None), (total,)):
        emit.as_strided(total, (*total.shape, 1), (*(total.strides or ()), 0))
    turned = emit.view(
        total, (total.shape[0], total.shape[2], total.shape[1]), (total.numel // total.shape[0], 1, total.shape[2])
    )
    with emit.around("aten::transpose", (total, -2, -1), (turned,)):
        emit.op("aten::as_strided", (total, turned.shape, turned.strides, None), (turned,))
    contiguous(emit, turned)


def _workspace(emit: GroupEmitter, keys: Tensor) -> None:
    batch, length, heads, width = keys.shape
    blocks = -(-length // _KEYS_PER_BLOCK)
    size = batch * heads * (4 * length * width + _BYTES_PER_BLOCK * blocks)
    zero(emit, empty(emit, (size,), "uint8"))


def scalar_tensor(emit: GroupEmitter, made: Tensor, value: Value, layout: int | None) -> None:
    """`torch.scalar_tensor` on the device."""
    text = (value, DTYPE_NUMBERS[made.dtype], layout, emit.device, None)
    with emit.around("aten::scalar_tensor", text, (made,)):
        empty(emit, (), made.dtype, layout=layout, made=made)
        emit.op("aten::fill_", (made, value), (made,))


def _expanded(emit: GroupEmitter, bias: Tensor | None) -> None:
    if bias is not None:
        wide = emit.view(bias)
        with emit.around("aten::expand", (bias, bias.shape, False), (wide,)):
            emit.op("aten::as_strided", (bias, bias.shape, bias.strides, None), (wide,))


def _reserved_like(emit: GroupEmitter, x: Tensor, made: Tensor) -> None:
    with emit.around("aten::empty_like", (x, None, None, None, None, None), (made,)):
        laid = (made.shape, made.strides, DTYPE_NUMBERS[made.dtype], 0, emit.device, None)
        emit.op("aten::empty_strided", laid, (made,))


def _turned_into(emit: GroupEmitter, x: Tensor, y: Tensor) -> None:
    with emit.around("aten::transpose", (x, 1, 2), (y,)):
        emit.op("aten::as_strided", (x, y.shape, y.strides, None), (y,))


def _by_token(x: Tensor) -> tuple[int, ...]:
    """Strides of a gradient: the heads of a token beside each other."""
    _, heads, length, width = x.shape
    return length * heads * width, width, heads * width, 1


FUSED: Mapping[str, Callable[..., None]] = {"cudnn": cudnn, "flash": flash, "efficient": efficient}
