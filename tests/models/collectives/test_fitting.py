"""Measured rows into models: which rows count, how repeats are reduced, what a fit may see, and the baselines on the same."""

from typing import Any

import numpy as np
import pytest

from steptime._models.collectives.fitting import (
    Points,
    Reduction,
    Swept,
    fit_curves,
    reduced,
    steadiest,
    swept,
    unseen_logs,
)
from steptime._models.collectives.message import Message, Messages, load_bytes, pair_bytes
from steptime._models.engine.splits import FIT, TEST, VALIDATION
from steptime.errors import InputError
from steptime_lab.baselines.collectives import RULES, Line, PublishedCurve, as_published, fit_line, fit_published
from steptime_lab.fit.fabrics import fit_fabric, fit_points

SIZES = [int(2 ** (place / 2)) // 64 * 64 for place in range(16, 52)]


def row(**changes: Any) -> dict[str, Any]:
    usual = {
        "collective": "all_reduce", "ranks": 2, "fabric": "loopback", "bytes": 1 << 20, "splits": None, "mode": "stream",
        "beside": "none", "host_threads": "idle", "arrival": "together", "times_ns": [3.0, 1.0, 2.0], "reference_ns": None,
        "run": "a", "process": "p1", "command": "steptime measure collectives --ranks 2",
    }  # fmt: skip
    return usual | changes


def points(sizes: list[int], ns: Any, kind: str = "all_reduce", ranks: int = 2, splits: Any = None) -> Points:
    rows = [Message(kind, ranks, size, sent) for size, sent in zip(sizes, splits or [None] * len(sizes), strict=True)]
    return Points(rows, np.asarray(ns, dtype=float))


def exchanges(seed: int, count: int, power: float) -> Points:
    """Uneven and even ones of four ranks whose time is that of their load times (pairs / load) ** power."""
    random = np.random.default_rng(seed)
    splits: list[tuple[tuple[int, ...], ...] | None] = []
    for place in range(count):
        sent = random.integers(1, 2 ** random.integers(8, 22), (4, 4)) * 16 * (random.random((4, 4)) < 0.6)
        splits.append(None if place % 3 == 0 else tuple(tuple(int(size) for size in some) for some in sent))
    sizes = [SIZES[place % len(SIZES)] if one is None else max(map(sum, one)) for place, one in enumerate(splits)]
    found = points(sizes, np.ones(count), "all_to_all", 4, splits)
    messages = found.messages
    ns = (30_000 + messages.load / 2) * (messages.pairs / messages.load) ** power
    return Points(found.rows, ns)


def test_only_plain_rows_of_the_fabric_count() -> None:
    rows = [row(), row(beside="gemm"), row(host_threads="busy"), row(arrival="skewed"), row(mode="single"),
            row(fabric="other"), row(collective="send_recv_ring")]  # fmt: skip
    assert len(swept(rows, "loopback")) == 1


def test_splits_come_row_by_row() -> None:
    found = swept([row(collective="all_to_all", splits=[1, 2, 3, 4])], "loopback")
    assert found[0].message.splits == ((1, 2), (3, 4))


def test_repeats_become_one_time_as_asked() -> None:
    some = swept([row(times_ns=[4.0, 1.0, 2.0, 3.0, 9.0], reference_ns=[2.0, 1.0, 1.0, 1.0, 3.0])], "loopback")
    assert reduced(some, Reduction(0.5)).ns == pytest.approx([3.0])
    assert reduced(some, Reduction(0.25)).ns == pytest.approx([2.0])
    assert reduced(some, Reduction(0.0)).ns == pytest.approx([1.0])
    assert reduced(some, Reduction(0.5, corrected=True)).ns == pytest.approx([2.0])


def test_a_message_asked_often_counts_once_per_run() -> None:
    some = swept([row(times_ns=[1.0]), row(times_ns=[3.0, 5.0]), row(run="b", times_ns=[7.0])], "loopback")
    found = reduced(some, Reduction(0.5))
    assert found.ns.tolist() == [3.0, 7.0]
    assert found.repeats[0] == (1.0, 3.0, 5.0)


def steady(run: str, ranks: int, count: int, width: float, *, sweep: bool = True) -> list[Swept]:
    times = (1.0 - width, 1.0, 1.0 + width)
    return [Swept(Message("all_reduce", ranks, size), run, "p", times, sweep=sweep) for size in SIZES[:count]]


def test_one_run_serves_all_rank_counts_unless_another_is_far_steadier() -> None:
    rows = [*steady("main", 2, 30, 0.10), *steady("main", 4, 30, 0.10), *steady("main", 8, 30, 0.10)]
    rows += [*steady("other", 2, 20, 0.09), *steady("other", 4, 20, 0.01), *steady("few", 8, 5, 0.001)]
    rows += steady("calibration", 8, 30, 0.001, sweep=False)
    chosen = {(one.message.ranks, one.run) for one in steadiest(rows)}
    assert chosen == {(2, "main"), (4, "other"), (8, "main")}


def test_heavy_tails_are_met_with_a_low_quantile() -> None:
    random = np.random.default_rng(4)
    rows = []
    for size in SIZES:
        times = (20_000 + size / 3) * np.where(random.random(7) < 0.5, 1.0, random.uniform(1, 5, 7)) * random.normal(1, 0.01, 7)
        rows.append(row(bytes=size, times_ns=times.tolist()))
    fitted = fit_fabric(swept(rows, "loopback"))
    assert fitted.reduction.quantile < 0.5
    assert fitted.model.times(Messages.even("all_reduce", 2, [2.0**20])).ns == pytest.approx([20_000 + 2**20 / 3], rel=0.05)


def test_no_sweep_says_how_to_get_one() -> None:
    with pytest.raises(InputError, match="measure collectives"):
        fit_fabric(swept([row(command="steptime measure steps")], "loopback"))


def test_a_message_is_on_one_side_whatever_it_took() -> None:
    first, second = points(SIZES, np.ones(len(SIZES))), points(SIZES, np.full(len(SIZES), 2.0))
    assert (first.split == second.split).all()
    assert set(first.split) == {FIT, VALIDATION, TEST}
    assert sum(len(first.of(split)) for split in (FIT, VALIDATION, TEST)) == len(first)
    assert sum(fold.sum() for fold in first.folds()) == len(first)


def test_the_split_goes_by_splits_too() -> None:
    splits = [((0, place), (place, 0)) for place in range(64, 6400, 64)]
    found = points([6400] * len(splits), np.ones(len(splits)), "all_to_all", 2, splits)
    assert len(set(found.split)) == 3


def test_test_rows_change_nothing() -> None:
    ns = 20_000 + np.array(SIZES) / 3
    found = points(SIZES, ns)
    disturbed = points(SIZES, np.where(found.split == TEST, 100 * ns, ns))
    assert fit_points(found).to_dict() == fit_points(disturbed).to_dict()


def test_residuals_are_of_rows_not_seen() -> None:
    noise = np.exp(np.random.default_rng(6).normal(0, 0.1, len(SIZES)))
    ends = fit_points(points(SIZES, (20_000 + np.array(SIZES) / 3) * noise)).residuals["all_reduce"]
    assert -0.35 < ends[0] < -0.08
    assert 0.08 < ends[1] < 0.35


def test_what_idle_peers_save_is_found() -> None:
    found = exchanges(1, 240, power=0.4)
    model = fit_curves(found)
    assert model.idle_power == pytest.approx(0.4, abs=0.05)
    assert np.abs(unseen_logs(model, found)["all_to_all"]).mean() < 0.03
    assert fit_curves(found.take(~found.uneven)).idle_power == 0.0


def test_what_ragged_parts_cost_is_found() -> None:
    sizes = [size + 4 * (place % 2) for place, size in enumerate(SIZES * 2)]
    ns = (30_000 + np.array(sizes) / 2) * np.where(np.array(sizes) % 64, 1.12, 1.0)
    model = fit_curves(points(sizes, ns, "all_to_all"))
    assert model.ragged == pytest.approx(np.log(1.12), abs=0.03)
    assert fit_curves(points(SIZES, np.array(SIZES) + 1e4, "all_to_all")).ragged == 0.0


def noisy(kind: str, seed: int, speed: float, switch: int) -> Points:
    sizes = np.array(SIZES[::2])
    ns = speed * (20_000 + sizes / 3) * np.where(sizes < switch, 1.0, 1.6)
    return points(sizes.tolist(), ns * np.exp(np.random.default_rng(seed).normal(0, 0.1, len(sizes))), kind)


@pytest.mark.parametrize(("switch", "gains"), [(1 << 18, True), (1 << 10, False)])
def test_a_mirror_image_serves_a_curve_only_where_it_is_one(switch: int, gains: bool) -> None:
    gathered, scattered = noisy("all_gather", 1, 1.0, 1 << 18), noisy("reduce_scatter", 2, 1.2, switch)
    if not gains:
        scattered = points(SIZES, np.array(SIZES)[::-1] / 3 + 1e6 / np.array(SIZES), "reduce_scatter")
    both = Points([*gathered.rows, *scattered.rows], np.append(gathered.ns, scattered.ns))
    alone, together = (fit_curves(some).curves["all_gather", 2].ns(SIZES) for some in (gathered, both))
    truth = (20_000 + np.array(SIZES) / 3) * np.where(np.array(SIZES) < 1 << 18, 1.0, 1.6)
    if gains:
        assert np.abs(np.log(together / truth)).mean() < np.abs(np.log(alone / truth)).mean()
    else:
        assert together == pytest.approx(alone)


def test_kinds_with_too_few_sizes_have_no_curve() -> None:
    few = points([64, 128], [1.0, 2.0], "broadcast")
    many = points(SIZES, SIZES)
    both = Points([*few.rows, *many.rows], np.append(few.ns, many.ns))
    assert set(fit_curves(both).curves) == {("all_reduce", 2)}
    with pytest.raises(InputError, match="3 sizes"):
        fit_curves(few)


@pytest.mark.parametrize(
    ("kinds", "ns", "text"),
    [
        (["all_reduce"], [1.0, 1.0], "1 and 2 rows"),
        (["gossip"], [1.0], "kind is 'gossip'"),
        (["all_reduce"], [0.0], "above 0"),
        (["all_reduce"], [float("nan")], "above 0"),
    ],
)
def test_bad_columns_are_refused(kinds: list[str], ns: list[float], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Points([Message(kind, 2, 1) for kind in kinds], np.array(ns))


# --- baselines -------------------------------------------------------------------------------------------------------------


def test_the_line_finds_latency_and_bandwidth() -> None:
    model = fit_line(points(SIZES, 20_000 + np.array(SIZES) / 4))
    line = model.curves["all_reduce", 2]
    assert isinstance(line, Line)
    assert (line.latency_ns, line.ns_per_byte) == pytest.approx((20_000, 0.25))
    assert model.times(Messages.even("all_reduce", [2, 1], [4e6, 4e6])).ns == pytest.approx([1_020_000, 0])
    with pytest.raises(InputError, match="all_reduce of 2"):
        model.times(Messages.even("all_reduce", 3, [64.0]))


def test_a_line_has_no_negative_part() -> None:
    falling = fit_line(points([64, 128, 256], [3.0, 2.0, 1.0])).curves["all_reduce", 2]
    assert isinstance(falling, Line)
    assert falling.ns_per_byte == 0.0
    assert falling.latency_ns > 0
    steep = fit_line(points([100, 200, 400], [1.0, 3.0, 9.0])).curves["all_reduce", 2]
    assert isinstance(steep, Line)
    assert steep.latency_ns == 0.0
    assert steep.ns_per_byte > 0


def test_the_published_curve_has_its_three_regions() -> None:
    sizes = [2**place for place in range(6, 30)]
    ns = np.maximum(20_000, 9_000 + np.array(sizes) / 5)
    model = fit_published(points(sizes, ns, "all_reduce", 2))
    curve = model.curves["all_reduce", 2]
    assert isinstance(curve, PublishedCurve)
    assert curve.t0_ns == pytest.approx(20_000)
    assert curve.best == pytest.approx(5, rel=0.05)
    assert 14 < curve.x1 < 18 < curve.x2 < 28
    found = model.times(Messages.even("all_reduce", 2, np.array(sizes, dtype=float))).ns
    assert np.median(np.abs(found / ns - 1)) < 0.05
    with pytest.raises(InputError, match="all_reduce of 2"):
        model.times(Messages.even("all_to_all", 2, [64.0]))


def test_uneven_exchanges_go_to_the_published_curve_without_what_ranks_keep() -> None:
    even = ((64, 64), (64, 64))
    asked = as_published(points([128], [1.0], "all_to_all", 2, [even]))
    assert asked.bytes.tolist() == [64.0]
    assert as_published(points([128], [1.0], "all_to_all", 2)).bytes.tolist() == [128.0]


# --- rules for uneven exchanges --------------------------------------------------------------------------------------------


def test_an_even_exchange_weighs_its_buffer_by_every_rule_that_says_so() -> None:
    even = np.full((1, 4, 4), 100.0)
    found = {rule: float(weigh(even)[0]) for rule, weigh in RULES.items()}
    assert found["sum"] == found["busiest rank"] == found["max of max, own chunk corrected"] == pytest.approx(400)
    # As published, what a rank keeps is missing, and what it sends and receives counts twice.
    assert found["max of max"] == pytest.approx(300)
    assert found["max of sum"] == pytest.approx(600)
    assert pair_bytes(even)[0] == pytest.approx(400)


def test_the_busiest_rank_is_the_one_that_moves_most_both_ways() -> None:
    sent = np.zeros((1, 4, 4))
    sent[0, 0, 1:] = 60  # rank 0 sends 180 and receives nothing
    sent[0, 2, 0] = 30
    sent[0, 3, 3] = 1e9  # what a rank keeps moves nowhere
    assert load_bytes(sent)[0] == pytest.approx((180 + 30) / 2 * 4 / 3)
