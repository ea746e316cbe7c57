"""The population of tables, and the public totals it was fitted to."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from steptime.errors import InputError
from steptime.lookups.calibration import Totals, fit, misfit, read_totals, totals_of
from steptime.lookups.populations import PRODUCTION_2021, PRODUCTION_2022, Population

SHARED = Path(os.environ.get("STEPTIME_SHARED", Path(__file__).parents[2].parent / "shared")) / "data" / "lookups"

EDGES = [0, *(1 << power for power in range(16))]


def described(name: str, shares: list[float]) -> str:
    bins = [f"({low}, {high}]" for low, high in pairwise(EDGES)] + ["(32768+"]
    lines = [f"{place}: {share:.3f}" for place, share in zip(bins, shares, strict=True)]
    histogram = ["Histogram of col sizes:", *lines, str(EDGES), "['0.000', '1.000']"]
    counts = ["Avg # of indices: 900", "Avg # of unique cols: 300", "Avg col size: 3.0"]
    ratios = ["Ratio of index distribution at different column sizes:", *histogram[1:], ""]
    return "\n".join([name, "Locality stats after processing 1 batches of size 64", *counts, *histogram, *ratios])


def test_totals_are_read_file_by_file(tmp_path: Path) -> None:
    shares = [0.5, 0.25, 0.25, *[0.0] * 14]
    path = tmp_path / "locality_stats.txt"
    path.write_text(described("fbgemm_t12_bs64.pt", shares) + described("fbgemm_t12_bs64_3.pt", shares[::-1]))
    first, second = read_totals(path)
    assert first == Totals("fbgemm_t12_bs64.pt", 12, 64, 900.0, 300.0, tuple(shares), tuple(shares))
    assert second.name == "fbgemm_t12_bs64_3.pt"
    assert second.row_shares == tuple(shares[::-1])
    assert second.mean_reuse == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "names no fbgemm"), ("fbgemm_t1_bs2.pt\nAvg # of indices: 1\n", "0 histogram lines"), (None, "cannot be read")],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "stats.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=f"stats.txt: .*{message}"):
        read_totals(path)


@pytest.mark.parametrize("population", [PRODUCTION_2021, PRODUCTION_2022])
def test_tables_spread_over_a_population_have_its_means(population: Population) -> None:
    tables = population.tables(400)
    assert np.mean([table.pooling for table in tables]) == pytest.approx(population.mean_pooling, rel=0.05)
    assert np.median([table.rows for table in tables]) == pytest.approx(population.rows_median, rel=0.15)
    assert min(table.alpha for table in tables) == pytest.approx(population.alpha_low, abs=0.01)
    assert max(table.alpha for table in tables) == pytest.approx(population.alpha_high, abs=0.01)
    assert population.tables(400) == tables


@pytest.mark.parametrize(("population", "file", "block"), [(PRODUCTION_2021, "2021", 1), (PRODUCTION_2022, "2022", 0)])
def test_the_shipped_populations_reproduce_the_public_totals(population: Population, file: str, block: int) -> None:
    path = SHARED / f"locality_stats_{file}.txt"
    if not path.exists():
        pytest.skip(f"the public statistics are not at hand ({path.name})")
    published = read_totals(path)[block]
    found = totals_of(population, published.samples, published.tables)
    assert found.lookups == pytest.approx(published.lookups, rel=0.02)
    assert found.mean_reuse == pytest.approx(published.mean_reuse, rel=0.02)
    np.testing.assert_allclose(found.row_shares, published.row_shares, atol=0.04)
    np.testing.assert_allclose(found.lookup_shares, published.lookup_shares, atol=0.04)


def test_a_fit_is_never_worse_than_its_start_and_leaves_held_fields() -> None:
    published = totals_of(PRODUCTION_2021, 4096, 10)
    start = replace(PRODUCTION_2021, rows_median=3e5, pooling_sigma=1.0)
    found = fit(start, published, rounds=3, held=("pooling_sigma",))
    assert misfit(PRODUCTION_2021, published) == 0.0
    assert misfit(found, published) < misfit(start, published)
    assert found.pooling_sigma == 1.0
