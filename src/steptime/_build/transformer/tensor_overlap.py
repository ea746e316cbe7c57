"""Exchanges of tensor-parallel ranks inside products: async tensor parallelism in PyTorch, `tp_comm_overlap` in Megatron-LM.

A product over the tokens of all ranks goes rank by rank: while the tokens of one are multiplied, those of the next arrive. A
product whose result is summed over the ranks goes piece by piece: each piece is on its way to the rank that keeps it while the
next one is multiplied, and that rank adds up what it got (Wang et al., Overlap Communication with Dependent Computation via
Decomposition, ASPLOS 2023; `torch.distributed._symmetric_memory` does the same with copies between peers). In backward the
exchanges of a layer split by columns run beside the products of its weights without this, as Megatron-LM has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.products import Affine, Factor, LinearProducts, in_one_piece, rows_of
from steptime._build.emit.tape import Gradients, Tape
from steptime._build.emit.views import lowered
from steptime._build.emit.writer import TENSOR
from steptime._program.program import Tensor

_NAME = "MatmulReduceScatter"


def multiply_as_they_arrive(
    emit: Emitter, products: LinearProducts, part: Factor, layers: Sequence[tuple[Tensor, Tensor | None, Tensor]]
) -> None:
    """Layers (weight, bias, result) over the tokens of all ranks, of which this one has a part."""
    for turn, arrived in enumerate(_in_turn(emit, part.rows)):
        factor = products.gathered(part, rows_of(emit, arrived))
        count = factor.rows.shape[0]
        for weight, bias, y in layers:
            flat = emit.view(y, (count * emit.group_size(TENSOR), y.shape[-1]))
            products.forward(factor, weight, bias, emit.sliced(flat, 0, turn * count, (turn + 1) * count))


def scattered_linear(tape: Tape, x: Tensor, layer: Affine, products: LinearProducts | None = None) -> Tensor:
    """A layer split by rows and this rank's part of the sum over the ranks; the gradient of that part is gathered."""
    emit, products = tape.emit, products or LinearProducts(tape)
    x, weight = lowered(tape, x), lowered(tape, layer[0])
    bias = None if layer[1] is None else lowered(tape, layer[1])
    inputs, ways = (x, weight, bias), emit.group_size(TENSOR)
    part = (x.shape[0] // ways, *x.shape[1:-1], weight.shape[0])
    y = emit.tensor(part, x.dtype)
    with emit.write(_NAME, inputs, (y,), sequence=emit.sequence):
        factor = products.input(rows_of(emit, x))
        _summed_as_made(emit, products, factor, (weight, bias), y)
    saved = products.saved(factor)

    def backward(gradient: Tensor) -> Gradients:
        given = products.rows(in_one_piece(emit, gradient))
        whole = emit.empty_from_python((ways * given.rows.shape[0], *given.rows.shape[1:]), given.rows.dtype)
        of_x = emit.tensor((x.numel // x.shape[-1], x.shape[-1]), x.dtype) if tape.needs(x) else None
        for turn, arrived in enumerate(_in_turn(emit, given.rows, whole)):
            if of_x is not None:
                count = of_x.shape[0] // ways
                place = emit.sliced(of_x, 0, turn * count, (turn + 1) * count)
                products.of_input(products.gathered(given, rows_of(emit, arrived)), weight, result=place)
        rows = rows_of(emit, whole)
        of_weight = None
        if tape.needs(weight):
            of_weight = products.of_weight(products.gathered(given, rows, columns=True), saved, weight)
        of_bias = None if bias is None else emit.new("sum", (rows, (0,), False, None), bias.shape)
        return (None if of_x is None else emit.view(of_x, x.shape)), of_weight, of_bias

    return tape.node(f"{_NAME}Backward", inputs, y, backward)


def _in_turn(emit: Emitter, part: Tensor, whole: Tensor | None = None) -> Iterator[Tensor]:
    """The parts of all ranks, this one's first; the next is on its way while one is used. `whole` is where they stay."""
    held, ways = in_one_piece(emit, part), emit.group_size(TENSOR)
    if whole is not None:
        place = emit.view(whole, held.shape)
        emit.op("copy_", (place, held, False), (place,))
    for turn in range(ways - 1):
        if whole is None:
            received = emit.empty_from_python(held.shape, held.dtype)
        else:
            received = emit.view(whole, held.shape, offset=(turn + 1) * held.numel)
        number = emit.rotate(received, held, TENSOR)
        yield held
        emit.wait(number, TENSOR)
        held = received
    yield held


def _summed_as_made(emit: Emitter, products: LinearProducts, factor: Factor, layer: Affine, y: Tensor) -> None:
    """Products of the tokens of one rank after the other, each sent while the next is made; what arrives is added up."""
    ways, rows = emit.group_size(TENSOR), factor.rows
    count, width = rows.shape[0] // ways, layer[0].shape[0]
    buffer, numbers = emit.empty_from_python((ways, count, width), y.dtype), []
    for turn in range(ways):
        place = emit.view(buffer, (count, width), offset=turn * count * width)
        own = turn == ways - 1  # a rank's own piece is the last, and stays
        made = place if own else emit.tensor((count, width), y.dtype)
        products.forward(replace(factor, rows=emit.sliced(rows, 0, turn * count, (turn + 1) * count)), *layer, made)
        if not own:
            numbers.append(emit.rotate(place, made, TENSOR))
    for number in numbers:
        emit.wait(number, TENSOR)
    emit.op("sum", (buffer, (0,), False, None), (emit.view(y, (count, width)),))
