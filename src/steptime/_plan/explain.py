"""`explain`: why the fastest layout wins: where its time goes, what the second does otherwise, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from steptime._plan.chances import beats
from steptime._plan.evaluate import Played
from steptime._plan.parts import BUBBLE, IDLE, PARTS, WIRES
from steptime._plan.search import FoundLayouts
from steptime._sim.explain.bound import regime

# Shares of a step that are worth a word.
_WORTH_SAYING = 0.005


@dataclass(frozen=True)
class Comparison:
    """The fastest layout beside the second."""

    second: Played
    longer_ns: float  # that the second's step is
    parts_ns: Mapping[str, float]  # what of it is in which part; negative where the second is quicker
    p_faster: float  # that the first is, measured


def compared(found: FoundLayouts) -> Comparison | None:
    """None where one layout fits."""
    if len(found.played) == 1:
        return None
    first, second = found.played[:2]
    parts = {name: second.parts_ns.get(name, 0.0) - first.parts_ns.get(name, 0.0) for name in PARTS}
    return Comparison(
        second,
        second.step_ns - first.step_ns,
        {name: value for name, value in parts.items() if value},
        beats((first.step_ns, second.step_ns), (first.draws_ns, second.draws_ns), found.own_error),
    )


def bound_by(played: Played) -> str:
    """What bounds a layout's step, in the regimes of `predict`, and where the time of its busiest stage goes."""
    shares = {name: value / played.step_ns for name, value in played.parts_ns.items()}
    wires, bubble, idle = sum(shares.get(name, 0.0) for name in WIRES), shares.get(BUBBLE, 0.0), shares.get(IDLE, 0.0)
    parts = {"computing": 1.0 - wires - bubble - idle, "exposed communication": wires, BUBBLE: bubble, IDLE: idle}
    said = ", ".join(f"{name} {100 * share:.0f} %" for name, share in parts.items() if share >= _WORTH_SAYING)
    return f"{regime(wires + bubble, 1.0 - idle)}: {said} of the step"
