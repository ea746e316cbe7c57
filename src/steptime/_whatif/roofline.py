"""Kernels as quick as the device's data sheet allows: what their op computes and moves, at peak rates."""

from __future__ import annotations

import numpy as np

from steptime._hardware.device import DeviceLimits
from steptime._models.kernels.call import computed_in
from steptime._ops.operations import operations_of
from steptime._ops.table import memory_bytes, on_device, op_table
from steptime._program.program import Program, WorkKind
from steptime._sim.core.timing import Cohort
from steptime._units import dtype_name
from steptime._whatif.edits import Floats, Mask, scaled_works


def at_peak(cohort: Cohort, works: Mask, limits: DeviceLimits) -> Cohort:
    """Works in the ratio of what the ops that launch them take at least; none longer, and none of which nothing is known."""
    program, calls = cohort.program, cohort.program.calls
    op = np.append(calls.op, -1)[program.works.call]
    works = works & (op >= 0) & (program.works.kind == WorkKind.KERNEL)  # copies go over other wires than those of its memory
    total = np.bincount(op[works], weights=cohort.timing.duration_ns.mean(axis=(1, 2))[works], minlength=len(program.ops))
    least = _least_ns(program, np.unique(op[works]).tolist(), limits)
    ratio = np.where((least > 0) & (total > 0), np.minimum(least / np.maximum(total, 1.0), 1.0), 1.0)
    return scaled_works(cohort, works, np.append(ratio, 1.0)[op])


def _least_ns(program: Program, rows: list[int], limits: DeviceLimits) -> Floats:
    """Per op what computing and moving its arguments takes at peak rates; 0 where nothing is known of them."""
    table, result = op_table(program), np.zeros(len(program.ops))
    for row in rows:
        arguments = table.arguments[row]
        tensors = [tensor for tensor in (*arguments.inputs, *arguments.outputs) if on_device(tensor) and tensor.dtype]
        nbytes = sum(memory_bytes(tensor) for tensor in tensors)
        if not nbytes:
            continue
        name = table.names[row].partition(".")[0]
        flop = operations_of(name, table.signatures[row].inputs, arguments.inputs) or 0.0
        precision = computed_in(table.names[row], tensors[0].dtype, table.signatures[row].switches.tf32)
        result[row] = limits.roofline_ns(flop, nbytes, dtype_name(precision) or precision)
    return result
