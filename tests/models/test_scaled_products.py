"""Laws of products of few bits: what exact sums and scales by row cost, and how near measured rows they are."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest

from steptime._models.engine.constants import reference_constants
from steptime._models.engine.splits import TEST
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.forms.matmul.scaled import ScaledConstants, by_row_ns, scaled_ns
from steptime._platforms.device import Device
from steptime_lab.measurements.kernels import of, rows_of
from steptime_lab.measurements.shipped import shipped


def call(scale: TensorArg, *, fast: bool, op: str = "_scaled_mm") -> Call:
    x, weight = TensorArg((8192, 4096), "float8"), TensorArg((4096, 4096), "float8").transposed()
    rest = (None,) if op == "_scaled_mm" else (None, None)
    return Call(f"aten::{op}.default", (x, weight, scale, scale, None, *rest, None, fast))


@pytest.mark.parametrize("op", ["_scaled_mm", "_scaled_grouped_mm"])
def test_exact_sums_take_longer_and_scales_of_short_blocks_need_none(op: str) -> None:
    one, bytes_of_blocks = TensorArg(()), TensorArg((8192, 128), "uint8")
    fast, exact, short = (
        scaled_ns(call(scale, fast=fast, op=op), 1e5) for scale, fast in ((one, True), (one, False), (bytes_of_blocks, False))
    )
    assert 1e5 < fast == short < exact < 1.2e5


def test_scales_by_row_run_in_whole_rounds_of_tiles() -> None:
    device = reference_constants("scaled", ScaledConstants)
    high, wide = 11 * 128, 12 * 128  # a tile for every SM
    assert device.sms == 11 * 12
    sizes = np.array(
        [(128, 128, 1 << 15), (high, wide, 1 << 15), (high, wide + 1, 1 << 15), (high, 2 * wide, 1 << 15)], dtype=float
    )
    one, full, more, two = by_row_ns(sizes, np.ones(4, dtype=bool), device).tolist()
    assert one == full < more == two
    half = by_row_ns(sizes[1:2], np.ones(1, dtype=bool), device, share=2)[0]
    assert half > full


@pytest.mark.slow
def test_measured_products_of_eight_bits_are_met() -> None:
    """Of the split that nothing was fitted to; it takes five seconds."""
    rows = [row for row in of(rows_of(shipped("kernels"), families=["grouped_products"], shares=(1,)), TEST)
            if "_scaled_mm" in row.question.call.op]  # fmt: skip
    estimates = Device.load("h200").estimates([row.question for row in rows])
    errors = [abs(each.estimate.time_ns / row.time_ns - 1) for each, row in zip(estimates, rows, strict=True)]
    inside = [each.estimate.low_ns <= row.time_ns <= each.estimate.high_ns for each, row in zip(estimates, rows, strict=True)]
    assert len(rows) == 61
    assert exp(sum(log(error + 4e-4) for error in errors) / len(errors)) < 0.05
    assert 0.8 <= sum(inside) / len(inside) <= 1.0
