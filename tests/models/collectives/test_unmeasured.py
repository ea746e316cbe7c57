"""Kinds and rank counts without rows: from a fabric with such links, from the mirror image, from other counts."""

from __future__ import annotations

import numpy as np
import pytest

from steptime._models.collectives.curve import Curve, moved_share
from steptime._models.collectives.fitting import Points, fit_curves
from steptime._models.collectives.message import Message, Messages
from steptime._models.collectives.tier import TierModel

KNOTS = np.arange(9.0, 30.0)
SIZES = np.exp2(KNOTS)
STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def ring_ns(kind: str, ranks: int, start: float = 5_000.0, step: float = 800.0, byte_ns: float = 0.003) -> np.ndarray:
    """A start, a latency per step of a ring, and bytes over one bandwidth."""
    result: np.ndarray = start + step * STEPS[kind] * (ranks - 1) + byte_ns * moved_share(kind, ranks) * SIZES
    return result


def curves(*ranks: int, slower: float = 1.0, byte_ns: float = 0.003) -> dict[tuple[str, int], Curve]:
    return {
        (kind, count): Curve(KNOTS, np.log(slower * ring_ns(kind, count, byte_ns=byte_ns))) for kind in STEPS for count in ranks
    }


def asked(model: TierModel, kind: str, ranks: int) -> np.ndarray:
    return model.times(Messages.even(kind, ranks, SIZES)).ns


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
@pytest.mark.parametrize(("counts", "left"), [((2, 4), 8), ((2, 8), 4), ((4, 8), 2)])
def test_latency_goes_with_the_steps_of_a_ring(kind: str, counts: tuple[int, ...], left: int) -> None:
    known = {pair: curve for pair, curve in curves(*counts).items() if pair[0] == kind}
    assert asked(TierModel(known, 0.0, {}), kind, left)[0] == pytest.approx(ring_ns(kind, left)[0], rel=0.03)


def test_many_ranks_of_an_all_reduce_go_by_trees() -> None:
    model = TierModel({pair: curve for pair, curve in curves(2, 4).items() if pair[0] == "all_reduce"}, 0.0, {})
    starts = [asked(model, "all_reduce", count)[0] for count in (8, 16, 64, 1024)]
    assert starts == sorted(starts)
    assert starts[-1] < 4 * starts[0]


def test_a_kind_left_out_comes_from_its_mirror_image_at_the_same_ranks() -> None:
    known = curves(2, 4, 8)
    switch = np.where(KNOTS > 22, np.log(1.4), 0.0)
    for kind in ("all_gather", "reduce_scatter"):
        known[kind, 8] = Curve(KNOTS, known[kind, 8].log_ns + switch)
    truth = np.exp(known.pop(("all_gather", 8)).log_ns)
    assert asked(TierModel(known, 0.0, {}), "all_gather", 8) == pytest.approx(truth, rel=0.01)


def test_a_fabric_with_such_links_knows_where_algorithms_change_and_the_own_one_how_fast_it_is() -> None:
    like, known = curves(2, 4, 8), curves(2, 4, 8, slower=1.1)
    for some in (like, known):
        some["all_reduce", 8] = Curve(KNOTS, some["all_reduce", 8].log_ns + np.where(KNOTS > 22, np.log(1.5), 0.0))
    truth = np.exp(known.pop(("all_reduce", 8)).log_ns)
    model = TierModel(known, 0.0, {}, like=like)
    found = model.times(Messages.even("all_reduce", 8, SIZES))
    assert found.ns == pytest.approx(truth, rel=0.01)
    assert not found.inside.any()
    assert (found.low_ns < found.ns).all()
    assert asked(TierModel(known, 0.0, {}), "all_reduce", 8)[-1] < 0.8 * truth[-1]


def test_a_kind_that_only_the_like_fabric_has_is_carried_too_and_nothing_comes_from_it_alone() -> None:
    like = curves(2, 8) | {("send_recv", 2): Curve(KNOTS, np.log(4_000 + 0.005 * SIZES))}
    model = TierModel(curves(2, slower=1.2), 0.0, {}, like=like)
    assert model.knows("send_recv")
    assert asked(model, "send_recv", 2) == pytest.approx(1.2 * (4_000 + 0.005 * SIZES), rel=0.01)
    assert asked(model, "all_reduce", 4)[0] == pytest.approx(1.2 * ring_ns("all_reduce", 4)[0], rel=0.05)


def test_sparse_rows_take_the_shape_of_the_like_fabric() -> None:
    like = curves(8)
    sizes = [1 << 10, 1 << 12, 1 << 14, 1 << 28]
    rows = [Message("all_reduce", 8, size) for size in sizes]
    points = Points(rows, 1.05 * like["all_reduce", 8].ns(sizes))
    middle = Messages.even("all_reduce", 8, [float(1 << 21)])
    truth = 1.05 * float(like["all_reduce", 8].ns(1 << 21))
    assert fit_curves(points, like=like).times(middle).ns[0] == pytest.approx(truth, rel=0.02)
    assert abs(fit_curves(points).times(middle).ns[0] / truth - 1) > 0.3
