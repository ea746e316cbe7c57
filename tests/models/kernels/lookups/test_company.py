"""What lookups on parts of one GPU do to each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from steptime._build.dlrm.model import Dlrm
from steptime._models.lookups.company import Company
from steptime._shard.evaluate.laws import row_bytes

MEASURED = Path(__file__).parents[4] / "benchmarks/h200/results"
RANKS, MEMORY = 4, 4800.0

Floats = npt.NDArray[np.float64]


def company(backward: list[float], *, rows: float = 0.0) -> Company:
    """Ranks with such lookups backward, half as long forward; beside copies everything takes twice as long."""
    back = np.array([backward])
    two = np.full_like(back, 2.0)
    return Company(back / 2, back, two, two, np.zeros_like(back), np.full_like(back, rows))


def test_a_rank_alone_is_not_slowed() -> None:
    forward, backward = company([1e6, 0.0, 0.0, 0.0]).stretched(np.zeros((1, RANKS)), 0.0, MEMORY, RANKS)
    assert backward.tolist() == [[1e6, 0.0, 0.0, 0.0]] and forward.tolist() == [[5e5, 0.0, 0.0, 0.0]]


def test_ranks_that_never_overlap_are_not_slowed() -> None:
    begin = np.array([[0.0, 1e8, 2e8, 3e8]])
    forward, backward = company([1e6] * RANKS).stretched(begin, 1e5, MEMORY, RANKS)
    np.testing.assert_allclose(backward, 1e6)
    np.testing.assert_allclose(forward, 5e5)


def test_a_long_lookup_is_slowed_only_while_the_others_run() -> None:
    _, backward = company([1e6] * RANKS).stretched(np.zeros((1, RANKS)), 1e9, MEMORY, RANKS)
    all_alike = backward[0, 0] / 1e6
    assert all_alike > 1.1
    _, backward = company([1e7, 1e6, 1e6, 1e6]).stretched(np.zeros((1, RANKS)), 1e9, MEMORY, RANKS)
    np.testing.assert_allclose(backward[0, 1:], 1e6 * all_alike)
    np.testing.assert_allclose(backward[0, 0], 1e7 + 1e6 * (all_alike - 1))


def test_rows_at_random_places_slow_the_others_more() -> None:
    begin = np.zeros((1, RANKS))
    few, many = (company([1e6] * RANKS, rows=rows).stretched(begin, 1e9, MEMORY, RANKS)[1] for rows in (0.0, 1e9))
    assert (many > few).all()
    # No lookup takes more of the memory than copies do.
    most = company([1e6] * RANKS, rows=1e15).stretched(begin, 1e9, MEMORY, RANKS)[1]
    np.testing.assert_allclose(most, 2e6)


def test_parts_that_no_rank_has_slow_nobody() -> None:
    two, four = (company([1e6, 1e6, 0.0, 0.0]).stretched(np.zeros((1, RANKS)), 1e9, MEMORY, parts)[1] for parts in (2, 4))
    np.testing.assert_allclose(two[0, 0] - 1e6, 3 * (four[0, 0] - 1e6))


def test_plans_do_not_depend_on_each_other() -> None:
    draws = np.random.default_rng(0)
    columns = [draws.uniform(0, 5e6, (6, RANKS)), draws.uniform(0, 5e6, (6, RANKS))]
    copies = [draws.uniform(1, 3, (6, RANKS)) for _ in range(2)]
    moved = [draws.uniform(0, 1e9, (6, RANKS)) for _ in range(2)]
    begin = draws.uniform(0, 3e6, (6, RANKS))
    whole = Company(*columns, *copies, *moved).stretched(begin, 1e5, MEMORY, RANKS)
    for place in range(6):
        some = Company(*(each[[place]] for each in (*columns, *copies, *moved))).stretched(begin[[place]], 1e5, MEMORY, RANKS)
        for all_of, one in zip(whole, some, strict=True):
            np.testing.assert_allclose(one[0], all_of[place])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_lookups_as_measured(ranks: int) -> None:
    """From what each rank takes alone and beside copies, what all take together. The constants were fitted on 4 ranks."""
    document = json.loads((MEASURED / f"ranks_together_lookups_{ranks}.json").read_text(encoding="utf-8"))
    law: tuple[list[float], list[float]] = ([], [])
    alone_off: tuple[list[float], list[float]] = ([], [])
    for case in document["cases"]:
        model = Dlrm.from_dict(case["config"]).with_batch(case["batch"])
        moved = [np.bincount(case["plan"], own, ranks)[None] for own in row_bytes(model)]
        marks = [(one["kind"], one["values"], np.array(one["marks_ns"], dtype=float)) for one in case["readings"]]
        alone, copies = (_one_by_one(marks, kind, ranks) for kind in ("alone", "copies"))
        factors = [np.maximum(beside / np.maximum(own, 1.0), 1.0) for own, beside in zip(alone, copies, strict=True)]
        for kind, _, read in marks:
            if kind == "together":
                found = Company(*alone, *factors, *moved).stretched(read[None, :, 0], document["gap_ns"], MEMORY, ranks)
                took = (read[:, 3] - read[:, 2], read[:, 1] - read[:, 0])
                for way, (own, said, real) in enumerate(zip(alone, found, took, strict=True)):
                    some = own[0] > 1e5
                    law[way].extend(np.abs(said[0][some] / real[some] - 1).tolist())
                    alone_off[way].extend(np.abs(own[0][some] / real[some] - 1).tolist())
    assert len(law[0]) > 50 * ranks
    assert np.mean(law[0]) < 0.075 < np.mean(alone_off[0])
    assert np.mean(law[1]) < 0.062 < np.mean(alone_off[1]) / 1.8


def _one_by_one(marks: list[tuple[str, list[int], Floats]], kind: str, ranks: int) -> tuple[Floats, Floats]:
    """Forward and backward of every rank by itself, [1, ranks]."""
    forward, backward = np.zeros((1, ranks)), np.zeros((1, ranks))
    for name, values, read in marks:
        if name == kind:
            rank = values[0]
            backward[0, rank], forward[0, rank] = read[rank, 1] - read[rank, 0], read[rank, 3] - read[rank, 2]
    return forward, backward
