"""`measure power`: power and clock of the card as it is found, in loops of kernels; times of kernels at the clocks it ran at.

Nothing of the card is changed: no clock, no limit, no mode. Loops run in random order, the same one (`anchor`) every minute.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import steptime_lab
from steptime._calibrate.device.meter import Meter
from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.conditions import gpus
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import Layout, run_ranks
from steptime._calibrate.harness.session import Session
from steptime._measurements.store import key_of, read
from steptime._models.kernels.call import Call, precision_of
from steptime.errors import InputError
from steptime_lab.measure.power.blocks import Block, Piece, anchor, blocks, product
from steptime_lab.measurements.sets import KERNELS, POWER

if TYPE_CHECKING:
    from steptime_lab.measure.power.bench import PowerBench

JOB = "power"
_SHIPPED = Path(steptime_lab.__file__).parent / "data" / "measurements"
PARTS = ("loops", "kernels", "products", "bursts")
# An anchor after so many blocks: about a minute.
_ANCHOR_EVERY = 7
# Calls of every family that are timed at other clocks; products that are timed again, their clock read on the device.
_OF_FAMILY, _PRODUCTS = 3, 200
_MORE_OF = {"attention": 10, "convolution": 8, "matmul": 10}  # these differ most
_KERNELS_NS, _PRODUCT_NS = (1e5, 4e6), (2e5, 6e6)
_KERNELS_S, _PRODUCTS_S, _BURST_S, _CLOSED_S = 10.0, 12.0, 3.0, 4.0
_REPEATED_NS = 5e5
# Of a whole block, the least that shows its power; and what preparing the next one takes.
_LEAST_PACE, _BETWEEN_S = 0.2, 0.4
_SKIPPED_FAMILIES = ("transfer",)


def run(session: Session, options: Options) -> None:
    """The card without a context, then one process with one."""
    if options.device != "cuda":
        raise InputError(f"--device {options.device}: power is a card's; measure it on a GPU")
    meter = Meter(gpus()[0]["uuid"])
    if meter.absent:
        session.warn(f"no power can be read: {meter.absent}")
    # The process that has a context adds it: it knows the versions of what torch brings along.
    closed = _closed(meter) if not meter.absent and not options.only else None
    layout = Layout(1)
    plan = session.to_plan(seed=options.seed, small=options.small, only=list(options.only), closed=closed)
    run_ranks(__name__, layout, plan, limit_s=session.budget.left_s() + 60.0)


def names(_: Options) -> list[str]:
    """What `--only` may name."""
    return list(PARTS)


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """All blocks that have no row yet."""
    import torch

    from steptime_lab.measure.op_calls import Arena
    from steptime_lab.measure.power.bench import PowerBench
    from steptime_lab.measure.power.operands import fill

    if plan["closed"] is not None:
        session.store.add(POWER, plan["closed"])
    torch.manual_seed(int(plan["seed"]))
    arena = Arena.on(group.device, 1, int(plan["seed"]))
    fill(arena)
    with torch.inference_mode():
        bench = PowerBench(arena, Meter(gpus()[0]["uuid"]))
        wanted = set(plan["only"] or PARTS)
        todo = _remaining(session, list(_loops(int(plan["seed"]), small=bool(plan["small"])))) if "loops" in wanted else []
        progress = session.progress(JOB, len(todo))
        pace = 0.1 if plan["small"] else _pace(todo, session.budget.left_s())
        for rows in _others(bench, wanted, pace):
            _attempt(session, rows)
        for block in (replace(each, seconds=each.seconds * pace) for each in todo):
            if session.budget.left_s() < block.seconds + 1:
                break
            _attempt(session, lambda block=block: [bench.measure(block)])  # type: ignore[misc]
            progress.step()
        progress.close()


def _attempt(session: Session, rows: Callable[[], list[dict[str, Any]]]) -> None:
    try:
        for row in rows():
            session.store.add(POWER, row)
    except (RuntimeError, NotImplementedError) as error:
        session.warn(f"not measured: {' '.join(str(error).split())[:200]}")
    session.store.flush()


def _pace(todo: Sequence[Block], left_s: float) -> float:
    """How much shorter everything has to be to be done in time; some readings each have to be left."""
    needed_s = _BURST_S + _PRODUCTS_S + 3 * _KERNELS_S + sum(block.seconds + _BETWEEN_S for block in todo)
    return min(1.0, max(_LEAST_PACE, left_s / needed_s))


def _others(bench: PowerBench, wanted: set[str], shorter: float) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What is no loop, if it is wanted: bursts, kernels at two clocks, products."""
    square = product(8192, 8192, 8192, count=2)
    if "bursts" in wanted:
        yield lambda: [bench.burst(square, _BURST_S * shorter)]
    if "products" in wanted:
        yield lambda: bench.kernel_rows(_products(), None, _PRODUCTS_S * shorter)
    if "kernels" in wanted:
        yield lambda: bench.kernel_rows(_kernels(), None, _KERNELS_S * shorter)
        yield lambda: bench.kernel_rows(_kernels(), product(8192, 8192, 8192, count=6), 2 * _KERNELS_S * shorter)


def _loops(seed: int, *, small: bool) -> Iterator[Block]:
    order = blocks()[::10] if small else blocks()
    random.Random(seed).shuffle(order)
    # What the card draws at rest, nothing can be fitted without.
    order.sort(key=lambda block: block.kind != "rest")
    for index, block in enumerate(order):
        if index % _ANCHOR_EVERY == 0:
            yield anchor()
        yield block
    yield anchor()


def _remaining(session: Session, order: Sequence[Block]) -> list[Block]:
    """Those that have no row yet; an anchor stays where a block behind it does."""
    done = session.store.done(POWER)
    names = {block.name for block in order if block.name}
    known = {row for row in names if any(done[key] for key in _keys(row, order))}
    return [block for block in order if block.kind == "anchor" or block.name not in known]


def _keys(name: str, order: Sequence[Block]) -> list[str]:
    from steptime_lab.measure.power.bench import pieces_text

    rows = [
        {"block": block.name, "kind": block.kind, "pieces": pieces_text(block), "duty": block.duty}
        for block in order
        if block.name == name
    ]
    return [key_of(POWER, row) for row in rows]


def _kernels() -> list[Piece]:
    """Some of every family, as large as there are, cold."""
    by_family: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in _timed_rows(*_KERNELS_NS):
        by_family[row["family"]].append(row)
    results = []
    for family, rows in sorted(by_family.items()):
        if family not in _SKIPPED_FAMILIES:
            more = _MORE_OF.get(family)
            results += [_piece(row) for row in _spread_out(rows, more or _OF_FAMILY, "call" if more else "op")]
    return results


def _products() -> list[Piece]:
    rows = [row for row in _timed_rows(*_PRODUCT_NS) if row["family"] == "matmul"]
    by_precision: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_precision[precision_of(Call.from_json(row["call"]), row["tf32"])].append(row)
    each = _PRODUCTS // max(1, len(by_precision))
    return [_piece(row) for of in by_precision.values() for row in _spread_out(of, each, "call")]


def _timed_rows(least_ns: float, most_ns: float) -> list[dict[str, Any]]:
    """Shipped rows of a whole GPU with times between the two."""
    table = read(_SHIPPED, KERNELS).select(["family", "op", "call", "cache", "tf32", "benchmark", "share", "time_ns"])
    return [
        row
        for row in table.to_pylist()
        if row["share"] == 1 and row["cache"] == "cold" and not row["benchmark"] and least_ns <= row["time_ns"] <= most_ns
    ]


def _spread_out(rows: Sequence[dict[str, Any]], count: int, by: str) -> list[dict[str, Any]]:
    """So many, evenly over the times, different in a column as long as there are any."""
    order = sorted(rows, key=lambda row: (-row["time_ns"], row["call"]))
    first: dict[str, dict[str, Any]] = {}
    for row in order:
        first.setdefault(str(row[by]), row)
    distinct = list(first.values())
    step = max(1, len(distinct) // count)
    return distinct[::step][:count]


def _piece(row: Mapping[str, Any]) -> Piece:
    return Piece(Call.from_json(row["call"]), max(1, round(_REPEATED_NS / row["time_ns"])), tf32=bool(row["tf32"]))


def _closed(meter: Meter) -> dict[str, Any]:
    """The row of a card that nobody has a context on."""
    with meter.watching() as watch:
        time.sleep(_CLOSED_S)
        drawn = watch.between(0.0, time.perf_counter())
    return {
        **dict.fromkeys(column.name for column in POWER.columns),
        "block": "closed",
        "kind": "rest",
        "pieces": json.dumps([]),
        "duty": 0.0,
        "pause_cycles": 0,
        "power_w": drawn.power_w,
        "reading_w": drawn.reading_w,
        "temperature_c": drawn.temperature_c,
        "limit_w": meter.limit_w,
        "uuid": meter.uuid,
        "times_ns": [1e9 * _CLOSED_S],
    }
