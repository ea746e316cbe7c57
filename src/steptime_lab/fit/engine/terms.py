"""Non-negative weights of physical terms: of one group of rows, or of groups within groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.engine.stored import Floats
from steptime_lab.fit.engine import fitting_library

_ROUNDS = 8
# A row off by less than this counts as one off by this: the fit is to the many, not to the few that are far off.
_CLOSE = 0.03


def non_negative(matrix: Floats, target: Floats, **options: Any) -> Floats:
    """The least squares whose weights are not negative. Raises RuntimeError where the solver gives up."""
    weights: Floats = fitting_library("scipy.optimize").nnls(matrix, target, **options)[0]
    return weights


def fit_terms(terms: Floats, times: Floats, weight: Floats | None = None) -> Floats:
    """Factors of terms, [terms], whose sum is least off from the times, relatively; few rows that are far off count less."""
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-30)
    importance = np.ones(len(times)) if weight is None else weight
    weights = importance / times
    solved = np.zeros(terms.shape[1])
    for _ in range(_ROUNDS):
        solved = non_negative(terms / scale * weights[:, None], times * weights)
        off = np.abs(terms / scale @ solved / times - 1)
        weights = importance / times / np.sqrt(np.maximum(off, _CLOSE))
    factors: Floats = solved / scale
    return factors


# Regression towards zero of the coarsest groups, which have nothing above them.
_RIDGE = 3e-2
# Weights of groups are refitted with less regard to what is far off, towards absolute error; errors below this count alike.
_GROUP_ROUNDS, _NEAR = 3, 0.03
# A group's column counts at least this share of its parent's: a group of small shapes must not get free bandwidth.
_PARENT_SHARE = 0.5
# Of the shortest measured time of a coarsest group: nothing in it is predicted shorter.
_SHORTEST = 0.8
# A column below this share of the time says nothing.
_NOTHING = 1e-9


@dataclass(frozen=True)
class GroupWeights:
    """A row of weights per group."""

    names: tuple[str, ...]
    values: Floats  # groups x terms
    least_ns: Floats  # groups: nothing of its coarsest group runs shorter


def fit_group_weights(
    terms: Floats,
    time_ns: Floats,
    groups: Sequence[tuple[str, ...]],
    importance: Floats,
    least_rows: Sequence[int],
    pull: Sequence[float],
) -> GroupWeights:
    """Weights of groups within groups, each drawn towards those of the group above it.

    `groups` has the names of every row's groups, coarse to fine. Per level, `least_rows` make a group and `pull` says how
    strongly it is drawn. `importance` is how much a row counts.
    """
    relative = terms / time_ns[:, None]
    fitted: dict[str, Floats] = {}
    scales: dict[str, Floats] = {}
    least_ns: dict[str, float] = {}
    for level, (least, strength) in enumerate(zip(least_rows, pull, strict=True)):
        members: dict[str, list[int]] = defaultdict(list)
        for row, names in enumerate(groups):
            members[names[level]].append(row)
        for name, rows in members.items():
            if len(rows) < least:
                continue
            parent = next((above for above in reversed(groups[rows[0]][:level]) if above in fitted), "")
            columns = relative[np.asarray(rows)]
            mean = columns.mean(axis=0)
            used = mean > _NOTHING
            scale = np.maximum(mean, _PARENT_SHARE * scales[parent]) if parent else mean + 1e-12
            towards = fitted[parent] * scale if parent else None
            solved = _solved(columns[:, used] / scale[used], importance[rows], strength, towards, used)
            if solved is not None:
                fitted[name], scales[name] = np.zeros_like(mean), mean
                fitted[name][used] = solved / scale[used]
                least_ns[name] = least_ns[parent] if parent else _SHORTEST * float(time_ns[rows].min())
    return GroupWeights(tuple(fitted), np.array(list(fitted.values())), np.array(list(least_ns.values())))


def _solved(
    columns: Floats, importance: Floats, pull: float, towards: Floats | None, used: npt.NDArray[np.bool_]
) -> Floats | None:
    """Weights in units of the columns' scale; None where the solver gives up."""
    count = columns.shape[1]
    strength = _RIDGE if towards is None else np.sqrt(pull)
    drawn = np.zeros(count) if towards is None else strength * towards[used]
    root = np.sqrt(importance)
    solved: Floats | None = None
    for _ in range(_GROUP_ROUNDS):
        left = np.vstack([columns * root[:, None], strength * np.eye(count)])
        try:
            solved = non_negative(left, np.concatenate([root, drawn]), maxiter=3000)
        except RuntimeError:
            break
        off = np.abs(columns @ solved - 1)
        root = np.sqrt(importance / np.maximum(off, _NEAR) * _NEAR * 10)
    return solved
