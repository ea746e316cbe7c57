"""Poisson numbers in the bins of a spectrum: near their means alone, against every bin and against the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._lookups.estimated import expected_statistics
from steptime._lookups.generators import Generator
from steptime._lookups.mixture import Mixture, counted, poisson_shares, rows_in_bins, shares_in_bins
from steptime._lookups.spectrum import EDGES, Spectrum, of_bins
from steptime._lookups.statistics import Floats

MIDDLES: Floats = (np.append(0, EDGES[:-1]) + 1 + EDGES) / 2
NO_ROWS = 1e-16
"""A share of rows below this comes from rounding and may be left out."""

FEW = 16
"""Counts up to which shares are exact."""


def in_every_bin(means: Floats, least: Floats) -> Floats:
    """Shares the slow way: at the ends of all bins, [bins, means]."""
    return shares_in_bins(poisson_shares(means, np.floor(np.append(0, EDGES)[:, None] - least)))


def spectrum_of_every_bin(mixture: Mixture) -> Spectrum:
    shares = in_every_bin(mixture.rates, np.zeros(len(mixture.rates)))
    # Differences of numbers near 1 know little of what is rare.
    shares[:FEW] = [[exact_share(mean, count, count + 1) for mean in mixture.rates] for count in range(FEW)]
    shares[FEW:][shares[FEW:] < 4 * NO_ROWS] = 0.0
    rows = shares @ mixture.rows
    if mixture.burst > 1:
        rows = in_every_bin(MIDDLES * (mixture.burst - 1), MIDDLES) @ rows
    rows[rows < NO_ROWS * rows.sum()] = 0.0
    return of_bins(rows, rows * MIDDLES)


def exact_share(mean: float, low: int, high: int) -> float:
    """P(low < N <= high) by the definition."""
    return math.fsum(math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) for number in range(low + 1, high + 1))


def test_shares_are_those_of_the_definition() -> None:
    means = np.array([0.1, 3.0, 40.0])
    found = poisson_shares(means, np.array([-1, 0, 1, 7, 45])[:, None])
    assert not found[0].any()
    for shares, count in zip(found[1:], (0, 1, 7, 45), strict=True):
        np.testing.assert_allclose(shares, [exact_share(mean, -1, count) for mean in means], atol=2e-3)


@given(st.lists(st.floats(-9, 12), min_size=1, max_size=30))
def test_bins_far_from_the_mean_hold_nothing(logs: list[float]) -> None:
    means = 10.0 ** np.array(logs)
    found = rows_in_bins(means, np.ones(len(means)))
    np.testing.assert_allclose(found, in_every_bin(means, np.zeros(len(means))).sum(axis=1), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("mean", [1e-3, 0.7, 9.0, 15.5, 17.0, 64.0, 900.0, 20_000.0])
def test_shares_in_bins_are_those_of_the_definition(mean: float) -> None:
    found = rows_in_bins(np.array([mean]), np.ones(1))
    assert found.sum() == pytest.approx(-math.expm1(-mean), abs=3e-3)
    places, ends = np.flatnonzero(found), np.append(0, EDGES)
    exact = [exact_share(mean, ends[place], ends[place + 1]) for place in places]
    np.testing.assert_allclose(found[places], exact, atol=3e-3)


@pytest.mark.parametrize("burst", [1.0, 1.3, 4.0, 1000.0])
@pytest.mark.parametrize("most", [0.01, 30.0, 1e5, 1e10])
def test_a_spectrum_is_that_of_every_bin(burst: float, most: float) -> None:
    rates = np.geomspace(most, most * 1e-8, 300)
    mixture = Mixture(rates, np.geomspace(1.0, 1e7, 300), burst)
    found, direct = mixture.spectrum(1.0), spectrum_of_every_bin(mixture)
    assert found.unique == pytest.approx(direct.unique, rel=1e-9)
    assert found.total == pytest.approx(direct.total, rel=1e-9)
    windows = np.geomspace(1.0, direct.total, 20)
    np.testing.assert_allclose(found.in_random_order(windows), direct.in_random_order(windows), rtol=1e-9)
    np.testing.assert_allclose(found.reuse_bins()[0], direct.reuse_bins()[0], rtol=1e-9, atol=NO_ROWS * direct.unique)
    by_bin = counted(rates, burst) @ mixture.rows
    assert by_bin.sum() == pytest.approx(direct.unique, rel=1e-7)
    assert by_bin @ MIDDLES == pytest.approx(direct.total, rel=1e-7)


@pytest.mark.parametrize("batch", [3, 4096, 300_000])
@pytest.mark.parametrize(
    "stream",
    [
        Generator(rows=1, pooling=1.0),
        Generator(rows=20_000, pooling=7.5, lengths="geometric"),
        Generator(rows=3_000_000, pooling=40.0, kind="zipf", alpha=1.2, shift=3.0, locality=0.4, long_bag=5000),
    ],
)
def test_expected_statistics_have_the_lookups_that_are_drawn(stream: Generator, batch: int) -> None:
    found = expected_statistics(stream, batch)
    offsets, lookups = stream.offsets(batch)
    assert found.lookups == lookups
    assert found.spectrum.total == pytest.approx(lookups, rel=1e-9)
    assert found.spectrum.unique == pytest.approx(found.footprint.unique, rel=1e-9)
    assert found.counted.pooling_spread == pytest.approx(float(np.diff(offsets).std()), rel=1e-9)
