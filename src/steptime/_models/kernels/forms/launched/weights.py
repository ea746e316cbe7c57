"""Non-negative weights of the terms, fitted on relative error from coarse groups to fine ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms.launched.columns import Numbers
from steptime._models.kernels.forms.launched.groups import LEAST, LEVELS, PULL
from steptime.errors import InputError

# Regression towards zero of the coarsest groups, which have nothing above them.
_RIDGE = 3e-2
# Weights are refitted with less regard to what is far off, towards absolute error; errors below this count alike.
_ROUNDS, _NEAR = 3, 0.03
# A group's column counts at least this share of its parent's: a group of small shapes must not get free bandwidth.
_PARENT_SHARE = 0.5
# Of the shortest measured time of a kernel: no launch of it is predicted shorter.
_SHORTEST = 0.8
# A column below this share of the time says nothing.
_NOTHING = 1e-9


@dataclass(frozen=True)
class Weights:
    """A row of weights per group."""

    names: tuple[str, ...]
    values: Numbers  # groups x terms
    least_ns: Numbers  # groups: nothing of its kernel runs shorter


def fit_weights(terms: Numbers, time_ns: Numbers, groups: Sequence[tuple[str, ...]], importance: Numbers) -> Weights:
    """Weights of every group with enough launches. `importance` is the share of its call's time that a launch takes."""
    relative = terms / time_ns[:, None]
    fitted: dict[str, Numbers] = {}
    scales: dict[str, Numbers] = {}
    least_ns: dict[str, float] = {}
    for level in range(LEVELS):
        members: dict[str, list[int]] = defaultdict(list)
        for place, names in enumerate(groups):
            members[names[level]].append(place)
        for name, some in members.items():
            if len(some) < LEAST[level]:
                continue
            places = np.asarray(some)
            parent = next((above for above in reversed(groups[some[0]][:level]) if above in fitted), "")
            columns = relative[places]
            own = columns.mean(axis=0)
            used = own > _NOTHING
            scale = np.maximum(own, _PARENT_SHARE * scales[parent]) if parent else own + 1e-12
            towards = fitted[parent] * scale if parent else None
            found = _solved(columns[:, used] / scale[used], importance[places], PULL[level], towards, used)
            if found is not None:
                fitted[name], scales[name] = np.zeros_like(own), own
                fitted[name][used] = found / scale[used]
                least_ns[name] = least_ns[parent] if parent else _SHORTEST * float(time_ns[places].min())
    return Weights(tuple(fitted), np.array(list(fitted.values())), np.array(list(least_ns.values())))


def _solved(
    columns: Numbers, importance: Numbers, pull: float, towards: Numbers | None, used: npt.NDArray[np.bool_]
) -> Numbers | None:
    """Weights in units of the columns' scale; None where the solver gives up."""
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise InputError("fitting needs SciPy: install steptime[fit]") from error
    count = columns.shape[1]
    strength = _RIDGE if towards is None else np.sqrt(pull)
    drawn = np.zeros(count) if towards is None else strength * towards[used]
    root = np.sqrt(importance)
    found: Numbers | None = None
    for _ in range(_ROUNDS):
        left = np.vstack([columns * root[:, None], strength * np.eye(count)])
        try:
            found = nnls(left, np.concatenate([root, drawn]), maxiter=3000)[0]
        except RuntimeError:
            break
        off = np.abs(columns @ found - 1)
        root = np.sqrt(importance / np.maximum(off, _NEAR) * _NEAR * 10)
    return found
