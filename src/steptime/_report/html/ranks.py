"""Which ranks a page draws: all while they are few, else those that stand for the others."""

from __future__ import annotations

from dataclasses import dataclass

from steptime._sim.explain.activity import RankSummary
from steptime._sim.prediction import PredictedStep

# More lanes than these ranks have, nobody scrolls through.
RANKS_AT_MOST = 64
# Calls and works in one page: at about eleven bytes each a file of 6 MB, and frames that a browser draws in time.
EVENTS_AT_MOST = 500_000
_NAMED = 8  # ranks that are listed


@dataclass(frozen=True)
class Drawn:
    """The ranks that are drawn, in order, and why each where not all are."""

    ranks: tuple[int, ...]
    reasons: dict[int, str]  # rank -> why it is among them; empty: all are drawn
    of: int  # ranks that could have been

    @property
    def note(self) -> str:
        """What is left out and what stands for it; nothing where all are drawn."""
        if not self.reasons:
            return ""
        alike: dict[str, list[int]] = {}
        for rank, reason in self.reasons.items():
            alike.setdefault(reason, []).append(rank)
        text = "; ".join(f"{_ranks(ranks)}: {reason}" for reason, ranks in alike.items())
        return f"{len(self.ranks)} of {self.of} ranks are drawn. {text}. All ranks are in the numbers above."


def _ranks(ranks: list[int]) -> str:
    """Ranks by number, those that nobody reads one by one by their count."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return "ranks " + ", ".join(map(str, sorted(ranks)[:_NAMED])) + more


def drawn(prediction: PredictedStep, *, ranks_at_most: int = RANKS_AT_MOST, events_at_most: int = EVENTS_AT_MOST) -> Drawn:
    """All ranks of a prediction where they fit; else as many of the representative ones as do, the most telling first."""
    events = {
        rank: len(cohort.cohort.program.calls) + len(cohort.cohort.program.works)
        for cohort in prediction.timeline.cohorts
        for rank in cohort.cohort.ranks
    }
    if len(events) <= ranks_at_most and sum(events.values()) <= events_at_most:
        return Drawn(tuple(sorted(events)), {}, len(events))
    chosen: dict[int, str] = {}
    room = events_at_most
    for rank, reason in _representatives(prediction):
        if rank in chosen:
            chosen[rank] += f", {reason}"
        elif rank in events and len(chosen) < ranks_at_most and (events[rank] <= room or not chosen):
            chosen[rank] = reason
            room -= events[rank]
    return Drawn(tuple(sorted(chosen)), chosen, len(events))


def _representatives(prediction: PredictedStep) -> list[tuple[int, str]]:
    """Ranks and what each stands for, the most telling first; a rank may come twice."""

    def computing(rank: RankSummary) -> tuple[float, int]:
        return rank.compute_ms, -rank.rank

    results: list[tuple[int, str]] = []
    if prediction.straggler is not None:
        results.append((prediction.straggler.rank, "the straggler"))
    if prediction.critical_path.ranks:
        results.append((prediction.critical_path.ranks[0].rank, "most of the critical path"))
    if prediction.ranks:
        results.append((max(prediction.ranks, key=computing).rank, "computes longest"))
        results.append((min(prediction.ranks, key=lambda r: (r.compute_ms, r.rank)).rank, "computes shortest"))
    named = {rank for rank, _ in results}
    for cohort in prediction.timeline.cohorts:
        ranks = cohort.cohort.ranks
        if named.isdisjoint(ranks):
            alike = f"one of {len(ranks)} that run the same program" if len(ranks) > 1 else "a program of its own"
            results.append((ranks[0], alike))
    return results
