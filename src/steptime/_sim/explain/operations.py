"""`operations_of`: the floating-point operations of one step, and how much of a device's peak they make use of.

Counted are products, convolutions and attention, by the shapes of their arguments; attention as if every query met every key,
whether a mask leaves half of them out or not. Backward is twice forward: what a backward pass has beyond that is computed
again (activation checkpointing, the scores of fused attention), which the hardware does and the model does not ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from steptime._hardware.device import DeviceLimits, device_names, read_device
from steptime._models.kernels.call import computed_in
from steptime._ops.operations import is_product, product_operations
from steptime._program.program import Phase, Program, Tensor, Value, tensors_in
from steptime._program.workload import Workload

# Forward, and a backward pass that differentiates each product by both of its factors.
_MODEL_PASSES = 3.0
# All of it computed again, scores of fused attention too. More than this says that the forward pass was not told from the
# rest, as in recordings of compiled steps.
_MOST_PASSES = 4.5


@dataclass(frozen=True, slots=True)
class Operations:
    """Floating-point operations of one step over all ranks."""

    forward: float = 0.0
    hardware: float = 0.0  # of the whole step, with what is computed again
    precision: str | None = None  # in which most of them are computed, as devices call it

    @property
    def model(self) -> float:
        """Without what is computed again."""
        phases_known = self.hardware <= _MOST_PASSES * self.forward
        return min(self.hardware, _MODEL_PASSES * self.forward) if phases_known else self.hardware


def operations_of(workload: Workload) -> Operations:
    """What all ranks of a step compute; a rank without a program is taken to do what the first one does."""
    forward, by_precision = 0.0, dict[str, float]()
    for index, program in enumerate(workload.programs):
        ranks = len(workload.run_by(program.rank)) + (len(workload.absent) if index == 0 else 0)
        for phase, precision, flop in _products(program):
            by_precision[precision] = by_precision.get(precision, 0.0) + ranks * flop
            forward += ranks * flop if phase == Phase.FORWARD else 0.0
    usual = max(by_precision, key=by_precision.__getitem__, default=None)
    return Operations(forward, sum(by_precision.values()), usual)


def _products(program: Program) -> Iterator[tuple[int, str, float]]:
    """Phase, precision and operations per step of every distinct product of a program."""
    ops = program.ops
    # Autocast shows an op around the casts of its arguments and once more inside.
    again = (ops.parent >= 0) & (ops.name[np.maximum(ops.parent, 0)] == ops.name)
    products = np.isin(ops.name, [row for row, name in enumerate(program.names) if is_product(name)])
    counted = products & (ops.signature >= 0) & ~again & ((ops.step >= 0) | (not program.steps))
    calls = zip(ops.name[counted].tolist(), ops.signature[counted].tolist(), ops.phase[counted].tolist(), strict=True)
    for (name, signature, phase), count in Counter(calls).items():
        arguments = program.signatures[signature].inputs
        flop = product_operations(program.names[name], arguments, tuple(tensors_in(arguments)))
        if flop is not None:
            precision = computed_in(program.names[name], _dtype(arguments))
            yield phase, precision, flop * count / max(len(program.steps), 1)


def _dtype(arguments: tuple[Value, ...]) -> str:
    return next((value.dtype for value in arguments if isinstance(value, Tensor)), "")


def peak_flop_per_s(limits: DeviceLimits, precision: str | None) -> float | None:
    """What one rank on this device could compute at most; None where nobody says for this precision."""
    peak = limits.peak_flop_per_s.get(precision or "")
    return None if peak is None else peak.value / limits.share


def recorded_peak_flop_per_s(workload: Workload, precision: str | None) -> float | None:
    """The same, summed over the ranks of a recording, of the devices and the share of their SMs that it names."""
    total = 0.0
    for program in workload.programs:
        peak = _recorded_peak(program, precision)
        if peak is None:
            return None
        total += peak
    return total * workload.world_size / len(workload.programs)


def _recorded_peak(program: Program, precision: str | None) -> float | None:
    named = program.device_name.upper()
    known = (read_device(name) for name in device_names())
    limits = next((item for item in known if item.share == 1 and item.whole.split("-")[0].upper() in named), None)
    peak = None if limits is None else peak_flop_per_s(limits, precision)
    if limits is None or peak is None:
        return None
    sms = program.meta.get("device_sms")
    return peak * min(sms / limits.sms.value, 1.0) if isinstance(sms, int) and sms > 0 else peak
