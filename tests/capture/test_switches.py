"""What a script switches in PyTorch travels with the ops that it concerns, into saved workloads and predictions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from steptime import Workload, capture, predict, read  # noqa: E402
from steptime._program.program import DEFAULT_SWITCHES, Program, Switches  # noqa: E402
from steptime.errors import InputError  # noqa: E402

Switch = Callable[[], object]


def captured(switch: Switch, *layers: nn.Module, shape: tuple[int, ...]) -> Workload:
    def make() -> Callable[[], None]:
        switch()
        model = nn.Sequential(*layers).to("cuda")
        x = torch.randn(*shape, device="cuda")

        def step() -> None:
            model.zero_grad()
            model(x).sum().backward()

        return step

    return capture(make)


def dense(switch: Switch) -> Workload:
    return captured(switch, nn.Linear(2048, 2048), nn.Linear(2048, 2048), shape=(4096, 2048))


def convolutional(switch: Switch) -> Workload:
    return captured(switch, nn.Conv2d(128, 128, 3, padding=1), nn.Conv2d(128, 128, 3, padding=1), shape=(32, 128, 56, 56))


def switched(program: Program, *names: str) -> set[Switches]:
    rows = zip(program.ops.name.tolist(), program.ops.signature.tolist(), strict=True)
    return {program.signatures[signature].switches for name, signature in rows if program.names[name] in names}


def allow(value: bool) -> Switch:
    return lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", value)


def in_cudnn(value: bool) -> Switch:
    return lambda: setattr(torch.backends.cudnn, "allow_tf32", value)


def precision(owner: object, value: str) -> Switch:
    return lambda: setattr(owner, "fp32_precision", value)


PRODUCTS, CONVOLUTIONS = ("aten::mm", "aten::addmm"), ("aten::convolution", "aten::convolution_backward")


@pytest.mark.parametrize(
    ("switch", "tf32"),
    [
        (lambda: None, None),
        (lambda: torch.set_float32_matmul_precision("highest"), None),
        (lambda: torch.set_float32_matmul_precision("high"), True),
        (lambda: torch.set_float32_matmul_precision("medium"), True),
        (allow(True), True),
        (allow(False), None),
        (precision(torch.backends.cuda.matmul, "tf32"), True),
        (precision(torch.backends, "tf32"), True),
    ],
)
def test_every_way_to_allow_tf32_for_products_is_noted_with_them(switch: Switch, tf32: bool | None) -> None:
    program = dense(switch).programs[0]
    assert switched(program, *PRODUCTS) == {Switches(tf32=tf32)}
    assert switched(program, "aten::sum") == {DEFAULT_SWITCHES}
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch._C._get_fp32_precision_getter("cuda", "matmul") == "none"


@pytest.mark.parametrize(
    ("switch", "tf32"),
    [
        (lambda: None, None),
        (in_cudnn(False), False),
        (precision(torch.backends.cudnn.conv, "ieee"), False),
        (allow(True), None),
    ],
)
def test_convolutions_use_tf32_until_they_are_told_not_to(switch: Switch, tf32: bool | None) -> None:
    program = convolutional(switch).programs[0]
    assert switched(program, *CONVOLUTIONS) == {Switches(tf32=tf32)}
    assert torch.backends.cudnn.allow_tf32  # which raises where old and new settings do not agree


def test_what_holds_when_an_op_runs_counts() -> None:
    def make() -> Callable[[], None]:
        weight = torch.randn(64, 64, device="cuda", requires_grad=True)

        def step() -> None:
            allow(True)()
            y = weight @ weight
            allow(False)()
            y.sum().backward()

        return step

    program = capture(make).programs[0]
    found = [program.signatures[row].switches.tf32 for row in rows_of(program, "aten::mm")]
    assert found == [True, None, None]


def rows_of(program: Program, name: str) -> list[int]:
    rows = zip(program.ops.name.tolist(), program.ops.signature.tolist(), strict=True)
    return [signature for at, signature in rows if program.names[at] == name]


def test_halves_know_nothing_of_tf32() -> None:
    layers = nn.Linear(64, 64).to(torch.bfloat16)
    program = capture(lambda: (allow(True)(), layers.to("cuda")(torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)))[1])
    assert switched(program.programs[0], *PRODUCTS) == {DEFAULT_SWITCHES}


def test_switches_are_saved_and_read_again(tmp_path: Path) -> None:
    workload = dense(allow(True))
    workload.save(tmp_path / "step.json")
    again = read(tmp_path / "step.json")
    assert again.programs[0].signatures == workload.programs[0].signatures
    assert predict(again, platform="1xh200").to_dict() == predict(workload, platform="1xh200").to_dict()


def test_tf32_makes_products_as_much_faster_as_it_was_measured() -> None:
    plain, fast = (predict(dense(allow(value)), platform="1xh200").step_time_ms for value in (False, True))
    # An H200 multiplies large matrices at 50 TFLOP/s in fp32 and at 230 to 330 in TF32.
    assert 3.5 < plain / fast < 6.5


def test_convolutions_without_tf32_take_as_much_longer_as_was_measured() -> None:
    plain, slow = (predict(convolutional(in_cudnn(value)), platform="1xh200").step_time_ms for value in (True, False))
    # Layers of 3x3 taps, 64 to 256 channels and 4 GFLOP or more: forward 155 TFLOP/s with TF32 and 36 without, backward
    # 87 and 38 (medians of 69, 74, 55 and 51 rows), so 2.7 for a step; a layer alone is off by a fourth now and then.
    assert 2.0 < slow / plain < 4.0


@pytest.mark.parametrize(
    ("switch", "said"),
    [
        (lambda: setattr(torch.backends.cudnn, "benchmark", True), "torch.backends.cudnn.benchmark"),
        (lambda: setattr(torch.backends.cudnn, "deterministic", True), "deterministic kernels are asked for"),
        (lambda: torch.use_deterministic_algorithms(True), "deterministic kernels are asked for"),
        (lambda: setattr(torch.backends.cudnn, "enabled", False), "cuDNN switched off"),
    ],
)
def test_a_switch_that_no_model_knows_is_said_with_what_it_concerns(switch: Switch, said: str) -> None:
    notices = predict(convolutional(switch), platform="1xh200").notices
    found = notices.basis if "benchmark" in said else notices.warnings  # that cuDNN may find something faster is no warning
    (text,) = (each for each in found if said in each)
    assert "% of the kernels' time (aten::convolution" in text
    usual = predict(convolutional(lambda: None), platform="1xh200").notices
    assert not any(said in each for each in (*usual.warnings, *usual.basis))


@pytest.mark.parametrize(
    ("allowed", "op"),
    [
        ([], "aten::_scaled_dot_product_cudnn_attention"),
        ([SDPBackend.FLASH_ATTENTION], "aten::_scaled_dot_product_flash_attention"),
        ([SDPBackend.EFFICIENT_ATTENTION], "aten::_scaled_dot_product_efficient_attention"),
        ([SDPBackend.MATH], "aten::_scaled_dot_product_attention_math"),
        ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], "aten::_scaled_dot_product_flash_attention"),
    ],
)
def test_attention_takes_the_kernel_that_a_script_allows(allowed: list[SDPBackend], op: str) -> None:
    def make() -> Callable[[], None]:
        query = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        def step() -> None:
            with sdpa_kernel(allowed) if allowed else nullcontext():
                result: Any = nn.functional.scaled_dot_product_attention(query, query, query)
            result.sum().backward()

        return step

    program = capture(make).programs[0]
    fused = {name for name in program.names if name.startswith("aten::_scaled_dot_product") and "backward" not in name}
    assert fused == {op}


def test_cudnn_is_not_asked_for_attention_where_it_is_switched_off() -> None:
    def make() -> Callable[[], object]:
        torch.backends.cuda.enable_cudnn_sdp(False)
        query = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
        return lambda: nn.functional.scaled_dot_product_attention(query, query, query)

    assert "aten::_scaled_dot_product_flash_attention" in capture(make).programs[0].names
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_attention_that_no_allowed_kernel_takes_is_an_error_as_on_a_gpu() -> None:
    def make() -> Callable[[], None]:
        query = torch.randn(2, 4, 64, 64, device="cuda")

        def step() -> None:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
                nn.functional.scaled_dot_product_attention(query, query, query)

        return step

    with pytest.raises(InputError, match="No available kernel"):
        capture(make)


def test_a_preferred_blas_is_said() -> None:
    workload = dense(lambda: torch.backends.cuda.preferred_blas_library("cublaslt"))
    assert any("a preferred BLAS" in warning for warning in predict(workload, platform="1xh200").warnings)


@pytest.mark.parametrize(("again", "casts"), [(True, 4), (False, 8)])
def test_autocast_casts_weights_once_where_it_may_keep_them(again: bool, casts: int) -> None:
    def make() -> Callable[[], None]:
        layer = nn.Linear(32, 32).to("cuda")
        x = torch.randn(4, 32, device="cuda", dtype=torch.float16)

        def step() -> None:
            with torch.autocast("cuda", torch.float16, cache_enabled=again):
                result = layer(layer(x))
            result.sum().backward()

        return step

    # Weight and bias, forward and backward, once or for each use.
    assert len(rows_of(capture(make).programs[0], "aten::_to_copy")) == casts
