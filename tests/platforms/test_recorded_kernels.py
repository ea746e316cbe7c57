"""Kernels without a model keep their time on the device of their recording and are carried to others by the limits of both."""

from __future__ import annotations

import pytest

from steptime._hardware.device import device_names, read_device
from steptime._models.estimate import Source
from steptime._platforms.recorded_kernels import CarriedKernels

LONG_NS = 1e6


def carried(device_name: str, there: str) -> CarriedKernels:
    return CarriedKernels.of(device_name, read_device(there))


def test_on_the_same_device_they_are_measured() -> None:
    for there in ("h200", "h200-half"):
        found = carried("NVIDIA H200", there).estimate("triton_poi_fused_0", LONG_NS)
        assert (found.time_ns, found.source, found.inside) == (LONG_NS, Source.MEASURED, True)


def test_of_a_device_that_nobody_knows_nothing_is_scaled() -> None:
    found = carried("NVIDIA GeForce GTX 1070", "h200").estimate("triton_poi_fused_0", LONG_NS)
    assert (found.time_ns, found.source) == (LONG_NS, Source.FALLBACK)
    assert found.high_ns / found.low_ns == pytest.approx(16)


@pytest.mark.parametrize(
    ("kernel", "ratio"),
    [
        ("triton_poi_fused_add_0", 2.039 / 4.8),
        ("triton_poi_fused__to_copy_convolution_flash_attention_sort_3", 2.039 / 4.8),
        ("triton_tem_fused_addmm_relu_3", 312 / 989.5),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", 312 / 989.5),
        ("ampere_sgemm_128x64_tn", 19.5 / 67),
        ("Memcpy HtoD (Pinned -> Device)", 32 / 64),
        ("at::native::radixSortKVInPlace", 108 * 1.41 / (132 * 1.98)),
    ],
)
def test_a_kernel_goes_with_what_binds_it(kernel: str, ratio: float) -> None:
    found = carried("NVIDIA A100-SXM4-80GB", "h200").estimate(kernel, LONG_NS)
    assert found.time_ns == pytest.approx(ratio * LONG_NS, rel=0.01)
    assert found.source is Source.ANALYTIC
    assert found.low_ns < found.time_ns / 1.4 < 1.4 * found.time_ns < found.high_ns


def test_there_and_back_is_where_it_began() -> None:
    for name in device_names():
        there = read_device(name)
        if there.share == 1:
            for kernel in ("triton_poi_fused_0", "nvjet_hsh_128x256", "radixSort"):
                out = CarriedKernels(read_device("h200"), there).estimate(kernel, LONG_NS).time_ns
                back = CarriedKernels(there, read_device("h200")).estimate(kernel, out).time_ns
                assert back == pytest.approx(LONG_NS, rel=0.01)
