"""Recordings that lack what models need: made on a CPU, or without device events. Nothing is left out silently.

Tensors of a step that was recorded on a CPU are taken to lie on the device that is asked about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steptime._ops.table import arguments_of, is_sparse
from steptime._program.one_step import OneStep
from steptime._program.program import Program, Signature, Tensor, Value
from steptime.errors import InputError

_CPU, _DEVICE = "cpu", "cuda:0"


def on_a_device(steps: Sequence[OneStep], *, strict: bool) -> tuple[list[OneStep], list[str]]:
    """The steps with every tensor that a device would hold on one, and what to warn of; an error if `strict`."""
    moved = [step for step in steps if _on_cpu(step.program)]
    if not moved:
        return list(steps), []
    first = moved[0].program
    where = (
        f"{first.source or f'rank {first.rank}'}: recorded on a CPU: none of its {len(first.ops)} ops has a tensor of a device"
    )
    if strict:
        raise InputError(f"{where}; record it on a GPU, or drop --strict to take its tensors as lying on one")
    message = f"{where}; all of them ({len(moved)} of {len(steps)} programs) are taken to run on one"
    return [replace(step, program=_moved(step.program)) if step in moved else step for step in steps], [message]


def refuse_lost_work(programs: Sequence[Program]) -> None:
    """An error where ops were timed and nothing that they launched was recorded."""
    for program in programs:
        if not len(program.works) and bool((program.ops.start_ns >= 0).any()):
            raise InputError(
                f"{program.source or f'rank {program.rank}'}: {len(program.ops)} ops were recorded and no device event, so "
                "that collectives are missing; record them (ProfilerActivity.CUDA), or drop --strict for what the ops say"
            )


def _on_cpu(program: Program) -> bool:
    """Whether tensors are recorded and all of them lie on the CPU; numbers that became tensors do not count."""
    tensors = 0
    for signature in program.signatures:
        arguments = arguments_of(signature)
        for tensor in arguments.inputs + arguments.outputs:
            if tensor.device != _CPU and not is_sparse(tensor):
                return False
            tensors += bool(tensor.shape)
    return tensors > 0


def _moved(program: Program) -> Program:
    signatures = tuple(Signature(_values(each.inputs), _values(each.outputs)) for each in program.signatures)
    return replace(program, signatures=signatures)


def _values(values: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple(map(_value, values))


def _value(value: Value) -> Value:
    if isinstance(value, Tensor):
        # What has no dimensions is mostly a number that PyTorch wrapped, and lies on the CPU in a step of a GPU as well.
        return replace(value, device=_DEVICE) if value.shape and value.device == _CPU else value
    return _values(value) if isinstance(value, tuple) else value
