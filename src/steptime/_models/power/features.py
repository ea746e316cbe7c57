"""What of a call decides the power it draws."""

from __future__ import annotations

from steptime._hardware.device import DeviceLimits
from steptime._models.kernels.call import Call, TensorArg, flop_of, moved_bytes, precision_of
from steptime._models.kernels.question import Question
from steptime._models.power.model import KernelDraw, PowerModel


def kernel_draw(model: PowerModel, question: Question, family: str, time_ns: float, device: DeviceLimits) -> KernelDraw:
    """Of a question's call that takes so long alone on a device."""
    call = question.call
    bandwidth = device.bandwidth_bytes_per_s.value * device.reach.bandwidth.value / device.share
    # Of a table no more is read than memory gives in the time there is.
    memory_bytes = min(
        max(moved_bytes(call) - (_written_bytes(call) if question.warm else 0.0), 0.0), bandwidth * time_ns * 1e-9
    )
    return model.draw(
        family,
        precision_of(call, question.tf32),
        flop=flop_of(call),
        memory_bytes=memory_bytes,
        time_ns=time_ns,
        memory_bound=memory_bytes / (bandwidth * time_ns * 1e-9) if time_ns > 0 else 1.0,
        share=device.share,
    )


def _written_bytes(call: Call) -> float:
    """Of arguments that were written just before, and so are in the cache."""
    every = [call.args[index] for index in call.written if index < len(call.args)]
    return float(sum(each.nbytes for each in every if isinstance(each, TensorArg)))
