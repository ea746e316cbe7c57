"""What kernels draw and the clock that a cap leaves: laws, files, and the fit of the shipped rows."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import steptime
from steptime._hardware.device import FOLDER, read_device
from steptime._models.kernels.question import Question
from steptime._models.power.card import Draws, Load
from steptime._models.power.model import KernelDraw, PowerModel, power_file
from steptime._platforms.calibration import Calibration
from steptime._platforms.machine_costs import MEMORY_CALL, PRODUCT_CALL, CardCosts, MachineCosts
from steptime._platforms.platform import Platform
from steptime._sim.modelled.prediction import predict_on
from steptime.errors import InputError

H200 = PowerModel.read(FOLDER / power_file("h200"))
LARGE = {"kind": "transformer", "layers": 4, "width": 2048, "heads": 16, "sequence": 2048, "vocabulary": 32000, "batch": 16}


def _product(side: int, time_ns: float, precision: str = "bfloat16", memory_bound: float = 0.0) -> KernelDraw:
    return H200.draw(
        "matmul", precision, flop=2.0 * side**3, memory_bytes=6.0 * side**2, time_ns=time_ns, memory_bound=memory_bound
    )


def _load(draws: list[tuple[float, KernelDraw | None]], counts: list[float], period_ns: float) -> Load:
    return Load(
        (Draws.of([time for time, _ in draws], [draw for _, draw in draws], 1),), (np.array(counts),), period_ns, 1.0, 0.0
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> steptime.Workload:
    file = tmp_path_factory.mktemp("power") / "large.toml"
    lines = [
        f"{name} = {json.dumps(value)}" for name, value in {**LARGE, "precision": "bf16", "optimizer": "adamw_fused"}.items()
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    return steptime.read(file)


def test_a_large_product_is_held_by_the_peak_and_a_small_one_by_its_tensor_cores_alone() -> None:
    assert _product(8192, 1.365e6).isolated * 1980 == pytest.approx(1620, rel=0.03)  # counted by its SMs, 2026-11-16
    assert _product(1024, 1e5).isolated == H200.tensor_clock
    assert _product(4096, 2.7e6, "float32").isolated == 1.0


def test_products_without_a_pause_run_at_the_measured_clock() -> None:
    product = (1.365e6, _product(8192, 1.365e6))
    clock, power = _load([product], [1.0], 1.365e6).solved(H200, np.ones(1))
    assert clock[0] * 1980 == pytest.approx(1485, rel=0.03)  # as the driver's tools showed it, 2026-11-16
    assert power[0] == pytest.approx(692, rel=0.01)


@given(pause=st.floats(0.0, 5e6), energy=st.floats(0.5, 2.0), cap_w=st.floats(300.0, 1500.0))
@settings(max_examples=100, deadline=None)
def test_no_card_draws_more_than_its_cap_and_a_lower_cap_never_raises_the_clock(
    pause: float, energy: float, cap_w: float
) -> None:
    model, lower = replace(H200, cap_w=cap_w), replace(H200, cap_w=0.9 * cap_w)
    load = _load([(1.365e6, _product(8192, 1.365e6))], [1.0], 1.365e6 + pause)
    (clock,), (power,) = load.solved(model, np.array([energy]))
    assert power <= cap_w * 1.001
    assert load.solved(lower, np.array([energy]))[0][0] <= clock + 1e-9
    assert load.solved(model, np.array([1.1 * energy]))[0][0] <= clock + 1e-9


def test_memory_bound_kernels_do_not_slow_with_the_clock() -> None:
    draw = H200.draw("elementwise", "float32", flop=0.0, memory_bytes=4e9, time_ns=1e6, memory_bound=1.0)
    draws = Draws.of([1e6], [draw], 1)
    assert draws.slowdown(H200, np.array([0.5]))[0, 0] == 1.0


def test_a_large_step_is_power_bound_and_a_capless_card_runs_it_as_the_models_say(large: steptime.Workload) -> None:
    platform = Platform.load("1xh200")
    capped = predict_on(large, platform)
    free = predict_on(large, replace(platform, device=replace(platform.device, power=None)))
    assert capped.power is not None
    assert capped.power.capped
    assert capped.bound_by.startswith("power-bound")
    assert capped.power.power_w == pytest.approx(H200.held * 700, rel=0.01)
    assert 1.02 < capped.step_time_ms / free.step_time_ms < 1.25
    assert free.power is None


def test_a_lower_cap_makes_a_step_longer_and_its_energy_smaller(large: steptime.Workload) -> None:
    answers = [steptime.predict(large, "1xh200", power_cap_w=watts) for watts in (700, 500, 350)]
    assert [answer.step_time_ms for answer in answers] == sorted(answer.step_time_ms for answer in answers)
    energies = [answer.power.energy_j for answer in answers if answer.power is not None]
    assert energies == sorted(energies, reverse=True)


@pytest.mark.parametrize("watts", [-1.0, 0.0, 50.0, 1e9, float("nan")])
def test_an_impossible_cap_is_one_line(large: steptime.Workload, watts: float) -> None:
    with pytest.raises(InputError, match="power-cap"):
        steptime.predict(large, "1xh200", power_cap_w=watts)


@pytest.mark.parametrize("energy", [0.85, 1.0, 1.12])
def test_a_calibrated_card_has_the_energy_that_its_clock_shows(energy: float) -> None:
    platform = Platform.load("1xh200")
    (product, memory) = platform.device.estimates([Question(PRODUCT_CALL), Question(MEMORY_CALL)])
    load = _load([(product.estimate.time_ns, product.draw)], [1.0], product.estimate.time_ns)
    clock, power = load.solved(H200, np.array([energy]))
    card = CardCosts(
        product.estimate.time_ns, 1.2 * product.estimate.time_ns, memory.estimate.time_ns, float(power[0]),
        float(clock[0]) * platform.device.limits.clock_hz.value, 1.0, 60.0, 700.0, "GPU-1",
    )  # fmt: skip
    result = Calibration.of(MachineCosts((), (), card=card), platform)
    assert result.device == pytest.approx(1.0, abs=1e-6)
    assert math.log(result.energy) == pytest.approx(0.8 * math.log(energy), abs=0.25 * abs(math.log(energy)) + 1e-2)
    assert result.power_error is not None
    assert result.power_error < H200.error


def test_a_hungry_card_takes_longer_and_a_cap_that_was_found_holds(large: steptime.Workload) -> None:
    usual, hungry, low = (
        predict_on(large, Platform.load("1xh200"), calibration=calibration)
        for calibration in (
            Calibration(),
            Calibration(energy=1.15, power_error=0.03),
            Calibration(power_error=0.03, power_cap_w=500.0),
        )
    )
    assert usual.step_time_ms < hungry.step_time_ms
    assert low.power is not None
    assert low.power.cap_w == 500.0
    assert low.step_time_ms > usual.step_time_ms


def test_shares_of_one_card_draw_its_power_together() -> None:
    whole, half = (
        H200.draw("matmul", "bfloat16", flop=1e12, memory_bytes=0.0, time_ns=1.3e6 * share, memory_bound=0.0, share=share)
        for share in (1, 2)
    )
    assert half.core_j == pytest.approx(whole.core_j, rel=1e-6)


def test_products_of_a_carried_card_draw_what_their_own_loops_say() -> None:
    """Of the precisions that are published; other kernels and precisions stay as one number for the card has them."""
    h200, b200 = read_device("h200"), read_device("b200")
    assert b200.transfer is not None
    plain = H200.carried(h200, replace(b200, transfer=replace(b200.transfer, product_energy={})))
    carried = H200.carried(h200, b200)
    assert plain is not None
    assert carried is not None
    more = {name for name, joule in carried.flop_j.items() if joule != plain.flop_j[name]}
    assert more == set(b200.transfer.product_energy) == {"bfloat16"}
    multiplying = {name for name, watt in carried.active_w.items() if watt != plain.active_w[name]}
    assert multiplying == {"attention", "convolution", "matmul"}


def test_carried_cards_go_by_their_own_cap() -> None:
    h200, l4 = read_device("h200"), read_device("l4")
    carried = H200.carried(h200, l4)
    assert carried is not None
    assert l4.power_w is not None
    assert carried.cap_w == l4.power_w.value
    assert carried.error > H200.error
    assert carried.rest_w < carried.cap_w


def test_files_that_are_no_power_models_are_one_line(tmp_path: Path) -> None:
    text = (FOLDER / power_file("h200")).read_text(encoding="utf-8")
    drawn = random.Random(0)
    file = tmp_path / "power.json"
    for _ in range(500):
        broken = list(text)
        for _ in range(drawn.randint(1, 6)):
            at = drawn.randrange(len(broken))
            broken[at : at + drawn.randint(1, 4)] = drawn.choice(["", "9", "-", '"', "null", "{", "1e9", ","])
        file.write_text("".join(broken), encoding="utf-8")
        try:
            PowerModel.read(file)
        except InputError as error:
            assert "\n" not in str(error)


def test_a_model_written_is_the_model_read(tmp_path: Path) -> None:
    H200.write(tmp_path / "power.json")
    assert PowerModel.read(tmp_path / "power.json") == H200


@pytest.mark.parametrize(
    ("key", "value"), [("active_w", {"copy": 10**400}), ("elasticity", {"indexing": "0.5"}), ("gamma", True)]
)
def test_a_number_that_no_card_has_is_one_line(tmp_path: Path, key: str, value: object) -> None:
    content = json.loads((FOLDER / power_file("h200")).read_text(encoding="utf-8"))
    file = tmp_path / "power.json"
    file.write_text(json.dumps({**content, key: value}), encoding="utf-8")
    with pytest.raises(InputError, match=f"not a power model .{key} is") as caught:
        PowerModel.read(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "lost"), [("active_w", "other"), ("elasticity", "other"), ("flop_j", "float32")])
def test_a_power_model_without_what_stands_for_others_is_refused(name: str, lost: str, tmp_path: Path) -> None:
    file = tmp_path / "h200-power.json"
    changes: dict[str, Any] = {name: {key: value for key, value in getattr(H200, name).items() if key != lost}}
    replace(H200, **changes).write(file)
    with pytest.raises(InputError, match=f"{name} lacks '{lost}'"):
        PowerModel.read(file)


def test_a_card_that_gives_power_at_rest_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "h200-power.json"
    replace(H200, leakage_w_per_k=10 * H200.leakage_w_per_k).write(file)
    with pytest.raises(InputError, match="W at rest, expected more than 0"):
        PowerModel.read(file)


@pytest.mark.parametrize("platform", ["1xh200", "1xa100", "1xl4", "1xb200", "1xrtx-4090"])
def test_a_step_draws_between_rest_and_cap(platform: str) -> None:
    for batch in (1, 16):
        step = steptime.predict({**LARGE, "precision": "bf16-autocast", "batch": batch}, platform)
        model = Platform.load(platform).device.power
        assert step.power is not None and model is not None
        assert model.base_w <= step.power.power_w <= model.cap_w
