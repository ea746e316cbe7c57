"""Recorded kernels on another device: carried there by the limits of both.

What a kernel is bound by is read from its name; the interval spans what it would take were it bound by something else. Of
kernels that PyTorch's compiler generated a recording may say what they move: the time that takes at the limits of a device is
their book time, less where a part came from the cache, and what they took beyond it goes with SMs and clock (`transfer`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from steptime._hardware.device import DeviceLimits, device_named, reference_device
from steptime._models.estimate import Estimate, Source
from steptime._platforms.device import FACTOR
from steptime._platforms.transfer import SHORT_NS, instruction_rate

# A profiler makes kernels a few percent longer than they are; another run of the same kernels differs by as much.
_SAME_DEVICE = (0.9, 1.05)
# How far off, either way, a carried time may be beside what binds it: nothing more is known of such kernels.
_UNSURE = 1.5
# Of the logarithm of what a kernel takes in another run on the same device: as _SAME_DEVICE.
_RECORDED = math.log(_SAME_DEVICE[1] / _SAME_DEVICE[0]) / 2


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

    def estimate(self, kernel: str, time_ns: float, moved_bytes: Sequence[float] = ()) -> Estimate:
        """What the kernel takes there; `moved_bytes` is what it may read and write, where that is known and all it does.

        Of several the largest that it can have moved in its time, beside the first.
        """
        if self.same:
            low, high = _SAME_DEVICE
            return Estimate(time_ns, low * time_ns, high * time_ns, Source.MEASURED, inside=True)
        if self.recorded_on is None:
            return Estimate(time_ns, time_ns / FACTOR, time_ns * FACTOR, Source.FALLBACK, inside=False)
        if moved_bytes and moved_bytes[0] > 0:
            most = time_ns * _memory(self.recorded_on) / 1e9
            return self._moving(time_ns, max((each for each in moved_bytes[1:] if each <= most), default=moved_bytes[0]))
        bound = next((bound for pattern, bound in _BY_NAME if pattern.search(kernel)), Bound.MEMORY)
        times = {each: self._time_ns(kernel, time_ns, each) for each in {bound, Bound.MEMORY, Bound.INSTRUCTIONS}}
        if bound is Bound.LINK:
            times = {bound: times[bound]}
        low, high = min(times.values()) / _UNSURE, max(times.values()) * _UNSURE
        return Estimate(times[bound], low, high, Source.ANALYTIC, inside=False)

    def _moving(self, time_ns: float, moved_bytes: float) -> Estimate:
        """A kernel that moves so much, by its book times."""
        here, there = self.recorded_on, self.there
        assert here is not None
        start_ns = min(_start_ns(here), time_ns)
        (memory, cache), (memory_there, cache_there) = ((_memory(each), _cache(each)) for each in (here, there))
        # Quicker than memory is: a part was in the cache, as far as that holds it there, too.
        cold_ns, warm_ns = (1e9 * moved_bytes / rate for rate in (memory, cache))
        cached = min(max((cold_ns - (time_ns - start_ns)) / (cold_ns - warm_ns), 0.0), 1.0) if cold_ns > warm_ns else 0.0
        kept = cached * min(1.0, there.cache_bytes.value / here.cache_bytes.value)
        book_ns = start_ns + (1.0 - cached) * cold_ns + cached * warm_ns
        book_there_ns = _start_ns(there) + 1e9 * moved_bytes * ((1.0 - kept) / memory_there + kept / cache_there)
        slower = instruction_rate(here) / instruction_rate(there)
        beyond_ns = math.sqrt(max(time_ns**2 - book_ns**2, 0.0)) * slower
        there_ns = math.hypot(book_there_ns, beyond_ns) * min(time_ns / book_ns, 1.0)
        kind = "short" if there_ns < SHORT_NS else "memory"
        carried = [math.log(each.transfer.interval_factor[kind].value) for each in (here, there) if each.transfer is not None]
        off = math.exp(math.hypot(_RECORDED, *carried))
        return Estimate(there_ns, there_ns / off, there_ns * off, Source.ANALYTIC, inside=True)

    def _time_ns(self, kernel: str, time_ns: float, bound: Bound) -> float:
        """All but its start, which goes with the clock, goes with what binds it."""
        here, there = self.recorded_on, self.there
        assert here is not None
        start = min(here.reach.start_ns.value, time_ns)
        return start * here.clock_hz.value / there.clock_hz.value + (time_ns - start) * self._slower(kernel, bound)

    def _slower(self, kernel: str, bound: Bound) -> float:
        here, there = (_limit(limits, kernel, bound) for limits in (self.recorded_on, self.there) if limits is not None)
        return here / there


def _start_ns(limits: DeviceLimits) -> float:
    """What the shortest kernels take: as is known, or by the clock of the device on which they were measured."""
    if limits.transfer is not None and limits.transfer.start_ns is not None:
        return limits.transfer.start_ns.value
    return limits.reach.start_ns.value * _measured(limits).clock_hz.value / limits.clock_hz.value


def _memory(limits: DeviceLimits) -> float:
    return limits.reach.bandwidth.value * limits.bandwidth_bytes_per_s.value


def _cache(limits: DeviceLimits) -> float:
    """L2 is reached through the SMs: elsewhere it goes with their number and clock."""
    known = limits.reach.cache_bandwidth_bytes_per_s.value
    return known * instruction_rate(limits) / instruction_rate(_measured(limits))


def _measured(limits: DeviceLimits) -> DeviceLimits:
    """The device whose kernels say what this one's reach."""
    return limits if limits.reached is not None else reference_device()


def _limit(limits: DeviceLimits, kernel: str, bound: Bound) -> float:
    if bound is Bound.LINK:
        link = limits.host_bandwidth_bytes_per_s
        return limits.bandwidth_bytes_per_s.value if link is None else link.value
    if bound is Bound.PRODUCTS:
        precision = next((precision for pattern, precision in _PRECISIONS if pattern.search(kernel)), "bfloat16")
        limits.check_format(precision, kernel)
        return limits.peak_flop_per_s[limits.rated(precision)].value
    return limits.bandwidth_bytes_per_s.value if bound is Bound.MEMORY else instruction_rate(limits)
