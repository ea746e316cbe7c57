"""Laws of collectives beside compute: who slows whom, what was not measured slows nothing, fits find what made the pairs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steptime._hardware.fabric import FOLDER
from steptime._hardware.nccl import read_nccl
from steptime._models.collectives.overlap import ANALYTIC, FILE, NOT_MEASURED, Overlap, is_persistent, read_overlaps
from steptime._models.engine.splits import FIT, VALIDATION
from steptime._platforms.platform import Platform
from steptime.errors import InputError
from steptime_lab.fit.overlap import (
    CollectivePairs,
    KernelPairs,
    busy_table,
    fit_overlap,
    measured_pairs,
    overlap_rows,
    write_overlaps,
)
from steptime_lab.measurements.shipped import FOLDER as MEASUREMENTS

LOOPBACK = Overlap.load("loopback")


@cache
def rows() -> list[Any]:
    return overlap_rows(MEASUREMENTS)


def test_fabrics_without_pairs_slow_nothing_and_say_so() -> None:
    overlap = Overlap.load("h100-nvlink")
    assert (overlap.known, overlap.source) == (False, NOT_MEASURED)
    assert overlap.compute_factor([1e3, 1e6], 4, persistent=[True, False]).tolist() == [1.0, 1.0]
    assert overlap.collective_factor([1e3, 1e6], 8, 8, kernel_ns=1e6, busy=True).tolist() == [1.0, 1.0]
    assert overlap.moving_factor([2, 8], beside=1.0, busy=True).tolist() == [1.0, 1.0]


def test_every_fabric_with_pairs_is_a_shipped_one() -> None:
    assert {name for name in read_overlaps(FILE) if (FOLDER / f"{name}.toml").exists()} == {"loopback", "loopback-2x2"}


def test_short_kernels_lose_more_and_none_gains() -> None:
    factors = LOOPBACK.compute_factor(np.geomspace(500, 1e8, 60), 4)
    assert (np.diff(factors) < 0).all()
    assert 1.0 < factors[-1] < 1.1 < factors[0]


def test_a_collective_holds_more_of_a_smaller_part() -> None:
    assert (np.diff(LOOPBACK.compute_factor(1e6, [1, 2, 4, 8, 16])) > 0).all()
    assert np.isfinite(LOOPBACK.compute_factor(1e3, [132, 1000])).all()


def test_a_long_kernel_hardly_notices_a_short_collective() -> None:
    factors = LOOPBACK.compute_factor(200e3, 4, collective_ns=[0, 1e4, 1e6, 1e9], persistent=True)
    assert factors[0] == 1.0
    assert (np.diff(factors) > 0).all()
    assert factors[-1] == pytest.approx(float(LOOPBACK.compute_factor(200e3, 4, persistent=True)), rel=1e-3)


def test_products_dealt_out_once_lose_most() -> None:
    assert is_persistent("nvjet_sm90_tst_192x128_64x5_2x4_h_bz_coopB_NNT")
    assert not is_persistent("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3")
    usual, dealt = LOOPBACK.compute_factor(100e3, 2, persistent=[False, True])
    assert 1.0 < usual < 1.1
    assert 1.3 < dealt < 2.0


def test_a_short_collective_waits_for_the_kernel_that_fills_the_device() -> None:
    short, long = LOOPBACK.collective_factor([50e3, 50e6], 2, 2, kernel_ns=250e3)
    assert short > 3
    assert 1.0 <= long < 1.05
    assert LOOPBACK.collective_factor([50e3], 2, 2).tolist() == [1.0]
    assert np.isfinite(LOOPBACK.collective_factor([0.0], 2, 2, kernel_ns=1e6)).all()


def test_busy_cores_matter_where_ranks_have_few() -> None:
    factors = LOOPBACK.moving_factor([2, 3, 4, 8, 16], busy=True)
    assert (np.diff(factors) >= 0).all()
    assert factors[0] < 1.02 < factors[3] == factors[4]
    assert (Overlap.load("loopback-2x2").moving_factor([4, 8], busy=True) > LOOPBACK.moving_factor([4, 8], busy=True)).all()


def test_only_the_time_in_common_slows_moving() -> None:
    factors = LOOPBACK.moving_factor(4, beside=[-1.0, 0.0, 0.5, 1.0, 2.0])
    assert factors[0] == factors[1] == 1.0 < factors[2] < factors[3] == factors[4]


@pytest.mark.parametrize(("share", "ranks"), [(0, 2), (2, 0), (float("nan"), 2)])
def test_parts_and_ranks_are_counts(share: float, ranks: int) -> None:
    with pytest.raises(InputError, match="expected 1 or more"):
        LOOPBACK.collective_factor(1e6, ranks, share)


def test_constants_come_back_from_pairs_that_they_made() -> None:
    truth = Overlap(
        "here", sms=132.0, held_sms=2.0, tail_ns=3000.0, tail_power=0.5, short_ns=2000.0, persistent={2: 1.5, 4: 1.8},
        start_wait=0.6, persistent_start_wait=0.12, moving=0.05, busy={2: 1.0, 8: 1.4},
    )  # fmt: skip
    draw = np.random.default_rng(0)
    count = 400
    share, text = draw.choice([2.0, 4.0], count), np.arange(count).astype(np.str_)
    kernels = KernelPairs(
        np.exp(draw.uniform(np.log(2e3), np.log(5e6), count)), np.ones(count), share, draw.random(count) < 0.3, text,
        np.full(count, 1e18), text,
    )  # fmt: skip
    kernels = replace(kernels, beside_ns=kernels.predicted_ns(truth))
    busy = draw.random(count) < 0.3
    alone_ns, ranks = np.exp(draw.uniform(np.log(5e4), np.log(2e7), count)), draw.choice([2.0, 8.0], count)
    persistent = draw.random(count) < 0.5
    collectives = CollectivePairs(
        alone_ns, np.ones(count), share, persistent, text, ranks, np.where(busy, 0.0, 3e5), busy,
    )  # fmt: skip
    collectives = replace(collectives, beside_ns=collectives.predicted_ns(truth))
    found = fit_overlap(kernels, collectives, moving=0.05, sms=132.0, source="here")
    assert found.held_sms == pytest.approx(2.0, abs=0.3)  # long kernels lose a little besides
    assert (found.start_wait, found.persistent_start_wait) == pytest.approx((0.6, 0.12))
    assert found.persistent == {2: 1.5, 4: 1.8}
    assert found.busy == {2: 1.0, 8: 1.4}
    assert kernels.predicted_ns(found) == pytest.approx(kernels.beside_ns, rel=0.05)


@pytest.mark.parametrize("split", [FIT, VALIDATION])
def test_measured_pairs_are_told_better_than_by_what_each_takes_alone(split: str) -> None:
    kernels, collectives = (some.of(split) for some in measured_pairs(rows(), "loopback"))
    for pairs in (kernels, collectives):
        said = np.abs(np.log(pairs.predicted_ns(LOOPBACK) / pairs.beside_ns)).mean()
        alone = np.abs(np.log(pairs.alone_ns / pairs.beside_ns)).mean()
        assert said < 0.75 * alone


def test_a_busy_host_is_a_busy_host_only() -> None:
    _, collectives = measured_pairs(rows(), "loopback")
    assert set(busy_table(collectives)) == {2, 4, 8}
    assert (collectives.busy & (collectives.kernel_ns > 0)).any()


def test_constants_survive_a_file_and_odd_files_are_told(tmp_path: Path) -> None:
    file = tmp_path / "overlap.json"
    write_overlaps(file, {"loopback": LOOPBACK}, "a command")
    assert read_overlaps(file) == {"loopback": LOOPBACK}
    plain = Overlap("no table of persistent kernels or busy cores")
    assert Overlap.from_dict(plain.to_dict(), "here") == plain
    content = json.loads(file.read_text())
    assert content["recipe"] == "a command"
    del content["fabrics"]["loopback"]["held_sms"]
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match="held_sms"):
        read_overlaps(file)
    file.write_text("[]")
    with pytest.raises(InputError, match="expected overlaps"):
        read_overlaps(file)
    file.write_text("{")
    with pytest.raises(InputError, match="not readable"):
        read_overlaps(file)


def test_over_nvlink_kernels_of_whole_gpus_lose_the_sms_that_nccl_holds_as_published() -> None:
    held = read_nccl().overlap.held_sms
    paper = Overlap.on_paper(132.0)
    assert paper.source == ANALYTIC
    assert paper.compute_factor([1e3, 1e6], 1) == pytest.approx([132 / (132 - held)] * 2)
    assert paper.compute_factor(1e6, 1, persistent=True) == pytest.approx(read_nccl().overlap.persistent)
    # A collective that is over soon takes less of a long kernel.
    assert paper.compute_factor(1e6, 1, collective_ns=1e4) < 1.01
    assert 1.0 < float(paper.moving_factor(8, beside=1.0)) < 1.1
    # A smaller GPU loses more.
    assert Overlap.on_paper(66.0).compute_factor(1e6, 1) > paper.compute_factor(1e6, 1)


def test_platforms_with_nvlink_have_it_and_others_have_what_was_measured_or_nothing() -> None:
    assert Platform.load("8xh100-nvlink").overlap == Overlap.on_paper(Platform.load("1xh100").device.limits.sms.value)
    assert Platform.load("64xh100-ib400").overlap.source == ANALYTIC
    assert Platform.load("4xh200-quarter-loopback").overlap == LOOPBACK
    assert not Platform.load("1xh200").overlap.known
