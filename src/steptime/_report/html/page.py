"""A prediction as one page: a single file that needs no network, in which the timeline of all ranks can be looked at.

The content policy in the page's head allows the one script and the one style sheet that are in it, by their digests, and
nothing from outside: a name that got past the escaping could still do nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from steptime import __version__
from steptime._report.alike import ranges, same_times, stood_for
from steptime._report.html import sections
from steptime._report.html.markup import Markup, digest, escape, page_part, tag
from steptime._report.html.sections import iterations_section, memory_section
from steptime._report.html.summary import summary
from steptime._report.html.timeline import Document, lanes_table, timeline_document
from steptime._sim.explain.activity import RankSummary
from steptime._sim.explain.critical_path import critical_path
from steptime._sim.prediction import PredictedStep

# More lanes than these ranks have, nobody scrolls through.
RANKS_AT_MOST = 64
# Calls and works in one page: at about eleven bytes each a file of 6 MB, and frames that a browser draws in time.
EVENTS_AT_MOST = 500_000


@dataclass(frozen=True)
class Drawn:
    """The ranks that are drawn, in order, and why each where not all are."""

    ranks: tuple[int, ...]
    reasons: dict[int, str]  # rank -> why it is among them; empty: all are drawn
    of: int  # ranks that could have been
    alike: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # rank -> those that it stands for, itself too

    @property
    def titles(self) -> dict[int, str]:
        """Per drawn rank, which ranks its lanes are those of."""
        return {rank: ranges(self.alike.get(rank, (rank,))) for rank in self.ranks}

    @property
    def note(self) -> str:
        """What is left out and what stands for it; nothing where all are drawn."""
        if not self.reasons:
            several = any(len(self.alike.get(rank, ())) > 1 for rank in self.ranks)
            return "Ranks that do the same at the same times are drawn once." if several else ""
        alike: dict[str, list[int]] = {}
        for rank, reason in self.reasons.items():
            alike.setdefault(reason, []).append(rank)
        text = "; ".join(f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}: {reason}" for reason, ranks in alike.items())
        return f"{len(self.ranks)} of {self.of} ranks are drawn. {text}. All ranks are in the numbers above."


def drawn(prediction: PredictedStep, *, ranks_at_most: int = RANKS_AT_MOST, events_at_most: int = EVENTS_AT_MOST) -> Drawn:
    """All ranks of a prediction where they fit; else as many of the representative ones as do, the most telling first."""
    alike = same_times(prediction.timeline)
    first = {rank: one for one, ranks in alike.items() for rank in ranks}
    events = {
        rank: len(cohort.cohort.program.calls) + len(cohort.cohort.program.works)
        for cohort in prediction.timeline.cohorts
        for rank in cohort.cohort.ranks
        if rank in alike
    }
    standing = stood_for(prediction)
    alike = {one: tuple(each for rank in ranks for each in standing.get(rank, (rank,))) for one, ranks in alike.items()}
    if len(events) <= ranks_at_most and sum(events.values()) <= events_at_most:
        return Drawn(tuple(sorted(events)), {}, len(events), alike)
    chosen: dict[int, str] = {}
    room = events_at_most
    for named, reason in _representatives(prediction):
        rank = first.get(named, named)
        if rank in chosen:
            chosen[rank] += f", {reason}"
        elif rank in events and len(chosen) < ranks_at_most and (events[rank] <= room or not chosen):
            chosen[rank] = reason
            room -= events[rank]
    return Drawn(tuple(sorted(chosen)), chosen, sum(map(len, alike.values())), alike)


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


# One script, in this order: reading the data, the state of the view, drawing it, what a person does with it.
SCRIPTS = ("data.js", "view.js", "colours.js", "draw.js", "search.js", "details.js", "main.js", "pointer.js", "keys.js")

_PLACE = re.compile(r"\{\{(\w+)\}\}")
# Inside a script element only these could end it or begin something else; JSON may write any character by its number.
_IN_SCRIPT = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


def page(prediction: PredictedStep, *, facts: Mapping[str, str] | None = None) -> str:
    """The page of a prediction, as text, the same for the same prediction; `facts` are said beside its own."""
    workload = prediction.workload
    chosen = drawn(prediction)
    path = critical_path(prediction.timeline)
    document = timeline_document(prediction.timeline, chosen.ranks, path, chosen.alike)
    style, script = page_part("style.css"), "\n".join(page_part(name) for name in SCRIPTS)
    parts = {
        "title": escape(f"{workload.name or 'workload'} · steptime"),
        "policy": Markup(f"default-src 'none'; img-src data:; style-src {digest(style)}; script-src {digest(script)}"),
        "style": Markup(style),
        "name": escape(workload.name or "workload"),
        "summary": summary(prediction, facts),
        "iterations": iterations_section(prediction.iterations),
        "families": sections.families(prediction.breakdown),
        "ranks": sections.ranks(prediction),
        "note": tag("p", chosen.note, class_="note") if chosen.note else Markup(),
        "lanes": lanes_table(prediction.timeline, chosen.ranks, chosen.titles),
        "critical_path": sections.critical_path(prediction.critical_path),
        "memory": memory_section(prediction),
        "coverage": sections.coverage(prediction.coverage),
        "version": escape(__version__),
        "data": Markup(_embedded(document)),
        "script": Markup(script),
    }
    return _PLACE.sub(lambda place: parts[place[1]], page_part("page.html"))


def _embedded(document: Document) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(_IN_SCRIPT)
