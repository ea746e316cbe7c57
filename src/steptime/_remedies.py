"""What would make a step fit. Every remedy is tried before it is named: what the fullest rank then needs is predicted.

Commands bring what can be changed, with what it leads to; here it is decided what is named and how it is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from steptime._build.transformer.config import KIND
from steptime._build.transformer.recompute import FULL
from steptime._hardware.device import device_names, read_device
from steptime._models.memory.fit import Fit, Remedy, usable_bytes
from steptime._models.memory.lifetimes import MemoryKind
from steptime._platforms.platform import Platform
from steptime._program.workload import Workload
from steptime._sim.modelled.prediction import memory_of
from steptime._sim.prediction import operations_of
from steptime._units import size_words
from steptime.errors import InputError

# A batch is halved, and ranks are doubled, so often at most.
_HALVINGS, _DOUBLINGS = 8, 3
_NAMED = 3


def enough(candidates: Iterable[Remedy]) -> Iterator[Remedy]:
    """Yield the candidates with which the step fits."""
    return (each for each in candidates if each.fit is not None and each.fit.fits)


def sentence(candidates: Iterable[Remedy]) -> str:
    """Return the first that are enough, for the one line of an error."""
    texts = [each.text for each in islice(enough(candidates), _NAMED)] or ["a smaller model"]
    return "What would help: " + "; ".join(f"({number}) {text}" for number, text in enumerate(texts, 1))


def remedies(job: OversizedJob) -> tuple[Remedy, ...]:
    """Return what would make a job fit that does not."""
    return tuple(enough(job.candidates()))


def larger_devices(platform: Platform, fit: Fit) -> Iterator[Remedy]:
    """Yield the shipped devices that are enough, the smallest first."""
    same = (each for each in map(read_device, device_names()) if each.share == platform.device.limits.share)
    for there, name in sorted((usable_bytes(each), each.name) for each in same):
        yield Remedy(f"GPUs with {size_words(there)}, such as {name}", fit.within(there))


@dataclass
class OversizedJob:
    """A job that does not fit, and what can be changed of it."""

    workload: Workload
    platform: Platform
    memory: Mapping[str, Any]  # as predictions have it, with the limit that is too small
    option: Callable[[str, Any], str] = "--set {}={}".format  # by which a command sets a key of the config
    _known: dict[str, Fit | None] = field(default_factory=dict)

    @cached_property
    def fit(self) -> Fit:
        """What the fullest rank needs."""
        fit = Fit.of(self.memory)
        assert fit is not None
        return fit

    @property
    def has_config(self) -> bool:
        """Whether it can be built anew: what was captured has to be run again, what was recorded is as it is."""
        return self.workload.rebuild is not None and not hasattr(self.workload.rebuild, "compiled")

    def candidates(self) -> Iterator[Remedy]:
        """Yield all that is tried: changes of the job, and larger devices."""
        yield from self.changes() if self.has_config else self.shares()
        yield from islice(enough(larger_devices(self.platform, self.fit)), 1)

    def changes(self) -> Iterator[Remedy]:
        """Yield changes of its config."""
        again, shared, ranks = {"recompute": FULL}, self._shared(), self.workload.world_size
        yield self._set(again, "activation checkpointing")
        if shared:
            yield self._set(shared, "parameters, gradients and optimizer state shared by the copies")
        if "tables" in self._ways:
            peaks = [(int(each["peak_bytes"]), len(self.workload.run_by(each["rank"]))) for each in self.memory["ranks"]]
            even = sum(peak * count for peak, count in peaks) // sum(count for _, count in peaks)
            yield Remedy("another placement of the tables (`steptime shard` searches), where even", self.fit.needing(even))
        batch = self.workload.description.batch or 0
        possible = range(1, min(_HALVINGS + 1, batch.bit_length()))
        halvings = next((each for each in possible if self._with(batch=batch >> each) is not None), 0)
        if not any(fit is not None for fit in self._known.values()):
            whole = {f"parallel.{key}": 1 for key in self._ways} | ({"parallel.fsdp": ranks} if ranks > 1 else {})
            settings = {**whole, **again, "gradient_accumulation": max(batch // ranks, 1)}
            yield self._set(settings, "all of these at once; `steptime plan` searches for the fastest layout")
        if halvings:
            parts = self.workload.meta.get(KIND, {}).get("gradient_accumulation", 1) << halvings
            yield self._set({"gradient_accumulation": parts}, "as many micro-batches, one after another")
            size = 3 * batch >> halvings + 1
            size = size if self._with(batch=size) is not None else batch >> halvings
            yield Remedy(f"--batch {size} (of {batch:,} now)", self._with(batch=size), batch=size)
        for count in (ranks << doublings for doublings in range(1, _DOUBLINGS + 1)):
            for settings in ({}, self._shared(count // ranks)):
                fit = self._with(ranks=count, settings=settings)
                if fit is not None:
                    options = "".join(f", {self.option(key, value)}" for key, value in settings.items())
                    yield Remedy(f"{count:,} GPUs instead of {ranks:,}{options}", fit, ranks=count, settings=settings)
                    return

    def shares(self) -> Iterator[Remedy]:
        """Yield changes of a job that cannot be built anew, by the share of its peak that each can take away at most."""
        activations, others = (self.fit.parts.get(kind.value, 0) for kind in (MemoryKind.ACTIVATIONS, MemoryKind.TEMPORARIES))
        varying = activations + others
        words = f"of the batch, with which activations and temporaries grow ({size_words(varying)})"
        parts = [1 << halvings for halvings in range(1, _HALVINGS)]
        smaller = (Remedy(f"about 1/{each} {words}", self._without(varying - varying // each)) for each in parts)
        yield from islice(enough(smaller), 1)
        if not operations_of(self.workload).again:
            words = f"activation checkpointing, which can save most of the activations ({size_words(activations)})"
            yield Remedy(words, self._without(activations))

    def _without(self, nbytes: int) -> Fit:
        return self.fit.needing(self.fit.needed_bytes - nbytes)

    @property
    def _ways(self) -> Mapping[str, int]:
        """How ranks share the job."""
        return self.workload.description.parallelism or {}

    def _set(self, settings: Mapping[str, Any], meaning: str) -> Remedy:
        options = " ".join(filter(None, (self.option(key, value) for key, value in settings.items())))
        return Remedy(f"{options} ({meaning})", self._with(settings=settings), settings=settings)

    def _shared(self, times: int = 1) -> dict[str, Any]:
        """Settings with which copies, so many times as many, share what they keep; none where there is one, or they do."""
        copies = self._ways.get("data", 1) * times
        return {} if copies < 2 or {"fsdp", "tables"} & self._ways.keys() else {"parallel.data": 1, "parallel.fsdp": copies}

    def _with(self, **change: Any) -> Fit | None:
        """What the fullest rank of the changed job needs, where that fits; ranks stay as many unless they are what changes."""
        key = repr(change)
        if key not in self._known:
            self._known[key] = next((each.fit for each in enough([Remedy(key, self._changed(**change))])), None)
        return self._known[key]

    def _changed(self, **change: Any) -> Fit | None:
        try:
            changed = self.workload.varied(**change)
        except InputError:  # a batch that ranks do not divide, a key that this kind of config does not have
            return None
        if changed.world_size != change.get("ranks", self.workload.world_size):
            return None
        fit = Fit.of(memory_of(changed, self.platform))
        return None if fit is None else fit.within(self.fit.limit_bytes)
