"""Generated kernels: the longest of what memory, caches, atomic additions, instructions and chains of loops take, and trees.

    time = (start + (memory^q + cache^q + atomics^q + instructions^q + chain^q)^(1/q)) * exp(trees)

Rates are of three kinds of kernels: pointwise ones, reductions that loop, reductions that hold a row at once. On a part of a
GPU the same sum is worked out with its share of multiprocessors, bandwidth and cache, and trees correct it as on a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from steptime._models.engine.regression import Trees
from steptime._models.engine.stored import Floats
from steptime._models.kernels.forms import settings_of
from steptime._models.kernels.forms.generated.numbers import AT, FUNCTIONS, RATED, GeneratedConstants, numbers_of, waves
from steptime._models.kernels.forms.lists import inside_of
from steptime._models.kernels.question import Answer, LaunchTime, Question

# What each kind of kernel has a rate of. Bytes go by shares of the peak bandwidth; what is counted, by SM and ns.
RATES = (
    *("read", "write", "cache", "wasted_loads", "wasted_stores", "atomics", "turn_ns", "access_sm_ns", "start_ns", "again"),
)  # fmt: skip
# The most that trees may change a time, as a natural logarithm.
MOST = 1.5
_NOTHING = 1e-9


@dataclass(frozen=True)
class GeneratedForm:
    """All that is fitted."""

    NARROW: ClassVar[bool] = True

    sharpness: float  # q above
    rates: Floats  # kinds x rates
    costs: Floats  # SM ns that each group of functions takes
    trees: Trees
    low: Floats  # range of what was measured
    high: Floats
    device: GeneratedConstants

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each question's call launches and how long that takes. Raises InputError for a call that cannot be."""
        if not questions:
            return []
        calls = [question.call for question in questions]
        share = settings_of(questions).share.astype(np.float64)
        whole = np.ones(len(calls))
        numbers = numbers_of(calls, self.device, whole.tolist())
        summed = self.base_ns(numbers, whole)
        time_ns = summed * np.exp(np.clip(self.trees.values(seen(numbers, summed)), -MOST, MOST))
        inside = inside_of(ranged(numbers), self.low, self.high)
        if (share > 1).any():
            parts = numbers_of(calls, self.device, share.tolist())
            time_ns *= self.base_ns(parts, share) / summed
        return [
            Answer((LaunchTime(call.op, float(time)),), bool(known))
            for call, time, known in zip(calls, time_ns, inside, strict=True)
        ]

    def base_ns(self, numbers: Floats, share: Floats) -> Floats:
        """The sum above without trees, on one of `share` equal parts of the device."""
        kind = numbers[:, AT["kind"]].astype(int)
        rates = dict(zip(RATES, self.rates[np.where(kind < len(RATED), kind, 0)].T, strict=True))
        return physics_ns(numbers, rates, self.costs, self.sharpness, self.device, share)


def physics_ns(
    numbers: Floats, rates: dict[str, Floats], costs: Floats, sharpness: float, device: GeneratedConstants, share: Floats
) -> Floats:
    """What each kernel takes by rates, a column of them for each."""
    of = dict(zip(AT, numbers.T, strict=True))
    peak, sms = device.peak_bytes_per_ns / share, device.sms / share
    memory = (of["missed"] / rates["read"] + of["written"] / rates["write"]) / peak
    cache = (of["asked"] + of["stored"]) / rates["cache"] + of["again"] / rates["again"]
    cache += of["wasted_loads"] / rates["wasted_loads"] + of["wasted_stores"] / rates["wasted_stores"]
    computed = np.stack([of[group] for group in FUNCTIONS], axis=1) @ costs
    instructions = of["padded"] * (computed + rates["access_sm_ns"] * (of["loads"] + of["stores"])) / sms
    chain = of["chain"] * np.sqrt(waves(of["blocks"], sms)) * rates["turn_ns"]
    parts = np.stack([memory, cache / peak, of["atomics"] / rates["atomics"] / sms, instructions, chain])
    result: Floats = rates["start_ns"] + ((parts + _NOTHING) ** sharpness).sum(axis=0) ** (1.0 / sharpness)
    return result


def seen(numbers: Floats, summed: Floats) -> Floats:
    """What trees see."""
    of = dict(zip(AT, numbers.T, strict=True))
    read, elements = of["read"] + 1.0, of["elements"]
    return np.column_stack(
        [
            numbers,
            summed,
            (of["asked"] + of["again"]) / read,
            of["wasted_loads"] / elements,
            of["wasted_stores"] / elements,
            of["missed"] / read,
            (of["read"] + of["written"]) / elements,
            of["blocks"],
        ]
    )


def ranged(numbers: Floats) -> Floats:
    """What has to lie within what was measured: iterations, rows, bytes."""
    return np.log1p(numbers[:, [AT[name] for name in ("elements", "reduced", "read", "written", "asked")]])


FORM = GeneratedForm
