"""Matrices split among tensor-parallel ranks, as in Megatron-LM, with and without sequence parallelism.

A layer's first matrix is split by columns and its second by rows, so that a layer's half needs one all_reduce of its output in
forward and one of its input's gradient in backward (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3).

With sequence parallelism the ranks share the tokens between the split matrices (Korthikanti et al., arXiv 2205.05198, section
4.2): an all_reduce becomes the reduce_scatter of an output and the all_gather of the next input. Ranks keep their part of an
input alone and gather it again in backward, beside the product that gives its gradient; its reduce_scatter is beside the
product that gives the weight's. Activations lie as [sequence, batch, width]: parts are whole pieces of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.layers import embedding
from steptime._build.emit.losses import places_in_part
from steptime._build.emit.products import Affine, Factor, LinearProducts, SavedFactor, in_one_piece, rows_of
from steptime._build.emit.tape import Gradients, Tape
from steptime._build.emit.views import lowered
from steptime._build.emit.writer import TENSOR
from steptime._build.transformer.tensor_overlap import multiply_as_they_arrive
from steptime._program.program import Tensor


def enter(tape: Tape, x: Tensor) -> Tensor:
    """What goes into a layer split by columns: itself, and the sum of its gradients in backward."""
    emit = tape.emit
    if emit.group_size(TENSOR) == 1:
        return x
    y = emit.view(x)
    with emit.write("_CopyToModelParallelRegion", (x,), (y,), sequence=emit.sequence):
        emit.op("view_as", (x, x), (y,))

    def backward(gradient: Tensor) -> Tensor:
        gradient = in_one_piece(emit, gradient)
        emit.wait(emit.all_reduce((gradient,), TENSOR, asynchronous=False), TENSOR)
        return gradient

    return tape.node("_CopyToModelParallelRegionBackward", (x,), y, backward)


def leave(tape: Tape, x: Tensor, *, sequence: bool) -> Tensor:
    """What comes out of a layer split by rows, summed over the ranks; with sequence parallelism each gets a part of it."""
    emit = tape.emit
    if emit.group_size(TENSOR) == 1:
        return x
    if sequence:
        return _reduced_part(tape, x)
    y = emit.view(x)
    with emit.write("_ReduceFromModelParallelRegion", (x,), (y,), sequence=emit.sequence):
        emit.wait(emit.all_reduce((x,), TENSOR, asynchronous=False), TENSOR)
    return tape.node("_ReduceFromModelParallelRegionBackward", (x,), y, lambda gradient: gradient)


def split_embedding(tape: Tape, weight: Tensor, ids: Tensor) -> Tensor:
    """Megatron-LM's `VocabParallelEmbedding` before ranks sum: rows that another rank holds come out as zeros."""
    emit = tape.emit
    places, hidden = places_in_part(emit, ids, weight.shape[0])
    x = embedding(tape, weight, places)
    y = emit.view(x)
    column = emit.view(hidden, (*ids.shape, 1))
    emit.op("masked_fill_", (x, column, 0.0), (y,), node=True)
    return tape.node("MaskedFillBackward0", (x,), y, lambda gradient: emit.new("masked_fill", (gradient, column, 0)))


# Sequence parallelism


def sum_over_ranks(emit: Emitter, gradients: Sequence[Tensor]) -> None:
    """Gradients of what every rank has and uses for its own tokens alone: norms, and biases of layers split by rows.

    One all_reduce when the backward passes are over, as in Megatron-LM (`_allreduce_layernorm_grads`).
    """
    flat = emit.tensor((sum(each.numel for each in gradients),), gradients[0].dtype)
    with emit.op("flatten_dense_tensors", (tuple(gradients),), (flat,)):
        emit.op("cat", (tuple(emit.view(each, (each.numel,)) for each in gradients), 0), (flat,))
    emit.wait(emit.all_reduce((flat,), TENSOR, asynchronous=False), TENSOR)
    starts = accumulate((each.numel for each in gradients), initial=0)
    sums = tuple(emit.view(flat, each.shape, offset=at) for each, at in zip(gradients, starts, strict=False))
    emit.op("unflatten_dense_tensors", (flat, tuple(gradients)), (sums,))
    for gradient, total in zip(gradients, sums, strict=True):
        emit.op("copy_", (gradient, total, False), (gradient,))


def own_part(tape: Tape, x: Tensor) -> Tensor:
    """This rank's tokens of what all ranks have; their gradients are gathered."""
    emit = tape.emit
    y = emit.tensor(_part(emit, x), x.dtype)
    with emit.write("_ScatterToSequenceParallelRegion", (x,), (y,), sequence=emit.sequence):
        emit.cloned(emit.sliced(x, 0, 0, y.shape[0]), y)
    return tape.node("_ScatterToSequenceParallelRegionBackward", (x,), y, lambda gradient: _gathered(emit, gradient))


def gathered_tokens(tape: Tape, x: Tensor) -> Tensor:
    """The tokens of all ranks, of which this one has a part; their gradients are summed and each rank gets its part."""
    emit = tape.emit
    with emit.write("_GatherFromSequenceParallelRegion", (x,), (), sequence=emit.sequence):
        y = _gathered(emit, x)

    def backward(gradient: Tensor) -> Tensor:
        result = emit.empty_from_python(x.shape, x.dtype)
        emit.wait(emit.reduce_scatter(result, in_one_piece(emit, gradient), TENSOR), TENSOR)
        return result

    return tape.node("_GatherFromSequenceParallelRegionBackward", (x,), y, backward)


def gathered_linears(
    tape: Tape, x: Tensor, layers: Sequence[Affine], products: LinearProducts | None = None, *, overlapped: bool = False
) -> tuple[Tensor, ...]:
    """Layers split by columns over the tokens of all ranks, of which this one has a part: Megatron-LM's linear layer.

    Where products are of fewer bits, so are the tokens that ranks gather and keep. With `overlapped` tokens are multiplied as
    they arrive.
    """
    emit, name = tape.emit, "LinearWithGradAccumulationAndAsyncCommunication"
    products = products or LinearProducts(tape)
    x, weights = lowered(tape, x), [lowered(tape, weight) for weight, _ in layers]
    biases = [None if bias is None else lowered(tape, bias) for _, bias in layers]
    tokens = (x.shape[0] * emit.group_size(TENSOR), *x.shape[1:-1])
    results = tuple(emit.tensor((*tokens, weight.shape[0]), x.dtype) for weight in weights)
    with emit.write(name, (x, *weights, *biases), results, sequence=emit.sequence):
        part, made = products.rows(x), tuple(zip(weights, biases, results, strict=True))
        if overlapped:
            multiply_as_they_arrive(emit, products, part, made)
        else:
            rows = products.gathered(part, rows_of(emit, _gathered(emit, part.rows)))
            for weight, bias, y in made:
                products.forward(rows, weight, bias, emit.view(y, (rows.rows.shape[0], y.shape[-1])))
    inputs, saved = (x, *weights, *biases), tape.save(part.rows)

    def backward(gradients: Gradients) -> Gradients:
        given = [rows_of(emit, gradient) for gradient in gradients if gradient is not None]
        return _of_gathered(tape, products, replace(part, rows=saved()), inputs, given)

    tape.record(f"{name}Backward", inputs, results, backward)
    return results


def _of_gathered(
    tape: Tape, products: LinearProducts, part: Factor, inputs: Sequence[Tensor | None], given: Sequence[Tensor]
) -> Gradients:
    """Gradients of a part of the tokens, of weights and of biases, from those of all tokens."""
    emit, weights, biases = tape.emit, inputs[1 : 1 + len(given)], inputs[1 + len(given) :]
    x, learnt = inputs[0], [weight is not None and tape.needs(weight) for weight in weights]
    assert x is not None
    factors = [products.gradient(each) for each in given]
    whole, gather = _asked(emit, part.rows) if any(learnt) else (part.rows, None)
    of_tokens = _summed_products(emit, products, factors, [weight for weight in weights if weight is not None])
    if gather is not None:
        emit.wait(gather, TENSOR)
    of_x = emit.empty_from_python(x.shape, x.dtype)
    scatter = emit.reduce_scatter(of_x, emit.viewed(of_tokens, (*whole.shape[:-1], x.shape[-1])), TENSOR)
    tokens = products.gathered(part, rows_of(emit, whole), columns=True)
    of_weights = [
        products.of_weight(factor, SavedFactor.there(tokens), weight) if wanted and weight is not None else None
        for factor, weight, wanted in zip(factors, weights, learnt, strict=True)
    ]
    of_biases = [
        None if bias is None or not tape.needs(bias) else emit.new("sum", (each, (0,), False, None), bias.shape)
        for each, bias in zip(given, biases, strict=True)
    ]
    emit.wait(scatter, TENSOR)
    return (of_x, *of_weights, *of_biases)


def _summed_products(emit: Emitter, products: LinearProducts, given: Sequence[Factor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of what went into all of the layers."""
    results = [products.of_input(each, weight) for each, weight in zip(given, weights, strict=True)]
    for other in results[1:]:
        emit.op("add_", (results[0], other, 1), (results[0],))
    return results[0]


def _reduced_part(tape: Tape, x: Tensor) -> Tensor:
    """This rank's tokens of the sum over the ranks; their gradients are gathered."""
    emit = tape.emit
    y = emit.tensor(_part(emit, x), x.dtype)
    with emit.write("_ReduceScatterToSequenceParallelRegion", (x,), (y,), sequence=emit.sequence):
        emit.empty(y, layout=None, pinned=False)
        emit.wait(emit.reduce_scatter(y, x, TENSOR), TENSOR)
    return tape.node("_ReduceScatterToSequenceParallelRegionBackward", (x,), y, lambda gradient: _gathered(emit, gradient))


def _part(emit: Emitter, x: Tensor) -> tuple[int, ...]:
    return (x.shape[0] // emit.group_size(TENSOR), *x.shape[1:])


def _asked(emit: Emitter, part: Tensor) -> tuple[Tensor, int]:
    """The tokens of all ranks, which are on their way, and the number of what brings them."""
    part = in_one_piece(emit, part)
    whole = emit.empty_from_python((part.shape[0] * emit.group_size(TENSOR), *part.shape[1:]), part.dtype)
    return whole, emit.all_gather(whole, part, TENSOR)


def _gathered(emit: Emitter, part: Tensor) -> Tensor:
    whole, number = _asked(emit, part)
    emit.wait(number, TENSOR)
    return whole
