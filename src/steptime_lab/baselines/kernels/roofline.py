"""A baseline: a floor, bytes at one bandwidth and operations at one rate, fitted per op and dtype. It stands in every table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.engine.splits import FIT
from steptime._models.engine.stored import Arrays
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime._models.kernels.work import base_of, flop_of, moved_bytes, precision_of
from steptime_lab.measurements.kernels import Row

# Nanoseconds, bytes per ns and operations per ns, so that weights are near one: an H200's orders of magnitude.
_SCALES = (1_000.0, 4_300.0, 50_000.0)
# Rows of an op and dtype below which the dtypes of the op, then all ops, are fitted together.
_LEAST = 8


@dataclass(frozen=True)
class Roofline:
    """Weights of floor, bytes and operations."""

    weights: Mapping[str, npt.NDArray[np.float64]]  # by "op|precision", "op", ""

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """One launch per call: this form knows no kernels."""
        results = []
        for question in questions:
            terms = _terms(question)
            key = next(key for key in (*_keys(question), "") if key in self.weights)
            results.append(Answer((LaunchTime("roofline", float(terms @ self.weights[key])),)))
        return results

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same from."""
        keys = sorted(self.weights)
        return {"keys": np.asarray(keys, dtype=np.str_), "weights": np.asarray([self.weights[key] for key in keys])}


def fit(rows: Sequence[Row], _seed: int) -> Roofline:
    """Non-negative weights with the least relative error; nothing is drawn."""
    from scipy.optimize import nnls

    groups: dict[str, list[tuple[npt.NDArray[np.float64], float]]] = defaultdict(list)
    for row in rows:
        if row.split == FIT:
            for key in (*_keys(row.question), ""):
                groups[key].append((_terms(row.question), row.time_ns))
    weights = {}
    for key, entry in groups.items():
        if len(entry) >= _LEAST or not key:
            terms, times_ns = np.asarray([item for item, _ in entry]), np.asarray([time_ns for _, time_ns in entry])
            result, _ = nnls(terms / times_ns[:, None], np.ones(len(entry)))
            if result.any():
                weights[key] = result
    return Roofline(weights)


def load(arrays: Arrays) -> Roofline:
    """The form that `arrays` were taken from."""
    return Roofline(dict(zip(arrays["keys"].tolist(), arrays["weights"], strict=True)))


def _keys(question: Question) -> tuple[str, str]:
    base = base_of(question.call.op)
    return f"{base}|{precision_of(question.call, question.tf32)}", base


def _terms(question: Question) -> npt.NDArray[np.float64]:
    """Floor, then what bytes and operations take at the usual rates of a whole GPU, times the parts it is divided into."""
    call, (floor, bandwidth, rate) = question.call, _SCALES
    return np.asarray([floor, question.share * moved_bytes(call) / bandwidth, question.share * flop_of(call) / rate])
