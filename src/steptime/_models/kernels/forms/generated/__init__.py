"""Generated kernels: the longest of what memory, caches, atomic additions, instructions and chains of loops take, corrected.

    time = (start + (memory^q + cache^q + busiest^q + atomics^q + instructions^q + chain^q)^(1/q)) * exp(correction)

Busiest is the multiprocessor that has most blocks: where there are fewer blocks than multiprocessors, what one block moves and
computes. Rates are of four kinds of kernels: pointwise ones, reductions that loop, reductions that hold a row at once, lists of
tensors. The correction is by trees and small networks. On a part of a GPU the same sum is worked out with its share of
multiprocessors, bandwidth and cache, and corrected as on a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from steptime._models.engine.regression import Blend
from steptime._models.engine.stored import Floats, Longs
from steptime._models.kernels.forms import settings_of
from steptime._models.kernels.forms.generated.numbers import AT, FUNCTIONS, RATED, GeneratedConstants, numbers_of
from steptime._models.kernels.forms.lists import inside_of
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime._ops.generated import REDUCTION

# What each kind of kernel has a rate of. Bytes go by shares of the peak bandwidth; what is counted, by SM and ns.
RATES = (
    *("read", "write", "cache", "stores", "scattered", "sm", "atomics"),
    *("turn_ns", "reduce_ns", "access_sm_ns", "instruction_sm_ns", "start_ns", "block_sm_ns"),
)  # fmt: skip
_WARP, _MOST_BLOCKS = 32, 32  # threads; blocks that a multiprocessor holds
# The most that the correction may change a time, as a natural logarithm.
MOST = 1.5
_NOTHING = 1e-9
# A cache's unit adds one number at a time to a sector. Gradients of a table of biases by distance, to which all pairs of tokens
# add, take 1.2 and 1.4 ns for each addition to 384 elements (T5 in the measured set, H200); in a microbenchmark there one
# element takes 1.76 ns each, 256 of them by chance 0.27.
_QUEUED_NS, _FEW_ELEMENTS, _QUEUE = 1.2, 1024, 400


@dataclass(frozen=True)
class GeneratedForm:
    """All that is fitted."""

    NARROW: ClassVar[bool] = True

    sharpness: float  # q above
    rates: Floats  # kinds x rates
    costs: Floats  # SM ns that each group of functions takes
    correction: Blend
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
        time_ns = summed * np.exp(np.clip(self.correction.values(self.seen(numbers, summed)), -MOST, MOST))
        time_ns = np.maximum(time_ns, queued_ns(numbers))
        inside = inside_of(ranged(numbers), self.low, self.high)
        if (share > 1).any():
            parts = numbers_of(calls, self.device, share.tolist())
            time_ns *= self.base_ns(parts, share) / summed
        return [
            Answer((LaunchTime(call.op, float(time)),), bool(known))
            for call, time, known in zip(calls, time_ns, inside, strict=True)
        ]

    def base_ns(self, numbers: Floats, share: Floats) -> Floats:
        """The sum above, not corrected, on one of `share` equal parts of the device."""
        return summed_ns(self.parts(numbers, share), self.sharpness)

    def parts(self, numbers: Floats, share: Floats) -> Floats:
        """What is summed, a row each, the start first."""
        rates = dict(zip(RATES, self.rates[rated(numbers)].T, strict=True))
        return parts_ns(numbers, rates, self.costs, self.device, share)

    def seen(self, numbers: Floats, summed: Floats) -> Floats:
        """What the correction sees: logarithms of all numbers, and of what each part of the sum takes."""
        of = dict(zip(AT, numbers.T, strict=True))
        parts = self.parts(numbers, np.ones(len(numbers)))
        read, elements = of["read"] + 1.0, of["elements"]
        ratios = [
            *((of["asked"] + of["again"]) / read, of["missed"] / read, (of["read"] + of["written"]) / elements),
            *(of["block_loads"] / read, of["warp_loads"] / (of["asked"] + of["again"] + 1.0)),
            *(of["block_stores"] / (of["written"] + 1.0), of["blocks"] / self.device.sms),
        ]
        return np.column_stack(
            [np.log1p(np.abs(numbers)), np.log(summed), *np.log1p(ratios), (parts / summed).T, np.log1p(parts).T]
        )


def rated(numbers: Floats) -> Longs:
    """The place of the rates of each kernel."""
    kind = numbers[:, AT["kind"]].astype(np.int64)
    return np.where(kind < len(RATED), kind, RATED.index(REDUCTION))


def queued_ns(numbers: Floats) -> Floats:
    """At least what atomic additions to a few elements take, each of which waits for the one before it; else nothing."""
    atomics, each = (numbers[:, AT[name]] for name in ("atomics", "contended"))
    few = (each >= _QUEUE) & (atomics <= _FEW_ELEMENTS * each)
    return np.where(few, atomics * _QUEUED_NS, 0.0)


def parts_ns(numbers: Floats, rates: dict[str, Floats], costs: Floats, device: GeneratedConstants, share: Floats) -> Floats:
    """What each part of a kernel's work takes by rates, a column of them for each kernel: the start, then what overlaps."""
    of = dict(zip(AT, numbers.T, strict=True))
    peak, sms = device.peak_bytes_per_ns / share, device.sms / share
    busiest = np.maximum(1.0, of["blocks"] / sms) / of["blocks"]
    memory = (of["missed"] / rates["read"] + of["written"] / rates["write"]) / peak
    cache = of["block_loads"] / rates["cache"] + of["block_stores"] / rates["stores"] + of["scattered"] / rates["scattered"]
    reached = (of["block_loads"] + of["block_stores"]) / rates["sm"] * busiest / device.peak_bytes_per_ns
    computed = np.stack([of[group] for group in FUNCTIONS], axis=1) @ costs
    computed = of["padded"] * (computed + rates["access_sm_ns"] * (of["loads"] + of["stores"]))
    issued = of["instructions"] * rates["instruction_sm_ns"] + of["blocks"] * rates["block_sm_ns"]
    turn = rates["turn_ns"] * np.maximum(of["loops"], 1) + rates["reduce_ns"] * of["reductions"]
    chain = np.sqrt(_waves(of, device, sms)) * of["turns"] * turn
    atomics = of["atomics"] / rates["atomics"] / sms
    return np.stack([rates["start_ns"], memory, cache / peak, reached, atomics, (computed + issued) * busiest, chain])


def summed_ns(parts: Floats, sharpness: float) -> Floats:
    """Of all parts together."""
    result: Floats = parts[0] + ((parts[1:] + _NOTHING) ** sharpness).sum(axis=0) ** (1.0 / sharpness)
    return result


def _waves(of: dict[str, Floats], device: GeneratedConstants, sms: Floats) -> Floats:
    """How often a device is full of blocks."""
    resident = np.clip(device.threads_per_sm / (_WARP * of["warps"]), 1, _MOST_BLOCKS)
    result: Floats = np.ceil(of["blocks"] / (sms * resident))
    return result


def ranged(numbers: Floats) -> Floats:
    """What has to lie within what was measured: iterations, rows, bytes."""
    return np.log1p(numbers[:, [AT[name] for name in ("elements", "reduced", "read", "written", "asked")]])


FORM = GeneratedForm
