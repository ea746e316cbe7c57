"""Calls answered by their own measurement instead of a model: what is left between that and a step, no model can mend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pyarrow as pa

from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime._models.kernels.family import family_of
from steptime._models.kernels.fitted import Answered
from steptime._models.kernels.launches import short_name
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime._ops.catalogue import overloads_of
from steptime_lab.measurements.kernels import rows_of

_Key = tuple[object, ...]
# Recorded out of place, because recording keeps what a step would overwrite.
_ELSEWHERE = {"aten::add_.Tensor": "aten::add.Tensor"}


class MeasuredAlone:
    """Measured rows by what a trace can tell of a call: not the values of floats, nor which integers an index holds."""

    def __init__(self, kernels: pa.Table) -> None:
        self._answers: dict[_Key, Answer] = {}
        for row in rows_of(kernels):
            launches = tuple(
                LaunchTime(short_name(name), time_ns) for name, time_ns in zip(row.kernel_names, row.kernel_ns, strict=True)
            )
            self._answers[_key(row.question)] = Answer(launches)

    def ask(self, questions: Sequence[Question]) -> list[Answered]:
        """Each question by its own row; where one cache state was measured, that stands for the other."""
        return [self._answered(question) for question in questions]

    def _answered(self, question: Question) -> Answered:
        other_state = replace(question, warm=not question.warm)
        asked = [question, other_state]
        if question.call.op in _ELSEWHERE:
            asked += [replace(one, call=replace(one.call, op=_ELSEWHERE[one.call.op])) for one in asked]
        found = next((self._answers[key] for key in map(_key, asked) if key in self._answers), None)
        return Answered(family_of(question.call.op), found, "" if found else f"{question.call.op} was not measured so")


def _key(question: Question) -> _Key:
    settings = (question.tf32, question.benchmark, question.warm, question.share, question.others)
    return (*_known(question.call), *settings)


@cache
def _known(call: Call) -> _Key:
    declared = next((each for each in overloads_of(call.op.partition(".")[0]) if each.op == call.op), None)
    numbers = () if declared is None else tuple(parameter.type == "T" for parameter in declared.parameters)
    args = tuple(_plain(value, place < len(numbers) and numbers[place]) for place, value in enumerate(call.args))
    return call.op, args, tuple((name, _plain(value, False)) for name, value in call.kwargs)


def _plain(value: Argument, instead_of_tensor: bool) -> object:
    if isinstance(value, TensorArg):
        return value.shape, value.dtype, value.strides, value.device
    if isinstance(value, tuple):
        return tuple(_plain(each, False) for each in value)
    if isinstance(value, float) or (instead_of_tensor and isinstance(value, int)):
        return "number"
    return value
