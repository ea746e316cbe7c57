"""Whether the kernels whose times are taken compute what they should, on the device they are timed on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steptime_lab.measure.lookups.cases import LookupCase
from steptime_lab.measure.lookups.memory import Memory
from steptime_lab.measure.lookups.prepared import drawn
from steptime_lab.workloads.table_batched import plain
from steptime_lab.workloads.table_batched.lookup import TableBatchedLookup


class NoKernelsError(RuntimeError):
    """The kernels cannot be compiled or run here."""


# Sums in another order, and rows of 8 significant bits that are rounded once more or less.
_TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}


def disagreement(cases: Sequence[LookupCase], memory: Memory) -> str:
    """The first table-batched case whose sums or updated rows differ from plain PyTorch's; empty where none does."""
    for case in cases:
        if case.implementation == "table_batched":
            try:
                wrong = _difference(case, memory)
            except Exception as error:
                raise NoKernelsError(str(error).splitlines()[0][:200] if str(error) else type(error).__name__) from error
            if wrong:
                return f"{wrong} of {len(case.dims)} tables, {case.dtype}, {case.optimizer}"
    return ""


def _difference(case: LookupCase, memory: Memory) -> str:
    indices, offsets = drawn(case, memory.device)
    scales = torch.rand(indices.numel(), device=memory.device) + 0.5 if case.weighted else None
    lookup = TableBatchedLookup(
        case.rows, case.dims, optimizer=case.optimizer, dtype=getattr(torch, case.dtype), device=memory.device
    )
    rows, state = lookup.weights.clone(), None if lookup.state is None else lookup.state.clone()
    gradient = memory.gradient(case.batch, sum(case.dims), torch.float32)
    sums = plain.forward(rows, lookup.layout, indices, offsets, scales)
    out = lookup(indices, offsets, scales)
    out.backward(gradient)
    rates = (lookup.learning_rate, lookup.eps)
    plain.backward(rows, state, lookup.layout, (indices, offsets, scales), gradient, rates)
    tolerance = _TOLERANCE[case.dtype]
    if not torch.allclose(out.detach(), sums, rtol=tolerance, atol=tolerance):
        return "the sums"
    return "" if torch.allclose(lookup.weights.float(), rows.float(), rtol=tolerance, atol=tolerance) else "the updated rows"
