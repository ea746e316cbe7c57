"""Whose error a predicted step's is: by group and for the worst cases, as text and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from steptime._report.json import Document
from steptime._report.layout import print_line, print_numbers, print_section
from steptime_lab.validate.steps.explain import Split, grouped, mean_splits
from steptime_lab.validate.steps.predict import CaseOutcome

_WORST = 20  # cases that are named
_PARTS = ("error", "device", "host", "communication", "synchronisation", "measured_parts")
_BLUNT = (
    "a profiler slows the host, and with it what collectives need of the host: in steps of few milliseconds, host, "
    "communication and synchronisation are told apart only roughly"
)
_HEADS = ("error", "device", "host", "commu-\nnication", "synchro-\nnisation", "parts as\nmeasured")


def split_document(outcomes: Sequence[CaseOutcome]) -> Document:
    """What `validate steps --explain --json` adds."""
    return {
        "cases": [
            {"name": outcome.name, "process": visit.visit.process, "regime": outcome.regime, **asdict(visit.split)}
            for outcome in outcomes
            for visit in outcome.visits
            if visit.split is not None
        ],
        "groups": mean_splits(split_groups(outcomes)),
    }


def split_groups(outcomes: Sequence[CaseOutcome]) -> dict[str, list[Split]]:
    """The splits of all cases, by workload and ranks, and by regime."""
    pairs = [(outcome, visit.split) for outcome in outcomes for visit in outcome.visits if visit.split is not None]
    return {
        **grouped((f"{outcome.workload} {outcome.ranks} rank{'s' * (outcome.ranks > 1)}", item) for outcome, item in pairs),
        **grouped((outcome.regime, item) for outcome, item in pairs),
    }


def print_splits(console: Console, outcomes: Sequence[CaseOutcome]) -> None:
    """The tables of `validate steps --explain`: percent of the measured step."""
    means = mean_splits(split_groups(outcomes))
    print_section(console, "Whose error", "mean of absolute values, % of the step; each part in turn as profiled")
    rows = [
        [name, f"{entry['rows']:.0f}", *(f"{100 * entry[f'absolute_{part}']:.1f}" for part in _PARTS)]
        for name, entry in means.items()
    ]
    print_numbers(console, ("", "rows", *_HEADS), rows)
    print_section(console, "Bias", "mean with its sign, % of the step")
    rows = [[name, f"{entry['rows']:.0f}", *(f"{100 * entry[part]:+.1f}" for part in _PARTS)] for name, entry in means.items()]
    print_numbers(console, ("", "rows", *_HEADS), rows)
    print_line(console, "Note", _BLUNT, style="dim")
    told = [(outcome, visit.split) for outcome in outcomes for visit in outcome.visits if visit.split is not None]
    told.sort(key=lambda pair: -abs(pair[1].error))
    print_section(console, "Worst", f"the {min(_WORST, len(told))} largest errors, % of the step")
    worst = [[entry.name, *(f"{100 * getattr(item, part):+.1f}" for part in _PARTS)] for entry, item in told[:_WORST]]
    print_numbers(console, ("", *_HEADS), worst)
