"""A layer's experts as torchtitan and Megatron-LM run them: a router, tokens sorted by expert, products of groups, tokens back.

Every token is copied once for each of its experts, weighted by the router's score, and brought into the order of the experts;
with expert parallelism ranks exchange how many tokens they have for each other (the host reads that, for it says how much to
send), then the tokens, which are sorted by expert once more; what the experts make goes back the same way and is added up. The
products are bfloat16 whatever the weights are.

Which tokens go where is not known: every expert is given as many, on a rank that has `imbalance` times the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.indexed import (
    add_rows,
    counted,
    group_ends,
    grouped_product,
    select_rows,
    shares_of_rows,
    softmax,
    sorted_places,
    topk,
)
from steptime._build.emit.layers import activation, curved, linear, mul
from steptime._build.emit.products import LinearProducts
from steptime._build.emit.tape import Tape
from steptime._build.emit.views import reshape, to_dtype, transpose, view
from steptime._build.emit.writer import EXPERT
from steptime._build.transformer import fused_experts
from steptime._build.transformer.capacity import batched, capacity_of, places
from steptime._build.transformer.parts import FUSED, Experts
from steptime._program.program import Tensor

_PRODUCTS, _SCORES = "bfloat16", "float32"


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The router, and of every expert of this rank a matrix."""

    router: Tensor  # [experts, width]
    gate: Tensor | None  # [experts here, inner, width]
    up: Tensor
    down: Tensor  # [experts here, width, inner]
    gated: bool = True
    activation: str = "gelu"  # where it is not gated


def routed(
    tape: Tape,
    x: Tensor,
    weights: ExpertWeights,
    config: Experts,
    products: LinearProducts | None = None,
    *,
    beside: bool = False,
) -> Tensor:
    """What the chosen experts make of tokens, in the shape of these.

    With `products` as Megatron-core runs them; then `up` holds the gate too. `beside`: tokens travel beside another pass.
    """
    emit, shape = tape.emit, x.shape
    x = view(tape, x, (x.numel // shape[-1], shape[-1]), (-1, shape[-1]))
    top, chosen = _scored(tape, x, weights.router, config)
    flat = emit.viewed(chosen, (chosen.numel,), (-1,))
    counts = counted(emit, flat, config.count)
    order = sorted_places(emit, flat)
    if config.capacity:
        order = places(emit, order, counts, capacity_of(order.numel, config.count, config.capacity))
    factors = select_rows(tape, view(tape, top, (top.numel,), (-1,)), order)
    rows = emit.new("floor_divide", (order, config.top_k))
    if products is not None:
        y = _made_fused(tape, x, rows, _Routing(counts, factors, weights, config, beside), products)
    else:
        y = _made(tape, x, rows, _Routing(counts, factors, weights, config))
    return view(tape, y, shape)


@dataclass(frozen=True, slots=True)
class _Routing:
    """Which tokens go where."""

    counts: Tensor  # of the copies for every expert
    factors: Tensor  # how much each copy weighs
    weights: ExpertWeights
    config: Experts
    beside: bool = False  # another pass, tokens travel


def _made(tape: Tape, x: Tensor, rows: Tensor, routing: _Routing) -> Tensor:
    copies = _weighted(tape, select_rows(tape, x, rows), routing.factors)
    if routing.config.capacity:
        made = _with_capacity(tape, copies, routing.weights)
    elif tape.emit.group_size(EXPERT) > 1:
        made = _exchanged(tape, copies, routing)
    else:
        made = _products(tape, copies, routing.weights, routing.counts)
    return add_rows(tape, made, rows, x.shape[0])


def _with_capacity(tape: Tape, copies: Tensor, weights: ExpertWeights) -> Tensor:
    matrices, ways = (weights.gate, weights.up, weights.down), tape.emit.group_size(EXPERT)
    if ways == 1:
        return batched(tape, copies, matrices, ways, weights.activation)
    pieces = _even(copies.shape[0], ways)
    made = batched(tape, _all_to_all(tape, copies, pieces, pieces), matrices, ways, weights.activation)
    return _all_to_all(tape, made, pieces, pieces)


def _made_fused(tape: Tape, x: Tensor, rows: Tensor, routing: _Routing, products: LinearProducts) -> Tensor:
    weights, top_k = routing.weights, routing.config.top_k
    ways, several = tape.emit.group_size(EXPERT), routing.config.count > tape.emit.group_size(EXPERT)
    experts = fused_experts.FusedExperts(products, weights.up, weights.down, weights.gated)
    if ways > 1 and routing.config.exchange == FUSED:
        return _made_once(tape, x, routing, experts)
    copies, factors, counts = fused_experts.permute(tape, x, rows, top_k), routing.factors, routing.counts
    if ways == 1:
        made = experts.of(tape, copies, counts, factors)
        return fused_experts.unpermute(tape, made, rows, top_k)
    here, (to_ranks, from_ranks) = _counts_exchanged(tape.emit, counts, ways), _splits(copies.shape[0], ways, routing.config)
    column = view(tape, factors, (factors.numel, 1))
    beside = routing.beside
    scores = _all_to_all(tape, column, to_ranks, from_ranks) if beside else None  # before the tokens, which are not waited for
    arrived = _all_to_all(tape, copies, to_ranks, from_ranks, beside=beside)
    scores = _all_to_all(tape, column, to_ranks, from_ranks) if scores is None else scores
    if several:
        arrived, scores = fused_experts.sort_chunks(tape, arrived), fused_experts.sort_chunks(tape, scores)
    made = experts.of(tape, arrived, here, scores)
    made = fused_experts.sort_chunks(tape, made) if several else made
    return fused_experts.unpermute(tape, _all_to_all(tape, made, from_ranks, to_ranks, beside=beside), rows, top_k)


def _made_once(tape: Tape, x: Tensor, routing: _Routing, experts: fused_experts.FusedExperts) -> Tensor:
    """As DeepEP and HybridEP exchange: a token goes to a rank once and is copied there for its experts; back comes their sum.

    All ranks see the choices of all, of which the host reads how many rows will come. The sum over ranks is a part of the
    exchange.
    """
    emit, config, (tokens, _) = tape.emit, routing.config, x.shape
    ways, copies = emit.group_size(EXPERT), tokens * config.top_k
    choices = emit.tensor((ways * tokens, config.count), "bool")
    emit.wait(emit.all_gather(choices, emit.tensor((tokens, config.count), "bool"), EXPERT), EXPERT)
    here = emit.new("sum", (choices, (0,), False, None), (config.count,), "int64")
    here = emit.viewed(emit.sliced(here, 0, 0, config.count // ways), (config.count // ways,))
    emit.read_back(here)
    sent = round(tokens * config.ranks_of_token(ways))
    (to_ranks, from_ranks), (_, arriving) = _splits(sent, ways, config), _splits(copies, ways, config)
    arrived = _all_to_all(tape, fused_experts.spread(tape, x, sent), to_ranks, from_ranks, beside=routing.beside)
    factors = select_rows(tape, routing.factors, emit.arange(sum(arriving)))
    made = experts.of(tape, fused_experts.permute_rows(tape, arrived, sum(arriving)), here, factors)
    summed = fused_experts.permute_rows(tape, made, sum(from_ranks))
    back = _all_to_all(tape, summed, from_ranks, to_ranks, beside=routing.beside)
    return fused_experts.spread(tape, back, tokens)


def _scored(tape: Tape, x: Tensor, router: Tensor, config: Experts) -> tuple[Tensor, Tensor]:
    """The scores of every token's experts, which add up to one, and which experts they are."""
    scores = to_dtype(tape, linear(tape, x, router), _SCORES)
    scores = softmax(tape, scores) if config.scores == "softmax" else activation(tape, "sigmoid", scores)
    top, chosen = topk(tape, scores, config.top_k)
    return shares_of_rows(tape, top), chosen


def _weighted(tape: Tape, copies: Tensor, factors: Tensor) -> Tensor:
    wide = to_dtype(tape, copies, _SCORES)
    return to_dtype(tape, mul(tape, wide, reshape(tape, factors, (factors.numel, 1), (-1, 1))), copies.dtype)


def _products(tape: Tape, x: Tensor, weights: ExpertWeights, counts: Tensor) -> Tensor:
    """The experts' two layers, gated or not, over tokens sorted by expert."""
    ends = group_ends(tape.emit, counts)
    low = to_dtype(tape, x, _PRODUCTS)

    def applied(rows: Tensor, weight: Tensor) -> Tensor:
        return grouped_product(tape, rows, transpose(tape, to_dtype(tape, weight, _PRODUCTS), 1, 2), ends)

    if weights.gate is None:
        inner = curved(tape, weights.activation, applied(low, weights.up))
    else:
        inner = mul(tape, activation(tape, "silu", applied(low, weights.gate)), applied(low, weights.up))
    return to_dtype(tape, applied(inner, weights.down), x.dtype)


# Expert parallelism


def _exchanged(tape: Tape, copies: Tensor, routing: _Routing) -> Tensor:
    """Tokens to the ranks of their experts, what those make of them, and the way back."""
    emit, ways, weights = tape.emit, tape.emit.group_size(EXPERT), routing.weights
    here = _counts_exchanged(emit, routing.counts, ways)
    to_ranks, from_ranks = _splits(copies.shape[0], ways, routing.config)
    arrived = _all_to_all(tape, copies, to_ranks, from_ranks)
    if routing.config.count == ways:  # one expert: what arrives is in order
        made = _products(tape, arrived, weights, here)
    else:
        group_ends(emit, routing.counts)
        by_expert = emit.arange(sum(from_ranks))  # for the kernel that fills the index, from where the groups end
        made = _products(tape, select_rows(tape, arrived, by_expert), weights, here)
        made = add_rows(tape, made, by_expert, sum(from_ranks))
    return _all_to_all(tape, made, from_ranks, to_ranks)


def _counts_exchanged(emit: Emitter, counts: Tensor, ways: int) -> Tensor:
    """How many tokens come for each expert here from each rank; the host waits for it."""
    arriving = emit.tensor(counts.shape, counts.dtype)
    each = (counts.numel // ways,) * ways
    emit.wait(emit.all_to_all(arriving, counts, each, each, group=EXPERT), EXPERT)
    for table in (counts, arriving):
        by_rank = emit.viewed(table, (ways, table.numel // ways), (ways, -1))
        emit.read_back(emit.new("sum", (by_rank, (1,), False, None), (ways,)))
    by_rank = emit.viewed(arriving, (ways, arriving.numel // ways), (ways, -1))
    return emit.new("sum", (by_rank, (0,), False, None), (arriving.numel // ways,))


def _all_to_all(tape: Tape, x: Tensor, sent: tuple[int, ...], received: tuple[int, ...], *, beside: bool = False) -> Tensor:
    """So many rows to every rank, and so many from it; in backward their gradients the other way.

    With `beside` the section ends here, and the exchange is waited for before the next one: what runs between is another pass.
    """
    emit = tape.emit

    def moved(rows: Tensor, away: tuple[int, ...], here: tuple[int, ...]) -> Tensor:
        result = emit.empty_from_python((sum(here), rows.shape[1]), rows.dtype)
        if beside:
            emit.land()
        number = emit.all_to_all(result, rows, here, away, group=EXPERT)
        if beside:
            emit.fly(number, EXPERT)
        else:
            emit.wait(number, EXPERT)
        return result

    with emit.write("_AllToAll", (x,), (), sequence=emit.sequence):
        y = moved(x, sent, received)
    return tape.node("_AllToAllBackward", (x,), y, lambda gradient: moved(gradient, received, sent))


def _splits(count: int, ways: int, config: Experts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows that go to every rank and that come from it."""
    received = round(count * min(config.imbalance, ways))
    return _busiest_first(count, received, ways), _even(received, ways)


def _busiest_first(count: int, received: int, ways: int) -> tuple[int, ...]:
    """Rows to every rank where the first, this program's, gets so many from all of them together."""
    first = min(received // ways, count)
    return first, *_even(count - first, ways - 1)


def _even(count: int, parts: int) -> tuple[int, ...]:
    return tuple(count * (number + 1) // parts - count * number // parts for number in range(parts))
