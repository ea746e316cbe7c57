"""Which layout of a job is fastest: what is lost by the one predicted fastest, and how often one is that was called likely."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._plan.chances import chances
from steptime_lab.validate.layouts.rows import LayoutRow

Floats = npt.NDArray[np.float64]

LEAST_LAYOUTS = 3
_LIKELY = 0.5


@dataclass(frozen=True)
class Job:
    """The layouts of one job: what each was measured and predicted to take, milliseconds, and how likely it is the fastest."""

    rows: Sequence[LayoutRow]
    predicted_ms: Floats
    chances: Floats

    @property
    def measured_ms(self) -> Floats:
        """Of each layout."""
        return np.array([row.measured_ms for row in self.rows])

    def regret(self, picked: Floats) -> float:
        """What layouts, picked with these probabilities, take longer than the fastest, relative to it."""
        return float(picked @ self.measured_ms / self.measured_ms.min()) - 1.0

    @property
    def pick(self) -> Floats:
        """The one predicted fastest."""
        return _evenly(self.predicted_ms == self.predicted_ms.min())

    @property
    def least_tensor(self) -> Floats:
        """Any of those with the least tensor parallelism."""
        ways = np.array([row.config.parallel.tensor for row in self.rows])
        return _evenly(ways == ways.min())

    @property
    def fastest(self) -> npt.NDArray[np.bool_]:
        """Whether a layout is the fastest measured."""
        return np.asarray(self.measured_ms == self.measured_ms.min())


def _evenly(among: npt.NDArray[np.bool_]) -> Floats:
    result: Floats = among / among.sum()
    return result


def jobs_of(rows: Sequence[LayoutRow], predicted_ms: Floats, draws_ms: Floats) -> list[Job]:
    """Jobs of three layouts or more; `draws_ms` (row, draw) say how likely each is the fastest, as `steptime plan` does."""
    places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        places[row.job].append(place)
    return [
        Job(
            [rows[place] for place in there],
            predicted_ms[there],
            np.array(chances(predicted_ms[there].tolist(), list(draws_ms[there]))),
        )
        for there in places.values()
        if len(there) >= LEAST_LAYOUTS
    ]


def chosen(jobs: Sequence[Job]) -> dict[str, float]:
    """How well layouts are chosen, over jobs that count alike."""
    regrets = [job.regret(job.pick) for job in jobs]
    given, was = (np.concatenate(each) for each in zip(*((job.chances, job.fastest) for job in jobs), strict=True))
    likely = given >= _LIKELY
    facts = {
        "jobs": float(len(jobs)),
        "mean_regret": float(np.mean(regrets)),
        "max_regret": float(np.max(regrets)),
        "best_found": float(np.mean([bool(job.pick @ job.fastest) for job in jobs])),
        "random_pick_regret": float(np.mean([job.regret(_evenly(np.ones(len(job.rows), bool))) for job in jobs])),
        "least_tensor_regret": float(np.mean([job.regret(job.least_tensor) for job in jobs])),
        "brier": float(np.mean([np.sum((job.chances - job.fastest) ** 2) for job in jobs])),
        "brier_of_even_chances": float(np.mean([1.0 - 1.0 / len(job.rows) for job in jobs])),
        "called_likely": float(likely.sum()),
    }
    if likely.any():
        facts |= {"likely_were_given": float(given[likely].mean()), "likely_were_fastest": float(was[likely].mean())}
    return facts
