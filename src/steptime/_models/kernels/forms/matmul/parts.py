"""Parts of a GPU: what a half, a quarter or an eighth has of the multiprocessors, the memory and the cache, beside its company.

The networks of the whole GPU are asked with a part's multiprocessors and bandwidths; how much of each a part has is fitted for
every number of parts and every company, starting from an equal share where the others work and from everything where they idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms.matmul.product import Column
from steptime._models.kernels.question import OTHERS

FACTORS = ("sms", "memory", "cache", "time")  # ln of what a part has relative to its start; `time` is what is left over
COMPANY = OTHERS[1:]  # none is asked like idle
_SCALES = (0.15, 0.5, 0.5, 0.15)  # how far from the start each may go before it has to be worth it
_PULL = 0.01
_STEP, _LEAST_STEP = 0.2, 0.02

Deviations = npt.NDArray[np.float64]  # shares x company x factors


@dataclass(frozen=True)
class Parts:
    """Fitted deviations, by number of parts and company."""

    shares: Column
    deviations: Deviations

    def factors(self, share: Column, others: Column) -> Deviations:
        """Factors on multiprocessors, memory and cache bandwidth and time, one column per product; ones on a whole GPU."""
        company = np.maximum(others - 1, 0)
        logs = np.zeros((len(FACTORS), len(share)))
        if len(self.shares):
            octave, known = np.log2(share), np.log2(self.shares)
            for place in range(len(COMPANY)):
                mine = company == place
                for factor in range(len(FACTORS)):
                    logs[factor, mine] = np.interp(octave[mine], known, self.deviations[:, place, factor])
        logs += _start(share, company)
        logs[:, share == 1] = 0
        return np.exp(logs)


NO_PARTS = Parts(np.zeros(0), np.zeros((0, len(COMPANY), len(FACTORS))))


def _start(share: Column, company: Column) -> Deviations:
    """ln of an equal share of everything where others work, of all but the multiprocessors where they are idle."""
    equal = -np.log(share)
    working = np.where(company == 0, 0.0, equal)
    return np.stack([equal, working, working, np.zeros(len(share))])


# ln(ns) of the rows at some places, as they would be on such parts.
Predict = Callable[["Parts", Column], Column]


def fit_parts(share: Column, others: Column, predict: Predict, log_ns: Column) -> Parts:
    """Parts fitted to rows."""
    shares = np.unique(share)
    deviations = np.zeros((len(shares), len(COMPANY), len(FACTORS)))
    seen = np.zeros(deviations.shape[:2], dtype=bool)
    for row, parts in enumerate(shares):
        for place in range(len(COMPANY)):
            mine = np.flatnonzero((share == parts) & (np.maximum(others - 1, 0) == place))
            if len(mine):
                seen[row, place] = True
                _descend(Parts(shares, deviations), (row, place), predict, mine, log_ns[mine])
    for place in range(len(COMPANY)):
        known = seen[:, place]
        if known.any() and not known.all():
            for factor in range(len(FACTORS)):
                fitted = deviations[known, place, factor]
                deviations[~known, place, factor] = np.interp(np.log2(shares[~known]), np.log2(shares[known]), fitted)
    return Parts(shares, deviations)


def _descend(parts: Parts, cell: tuple[int, int], predict: Predict, mine: Column, log_ns: Column) -> None:
    """Moves one cell's factors, one at a time, while that lessens the mean error; halves the step when it no longer does."""

    deviations = parts.deviations

    def cost() -> float:
        error = np.abs(predict(parts, mine) - log_ns).mean()
        return float(error + _PULL * np.square(deviations[cell] / _SCALES).sum())

    best, step = cost(), _STEP
    while step > _LEAST_STEP:
        moved = False
        for factor in range(len(FACTORS)):
            for way in (step, -step):
                deviations[(*cell, factor)] += way
                tried = cost()
                if tried < best:
                    best, moved = tried, True
                    break
                deviations[(*cell, factor)] -= way
        if not moved:
            step /= 2
