"""Laws of contention for memory at one moment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steptime.errors import InputError
from steptime.measurements.shipped import shipped
from steptime.models.contention import (
    LEAST_SENSITIVITY,
    Beside,
    Contention,
    Fractions,
    beside,
    fit,
    load,
    predicted_ns,
    traffic_bytes,
)
from steptime.models.kernels.call import Call, TensorArg
from steptime.models.kernels.question import Question
from steptime.models.kernels.rows import TEST, Row, rows_of

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
    made = Contention(offered=3.5, sharpness=1.5, everywhere=0.3, bandwidth=0.4, start_ns=2000.0, busy=0.4, families={})
    random = np.random.default_rng(0)
    rows = []
    for _ in range(60):
        alone_ns = float(np.exp(random.uniform(np.log(1e3), np.log(1e6))))
        nbytes = float(random.uniform(0, 0.3) * alone_ns * made.limit_bytes_per_s / 1e9)
        for share in (2, 8):
            rows += [Beside(share, others, "copy", nbytes, 1, alone_ns, alone_ns) for others in ("same", "streaming")]
    times = predicted_ns(made, rows)
    measured = [replace(row, time_ns=float(time_ns)) for row, time_ns in zip(rows, times, strict=True)]
    peaks = {share: made.part_bandwidth(share) * made.limit_bytes_per_s for share in (1, 2, 4, 8)}
    found = fit(measured, peaks=peaks)
    assert np.abs(predicted_ns(found, measured) / times - 1).max() < 0.02


def test_arrays_give_the_same_law_again() -> None:
    assert load(LAW.arrays()) == LAW


def row(share: int, others: str, time_ns: float) -> Row:
    call = Call("aten::add.Tensor", (TensorArg((1024, 1024)), TensorArg((1024, 1024))))
    question = Question(call, share=share, others=others)
    return Row(question, "elementwise", "sweep", "fit", time_ns, (time_ns,), 0.0, ("add",), (time_ns,))


def test_only_calls_measured_beside_idle_parts_tell_of_company() -> None:
    rows = [row(2, "idle", 10.0), row(2, "same", 12.0), row(4, "same", 30.0), row(1, "none", 5.0), row(2, "streaming", 18.0)]
    found = beside(rows)
    assert [(one.share, one.others, one.alone_ns, one.time_ns) for one in found] == [
        (2, "same", 10.0, 12.0),
        (2, "streaming", 10.0, 18.0),
    ]


def test_traffic_of_a_sum_is_three_times_its_tensor() -> None:
    assert traffic_bytes(row(1, "none", 1.0).question.call) == 3 * 1024 * 1024 * 4


def test_measured_company_is_explained_better_than_by_nothing() -> None:
    """On the shipped rows kept for testing: the error of every kind of company falls by more than 40 %."""
    rows = beside([one for one in rows_of(shipped("kernels"), shares=[2, 4, 8]) if one.split == TEST])
    predicted = predicted_ns(LAW, rows)
    for kind in {(one.share, one.others) for one in rows}:
        chosen = [i for i, one in enumerate(rows) if (one.share, one.others) == kind]
        measured = np.array([rows[i].time_ns for i in chosen])
        alone = np.array([rows[i].alone_ns for i in chosen])
        assert np.abs(predicted[chosen] / measured - 1).mean() < 0.6 * np.abs(alone / measured - 1).mean()
