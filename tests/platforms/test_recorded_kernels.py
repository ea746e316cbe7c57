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


def moving(here: str, there: str, time_ns: float, moved_bytes: float) -> float:
    found = CarriedKernels(read_device(here), read_device(there)).estimate("triton_poi_fused_0", time_ns, (moved_bytes,))
    assert (found.source, found.inside) == (Source.ANALYTIC, True)
    assert found.low_ns < found.time_ns < found.high_ns
    return found.time_ns


def at_limits_ns(device: str, moved_bytes: float) -> float:
    limits = read_device(device)
    return 1e9 * moved_bytes / (limits.reach.bandwidth.value * limits.bandwidth_bytes_per_s.value)


@pytest.mark.parametrize("there", ["a100", "h100", "b200", "l4", "mi300x"])
def test_a_generated_kernel_that_runs_at_the_speed_of_memory_goes_with_it(there: str) -> None:
    moved = 4e9
    found = moving("h200", there, at_limits_ns("h200", moved), moved)
    assert found == pytest.approx(at_limits_ns(there, moved), rel=0.02)


def test_what_a_generated_kernel_takes_beyond_memory_goes_with_the_sms() -> None:
    """One that moves next to nothing is bound by instructions, which memory does not help."""
    h200, a100 = read_device("h200"), read_device("a100")
    ratio = h200.sms.value * h200.clock_hz.value / (a100.sms.value * a100.clock_hz.value)
    assert moving("h200", "a100", LONG_NS, 1e3) == pytest.approx(ratio * LONG_NS, rel=0.02)


def test_a_generated_kernel_that_found_its_data_in_the_cache_does_so_where_that_is_as_large() -> None:
    """Twice as fast as memory on an H200: on an H100, whose memory is slower and whose cache is not, it loses less."""
    moved = 2e7
    time_ns = 1000 + 0.5 * at_limits_ns("h200", moved)
    same_cache, no_cache = (moving("h200", there, time_ns, moved) / time_ns for there in ("h100", "a10"))
    slower = read_device("h200").bandwidth_bytes_per_s.value
    assert 1 < same_cache < slower / read_device("h100").bandwidth_bytes_per_s.value
    assert no_cache > slower / read_device("a10").bandwidth_bytes_per_s.value


def test_more_bytes_or_more_time_never_make_a_carried_kernel_faster() -> None:
    for there in ("a100", "b200"):
        times = [moving("h200", there, time_ns, 1e7) for time_ns in (2e3, 4e3, 8e3, 16e3, 64e3)]
        assert times == sorted(times)


def test_a_generated_kernel_moves_no_more_than_it_can_have_in_its_time() -> None:
    """Whether its first tensor is written as well, a recording does not say; its time may."""
    carried_over = CarriedKernels(read_device("h200"), read_device("a100"))
    in_place, copying = (at_limits_ns("h200", moved) for moved in (3.1e9, 2.1e9))
    found = [carried_over.estimate("triton_poi_fused_0", time_ns, (2e9, 3e9)).time_ns for time_ns in (in_place, copying)]
    expected = [moving("h200", "a100", in_place, 3e9), moving("h200", "a100", copying, 2e9)]
    assert found == pytest.approx(expected)
