"""What lookups on shares of one GPU do to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from steptime._hardware.device import read_device
from steptime._models.lookups.contention import Contention, LookupsTogether
from steptime._models.lookups.question import BACKWARD, FORWARD
from steptime_lab.fit.sharing import OverlappingLookups, fit_contention, measured_lookups_together
from steptime_lab.measurements.shipped import FOLDER

RANKS = 4

Floats = npt.NDArray[np.float64]
Pair = Sequence[Floats]


def law(shares: int = RANKS) -> Contention:
    found = Contention.of(read_device({2: "h200-half", 4: "h200-quarter", 8: "h200-eighth"}[shares]))
    assert found is not None
    return found


def lookups(backward: list[float], *, rows: float = 0.0, shares: int = RANKS) -> LookupsTogether:
    """Ranks with such lookups backward, half as long forward; beside copies everything takes twice as long."""
    back = np.array([backward])
    return together((back / 2, back), (back, 2 * back), (np.zeros_like(back), np.full_like(back, rows)), shares)


def together(alone: Pair, copies: Pair, moved: Pair, shares: int = RANKS) -> LookupsTogether:
    """Forward and backward."""
    taken = [law(shares).taken(way, own, rows) for way, own, rows in zip((FORWARD, BACKWARD), alone, moved, strict=True)]
    slowed = [law(shares).slowed(own, beside) for own, beside in zip(alone, copies, strict=True)]
    return LookupsTogether(*alone, *taken, *slowed)


def durations(one: LookupsTogether, begin: Floats, between: float) -> tuple[Floats, Floats]:
    return one.durations_ns(begin, np.full_like(begin, between))


def test_a_rank_alone_is_not_slowed() -> None:
    forward, backward = durations(lookups([1e6, 0.0, 0.0, 0.0]), np.zeros((1, RANKS)), 0.0)
    assert backward.tolist() == [[1e6, 0.0, 0.0, 0.0]] and forward.tolist() == [[5e5, 0.0, 0.0, 0.0]]


def test_ranks_that_never_overlap_are_not_slowed() -> None:
    begin = np.array([[0.0, 1e8, 2e8, 3e8]])
    forward, backward = durations(lookups([1e6] * RANKS), begin, 1e5)
    np.testing.assert_allclose(backward, 1e6)
    np.testing.assert_allclose(forward, 5e5)


def test_a_long_lookup_is_slowed_only_while_the_others_run() -> None:
    _, backward = durations(lookups([1e6] * RANKS), np.zeros((1, RANKS)), 1e9)
    all_alike = backward[0, 0] / 1e6
    assert all_alike > 1.1
    _, backward = durations(lookups([1e7, 1e6, 1e6, 1e6]), np.zeros((1, RANKS)), 1e9)
    np.testing.assert_allclose(backward[0, 1:], 1e6 * all_alike)
    np.testing.assert_allclose(backward[0, 0], 1e7 + 1e6 * (all_alike - 1))


def test_rows_at_random_places_slow_the_others_more() -> None:
    begin = np.zeros((1, RANKS))
    few, many = (durations(lookups([1e6] * RANKS, rows=rows), begin, 1e9)[1] for rows in (0.0, 1e9))
    assert (many > few).all()
    # No lookup takes more of the memory than copies do.
    most = durations(lookups([1e6] * RANKS, rows=1e15), begin, 1e9)[1]
    np.testing.assert_allclose(most, 2e6)


def test_shares_that_no_rank_has_slow_nobody() -> None:
    two, four = (durations(lookups([1e6, 1e6, 0.0, 0.0], shares=shares), np.zeros((1, RANKS)), 1e9)[1] for shares in (2, 4))
    np.testing.assert_allclose(two[0, 0] - 1e6, 3 * (four[0, 0] - 1e6))


def test_plans_do_not_depend_on_each_other() -> None:
    draws = np.random.default_rng(0)
    columns = [draws.uniform(0, 5e6, (6, RANKS)), draws.uniform(0, 5e6, (6, RANKS))]
    copies = [own * draws.uniform(1, 3, (6, RANKS)) for own in columns]
    moved = [draws.uniform(0, 1e9, (6, RANKS)) for _ in range(2)]
    begin = draws.uniform(0, 3e6, (6, RANKS))
    whole = durations(together(columns, copies, moved), begin, 1e5)
    for place in range(6):
        chosen = [[each[[place]] for each in pair] for pair in (columns, copies, moved)]
        some = durations(together(chosen[0], chosen[1], chosen[2]), begin[[place]], 1e5)
        for all_of, one in zip(whole, some, strict=True):
            np.testing.assert_allclose(one[0], all_of[place])


def errors(measured: OverlappingLookups, contention: Contention) -> list[Floats]:
    """Relative, forward and backward, of lookups long enough to tell: shorter ones are mostly launches."""
    ways = zip(measured.predicted_ns(contention), measured.took_ns, measured.alone_ns, strict=True)
    return [np.abs(predicted / np.maximum(took, 1.0) - 1)[alone > 1e5] for predicted, took, alone in ways]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_lookups_as_measured(ranks: int) -> None:
    """From what each rank takes alone and beside copies, what all take together. The constants were fitted on 4 ranks."""
    measured = measured_lookups_together(FOLDER, ranks)
    alone = replace(law(ranks), backward=0.0, rows=0.0)
    (forward, backward), (forward_alone, backward_alone) = errors(measured, law(ranks)), errors(measured, alone)
    assert len(forward) > 50 * ranks
    assert forward.mean() < 0.075 < forward_alone.mean()
    assert backward.mean() < 0.062 < backward_alone.mean() / 1.8


def test_the_shipped_constants_are_what_fitting_gives() -> None:
    assert fit_contention(measured_lookups_together(FOLDER, RANKS), law()) == law()
