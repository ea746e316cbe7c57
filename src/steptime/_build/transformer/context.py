"""Attention over sequences that several ranks share: in rounds, as PyTorch's `context_parallel`, or by an exchange of heads.

In rounds (Liu et al., Ring Attention, arXiv 2310.01889) every rank computes its queries' attention to the keys and values of
one rank after the other, which come beside it: a rank sends on what it had ("ring"), or all have gathered all before the second
round ("all_gather", PyTorch's default). Results of rounds are put together in fp32 by their rows' statistics. In backward keys
and values come once more, and their gradients travel with them in fp32, always from rank to rank. A sequence under a causal
mask is cut into twice as many pieces as there are ranks, of which a rank has one from the front and one from the back: then
every round but the first is half of the products on every rank. A rank leaves out half of its queries, or half of a round's
keys; the program is that of the first rank, which leaves out queries in all rounds.

Fused layers do it as Transformer Engine (`AttnFuncWithCPAndKVP2P`): a buffer of keys and values goes round as it is, results
and gradients are added up in their own precision, and a round's result in one kernel.

By an exchange of heads (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509), "all_to_all": before attention a rank gives away
the other ranks' heads of its tokens and gets all tokens of its own heads, and back after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.emit.emitter import Emitter, compact_strides
from steptime._build.emit.tape import Gradients, Saved, Tape
from steptime._build.emit.views import contiguous_copy, permute, reshape, view
from steptime._build.emit.writer import CONTEXT, contiguous_strides, is_contiguous
from steptime._build.transformer.attention_kernels import KERNELS, Attention, Computed, Heads, result_of
from steptime._program.program import Tensor

RING, ALL_TO_ALL, ALL_GATHER = "ring", "all_to_all", "all_gather"
_TOKENS = 2  # dimension of [batch, heads, sequence, head width]
_NAME = "ContextParallelAttention"


class _Rotation:
    """Buffers of all ranks, one after the other: this rank's own, then that of the rank before it, and so on."""

    def __init__(self, emit: Emitter, *, gathers: bool) -> None:
        self._emit, self._gathers = emit, gathers
        self._whole: Tensor | None = None
        self._coming: tuple[Tensor, int] | None = None
        self._turn = 0

    def send(self, buffer: Tensor) -> None:
        """Lets the next buffer come; this one goes to the rank that asks for it."""
        emit, ways = self._emit, self._emit.group_size(CONTEXT)
        self._turn += 1
        if not self._gathers:
            received = emit.empty_from_python(buffer.shape, buffer.dtype)
            self._coming = received, emit.rotate(received, buffer, CONTEXT)
        elif self._whole is None:
            self._whole = emit.empty_from_python((ways * buffer.numel,), buffer.dtype)
            self._coming = self._whole, emit.all_gather(self._whole, buffer, CONTEXT)

    def arrived(self) -> Tensor:
        """The buffer that was asked for last."""
        if self._coming is not None:
            buffer, number = self._coming
            self._coming = None
            self._emit.wait(number, CONTEXT)
            if self._whole is None:
                return buffer
        assert self._whole is not None
        ways = self._emit.group_size(CONTEXT)
        part, at = self._whole.numel // ways, -self._turn % ways
        return self._emit.view(self._whole, (part,), offset=at * part)


def in_rounds(tape: Tape, heads: Heads, kind: Attention) -> Tensor:
    """What the heads of this rank's tokens attend to."""
    emit = tape.emit
    made: list[Computed] = []
    with emit.write(_NAME, heads, sequence=emit.sequence):
        y, rows = _forward(emit, heads, kind, made)
    saved = [tape.save(each) for each in (*heads, y, rows, *made[-1].kept[1:])]
    return tape.node(f"{_NAME}Backward", heads, y, lambda gradient: _backward(emit, gradient, saved, kind, made))


def _forward(emit: Emitter, heads: Heads, kind: Attention, made: list[Computed]) -> tuple[Tensor, Tensor]:
    """The result and its rows' statistics; what the kernels of each round say goes to `made`."""
    query, keys, values = heads[0], *(_in_one_piece(emit, each) for each in heads[1:])
    rotation, ways = _Rotation(emit, gathers=kind.exchange == ALL_GATHER), emit.group_size(CONTEXT)
    parts: list[tuple[Tensor, Tensor]] = []
    for turn in range(ways):
        keys, values = _next(emit, rotation, (keys, values), turn, kind)
        asked = _second_half(emit, query) if kind.causal and turn else query
        y = result_of(emit, asked, values, kind)
        made.append(KERNELS[kind.kernels](emit, (asked, keys, values), y, None, _of_round(kind, turn)))
        parts.append((y, _column(emit, made[-1].kept[0], asked)))
        if not kind.in_place:
            parts = [_merged(emit, parts[0] if turn else None, *parts[-1])]
    if kind.in_place:
        return _added_up(emit, parts)
    ((result, rows),) = parts
    return _as(emit, result, query.dtype), rows


def _next(emit: Emitter, rotation: _Rotation, own: tuple[Tensor, Tensor], turn: int, kind: Attention) -> tuple[Tensor, Tensor]:
    """The keys and values of a round, those of the next one on their way."""
    buffer = rotation.arrived() if turn else None
    keys, values = own if buffer is None else _both(emit, buffer, own)
    if turn < emit.group_size(CONTEXT) - 1:
        rotation.send(buffer if kind.in_place and buffer is not None else _together(emit, (keys, values)))
    return keys, values


def _added_up(emit: Emitter, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What rounds gave, weighed by the statistics of all of them, in one kernel for each."""
    first, sums = parts[0]
    for _, rows in parts[1:]:
        place = sums if rows.shape == sums.shape else _second_half(emit, sums)
        emit.op("add_", (place, rows, 1), (place,))  # the logarithm of two sums of exponentials, in as many passes
    result = _zeros(emit, first, first.dtype)
    for y, rows in parts:
        place = result if y.shape == result.shape else _second_half(emit, result)
        emit.op("addcmul_", (place, y, rows, 1), (place,))
    return result, sums


def _of_round(kind: Attention, turn: int) -> Attention:
    return kind._replace(causal=kind.causal and not turn)


def _merged(emit: Emitter, total: tuple[Tensor, Tensor] | None, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Results so far and those of one more round, of all queries or of the second half: each weighs by its rows' statistics."""
    y = _as(emit, y, "float32")
    if total is None:
        return y, rows
    half = y.shape != total[0].shape
    before, before_rows = (_second_half(emit, each) for each in total) if half else total
    weight = emit.new("sigmoid", (emit.new("sub", (rows, before_rows, 1)),))
    change = emit.new("mul", (weight, emit.new("sub", (before, y, 1))), y.shape)
    result = emit.new("sub", (before, change, 1))
    sums = emit.new("sub", (before_rows, _log_sigmoid(emit, emit.new("sub", (before_rows, rows, 1))), 1))
    if not half:
        return result, sums
    sums = _with_second_half(emit, total[1], sums)
    return _with_second_half(emit, total[0], result), sums


def _log_sigmoid(emit: Emitter, x: Tensor) -> Tensor:
    y = emit.tensor(x.shape, x.dtype)
    with emit.op("log_sigmoid", (x,), (y,)):
        emit.op("log_sigmoid_forward", (x,), (y, emit.tensor((0,), x.dtype)))
    return y


def _backward(emit: Emitter, gradient: Tensor, saved: Sequence[Saved], kind: Attention, made: Sequence[Computed]) -> Gradients:
    """Gradients of queries, keys and values; those of keys and values end where they began."""
    query, keys, values, result, rows, *rest = (each() for each in saved)
    dtype = query.dtype if kind.in_place else "float32"
    of_query, *of_others = (_zeros(emit, each, dtype) for each in (query, keys, values))
    keys, values = _in_one_piece(emit, keys), _in_one_piece(emit, values)
    rotation, back = _Rotation(emit, gathers=kind.exchange == ALL_GATHER), _Rotation(emit, gathers=False)
    for turn, computed in enumerate(made):
        keys, values = _next(emit, rotation, (keys, values), turn, kind)
        half = kind.causal and turn > 0
        asked, given, of, known = (_second_half(emit, each) if half else each for each in (query, gradient, result, rows))
        new, *others = computed.backward(given, (asked, keys, values, of, _statistics(emit, known, computed), *rest))
        buffer = back.arrived() if turn else None
        of_others = list(_both(emit, buffer, of_others)) if buffer is not None else of_others
        for held, more in zip(of_others, others, strict=True):
            emit.op("add_", (held, more, 1), (held,))
        back.send(buffer if kind.in_place and buffer is not None else _together(emit, of_others))
        of_query = _added(emit, of_query, new, half=half, in_place=kind.in_place)
    of_query = _as(emit, of_query, query.dtype)
    return of_query, *_both(emit, _as(emit, back.arrived(), keys.dtype), (keys, values))


def _added(emit: Emitter, held: Tensor, more: Tensor | None, *, half: bool, in_place: bool) -> Tensor:
    place = _second_half(emit, held) if half else held
    emit.op("add_", (place, more, 1), (place,))
    return _with_second_half(emit, held, place) if half and not in_place else held


# Halves, buffers


def _second_half(emit: Emitter, x: Tensor) -> Tensor:
    length = x.shape[_TOKENS]
    return emit.sliced(x, _TOKENS, length // 2, length)


def _with_second_half(emit: Emitter, x: Tensor, second: Tensor) -> Tensor:
    first = emit.sliced(x, _TOKENS, 0, x.shape[_TOKENS] // 2)
    return emit.new("cat", ((first, second), _TOKENS), x.shape, x.dtype)


def _together(emit: Emitter, pair: Sequence[Tensor]) -> Tensor:
    """Keys and values, or their gradients, in one row."""
    flat = tuple(emit.reshaped(each, (each.numel,)) for each in pair)
    return emit.new("cat", (flat, 0), (sum(each.numel for each in flat),), flat[0].dtype)


def _both(emit: Emitter, buffer: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values, or their gradients, from one row."""
    first, second = like
    return emit.view(buffer, first.shape), emit.view(buffer, second.shape, offset=buffer.offset + first.numel)


def _column(emit: Emitter, statistics: Tensor, query: Tensor) -> Tensor:
    """Statistics of rows with a last dimension, as results have."""
    shape = (*query.shape[:3], 1)
    return statistics if statistics.shape == shape else emit.view(statistics, shape)


def _statistics(emit: Emitter, rows: Tensor, computed: Computed) -> Tensor:
    """Statistics of all rounds in the shape that a kernel takes."""
    rows = _in_one_piece(emit, rows)
    shape = computed.kept[0].shape
    return rows if rows.shape == shape else emit.view(rows, shape)


def _zeros(emit: Emitter, like: Tensor, dtype: str) -> Tensor:
    y = emit.tensor(like.shape, dtype, strides=compact_strides(like))
    with emit.op("zeros_like", (like, *emit.options(y), None, None), (y,)):
        emit.empty_like(like, y, emit.options(y))
        emit.zero(y)
    return y


def _as(emit: Emitter, x: Tensor, dtype: str) -> Tensor:
    return x if x.dtype == dtype else emit.cast(x, dtype)


def _in_one_piece(emit: Emitter, x: Tensor) -> Tensor:
    return x if is_contiguous(x) else emit.contiguous(x)


# Exchange of heads


def by_heads(tape: Tape, x: Tensor) -> Tensor:
    """All tokens of this rank's heads, [batch, heads of this rank, sequence, head width], of what has its tokens' heads."""
    ways, (batch, heads, length, width) = tape.emit.group_size(CONTEXT), x.shape
    parts = permute(tape, view(tape, x, (batch, ways, heads // ways, length, width)), (1, 3, 0, 2, 4))
    whole = view(tape, _exchanged(tape, contiguous_copy(tape, parts)), (ways * length, batch, heads // ways, width))
    return permute(tape, whole, (1, 2, 0, 3))


def by_tokens(tape: Tape, y: Tensor, *, sequence_first: bool) -> Tensor:
    """All heads of this rank's tokens, [batch, tokens of this rank, heads x head width], or tokens first."""
    ways, (batch, heads, length, width) = tape.emit.group_size(CONTEXT), y.shape
    rows = permute(tape, y, (2, 0, 1, 3))
    rows = rows if is_contiguous(rows) else contiguous_copy(tape, rows)
    own = _exchanged(tape, view(tape, rows, (ways, length // ways, batch, heads, width)))
    order = (1, 2, 0, 3, 4) if sequence_first else (2, 1, 0, 3, 4)
    first = (length // ways, batch) if sequence_first else (batch, length // ways)
    return reshape(tape, permute(tape, own, order), (*first, ways * heads * width))


def _exchanged(tape: Tape, x: Tensor) -> Tensor:
    """The part of every rank that is this rank's: [ranks, ...] to [ranks, ...]."""

    def exchange(sent: Tensor) -> Tensor:
        emit, sent = tape.emit, _in_one_piece(tape.emit, sent)
        splits = (sent.shape[0] // emit.group_size(CONTEXT),) * emit.group_size(CONTEXT)
        received = emit.empty_from_python(sent.shape, sent.dtype)
        emit.wait(emit.all_to_all(received, sent, splits, splits, group=CONTEXT, asynchronous=False), CONTEXT)
        return received

    with tape.emit.write("_SeqAllToAll", (x,), sequence=tape.emit.sequence):
        y = exchange(x)
    assert y.strides == contiguous_strides(y.shape)
    return tape.node("_SeqAllToAllBackward", (x,), y, exchange)
