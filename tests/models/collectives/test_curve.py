"""A curve over bytes: it never falls, meets the rows, bears outliers, and goes on beyond them as bytes do."""

import json

import numpy as np
import pytest

from steptime._models.collectives.curve import Curve
from steptime._models.collectives.fitting import fit_curve
from steptime.errors import InputError

SIZES = 2.0 ** np.arange(6, 27)


def straight(sizes: np.ndarray) -> np.ndarray:
    return 20_000 + sizes / 3


def test_a_latency_and_a_bandwidth_are_met_between_the_rows() -> None:
    between = SIZES[:-1] * 1.4
    assert np.abs(fit_curve(SIZES, straight(SIZES)).ns(between) / straight(between) - 1).max() < 0.03


def test_time_never_falls_whatever_the_noise() -> None:
    noise = np.random.default_rng(5).normal(0, 0.3, len(SIZES))
    curve = fit_curve(SIZES, straight(SIZES) * np.exp(noise))
    assert (np.diff(curve.ns(np.geomspace(1, 1e12, 4000))) >= 0).all()


def test_one_row_that_took_ten_times_as_long_does_not_bend_the_curve() -> None:
    times = straight(SIZES)
    disturbed = times.copy()
    disturbed[10] *= 10
    assert np.abs(fit_curve(SIZES, disturbed).ns(SIZES) / times - 1).max() < 0.1


def test_a_switch_between_two_sizes_stays_sharp() -> None:
    sizes = 2.0 ** np.arange(6, 26, 0.25)
    times = np.where(sizes < 2**14.9, 40_000.0, 80_000.0)
    curve = fit_curve(sizes, times)
    assert curve.ns(2.0**14) < 45_000
    assert curve.ns(2.0**16) > 75_000


def test_beyond_the_largest_size_a_byte_costs_what_it_did_last() -> None:
    seen = SIZES[SIZES <= 2**20]
    far = 2.0**26
    curve = fit_curve(seen, straight(seen))
    assert curve.ns(far) == pytest.approx(straight(np.array(far)), rel=0.05)
    assert curve.ns(2 * far) / curve.ns(far) == pytest.approx(2, rel=0.02)


def test_below_the_smallest_size_it_is_flat() -> None:
    curve = fit_curve(SIZES, straight(SIZES))
    assert curve.ns(0.0) == curve.ns(1.0) == curve.ns(SIZES[0])


def test_a_curve_survives_json() -> None:
    curve = fit_curve(SIZES, straight(SIZES))
    again = Curve.from_dict(json.loads(json.dumps(curve.to_dict())))
    assert np.abs(again.ns(SIZES) / curve.ns(SIZES) - 1).max() < 1e-4


@pytest.mark.parametrize(
    "values",
    [
        {"log2_bytes": [1, 2, 3], "log_ns": [1, 2]},
        {"log2_bytes": [1, 2, 2], "log_ns": [1, 2, 3]},
        {"log2_bytes": [1, 2, 3], "log_ns": [1, 3, 2]},
        {"log2_bytes": [1, 2, 3], "log_ns": [1, 2, float("nan")]},
        {"log2_bytes": [1], "log_ns": [1]},
    ],
)
def test_what_is_no_curve_is_refused(values: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="curve"):
        Curve.from_dict(values)


def test_too_few_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="3 sizes"):
        fit_curve([8, 8, 16], [1.0, 1.0, 2.0])
