"""bf16 autocast: products, convolutions and attention in bfloat16, with the casts that this takes; norms and losses stay.

Casts are counted as PyTorch makes them: in the forward pass one of each argument of a product that is float32 (weights once a
step), in the backward pass one of each gradient of a weight. Activation functions and dropout stand between products and take
what these give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from steptime._models.host.model import STEP, HostCost
from steptime._ops.catalogue import op_kind
from steptime._ops.operations import is_product
from steptime._ops.table import arguments_of
from steptime._program.program import Phase, Program, Signature, Tensor, Value
from steptime._sim.core.timing import Cohort
from steptime._units import dtype_bytes
from steptime._whatif.edits import Floats, Mask
from steptime._whatif.models import Models, rewritten, with_op_times

_WIDE, _NARROW = "float32", "bfloat16"
_BETWEEN = (
    "relu", "relu_", "threshold_backward", "gelu", "gelu_backward", "silu", "silu_", "silu_backward", "native_dropout",
    "native_dropout_backward", "sigmoid", "sigmoid_backward", "tanh", "tanh_backward",
)  # fmt: skip
_CAST = "aten::_to_copy"


@dataclass(frozen=True)
class Autocast:
    """A program's ops under autocast."""

    program: Program
    models: Models

    def made(self, cohort: Cohort) -> tuple[Cohort, bool]:
        """The cohort with products in bfloat16, and whether there was one to change."""
        before = self.models.op_times(self.program)
        after_ns = self.models.op_times(rewritten(self.program, _narrowed)).time_ns
        products = self._products() & (before.time_ns > 0) & (before.time_ns != after_ns)
        casts_ns, casts = self._casts(products)
        changed = with_op_times(cohort, before, after_ns + casts_ns)
        cast = self.models.host.op(_CAST)[0]
        host_ns = STEP.time_ns(HostCost(cast.cpu_ns, self.models.host.launch_ns)) * casts
        return _with_host(changed, host_ns), bool(products.any())

    def _products(self) -> Mask:
        names = np.array([is_product(name) for name in self.program.names], dtype=bool)
        return np.asarray(names[self.program.ops.name])

    def _casts(self, products: Mask) -> tuple[Floats, Floats]:
        """Per op, what its casts take on the device, and how many there are."""
        times, counts = np.zeros(len(products)), np.zeros(len(products))
        limits, ops = self.models.device.limits, self.program.ops
        for row in np.flatnonzero(products & (ops.signature >= 0)).tolist():
            signature = self.program.signatures[int(ops.signature[row])]
            wide = [tensor for tensor in arguments_of(signature).inputs if tensor.dtype == _WIDE]
            if ops.phase[row] == Phase.BACKWARD:
                wide = sorted(wide, key=lambda tensor: math.prod(tensor.shape))[:1]  # of its size is a gradient
            for tensor in wide:
                moved = math.prod(tensor.shape) * (dtype_bytes(_WIDE) + dtype_bytes(_NARROW))
                times[row] += limits.reach.start_ns.value + limits.roofline_ns(0.0, moved, _WIDE)
            counts[row] = len(wide)
        return times, counts


def _with_host(cohort: Cohort, op_ns: Floats) -> Cohort:
    """More host work before the first call of each op."""
    timing, calls = cohort.timing, cohort.program.calls
    first = np.zeros(len(calls))
    rows = np.flatnonzero(calls.op >= 0)
    ops, at = np.unique(calls.op[rows], return_index=True)
    first[rows[at]] = op_ns[ops]
    gap_ns = np.rint(timing.gap_ns + first[:, None, None]).astype(np.int64)
    return replace(cohort, timing=replace(timing, gap_ns=gap_ns))


def _narrowed(program: Program, row: int, signature: Signature) -> Signature:
    name = program.names[int(program.ops.name[row])]
    if not is_product(name) and op_kind(name).plain not in _BETWEEN:
        return signature
    inputs, outputs = (tuple(map(_narrow, values)) for values in (signature.inputs, signature.outputs))
    changed = (inputs, outputs) != (signature.inputs, signature.outputs)
    return replace(signature, inputs=inputs, outputs=outputs) if changed else signature


def _narrow(value: Value) -> Value:
    if isinstance(value, tuple):
        return tuple(map(_narrow, value))
    return replace(value, dtype=_NARROW) if isinstance(value, Tensor) and value.dtype == _WIDE else value
