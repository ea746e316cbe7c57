"""Layers as Transformer Engine and Megatron-core run them: a kernel where PyTorch has several, and a node of autograd for it.

Norms, rotary positions, activations, dropout with the residual, and cross entropy, which writes its gradient
over the scores already in forward. Ops have the names of Transformer Engine's library.
"""

from __future__ import annotations

from steptime._build.emit.emitter import Emitter, compact_strides
from steptime._build.emit.tape import Gradients, Tape
from steptime._build.emit.writer import TENSOR
from steptime._program.program import Tensor, Value

_ENGINE = "transformer_engine::"


def _op(emit: Emitter, name: str, inputs: tuple[Value, ...], outputs: tuple[Value, ...], *, node: bool = False) -> None:
    emit.write(_ENGINE + name, inputs, outputs, sequence=emit.sequence if node else -1)


def norm(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """RMS norm, or layer norm where there is a bias; one pass over the rows each way."""
    emit, name = tape.emit, "rmsnorm" if bias is None else "layernorm"
    affine = (weight,) if bias is None else (weight, bias)
    y, statistics = emit.tensor(x.shape, x.dtype), tuple(emit.tensor((x.numel // x.shape[-1],)) for _ in affine)
    saved_x = tape.save(x)
    _op(emit, f"{name}_fwd", (x, *affine, 1e-5), (y, *statistics), node=True)
    saved = [tape.save(each) for each in statistics]

    def backward(gradient: Tensor) -> Gradients:
        results = emit.tensor(x.shape, x.dtype), *(emit.tensor(each.shape, each.dtype) for each in affine)
        _op(emit, f"{name}_bwd", (gradient, saved_x(), *(each() for each in saved), weight), results)
        return results

    return tape.node(f"{name}Backward", (x, *affine), y, backward)


def rotary(tape: Tape, x: Tensor, angles: Tensor) -> Tensor:
    """Heads turned by their positions."""
    emit = tape.emit
    y = emit.tensor(x.shape, x.dtype, strides=compact_strides(x))
    _op(emit, "fused_rope_forward", (x, angles), (y,), node=True)

    def backward(gradient: Tensor) -> Tensor:
        result = emit.tensor(x.shape, x.dtype, strides=compact_strides(gradient))
        _op(emit, "fused_rope_backward", (gradient, angles), (result,))
        return result

    return tape.node("FusedRoPEFuncBackward", (x,), y, backward)


def turned_end(tape: Tape, x: Tensor, angles: Tensor) -> Tensor:
    """Heads whose last elements, as many as angles have, are turned in place."""
    emit, last = tape.emit, len(x.shape) - 1

    def turned(name: str, heads: Tensor) -> Tensor:
        end = emit.sliced(heads, last, heads.shape[-1] - angles.shape[-1], heads.shape[-1])
        _op(emit, f"fused_rope_{name}", (end, angles), (end,))
        return emit.view(heads)

    y = turned("forward", x)
    return tape.node("FusedMLARoPEQBackward", (x,), y, lambda gradient: turned("backward", gradient))


def keys_and_values(tape: Tape, x: Tensor, key: Tensor, angles: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Of heads with the still part of a key before a value: whole keys, whose end is the one turned for all, and the values."""
    emit = tape.emit
    keys = emit.tensor((*x.shape[:-1], x.shape[-1] - width + key.shape[-1]), x.dtype)
    values = emit.tensor((*x.shape[:-1], width), x.dtype)
    _op(emit, "mla_rope_kv_forward", (x, key, angles), (keys, values), node=True)

    def backward(gradients: Gradients) -> Gradients:
        results = emit.tensor(x.shape, x.dtype), emit.tensor(key.shape, key.dtype)
        _op(emit, "mla_rope_kv_backward", (*gradients, angles), results)
        return results

    tape.record("FusedMLARoPEKVBackward", (x, key), (keys, values), backward)
    return keys, values


def swiglu(tape: Tape, x: Tensor) -> Tensor:
    """The first half of every row, through SiLU, times the second."""
    emit = tape.emit
    y, saved = emit.tensor((*x.shape[:-1], x.shape[-1] // 2), x.dtype), tape.save(x)
    _op(emit, "swiglu", (x,), (y,), node=True)

    def backward(gradient: Tensor) -> Tensor:
        result = emit.tensor(x.shape, x.dtype)
        _op(emit, "dswiglu", (gradient, saved()), (result,))
        return result

    return tape.node("SwiGLUFunctionBackward", (x,), y, backward)


def gelu(tape: Tape, x: Tensor) -> Tensor:
    """GELU; where a layer has a bias, its product adds it."""
    emit = tape.emit
    y, saved = emit.tensor(x.shape, x.dtype), tape.save(x)
    _op(emit, "gelu", (x,), (y,), node=True)

    def backward(gradient: Tensor) -> Tensor:
        result = emit.tensor(x.shape, x.dtype)
        _op(emit, "dgelu", (gradient, saved()), (result,))
        return result

    return tape.node("GeLUFunctionBackward", (x,), y, backward)


def dropout_add(tape: Tape, x: Tensor, residual: Tensor, probability: float) -> Tensor:
    """`residual + dropout(x)`."""
    emit = tape.emit
    y = emit.tensor(x.shape, x.dtype)
    mask = emit.tensor(x.shape, "bool") if probability else None
    _op(emit, "dropout_add", (x, residual, probability), (y,) if mask is None else (y, mask), node=True)
    saved = None if mask is None else tape.save(mask)

    def backward(gradient: Tensor) -> Gradients:
        if saved is None:
            return gradient, gradient
        result = emit.tensor(x.shape, x.dtype)
        _op(emit, "dropout_bwd", (gradient, saved()), (result,))
        return result, gradient

    return tape.node("DropoutAddBackward", (x, residual), y, backward)


def cross_entropy(tape: Tape, scores: Tensor, labels: Tensor) -> Tensor:
    """The mean over rows, of a vocabulary that may be split: largest score and sum of every row go over the ranks at once."""
    emit, (rows, _) = tape.emit, scores.shape
    sums, losses, loss = emit.tensor((rows, 3)), emit.tensor((rows,)), emit.tensor(())
    with emit.write("CrossEntropyFunction", (scores, labels), (loss,), sequence=emit.sequence):
        _op(emit, "online_softmax", (scores, labels), (sums,))
        ways = emit.group_size(TENSOR)
        if ways > 1:
            whole = emit.empty_from_python((ways * rows, 3), sums.dtype)
            emit.wait(emit.all_gather(whole, sums, TENSOR), TENSOR)
            sums = whole
        _op(emit, "cross_entropy", (scores, labels, sums), (losses, scores))
        emit.op("mean", (losses, None), (loss,))

    def backward(gradient: Tensor) -> Tensor:
        _op(emit, "element_mul", (scores, gradient), (scores,))
        return scores

    return tape.node("CrossEntropyFunctionBackward", (scores,), loss, backward)
