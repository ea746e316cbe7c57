"""Laws of contention for memory at one moment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steptime.errors import InputError
from steptime.models.contention import LEAST_SENSITIVITY, Beside, Contention, Fractions, fit, predicted_ns

LAW = Contention()
USED = arrays(np.float64, 4, elements=st.floats(0, 0.97))
WAITS = arrays(np.float64, 4, elements=st.floats(LEAST_SENSITIVITY, 1))


@given(st.floats(0, 0.97), st.floats(LEAST_SENSITIVITY, 1))
def test_without_others_nothing_changes(used: float, waits: float) -> None:
    alone = np.array([used, 0.0, 0.0, 0.0])
    assert LAW.slowdown(alone, np.full(4, waits))[0] == 1.0


@given(USED, WAITS)
def test_nobody_is_faster_in_company(used: Fractions, waits: Fractions) -> None:
    assert (LAW.slowdown(used, waits) >= 1.0).all()


@given(USED, WAITS)
def test_all_together_use_no_more_than_the_limit(used: Fractions, waits: Fractions) -> None:
    assert (used / LAW.slowdown(used, waits)).sum() <= 1.0 + 1e-6


@given(USED, WAITS, st.floats(0, 1))
def test_more_demand_slows_every_other(used: Fractions, waits: Fractions, more: float) -> None:
    grown = used.copy()
    grown[0] += more * (0.97 - grown[0])
    assert (LAW.slowdown(grown, waits)[1:] >= LAW.slowdown(used, waits)[1:] - 1e-6).all()


@given(st.floats(0.01, 0.97), st.floats(LEAST_SENSITIVITY, 1))
def test_equals_slow_equally(used: float, waits: float) -> None:
    found = LAW.slowdown(np.full(4, used), np.full(4, waits))
    assert np.ptp(found) == 0.0


def test_kernels_bound_by_bandwidth_divide_it() -> None:
    """Four that each could use three quarters take about three times as long, and a little more."""
    slowdown = LAW.slowdown(np.full(4, 0.75), np.ones(4))[0]
    assert 3.0 < slowdown < 3.3


def test_larger_parts_reach_more_bandwidth_and_none_the_limit() -> None:
    reached = [LAW.part_bandwidth(share) for share in (8, 4, 2, 1)]
    assert reached == sorted(reached)
    assert reached[-1] < 1.0


def test_a_whole_gpu_has_no_company() -> None:
    used, waits = np.array([0.5]), np.array([1.0])
    assert LAW.beside(used, waits, 1, "streaming")[0] == 1.0
    assert LAW.beside(used, waits, 4, "idle")[0] == 1.0


def test_streaming_slows_more_than_the_same_and_unknown_company_is_refused() -> None:
    used, waits = np.array([0.2]), np.array([0.6])
    assert LAW.beside(used, waits, 4, "streaming")[0] > LAW.beside(used, waits, 4, "same")[0] > 1.0
    with pytest.raises(InputError, match="others 'sleeping'"):
        LAW.beside(used, waits, 4, "sleeping")


def test_short_kernels_and_those_that_move_much_wait_most() -> None:
    used = np.array([0.01, 0.01, 0.7])
    waits = LAW.sensitivity(used, np.array([1e6, 2e3, 1e6]), 2)
    assert waits[0] < waits[1]
    assert waits[0] < waits[2]
    assert (waits < 1.0).all()


def test_fit_finds_the_law_its_rows_were_made_with() -> None:
    made = Contention(offered=3.0, sharpness=1.5, everywhere=0.3, bandwidth=0.4, start_ns=2000.0, busy=0.4)
    random = np.random.default_rng(0)
    rows = []
    for _ in range(60):
        alone_ns = float(np.exp(random.uniform(np.log(1e3), np.log(1e6))))
        nbytes = float(random.uniform(0, 0.3) * alone_ns * 4.8e3)
        for share in (2, 8):
            rows += [Beside(share, others, nbytes, 1, alone_ns, alone_ns) for others in ("same", "streaming")]
    times = predicted_ns(made, rows)
    measured = [Beside(r.share, r.others, r.nbytes, 1, r.alone_ns, float(t)) for r, t in zip(rows, times, strict=True)]
    peaks = {share: made.part_bandwidth(share) * made.limit_bytes_per_s for share in (1, 2, 4, 8)}
    found = predicted_ns(fit(measured, peaks), measured)
    assert np.abs(found / times - 1).max() < 0.01
