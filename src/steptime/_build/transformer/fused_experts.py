"""A layer's experts as Megatron-core and Transformer Engine run them: tokens are moved by kernels of their own.

Tokens are copied into the order of their experts by one kernel and added up by another, which reads every copy once; with
expert parallelism the scores travel beside the tokens, and pieces of tokens are sorted by expert after they came. Both halves
of a gated layer are one matrix, and scores weigh what the activation makes, in its kernel. Movements are written as the PyTorch
op that moves the same bytes: rows selected by index, and a sum over a token's copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.indexed import group_ends
from steptime._build.emit.products import LinearProducts, fused_grouped_linear
from steptime._build.emit.tape import Gradients, Tape
from steptime._build.emit.views import to_dtype
from steptime._program.program import Tensor

_PRODUCTS = "bfloat16"


def permute(tape: Tape, x: Tensor, rows: Tensor, copies: int) -> Tensor:
    """Every token's copies in the order of their experts; in backward a token's gradients are added up."""
    emit, name = tape.emit, "_moe_permute"
    with emit.write(name, (x, rows), (), sequence=emit.sequence):
        y = emit.new("index_select", (x, 0, rows), (rows.numel, *x.shape[1:]))
    return tape.node(f"{name}Backward", (x,), y, lambda gradient: _added_up(emit, gradient, copies))


def unpermute(tape: Tape, x: Tensor, rows: Tensor, copies: int) -> Tensor:
    """What experts made of a token's copies, added up; in backward every copy gets the token's gradient."""
    emit, name = tape.emit, "_moe_unpermute"
    with emit.write(name, (x, rows), (), sequence=emit.sequence):
        y = _added_up(emit, x, copies)
    return tape.node(f"{name}Backward", (x,), y, lambda gradient: emit.new("index_select", (gradient, 0, rows), x.shape))


def _added_up(emit: Emitter, x: Tensor, copies: int) -> Tensor:
    by_token = emit.viewed(x, (x.shape[0] // copies, copies, x.shape[1]))
    return emit.new("sum", (by_token, (1,), False, None), (by_token.shape[0], x.shape[1]))


def permute_rows(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """So many rows of these: copied for their experts, or a token's copies added up; in backward the other way."""
    emit, name = tape.emit, "moe_permute" if rows > x.shape[0] else "moe_unpermute"

    def moved(given: Tensor, count: int, name: str) -> Tensor:
        y = emit.tensor((count, given.shape[1]), given.dtype)
        emit.write(f"transformer_engine::{name}", (given, count), (y,), sequence=emit.sequence)
        return y

    other = {"moe_permute": "moe_unpermute", "moe_unpermute": "moe_permute"}[name]
    return tape.node(f"{name}Backward", (x,), moved(x, rows, name), lambda gradient: moved(gradient, x.shape[0], other))


def spread(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """Rows as an exchange of tokens reads or writes them, one for every rank that a token goes to: nothing is moved for it."""
    emit = tape.emit
    y = emit.view(x, (rows, x.shape[1]), (x.shape[1], 1))
    return tape.node("ExchangedBackward", (x,), y, lambda gradient: emit.view(gradient, x.shape, (x.shape[1], 1)))


def sort_chunks(tape: Tape, x: Tensor) -> Tensor:
    """Pieces of rows in another order, and back in backward."""
    emit, name = tape.emit, "_moe_chunk_sort"

    def moved(rows: Tensor) -> Tensor:
        return emit.new("clone", (rows, 0), rows.shape)

    with emit.write(name, (x,), (), sequence=emit.sequence):
        y = moved(x)
    return tape.node(f"{name}Backward", (x,), y, moved)


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The experts' two layers, and how they multiply."""

    products: LinearProducts
    up: Tensor  # [experts here, inner, width], of both halves where it is gated
    down: Tensor  # [experts here, width, inner]
    gated: bool

    def of(self, tape: Tape, x: Tensor, counts: Tensor, factors: Tensor) -> Tensor:
        """Over tokens sorted by expert, weighted by the router's scores."""
        ends, (up, down) = group_ends(tape.emit, counts), (to_dtype(tape, each, _PRODUCTS) for each in (self.up, self.down))
        inner = fused_grouped_linear(tape, self.products, to_dtype(tape, x, _PRODUCTS), up, ends)
        curved = _weighted_activation(tape, inner, factors, gated=self.gated)
        return to_dtype(tape, fused_grouped_linear(tape, self.products, curved, down, ends), x.dtype)


def _weighted_activation(tape: Tape, x: Tensor, factors: Tensor, *, gated: bool) -> Tensor:
    """SwiGLU or GELU of every row times its score, in one kernel each way."""
    emit, name = tape.emit, "swiglu" if gated else "gelu"
    y, saved = emit.tensor((x.shape[0], x.shape[1] // (2 if gated else 1)), x.dtype), tape.save(x)
    emit.write(f"transformer_engine::{name}", (x,), (y,), sequence=emit.sequence)

    def backward(gradient: Tensor) -> Gradients:
        result = emit.tensor(x.shape, x.dtype)
        emit.write(f"transformer_engine::d{name}", (gradient, saved()), (result,))
        return result, emit.tensor(factors.shape, factors.dtype)

    return tape.node("WeightedActivationBackward", (x, factors), y, backward)
