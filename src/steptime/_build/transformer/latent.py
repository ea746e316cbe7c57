"""Attention over latent keys and values (multi-head latent attention), as the published code of DeepSeek-V3 computes it.

A narrow layer makes what keys and values of all heads are made of, and one key that carries the positions for all of them; a
second layer makes a head's keys and values. Queries may come the same way. Tensor parallelism splits the second layers.
With `fused_rope` kernels of Megatron-core turn queries in place and write whole keys and values at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from steptime._build.emit.layers import linear
from steptime._build.emit.tape import Tape
from steptime._build.emit.views import cat_last, expand, split_last, transpose, view
from steptime._build.transformer.fused import keys_and_values, turned_end
from steptime._build.transformer.parts import LatentAttention
from steptime._program.program import Tensor


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The parameters of one layer; queries that come directly have one matrix."""

    query_down: Tensor | None
    query_norm: Tensor | None
    query_up: Tensor
    down: Tensor  # of what keys and values are made of, and of the key that is turned
    norm: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class Surroundings:
    """How a model runs what these layers are made of."""

    by_columns: Callable[[Tensor, Tensor], Tensor]  # a layer split among tensor-parallel ranks
    for_all: Callable[[Tensor], Tensor]  # what all tensor-parallel ranks use for their own heads
    turned: Callable[[Tensor], Tensor]  # by positions
    normed: Callable[[Tensor, Tensor], Tensor]  # by a weight
    sequence_first: bool
    angles: Callable[[Tensor], Tensor] | None = None  # of positions, where kernels turn and join


def latent_heads(
    tape: Tape, x: Tensor, weights: LatentWeights, widths: LatentAttention, around: Surroundings
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by heads."""
    joins = around.angles is not None
    q = _heads(tape, _queries(tape, x, weights, around), widths.nope + widths.rope, around)
    parts = () if joins else split_last(tape, q, (widths.nope, widths.rope))
    both, key = split_last(tape, linear(tape, x, weights.down), (widths.kv_rank, widths.rope))
    made = _heads(tape, around.by_columns(around.normed(both, weights.norm), weights.up), widths.nope + widths.value, around)
    parts += () if joins else split_last(tape, made, (widths.nope, widths.value))
    by_heads, key = 2 if around.sequence_first else 1, around.for_all(key)
    moving_key = view(tape, key, (*key.shape[:by_heads], 1, *key.shape[by_heads:]))
    if around.angles is not None:
        angles = around.angles(moving_key)
        return turned_end(tape, q, angles), *keys_and_values(tape, made, moving_key, angles, widths.value)
    still, moving, still_key, value = parts
    moving, moving_key = around.turned(moving), around.turned(moving_key)
    spread = expand(tape, moving_key, (*still_key.shape[:3], widths.rope))
    return cat_last(tape, (still, moving)), cat_last(tape, (still_key, spread)), value


def _queries(tape: Tape, x: Tensor, weights: LatentWeights, around: Surroundings) -> Tensor:
    if weights.query_down is None or weights.query_norm is None:
        return around.by_columns(x, weights.query_up)
    return around.by_columns(around.normed(linear(tape, x, weights.query_down), weights.query_norm), weights.query_up)


def _heads(tape: Tape, x: Tensor, width: int, around: Surroundings) -> Tensor:
    result = view(tape, x, (*x.shape[:2], x.shape[2] // width, width), (*x.shape[:2], -1, width))
    return result if around.sequence_first else transpose(tape, result, 1, 2)
