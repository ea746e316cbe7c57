"""Triton kernels of the table-batched lookup. Rows are handled in quads: four neighbouring elements, one 16-byte access.

Which quad of which row a lane holds is worked out when the kernel runs, so that one compiled kernel serves every mix of dims,
and the address of a quad is four times an integer, from which the compiler sees that it may use wide accesses.
`meta` is int64 [tables, 4]: first quad of the table's weights, quads in a row, first quad in a row of the output, first state.
"""

# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: N803, PLR0913, PLR0915, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

TABLE_BITS = 16
"""Low bits of a lookup's info that hold its table; above them is the first quad of its gradient."""


@triton.jit
def _row_number(indices: tl.tensor, position: tl.tensor, here: tl.tensor) -> tl.tensor:
    return tl.load(indices + position, mask=here, other=0).to(tl.int64)


@triton.jit
def _row(
    weights: tl.tensor, scales: tl.tensor, position: tl.tensor, here: tl.tensor, quad: tl.tensor, scaled: tl.tensor
) -> tl.tensor:
    """A row's quads, [QUADS, 4], times its per-sample weight."""
    element = tl.arange(0, 4)
    values = tl.load(weights + 4 * quad[:, None] + element[None, :], mask=here[:, None], other=0.0).to(tl.float32)
    scale = tl.load(scales + position, mask=here & (scaled != 0), other=1.0)
    return values * scale[:, None]


@triton.jit(do_not_specialize=["batch", "out_quads", "scaled"])
def table_batched_forward(
    weights: tl.tensor, indices: tl.tensor, offsets: tl.tensor, scales: tl.tensor, out: tl.tensor,
    table_of: tl.tensor, first_program: tl.tensor, meta: tl.tensor,
    batch: tl.tensor, out_quads: tl.tensor, scaled: tl.tensor,
    QUADS: tl.constexpr,
) -> None:  # fmt: skip
    """Sums of looked-up rows: a program has as many bags of one table as fit its quads, four rows of each in flight."""
    program = tl.program_id(0)
    table = tl.load(table_of + program).to(tl.int64)
    base = tl.load(meta + table * 4)
    wide = tl.load(meta + table * 4 + 1).to(tl.int32)
    column = tl.load(meta + table * 4 + 2)
    part = program - tl.load(first_program + table).to(tl.int32)
    bags = tl.maximum(QUADS // wide, 1)
    parts = tl.cdiv(wide, QUADS)

    lane = tl.arange(0, QUADS)
    local = lane // wide
    quad = (part % parts) * QUADS + lane - local * wide
    bag = (part // parts) * bags + local
    ok = (local < bags) & (bag < batch) & (quad < wide)
    start = tl.load(offsets + table * batch + bag, mask=ok, other=0).to(tl.int64)
    end = tl.load(offsets + table * batch + bag + 1, mask=ok, other=0).to(tl.int64)
    longest = tl.max((end - start).to(tl.int32), axis=0)
    base_quad = base + quad

    total = tl.zeros([QUADS, 4], dtype=tl.float32)
    step = 0
    while step < longest:
        p0 = start + step
        p1, p2, p3 = p0 + 1, p0 + 2, p0 + 3
        h0, h1, h2, h3 = p0 < end, p1 < end, p2 < end, p3 < end
        r0 = _row_number(indices, p0, h0)
        r1 = _row_number(indices, p1, h1)
        r2 = _row_number(indices, p2, h2)
        r3 = _row_number(indices, p3, h3)
        v0 = _row(weights, scales, p0, h0, base_quad + r0 * wide, scaled)
        v1 = _row(weights, scales, p1, h1, base_quad + r1 * wide, scaled)
        v2 = _row(weights, scales, p2, h2, base_quad + r2 * wide, scaled)
        v3 = _row(weights, scales, p3, h3, base_quad + r3 * wide, scaled)
        total += (v0 + v1) + (v2 + v3)
        step += 4
    element = tl.arange(0, 4)
    target = bag.to(tl.int64) * out_quads + column + quad
    tl.store(out + 4 * target[:, None] + element[None, :], total, mask=ok[:, None])


@triton.jit(do_not_specialize=["batch", "bags", "out_quads"])
def table_batched_linearize(
    indices: tl.tensor, offsets: tl.tensor, keys: tl.tensor, infos: tl.tensor, meta: tl.tensor,
    batch: tl.tensor, bags: tl.tensor, out_quads: tl.tensor,
    BAGS: tl.constexpr, LANES: tl.constexpr, SHIFT: tl.constexpr,
) -> None:  # fmt: skip
    """For each lookup: the first quad of its row (equal for equal rows of equal tables only), and where its gradient lies."""
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    ok = bag < bags
    table = (bag // batch).to(tl.int64)
    sample = bag.to(tl.int64) - table * batch
    base = tl.load(meta + table * 4, mask=ok, other=0)
    wide = tl.load(meta + table * 4 + 1, mask=ok, other=0)
    column = tl.load(meta + table * 4 + 2, mask=ok, other=0)
    info = ((sample * out_quads + column) << SHIFT) + table
    start = tl.load(offsets + bag, mask=ok, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=ok, other=0).to(tl.int64)
    longest = tl.max((end - start).to(tl.int32), axis=0)
    lane = tl.arange(0, LANES)
    step = 0
    while step < longest:
        position = start[:, None] + step + lane[None, :]
        here = position < end[:, None]
        row = tl.load(indices + position, mask=here, other=0).to(tl.int64)
        key = base[:, None] + row * wide[:, None]
        tl.store(keys + position, key.to(keys.dtype.element_ty), mask=here)
        tl.store(infos + position, tl.broadcast_to(info[:, None], [BAGS, LANES]), mask=here)
        step += LANES


@triton.jit
def _adagrad_rate(
    total: tl.tensor,
    state: tl.tensor,
    meta: tl.tensor,
    table: tl.tensor,
    key: tl.tensor,
    wide: tl.tensor,
    quad: tl.tensor,
    writes: tl.tensor,
    rate: tl.tensor,
    eps: tl.tensor,
    QUADS: tl.constexpr,
    STRIDE: tl.constexpr,
) -> tl.tensor:
    """Adds the mean squared gradient of the row to its state; the step this leaves, per quad.

    `STRIDE` lanes, a power of two, hold one row, so that its sum is a few shuffles; those beyond its width hold zeros.
    """
    square = tl.reshape(tl.sum(total * total, axis=1), [QUADS // STRIDE, STRIDE])
    whole = tl.reshape(tl.broadcast_to(tl.sum(square, axis=1)[:, None], [QUADS // STRIDE, STRIDE]), [QUADS])
    first_quad = tl.load(meta + table * 4, mask=writes, other=0)
    first_state = tl.load(meta + table * 4 + 3, mask=writes, other=0)
    width = tl.maximum(wide, 1)
    place = first_state + (key.to(tl.int64) - first_quad) // width
    grown = tl.load(state + place, mask=writes, other=0.0) + whole / (4 * width).to(tl.float32)
    tl.store(state + place, grown, mask=writes & (quad == 0))
    return rate / (tl.sqrt(grown) + eps)


@triton.jit
def _finish(
    total: tl.tensor, row: tl.tensor, key: tl.tensor, next_key: tl.tensor, began: tl.tensor, wide: tl.tensor, table: tl.tensor,
    weights: tl.tensor, state: tl.tensor, meta: tl.tensor, partials: tl.tensor, partial_quad: tl.tensor,
    quad: tl.tensor, rate: tl.tensor, eps: tl.tensor,
    ADAGRAD: tl.constexpr, QUADS: tl.constexpr, STRIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Ends the run at this position where the next key differs: updates the row, or hands on a run from an earlier chunk."""
    element = tl.arange(0, 4)
    ends = (key >= 0) & (key != next_key) & (quad < wide)
    writes = ends & (began == 0)
    if ADAGRAD:
        step = _adagrad_rate(total, state, meta, table, key, wide, quad, writes, rate, eps, QUADS, STRIDE)
        updated = row - step[:, None] * total
    else:
        updated = row - rate * total
    target = key.to(tl.int64) + quad
    tl.store(weights + 4 * target[:, None] + element[None, :], updated.to(weights.dtype.element_ty), mask=writes[:, None])
    partial = 4 * (partial_quad + quad)[:, None] + element[None, :]
    tl.store(partials + partial, total, mask=(ends & (began != 0))[:, None])
    return tl.where((key == next_key)[:, None], total, 0.0), tl.where(key == next_key, began, 0)


@triton.jit
def _gradient(
    source: tl.tensor, scales: tl.tensor, position: tl.tensor, info: tl.tensor, table: tl.tensor, quad: tl.tensor,
    stride: tl.tensor, meta: tl.tensor, scaled: tl.tensor,
    FIRST: tl.constexpr, SHIFT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What a position adds to its run, and how wide its table's rows are."""
    element = tl.arange(0, 4)
    here = info >= 0
    wide = tl.load(meta + table * 4 + 1)
    place = (info >> SHIFT) if FIRST else position * stride
    mask = here & (quad < wide)
    values = tl.load(source + 4 * (place + quad)[:, None] + element[None, :], mask=mask[:, None], other=0.0)
    if FIRST:
        scale = tl.load(scales + position, mask=here & (scaled != 0), other=1.0)
        values = values * scale[:, None]
    return values, wide


@triton.jit
def _weights_of(
    weights: tl.tensor, key: tl.tensor, next_key: tl.tensor, began: tl.tensor, quad: tl.tensor, wide: tl.tensor
) -> tl.tensor:
    element = tl.arange(0, 4)
    mask = (key >= 0) & (key != next_key) & (began == 0) & (quad < wide)
    target = key.to(tl.int64) + quad
    return tl.load(weights + 4 * target[:, None] + element[None, :], mask=mask[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["count", "stride", "rows_at_once", "rate", "eps", "scaled"])
def table_batched_update(
    keys: tl.tensor, infos: tl.tensor, source: tl.tensor, scales: tl.tensor, weights: tl.tensor, state: tl.tensor,
    meta: tl.tensor,
    out_keys: tl.tensor, out_infos: tl.tensor, partials: tl.tensor,
    count: tl.tensor, stride: tl.tensor, rows_at_once: tl.tensor, rate: tl.tensor, eps: tl.tensor, scaled: tl.tensor,
    QUADS: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr, ADAGRAD: tl.constexpr, STRIDE: tl.constexpr,
    SHIFT: tl.constexpr,
) -> None:  # fmt: skip
    """Sums runs of equal keys and updates each run's row once; `stride` lanes walk one chunk of consecutive positions.

    A run that lies in one chunk is finished here. One that crosses a border leaves a sum in each chunk it touches, at entry
    2c (it began before chunk c) or 2c + 1 (it begins in c and goes on): the sequence that the next launch walks likewise.
    Keys below 0 are entries that nobody wrote; infos below 0 add nothing to their run.
    """
    lane = tl.arange(0, QUADS)
    own = lane // stride
    quad = lane - own * stride
    chunk = tl.program_id(0).to(tl.int64) * rows_at_once + own
    begin = chunk * CHUNK
    ok = (own < rows_at_once) & (begin < count)
    key = tl.load(keys + begin, mask=ok, other=-1)
    before = tl.load(keys + begin - 1, mask=ok & (begin > 0), other=-1)
    entered = (key == before) & (key >= 0)
    first_key = key
    first_info = tl.load(infos + begin, mask=ok, other=-1)
    began = entered.to(tl.int32)
    last = key
    table = tl.zeros([QUADS], dtype=tl.int64)
    total = tl.zeros([QUADS, 4], dtype=tl.float32)
    for step in range(0, CHUNK, 4):
        p0 = begin + step
        p1, p2, p3, p4 = p0 + 1, p0 + 2, p0 + 3, p0 + 4
        k1 = tl.load(keys + p1, mask=ok & (p1 < count), other=-1)
        k2 = tl.load(keys + p2, mask=ok & (p2 < count), other=-1)
        k3 = tl.load(keys + p3, mask=ok & (p3 < count), other=-1)
        k4 = tl.load(keys + p4, mask=ok & (p4 < count), other=-1)
        n0 = tl.load(infos + p0, mask=ok & (p0 < count), other=-1)
        n1 = tl.load(infos + p1, mask=ok & (p1 < count), other=-1)
        n2 = tl.load(infos + p2, mask=ok & (p2 < count), other=-1)
        n3 = tl.load(infos + p3, mask=ok & (p3 < count), other=-1)
        t0 = tl.where(n0 >= 0, n0 & ((1 << SHIFT) - 1), table)
        t1 = tl.where(n1 >= 0, n1 & ((1 << SHIFT) - 1), t0)
        t2 = tl.where(n2 >= 0, n2 & ((1 << SHIFT) - 1), t1)
        t3 = tl.where(n3 >= 0, n3 & ((1 << SHIFT) - 1), t2)
        g0, w0 = _gradient(source, scales, p0, n0, t0, quad, stride, meta, scaled, FIRST, SHIFT)
        g1, w1 = _gradient(source, scales, p1, n1, t1, quad, stride, meta, scaled, FIRST, SHIFT)
        g2, w2 = _gradient(source, scales, p2, n2, t2, quad, stride, meta, scaled, FIRST, SHIFT)
        g3, w3 = _gradient(source, scales, p3, n3, t3, quad, stride, meta, scaled, FIRST, SHIFT)
        b1 = tl.where(key == k1, began, 0)
        b2 = tl.where(k1 == k2, b1, 0)
        b3 = tl.where(k2 == k3, b2, 0)
        # All loads before the first store: a load is not moved up over a store that might be to its address.
        r0 = _weights_of(weights, key, k1, began, quad, w0)
        r1 = _weights_of(weights, k1, k2, b1, quad, w1)
        r2 = _weights_of(weights, k2, k3, b2, quad, w2)
        r3 = _weights_of(weights, k3, k4, b3, quad, w3)
        place = 2 * chunk * stride
        total, b1 = _finish(
            total + g0, r0, key, k1, began, w0, t0, weights, state, meta, partials, place, quad, rate, eps, ADAGRAD,
            QUADS, STRIDE,
        )  # fmt: skip
        total, b2 = _finish(
            total + g1, r1, k1, k2, b1, w1, t1, weights, state, meta, partials, place, quad, rate, eps, ADAGRAD,
            QUADS, STRIDE,
        )  # fmt: skip
        total, b3 = _finish(
            total + g2, r2, k2, k3, b2, w2, t2, weights, state, meta, partials, place, quad, rate, eps, ADAGRAD,
            QUADS, STRIDE,
        )  # fmt: skip
        total, began = _finish(
            total + g3, r3, k3, k4, b3, w3, t3, weights, state, meta, partials, place, quad, rate, eps, ADAGRAD,
            QUADS, STRIDE,
        )  # fmt: skip
        last, key, table = k3, k4, t3
    _hand_on(
        total, entered, began, first_key, first_info, last, key, table, ok, chunk, quad, stride, out_keys, out_infos, partials,
        SHIFT,
    )  # fmt: skip


@triton.jit
def _hand_on(
    total: tl.tensor, entered: tl.tensor, began: tl.tensor, first_key: tl.tensor, first_info: tl.tensor, last: tl.tensor,
    key: tl.tensor, table: tl.tensor, ok: tl.tensor, chunk: tl.tensor,
    quad: tl.tensor, stride: tl.tensor, out_keys: tl.tensor, out_infos: tl.tensor, partials: tl.tensor,
    SHIFT: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the chunk's two entries: their keys and infos always, the sum of a run that goes on beyond the chunk."""
    element = tl.arange(0, 4)
    leaves = ok & (last == key) & (key >= 0)
    entry = 2 * chunk + tl.where(began != 0, 0, 1)
    target = 4 * (entry * stride + quad)[:, None] + element[None, :]
    tl.store(partials + target, total, mask=leaves[:, None])
    item = ok & (quad == 0)
    low = (1 << SHIFT) - 1
    tl.store(out_keys + 2 * chunk, tl.where(entered, first_key, -1), mask=item)
    tl.store(out_infos + 2 * chunk, tl.where(entered, first_info & low, -1), mask=item)
    tl.store(out_keys + 2 * chunk + 1, tl.where(leaves, last, -1), mask=item)
    tl.store(out_infos + 2 * chunk + 1, tl.where(leaves & (began == 0), table, -1), mask=item)
