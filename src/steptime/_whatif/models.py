"""What models say of changed ops, relative to what they say of the ops as they are.

Times of a recording stay its own. Where a change makes an op another one (TF32, another batch), models are asked about both,
and their ratio multiplies what was recorded: what they are off by on this machine cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from steptime._hardware.device import device_named
from steptime._models.estimate import Estimate
from steptime._models.host.model import HostModel, read_host
from steptime._platforms.device import Device
from steptime._platforms.platform import Platform
from steptime._program.one_step import OneStep
from steptime._program.program import Program, Signature
from steptime._sim.core.timing import Cohort
from steptime._sim.modelled.device_work import device_work
from steptime._sim.prediction import NINE_OF_TEN
from steptime._whatif.draws import with_errors
from steptime._whatif.edits import Floats, scaled_works
from steptime._whatif.grammar import Change, error

HOST = "xeon-h200"  # whose costs are compared with each other where no platform is given
Rewrite = Callable[[Program, int, Signature], Signature]


@dataclass(frozen=True)
class Models:
    """The models that are asked: of a device and of a host."""

    device: Device
    host: HostModel

    @classmethod
    def of(cls, change: Change, programs: Sequence[Program], platform: Platform | None) -> Models:
        """A platform's, or those of the device that a recording names."""
        if platform is not None:
            return cls(platform.device, platform.host)
        name = next((program.device_name for program in programs if program.device_name), "")
        limits = device_named(name)
        if limits is None:
            what = f"{name!r} is no device that is known" if name else "the recording names no device"
            raise error(change.text, f"needs models of the device, and {what}; give --platform NAME")
        return cls(_device(limits.name), read_host(HOST))

    def op_times(self, program: Program) -> OpTimes:
        """What the launches of every op take on the device."""
        time_ns, spread = np.zeros(len(program.ops)), np.zeros(len(program.ops))
        for work in device_work([OneStep(program)], self.device)[0].works:
            time_ns[work.op] += work.estimate.time_ns
            spread[work.op] = log_error(work.estimate)
        return OpTimes(time_ns, spread)


@dataclass(frozen=True, eq=False)
class OpTimes:
    """Per op: nanoseconds (0 where another op answers for it, or it launches nothing), and the error of their logarithm."""

    time_ns: Floats
    error: Floats


def log_error(estimate: Estimate) -> float:
    """The standard deviation of the logarithm that an estimate's interval says."""
    low, high = max(estimate.low_ns, 1e-3), max(estimate.high_ns, 1e-3)
    return math.log(high / low) / (2 * NINE_OF_TEN) if high > low else 0.0


_device = cache(Device.load)


def rewritten(program: Program, rewrite: Rewrite) -> Program:
    """The program with other signatures: `rewrite` gives the one of an op (its row), or the same one."""
    known: dict[tuple[int, int], int] = {}
    signatures = list(program.signatures)
    column = program.ops.signature.copy()
    for row, (name, at) in enumerate(zip(program.ops.name.tolist(), column.tolist(), strict=True)):
        if at < 0:
            continue
        key = (name, at)
        if key not in known:
            changed = rewrite(program, row, program.signatures[at])
            known[key] = at if changed is program.signatures[at] else len(signatures)
            if known[key] != at:
                signatures.append(changed)
        column[row] = known[key]
    return replace(program, ops=program.ops.replace(signature=column), signatures=tuple(signatures))


def with_op_times(cohort: Cohort, before: OpTimes, after_ns: Floats) -> Cohort:
    """Works of ops of which models say another time, in the same ratio; in draws, with what models are off by."""
    program, before_ns = cohort.program, before.time_ns
    ratio = np.where(before_ns > 0, after_ns / np.where(before_ns > 0, before_ns, 1.0), 1.0)
    answering = answering_ops(program, before_ns > 0)
    of_work = np.append(answering, -1)[np.append(program.calls.op, -1)[program.works.call]]
    factors = np.append(ratio, 1.0)[of_work]
    errors = np.where(factors != 1.0, np.append(before.error, 0.0)[of_work], 0.0)
    return with_errors(scaled_works(cohort, factors != 1.0, factors), errors)


def answering_ops(
    program: Program, answered: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Per op, the nearest one around it (or itself) that a model answered for, or -1."""
    result = np.full(len(program.ops), -1, dtype=np.int64)
    for row, parent in enumerate(program.ops.parent.tolist()):
        result[row] = row if answered[row] else result[parent] if parent >= 0 else -1
    return result
