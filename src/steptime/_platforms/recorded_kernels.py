"""Kernels that no model knows, of which one recording has the time: carried to another device by the limits of both.

What a kernel is bound by is read from its name; the interval spans what it would take were it bound by something else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from steptime._hardware.device import DeviceLimits, device_named
from steptime._models.estimate import Estimate, Source
from steptime._platforms.device import FACTOR
from steptime._platforms.transfer import instruction_rate

# A profiler makes kernels a few percent longer than they are; another run of the same kernels differs by as much.
_SAME_DEVICE = (0.9, 1.05)
# How far off, either way, a carried time may be beside what binds it: nothing more is known of such kernels.
_UNSURE = 1.5


class Bound(Enum):
    """What a kernel waits for."""

    MEMORY = "memory"
    INSTRUCTIONS = "instructions"
    PRODUCTS = "products"
    LINK = "link"


# By the names that kernels have in recordings; the first that fits. Others move memory, as most do that compilers write.
_BY_NAME = (
    (re.compile(r"memcpy\s*(htod|dtoh)", re.IGNORECASE), Bound.LINK),
    (re.compile(r"^triton_(?:tem|mm|bmm)_"), Bound.PRODUCTS),
    # Named after all that is fused into them, also after the products and convolutions that they prepare or finish.
    (re.compile(r"^triton_(?:poi|red|per|for|spl)_"), Bound.MEMORY),
    (
        re.compile(r"gemm|cutlass|nvjet|xmma|wgrad|dgrad|fprop|_mm_|\bmma|flash|fmha|attention|conv", re.IGNORECASE),
        Bound.PRODUCTS,
    ),
    (re.compile(r"sort|scan|topk|philox|random|nccl", re.IGNORECASE), Bound.INSTRUCTIONS),
)
# What products of a kernel compute in, by its name; else in half precision.
_PRECISIONS = (
    (re.compile(r"sgemm|simt|ffma|f32f32_f32f32", re.IGNORECASE), "float32"),
    (re.compile(r"tf32", re.IGNORECASE), "tf32"),
    (re.compile(r"dgemm|f64", re.IGNORECASE), "float64"),
    (re.compile(r"e4m3|e5m2|fp8", re.IGNORECASE), "float8"),
    (re.compile(r"f16(?!_bf16)|half|hgemm|h884|h1688|h16816", re.IGNORECASE), "float16"),
)


def crosses_link(kernel: str) -> bool:
    """Whether it is a copy between the host's memory and the device's: ops in recordings do not say where their tensors lie."""
    return _BY_NAME[0][0].search(kernel) is not None


@dataclass(frozen=True)
class CarriedKernels:
    """Kernels recorded on one device as another one runs them; as recorded, a guess, where the first is not known."""

    recorded_on: DeviceLimits | None
    there: DeviceLimits

    @classmethod
    def of(cls, device_name: str, there: DeviceLimits) -> CarriedKernels:
        """From what the driver calls the device of the recording, or a prediction its own."""
        return cls(device_named(device_name), there)

    @property
    def same(self) -> bool:
        """Whether they were recorded on such a device."""
        return self.recorded_on is not None and self.recorded_on.whole == self.there.whole

    def estimate(self, kernel: str, time_ns: float) -> Estimate:
        """What the kernel takes there."""
        if self.same:
            low, high = _SAME_DEVICE
            return Estimate(time_ns, low * time_ns, high * time_ns, Source.MEASURED, inside=True)
        if self.recorded_on is None:
            return Estimate(time_ns, time_ns / FACTOR, time_ns * FACTOR, Source.FALLBACK, inside=False)
        bound = next((bound for pattern, bound in _BY_NAME if pattern.search(kernel)), Bound.MEMORY)
        times = {each: self._time_ns(kernel, time_ns, each) for each in {bound, Bound.MEMORY, Bound.INSTRUCTIONS}}
        if bound is Bound.LINK:
            times = {bound: times[bound]}
        low, high = min(times.values()) / _UNSURE, max(times.values()) * _UNSURE
        return Estimate(times[bound], low, high, Source.ANALYTIC, inside=False)

    def _time_ns(self, kernel: str, time_ns: float, bound: Bound) -> float:
        """All but its start, which goes with the clock, goes with what binds it."""
        here, there = self.recorded_on, self.there
        assert here is not None
        start = min(here.reach.start_ns.value, time_ns)
        return start * here.clock_hz.value / there.clock_hz.value + (time_ns - start) * self._slower(kernel, bound)

    def _slower(self, kernel: str, bound: Bound) -> float:
        here, there = (_limit(limits, kernel, bound) for limits in (self.recorded_on, self.there) if limits is not None)
        return here / there


def _limit(limits: DeviceLimits, kernel: str, bound: Bound) -> float:
    if bound is Bound.LINK:
        link = limits.host_bandwidth_bytes_per_s
        return limits.bandwidth_bytes_per_s.value if link is None else link.value
    if bound is Bound.PRODUCTS:
        precision = next((precision for pattern, precision in _PRECISIONS if pattern.search(kernel)), "bfloat16")
        return limits.peak_flop_per_s[limits.rated(precision)].value
    return limits.bandwidth_bytes_per_s.value if bound is Bound.MEMORY else instruction_rate(limits)
