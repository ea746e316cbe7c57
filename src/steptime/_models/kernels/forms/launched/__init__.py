"""Kernels whose launches follow from rules: each launch is a sum of what it has to do, corrected by trees.

time(call) = sum over its launches of max(least of its kernel, terms . weights of its finest measured group) * exp(trees)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from steptime._models.engine.constants import reference_constants
from steptime._models.engine.regression import Trees
from steptime._models.engine.stored import Longs, stored
from steptime._models.kernels.family import family_of, launches_of
from steptime._models.kernels.forms import settings_of
from steptime._models.kernels.forms.launched.terms import (
    PAIRS,
    LaunchColumns,
    LaunchConstants,
    LaunchTraffic,
    Numbers,
    shares_of,
    terms,
    traffic,
)
from steptime._models.kernels.launches import Launch
from steptime._models.kernels.question import OTHERS, Answer, LaunchTime, Question

# Levels that say what code runs; those below say what it computes, which changes the time of the same code only so much.
CODE_LEVELS = 3
# What launches of any name can have no part of; it also tells levels apart, by how many there are.
JOIN = "\t"
# The most that trees may change a time, as a natural logarithm.
MOST = 1.2
# How far what it computes may move a time from that of the same code: validation rows lie within 0.6 and 2.4, and beyond 2 a
# group of few rows is used far from them.
_MOST_APART = 2.0
# What a launch costs beside its bytes where its kernel was never measured (the usual floor of a small cold one).
_FLOOR_NS = 1000.0
# Pairs of a grid that trees see.
_SEEN_PAIRS = 3


def groups_of(op: str, launch: Launch) -> tuple[str, ...]:
    """The groups of a launch by name, coarse to fine."""
    operand = launch.reads[0] if launch.reads else launch.writes[0] if launch.writes else None
    item = str(operand.item_bytes if operand is not None else 4)
    name, names = "", []
    for level, part in enumerate((launch.timed_as or launch.kernel, launch.path, item, op, launch.tag)):
        name = f"{name}{JOIN}{part}" if level else part
        names.append(name)
    return tuple(names)


def coded(names: tuple[str, ...]) -> tuple[str, str, str]:
    """Of the groups of a launch those whose mean error trees are told: its path, op and tag."""
    return names[1], names[3], names[4]


@dataclass(frozen=True)
class LaunchRows:
    """The launches of questions, one row each."""

    columns: LaunchColumns
    numbers: Numbers  # launches x columns
    groups: list[tuple[str, ...]]  # names of each launch's groups, coarse to fine
    share: Numbers
    others: Longs  # places in OTHERS


def launch_rows(columns: LaunchColumns, questions: Sequence[Question], launches: Sequence[Sequence[Launch]]) -> LaunchRows:
    """The rows of questions that launch so; a share of a GPU whose company is not told is taken to do the same."""
    settings, counts = settings_of(questions), [len(item) for item in launches]
    untold = (settings.share > 1) & (settings.others == OTHERS.index("none"))
    asked = list(zip(questions, launches, strict=True))
    numbers = [row for question, item in asked for row in columns.rows(question.call, item, question.warm)]
    return LaunchRows(
        columns,
        np.asarray(numbers).reshape(-1, columns.width),
        [groups_of(question.call.op, launch) for question, item in asked for launch in item],
        np.repeat(settings.share.astype(np.float64), counts),
        np.repeat(np.where(untold, OTHERS.index("same"), settings.others), counts),
    )


@dataclass(frozen=True)
class Batch:
    """Launches to be timed, as a model knows them."""

    numbers: Numbers  # launches x columns
    share: Numbers
    others: Longs
    group: Longs  # row of the weights; -1 where no group is known
    code: Longs  # that of the group of launches that run the same code, whatever it computes
    codes: Numbers  # launches x (path, op, tag)

    def take(self, used: Longs) -> Batch:
        """The launches at some places."""
        return Batch(*(column[used] for column in vars(self).values()))


@dataclass(frozen=True)
class LaunchedModel:
    """All that is fitted: weights of terms per group of launches, scales of shares of a GPU, and trees."""

    facts: tuple[str, ...]
    groups: tuple[str, ...]
    weights: Numbers  # groups x terms
    least_ns: Numbers  # groups: nothing of its kernel runs shorter
    scales: Numbers
    # How far launches of a path, an op, a tag are from the sum of terms on average: text as a number for the trees.
    code_names: tuple[str, ...]
    codes: Numbers
    uncorrected: frozenset[str]  # families whose validation rows the trees do not help
    range_names: tuple[str, ...]  # groups of a path
    ranges: Numbers  # least and most elements measured of each
    trees: Trees = field(metadata=stored(prefix="trees_"))
    device: LaunchConstants = field(default_factory=partial(reference_constants, "launched", LaunchConstants))

    @cached_property
    def columns(self) -> LaunchColumns:
        """The numbers of a launch."""
        return LaunchColumns(self.facts)

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.groups)}

    @cached_property
    def _code_of(self) -> dict[str, float]:
        return dict(zip(self.code_names, self.codes.tolist(), strict=True))

    @cached_property
    def _ranges(self) -> dict[str, tuple[float, float]]:
        return {name: (low, high) for name, (low, high) in zip(self.range_names, self.ranges.tolist(), strict=True)}

    def batch(self, rows: LaunchRows) -> Batch:
        """Launches by the rows of the weights that they use, and by the numbers of their texts; 0 for what was not measured."""
        row_of, code_of = self._row_of, self._code_of

        def finest(names: tuple[str, ...]) -> int:
            return next((row_of[name] for name in reversed(names) if name in row_of), -1)

        return Batch(
            *(rows.numbers, rows.share, rows.others),
            np.array([finest(names) for names in rows.groups], dtype=np.int64),
            np.array([finest(names[:CODE_LEVELS]) for names in rows.groups], dtype=np.int64),
            np.array([[code_of.get(name, 0.0) for name in coded(names)] for names in rows.groups]).reshape(-1, 3),
        )

    def inside(self, names: tuple[str, ...], elements: float) -> bool:
        """Whether launches of this kernel and path were measured below and above this size."""
        least, most = self._ranges.get(names[1], (np.inf, 0.0))
        return least <= elements <= most

    def time_ns(self, batch: Batch, corrected: npt.NDArray[np.bool_]) -> Numbers:
        """How long every launch takes."""
        result, moved = base_ns(self, batch)
        if corrected.any():
            seen = features(self.columns, batch, moved, result)[corrected]
            result[corrected] *= np.exp(np.clip(self.trees.values(seen), -MOST, MOST))
        return np.maximum(result, moved.at_peak_ns(self.device))


def base_ns(model: LaunchedModel, batch: Batch) -> tuple[Numbers, LaunchTraffic]:
    """The weighted sum of terms of every launch, and where its bytes are."""
    device = model.device
    shares = shares_of(device.sms, batch.share, batch.others, model.scales)
    moved = traffic(batch.numbers, device, shares)
    worked = terms(model.columns, batch.numbers, moved, device, shares)
    result = np.einsum("lt,lt->l", worked, model.weights[batch.group])
    usual = np.einsum("lt,lt->l", worked, model.weights[batch.code])
    result = np.clip(result, usual / _MOST_APART, usual * _MOST_APART)
    result = np.where(batch.group < 0, _FLOOR_NS + moved.least_ns(device, shares), result)
    return np.maximum(result, model.least_ns[batch.group]), moved


def features(columns: LaunchColumns, batch: Batch, moved: LaunchTraffic, base: Numbers) -> Numbers:
    """What trees see of every launch."""
    grid = batch.numbers[:, columns.features :]
    blocks, work = grid[:, :_SEEN_PAIRS], grid[:, PAIRS : PAIRS + _SEEN_PAIRS]
    bytes_seen = (moved.memory_bytes, moved.cache_bytes, moved.cold_share)
    part_seen = (base, base * batch.share, batch.share, batch.others, batch.codes)
    own = np.column_stack([*bytes_seen, *part_seen, blocks, work, blocks * work])
    return np.hstack([batch.numbers[:, : columns.features], own])


@dataclass(frozen=True)
class LaunchedForm:
    """The fitted form: one model for whole GPUs, one that has seen shares of them as well."""

    whole: LaunchedModel
    shared: LaunchedModel | None = field(default=None, metadata=stored(prefix="parts."))

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each question's call launches and how long that takes. Raises InputError for a call that cannot be."""
        whole = iter(_answers(self.whole, [question for question in questions if question.share == 1]))
        shared = iter(_answers(self.shared or self.whole, [question for question in questions if question.share != 1]))
        return [next(whole if question.share == 1 else shared) for question in questions]


def _answers(model: LaunchedModel, questions: Sequence[Question]) -> list[Answer]:
    if not questions:
        return []
    launches = [launches_of(question.call, model.device.gpu) for question in questions]
    rows = launch_rows(model.columns, questions, launches)
    corrected = [family_of(question.call.op) not in model.uncorrected for question in questions]
    times = model.time_ns(model.batch(rows), np.repeat(corrected, [len(item) for item in launches]))
    inside = map(model.inside, rows.groups, rows.numbers[:, 0].tolist())
    each = zip(times.tolist(), inside, strict=True)
    answers = []
    for item in launches:
        timed = [(LaunchTime(launch.kernel, time_ns), within) for launch, (time_ns, within) in zip(item, each, strict=False)]
        answers.append(Answer(tuple(launch for launch, _ in timed), all(within for _, within in timed)))
    return answers


FORM = LaunchedForm
