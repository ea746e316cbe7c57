"""Times on a device that was not measured: those of a measured device, scaled by the data sheets of both.

A launch takes what it would at the limits of its device (its *book* time), and longer by what no limit shows: SMs that wait
for memory, chains of instructions, tails. Both go on at once in part, so squares add up; each is scaled by what it is due to:

    time(there)^2 = book(there)^2 + (time(here)^2 - book(here)^2) * (rate(here) / rate(there))^2,        rate = SMs * clock
    book          = start / clock + the longest of  operations / peak,  bytes / bandwidth,  bytes to the host / link

A launch that is faster than its book is scaled as its book is. Peaks and bandwidths are those of the data sheets times the
fraction of them that the largest measured kernels reach; products run in tiles (`analytic_products`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from steptime._hardware.device import DeviceLimits, TransferBasis
from steptime._models.estimate import Estimate, Source
from steptime._models.kernels.question import LaunchTime, Question
from steptime._models.lookups.fitted import LookupEstimate
from steptime._models.lookups.question import Lookup
from steptime._platforms.analytic.lookups import lookup_works
from steptime._platforms.analytic.products import product_ns
from steptime._platforms.analytic.work import Work, attention_of, works_of


@dataclass(frozen=True)
class Transfer:
    """From times on one device to times on another."""

    here: DeviceLimits  # where the models were fitted
    there: DeviceLimits
    basis: TransferBasis

    @cached_property
    def _slower(self) -> float:
        """How many times as long what is bound by instructions takes there."""
        return _rate(self.here) / _rate(self.there)

    @cached_property
    def cache(self) -> float:
        """How much the cache there holds, of what it holds here."""
        return self.there.cache_bytes.value / self.here.cache_bytes.value

    def launches(self, question: Question, family: str, launches: Sequence[LaunchTime]) -> tuple[LaunchTime, ...]:
        """The launches of a call with their times there."""
        here, there = (works_of(question, family, launches, self.here, cache, self.here.reach) for cache in (1.0, self.cache))
        reached = self._attention_flop_per_s(question)
        return tuple(
            replace(launch, time_ns=self._time_ns(launch.time_ns, work, replace(other, flop_per_s=reached or work.flop_per_s)))
            for launch, work, other in zip(launches, here, there, strict=True)
        )

    def _attention_flop_per_s(self, question: Question) -> float:
        """What attention reaches there, if that is known: between its products is a softmax, which no peak counts."""
        kind, direction = attention_of(question.call)
        result = self.basis.attention_flop_per_s.get(direction)
        if result is None or question.call.dtype == "float32":
            return 0.0
        return (
            result.value
            if kind in ("flash", "cudnn")
            else self.here.reach.attention_flop_per_s[kind][direction].value / self._slower
        )

    def lookups(self, lookups: Sequence[Lookup], known: Sequence[LookupEstimate]) -> list[LookupEstimate]:
        """How long each lookup takes there; its launches keep their proportions."""
        here, there = (lookup_works(lookups, limits.cache_bytes.value) for limits in (self.here, self.there))
        results = []
        for item, work, other in zip(known, here, there, strict=True):
            time_ns = self._time_ns(item.estimate.time_ns, work, other)
            scale = time_ns / item.estimate.time_ns if item.estimate.time_ns else 1.0
            launches = tuple(replace(launch, time_ns=launch.time_ns * scale) for launch in item.launches)
            results.append(LookupEstimate(self.estimate(item.estimate, time_ns), launches))
        return results

    def estimate(self, known: Estimate, time_ns: float) -> Estimate:
        """A time there; its interval holds what the models are off by and what carrying them over is."""
        if known.time_ns <= 0:  # nothing is launched
            return replace(known, source=Source.ANALYTIC)
        own = math.log(self.basis.interval_factor.value)
        # The two are off independently of each other.
        low, high = (math.hypot(own, math.log(bound / known.time_ns)) for bound in (known.low_ns, known.high_ns))
        return Estimate(time_ns, time_ns * math.exp(-low), time_ns * math.exp(high), Source.ANALYTIC, known.inside)

    def _time_ns(self, time_ns: float, here: Work, there: Work) -> float:
        book = self.book_ns(self.here, here)
        other = self.book_ns(self.there, there, whole_waves=self.basis.whole_waves)
        if time_ns <= book:
            return time_ns * other / book
        return math.sqrt(other**2 + (time_ns**2 - book**2) * self._slower**2)

    def book_ns(self, limits: DeviceLimits, work: Work, *, whole_waves: bool = False) -> float:
        """What a launch takes at the limits of a device, reached as far as kernels reach them here."""
        reached = self.here.reach
        peak = limits.peak_flop_per_s.get(work.precision, limits.peak_flop_per_s["float32"]).value
        flop_per_s = work.flop_per_s or reached.peak.value * peak
        # L2 is reached through the SMs, so elsewhere it goes with their number and clock.
        cache = reached.cache_bandwidth_bytes_per_s.value * _rate(limits) / _rate(self.here)
        computing = 1e9 * work.flop / flop_per_s
        if work.product is not None:
            computing = product_ns(limits, work.product, flop_per_s, cache, whole_waves=whole_waves)
        bandwidth = reached.bandwidth.value * limits.bandwidth_bytes_per_s.value
        moving = work.memory_bytes / bandwidth + work.cache_bytes / cache
        link = limits.host_bandwidth_bytes_per_s
        crossing = 0.0 if link is None else work.host_bytes / (reached.host_bandwidth.value * link.value)
        start = reached.start_ns.value * self.here.clock_hz.value / limits.clock_hz.value
        return start + max(computing, 1e9 * moving, 1e9 * crossing)


def _rate(limits: DeviceLimits) -> float:
    return limits.sms.value * limits.clock_hz.value
