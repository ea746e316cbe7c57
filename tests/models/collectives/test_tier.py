"""Collectives of one tier: rank counts measured and not, uneven exchanges, stand-ins, intervals, errors, speed."""

import json
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from steptime._models.collectives.curve import moved_share
from steptime._models.collectives.fitting import fit_curve
from steptime._models.collectives.message import KINDS, Message, Messages
from steptime._models.collectives.tier import TierModel
from steptime.errors import InputError

SIZES = 2.0 ** np.arange(6, 27)


def truth(kind: str, ranks: int, sizes: Any) -> np.ndarray:
    """Steps like a ring's, and bytes over one bandwidth."""
    return 8_000 * (ranks - 1) + np.asarray(sizes) * moved_share(kind, ranks) / 3


def tier(*pairs: tuple[str, int], **more: Any) -> TierModel:
    curves = {(kind, ranks): fit_curve(SIZES, truth(kind, ranks, SIZES)) for kind, ranks in pairs}
    settings: dict[str, Any] = {"idle_power": 0.25, "residuals": {kind: (-0.1, 0.2) for kind, _ in pairs}} | more
    return TierModel(curves, **settings)


RING = tier(*((kind, ranks) for kind in ("all_reduce", "all_to_all", "reduce_scatter", "broadcast") for ranks in (2, 8)))


def ns(model: TierModel, kind: str, ranks: int, size: float) -> float:
    return float(model.times(Messages.even(kind, [ranks], [size])).ns[0])


def test_measured_counts_answer_with_their_curves() -> None:
    found = RING.times(Messages.even("all_reduce", 8, SIZES))
    assert found.ns == pytest.approx(truth("all_reduce", 8, SIZES), rel=0.02)
    assert found.inside.all()
    assert found.low_ns == pytest.approx(found.ns * np.exp(-0.1))
    assert found.high_ns == pytest.approx(found.ns * np.exp(0.2))


def test_one_rank_takes_no_time_even_of_kinds_never_measured() -> None:
    found = RING.times(Messages.even("send_recv", 1, SIZES))
    assert not found.ns.any()
    assert not found.high_ns.any()
    assert found.inside.all()


@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all", "broadcast"])
@pytest.mark.parametrize("ranks", [3, 4, 6, 16])
def test_bytes_of_counts_never_measured_go_as_a_rank_moves_them(kind: str, ranks: int) -> None:
    found = RING.times(Messages.even(kind, ranks, [2.0**26]))
    assert found.ns == pytest.approx(truth(kind, ranks, [2.0**26]), rel=0.1)
    assert not found.inside.any()


def test_latency_lies_between_that_of_the_neighbours_and_goes_on_growing() -> None:
    times = [ns(RING, "all_reduce", ranks, 64) for ranks in (2, 3, 4, 6, 8, 12, 16, 64)]
    assert times == sorted(times)
    assert times[-1] > 2 * times[4]


def test_time_never_falls_with_bytes_at_any_count() -> None:
    noise = np.random.default_rng(2)
    curves = {
        ("all_reduce", ranks): fit_curve(SIZES, truth("all_reduce", ranks, SIZES) * np.exp(noise.normal(0, 0.2, len(SIZES))))
        for ranks in (2, 4, 8)
    }
    model = TierModel(curves, 0.0, {})
    for ranks in (2, 3, 5, 8, 16, 100):
        assert (np.diff(model.times(Messages.even("all_reduce", ranks, np.geomspace(1, 1e11, 500))).ns) >= 0).all()


def test_the_interval_grows_with_the_distance_in_ranks_and_bytes() -> None:
    def width(ranks: int, size: float) -> float:
        found = RING.times(Messages.even("all_reduce", [ranks], [size]))
        return float(np.log(found.high_ns / found.low_ns)[0])

    assert width(8, 2**20) == pytest.approx(0.3)
    assert width(8, 2**20) < width(4, 2**20) < width(16, 2**20) < width(64, 2**20)
    assert width(8, 2**26) < width(8, 2**28) < width(8, 2**34)
    assert width(8, 2**4) > width(8, 2**6)


def test_one_measured_count_is_scaled_by_what_a_rank_moves() -> None:
    model = tier(("all_to_all", 4))
    large = ns(model, "all_to_all", 8, 2**26) / ns(model, "all_to_all", 4, 2**26)
    assert large == pytest.approx((7 / 8) / (3 / 4), rel=0.01)
    assert ns(model, "all_to_all", 8, 64) == pytest.approx(1.5 * ns(model, "all_to_all", 4, 64), rel=0.01)


def test_an_exchange_goes_by_its_load_and_by_its_pairs() -> None:
    even = Message("all_to_all", 2, 1 << 20, ((1 << 19, 1 << 19), (1 << 19, 1 << 19)))
    one_way = Message("all_to_all", 2, 1 << 20, ((0, 1 << 20), (0, 0)))
    found = RING.times(Messages.of([even, one_way])).ns
    assert found[0] == pytest.approx(truth("all_to_all", 2, 1 << 20), rel=0.02)
    # One rank sends what two exchange: the load is the same, the pairs are sqrt(2) of it.
    assert found[1] / found[0] == pytest.approx(2**0.125, rel=1e-6)


def test_an_exchange_of_nothing_takes_the_latency() -> None:
    nothing = Message("all_to_all", 2, 0, ((0, 0), (0, 0)))
    assert RING.times(Messages.of([nothing])).ns[0] == pytest.approx(ns(RING, "all_to_all", 2, 1), rel=1e-9)


def test_ragged_parts_cost_more_and_only_even_exchanges_have_them() -> None:
    model = tier(("all_to_all", 2), ("all_reduce", 2), ragged=0.1)
    assert ns(model, "all_to_all", 2, 6400) / ns(model, "all_to_all", 2, 6404) < 0.92
    assert ns(model, "all_to_all", 2, 6404.5) < ns(model, "all_to_all", 2, 6404)
    assert ns(model, "all_reduce", 2, 6400) == pytest.approx(ns(model, "all_reduce", 2, 6404), rel=0.01)


def test_even_splits_are_an_even_exchange_to_the_last_digit() -> None:
    model = tier(("all_to_all", 7), ragged=0.1)
    for part in range(1001, 1101):
        split = Message("all_to_all", 7, 7 * part, ((part,) * 7,) * 7)
        assert model.times(Messages.of([split])).ns[0] == pytest.approx(ns(model, "all_to_all", 7, 7 * part), rel=1e-9)


def test_stated_kinds_stand_in_with_a_wider_interval() -> None:
    gathered = RING.times(Messages.even("all_gather", 8, [2.0**20]))
    scattered = RING.times(Messages.even("reduce_scatter", 8, [2.0**20]))
    assert gathered.ns == scattered.ns
    assert gathered.high_ns > scattered.high_ns
    assert not gathered.inside.any()
    assert ns(RING, "reduce", 8, 2**20) == ns(RING, "broadcast", 8, 2**20)


def test_a_barrier_is_an_all_reduce_of_four_bytes_unless_measured() -> None:
    assert ns(RING, "barrier", 8, 2**20) == ns(RING, "all_reduce", 8, 4)
    own = tier(("barrier", 8), ("all_reduce", 8))
    assert ns(own, "barrier", 8, 64) == pytest.approx(float(truth("barrier", 8, 64)), rel=0.02)


def test_a_kind_that_nothing_stands_in_for_says_what_is_there() -> None:
    with pytest.raises(InputError, match=r"no send_recv .* all_reduce \(2, 8 ranks\), .*broadcast"):
        RING.times(Messages.even("send_recv", 2, [64.0]))
    with pytest.raises(InputError, match="there are none"):
        TierModel({}, 0.0, {}).times(Messages.even("barrier", 2, [0.0]))


@pytest.mark.parametrize("kind", KINDS)
def test_curves_of_a_fabric_like_it_say_nothing_of_one_without_its_own(kind: str) -> None:
    with pytest.raises(InputError, match="there are none"):
        TierModel({}, 0.0, {}, like=RING.curves).times(Messages.even(kind, 2, [64.0]))


def test_json_gives_the_same_times() -> None:
    model = tier(("all_to_all", 2), ("all_to_all", 4), ragged=0.07)
    again = TierModel.from_dict(json.loads(json.dumps(model.to_dict())), "fabric.json")
    asked = Messages.even("all_to_all", [2, 3, 4, 64], [100.0, 1e5, 1e7, 1e9])
    first, second = model.times(asked), again.times(asked)
    assert second.ns == pytest.approx(first.ns, rel=1e-3)
    assert second.low_ns == pytest.approx(first.low_ns, rel=1e-3)
    assert (second.inside == first.inside).all()


def test_measured_ends_stay_inside_after_json() -> None:
    sizes = np.array([1000.0, 3001, 9007, 27011])
    model = TierModel({("all_reduce", 2): fit_curve(sizes, sizes)}, 0.0, {})
    again = TierModel.from_dict(model.to_dict(), "fabric.json")
    assert again.times(Messages.even("all_reduce", 2, sizes)).inside.all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 7}, "schema version 7"),
        ({"curves": None}, "no fitted collectives"),
        ({"curves": []}, "it has no curves; fit them again"),
        ({"curves": {}}, "it has no curves"),
        ({"curves": [{"kind": "gossip", "ranks": 2}]}, "kind 'gossip'"),
        ({"curves": [{"kind": "all_reduce", "ranks": "2"}]}, "ranks '2'"),
        ({"curves": [{"kind": "all_reduce", "ranks": 2, "log2_bytes": [1, 2]}]}, "log_ns"),
        ({"residuals": {"all_reduce": [0.1]}}, "no fitted collectives"),
        ({"residuals": {"all_reduce": [0.1, float("inf")]}}, "expected logarithms"),
        ({"idle_power": "much"}, "no fitted collectives"),
    ],
)
def test_bad_content_is_one_line_that_says_where(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        TierModel.from_dict(RING.to_dict() | change, "fabric.json")
    assert str(raised.value).startswith("fabric.json: ")
    assert "\n" not in str(raised.value)


def test_a_missing_part_is_named() -> None:
    values = RING.to_dict()
    del values["idle_power"]
    with pytest.raises(InputError, match="no 'idle_power'"):
        TierModel.from_dict(values, "fabric.json")


def test_questions_of_many_kinds_come_back_in_their_order() -> None:
    random = np.random.default_rng(3)
    kinds = random.choice([KINDS.index("all_reduce"), KINDS.index("all_to_all")], 200)
    ranks, sizes = random.choice([1, 2, 4, 8], 200), 2.0 ** random.uniform(4, 28, 200)
    together = RING.times(Messages(kinds, ranks, sizes, sizes, sizes))
    alone = [ns(RING, KINDS[kind], int(count), size) for kind, count, size in zip(kinds, ranks, sizes, strict=True)]
    assert together.ns == pytest.approx(alone)


def test_no_questions_no_answers() -> None:
    assert len(RING.times(Messages.even("all_reduce", 2, [])).ns) == 0


def test_a_million_estimates_take_about_a_second() -> None:
    random = np.random.default_rng(1)
    count = 1_000_000
    kinds = random.choice([KINDS.index(kind) for kind in ("all_reduce", "all_to_all", "broadcast")], count)
    sizes = 2.0 ** random.uniform(5, 30, count)
    asked = Messages(kinds, random.choice([2, 3, 4, 8, 16], count), sizes, sizes, sizes)
    started = perf_counter()
    RING.times(asked)
    # Half a second alone; the rest is for machines that do other things as well.
    assert perf_counter() - started < 3
