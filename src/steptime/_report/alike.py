"""Ranks that do the same are said once: which ranks one stands for, and how a list of them is written."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steptime._sim.core.timing import CohortTimeline, Timeline
from steptime._sim.explain.activity import RankSummary
from steptime._sim.prediction import PredictedStep

# Letters that ranges of ranks are written out in; of longer lists the first range is.
_WRITTEN_OUT = 16


@dataclass(frozen=True, slots=True)
class Alike:
    """Ranks that differ in nothing that is shown, by one of them."""

    summary: RankSummary
    ranks: tuple[int, ...]

    @property
    def label(self) -> str:
        """Their numbers."""
        return ranges(self.ranks)


def ranges(ranks: Sequence[int]) -> str:
    """Numbers of ranks, neighbours as a range: 0-3, 8; of many ranges the first, and how many ranks there are."""
    numbers = np.unique(np.asarray(ranks, dtype=np.int64))
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    text = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts if len(part)]
    whole = ", ".join(text)
    return whole if len(whole) <= _WRITTEN_OUT else f"{text[0]}, ... ({len(numbers):,})"


def stood_for(prediction: PredictedStep) -> Mapping[int, tuple[int, ...]]:
    """The ranks that each listed one stands for: of very many that run the same program, one is played and listed."""
    workload = prediction.workload
    listed = [summary.rank for summary in prediction.ranks]
    own: dict[int, tuple[int, ...]] = {rank: (rank,) for rank in listed}
    if len(listed) >= len(workload.running) or not workload.owners:
        return own
    known = set(listed)
    for program in workload.programs:
        runners = workload.run_by(program.rank)
        first = next((rank for rank in runners if rank in known), None)
        if first is not None:
            own[first] = tuple(rank for rank in runners if rank == first or rank not in known)
    return own


def folded(prediction: PredictedStep, shown: Callable[[RankSummary], Hashable]) -> list[Alike]:
    """The ranks of a prediction, those together of which the same is shown, in order of the first of each."""
    standing = stood_for(prediction)
    groups: dict[Hashable, list[RankSummary]] = {}
    for summary in prediction.ranks:
        groups.setdefault(shown(summary), []).append(summary)
    return [Alike(each[0], tuple(rank for one in each for rank in standing[one.rank])) for each in groups.values()]


def same_times(timeline: Timeline) -> dict[int, tuple[int, ...]]:
    """The first of ranks at which everything happens at the same times -> all of them."""
    result: dict[int, tuple[int, ...]] = {}
    for played in timeline.cohorts:
        groups: dict[bytes, list[int]] = {}
        for place, rank in enumerate(played.cohort.ranks):
            groups.setdefault(_times(played, place), []).append(rank)
        result |= {ranks[0]: tuple(ranks) for ranks in groups.values()}
    return result


def _times(played: CohortTimeline, place: int) -> bytes:
    """What happens when on one rank of a cohort; columns that all ranks share say nothing of one."""
    timing = played.cohort.timing
    columns = (
        played.call_start_ns, played.call_end_ns, played.work_start_ns, played.work_end_ns, played.moving_ns, timing.gap_ns,
        timing.call_ns,
    )  # fmt: skip
    return b"".join(np.ascontiguousarray(each[:, place, 0]).tobytes() for each in columns if each.shape[1] > 1)
