"""What lookups on shares of one GPU do to each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.table_lookups import table_lookups
from steptime._hardware.device import read_device
from steptime._models.lookups.contention import Contention, LookupsTogether, row_bytes
from steptime._models.lookups.question import BACKWARD, FORWARD

MEASURED = Path(__file__).parents[4] / "benchmarks/h200/results"
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


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_lookups_as_measured(ranks: int) -> None:
    """From what each rank takes alone and beside copies, what all take together. The constants were fitted on 4 ranks."""
    document = json.loads((MEASURED / f"ranks_together_lookups_{ranks}.json").read_text(encoding="utf-8"))
    errors: tuple[list[float], list[float]] = ([], [])
    alone_off: tuple[list[float], list[float]] = ([], [])
    for case in document["cases"]:
        model = Dlrm.from_dict(case["config"]).with_batch(case["batch"])
        known = [table_lookups(table, model.batch) for table in model.tables]
        rows = [row_bytes(known, direction, model.optimizer) for direction in (FORWARD, BACKWARD)]
        moved = [np.bincount(case["plan"], own, ranks)[None].astype(np.float64) for own in rows]
        marks = [(one["kind"], one["values"], np.array(one["marks_ns"], dtype=float)) for one in case["readings"]]
        alone, copies = (_one_by_one(marks, kind, ranks) for kind in ("alone", "copies"))
        for kind, _, read in marks:
            if kind == "together":
                found = durations(together(alone, copies, moved, ranks), read[None, :, 0], document["gap_ns"])
                took = (read[:, 3] - read[:, 2], read[:, 1] - read[:, 0])
                for way, (own, said, real) in enumerate(zip(alone, found, took, strict=True)):
                    some = own[0] > 1e5
                    errors[way].extend(np.abs(said[0][some] / real[some] - 1).tolist())
                    alone_off[way].extend(np.abs(own[0][some] / real[some] - 1).tolist())
    assert len(errors[0]) > 50 * ranks
    assert np.mean(errors[0]) < 0.075 < np.mean(alone_off[0])
    assert np.mean(errors[1]) < 0.062 < np.mean(alone_off[1]) / 1.8


def _one_by_one(marks: list[tuple[str, list[int], Floats]], kind: str, ranks: int) -> tuple[Floats, Floats]:
    """Forward and backward of every rank by itself, [1, ranks]."""
    forward, backward = np.zeros((1, ranks)), np.zeros((1, ranks))
    for name, values, read in marks:
        if name == kind:
            rank = values[0]
            backward[0, rank], forward[0, rank] = read[rank, 1] - read[rank, 0], read[rank, 3] - read[rank, 2]
    return forward, backward
