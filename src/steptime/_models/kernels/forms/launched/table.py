"""Questions as a table of launches: what the form is fitted to and what it is asked with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.call import Call
from steptime._models.kernels.family import families, family_of
from steptime._models.kernels.forms.launched.columns import Columns, Numbers
from steptime._models.kernels.forms.launched.groups import groups_of
from steptime._models.kernels.forms.launched.parts import others_code
from steptime._models.kernels.launches import Launch
from steptime._models.kernels.launches.facts import FACTS
from steptime._models.kernels.launches.names import short_name
from steptime._models.kernels.question import OTHERS, Question
from steptime._models.kernels.rows import Row
from steptime._units import dtype_bytes
from steptime.errors import InputError

# Calls whose launches are kept: several steps' worth of distinct ones.
_KEPT = 20_000
# What rules may run into on arguments that are not what an op takes.
_ODD_ARGUMENTS = (IndexError, TypeError, ValueError, ZeroDivisionError, KeyError, AttributeError, OverflowError)


@lru_cache(maxsize=_KEPT)
def launches_of(call: Call) -> tuple[Launch, ...]:
    """What a call launches, by the rules of its family. Raises InputError where there are none or the call cannot be."""
    family = family_of(call.op)
    rules = families()[family].rules if family else None
    if rules is None:
        raise InputError(f"{call.op}: no rules say what it launches")
    for shape, dtype in {(tensor.shape, tensor.dtype) for tensor in call.tensors()}:
        if not dtype_bytes(dtype):
            raise InputError(f"{call.op}: dtype {dtype!r} is unknown")
        if min(shape, default=0) < 0:
            raise InputError(f"{call.op}: a tensor of shape {list(shape)} cannot be")
    try:
        found = rules(call)
    except _ODD_ARGUMENTS as error:
        raise InputError(f"{call.op}: its arguments are not what the op takes ({error})") from error
    # A kernel over no elements is not launched.
    return tuple(launch for launch in found if launch.elements > 0)


def checked(question: Question) -> None:
    """Raises InputError for settings that cannot be."""
    if question.share < 1:
        raise InputError(f"{question.call.op}: share {question.share} of a GPU, expected 1 or more")
    if question.others not in OTHERS:
        raise InputError(f"{question.call.op}: others {question.others!r}, expected one of {', '.join(OTHERS)}")


@dataclass(frozen=True)
class Table:
    """Launches of measured questions, those whose rules agree with what was seen."""

    columns: Columns
    numbers: Numbers  # launches x columns
    groups: list[tuple[str, ...]]
    row: npt.NDArray[np.int64]  # of which measured row
    share: Numbers
    others: npt.NDArray[np.int64]
    time_ns: Numbers  # of the launch


def table_of(rows: Sequence[Row]) -> Table:
    """The launches of measured rows; rows whose launches are not those of the rules are left out."""
    agreed = [(place, row, launched) for place, row in enumerate(rows) if (launched := _agreeing(row)) is not None]
    extra = sorted({name for _, _, launched in agreed for launch in launched for name in launch.facts} - set(FACTS))
    columns = Columns((*FACTS, *extra))
    numbers: list[list[float]] = []
    groups: list[tuple[str, ...]] = []
    places: list[tuple[int, int, int]] = []
    time_ns: list[float] = []
    for place, row, launched in agreed:
        question = row.question
        numbers += columns.rows(question.call, launched, question.warm)
        groups += [groups_of(question.call.op, launch) for launch in launched]
        places += [(place, question.share, others_code(question))] * len(launched)
        time_ns += row.kernel_ns
    where = np.asarray(places, dtype=np.int64).reshape(-1, 3)
    return Table(
        columns,
        np.asarray(numbers).reshape(-1, columns.width),
        groups,
        where[:, 0],
        where[:, 1].astype(np.float64),
        where[:, 2],
        np.asarray(time_ns),
    )


def _agreeing(row: Row) -> tuple[Launch, ...] | None:
    try:
        launched = launches_of(row.question.call)
    except InputError:
        return None
    return launched if [launch.kernel for launch in launched] == [short_name(name) for name in row.kernel_names] else None
