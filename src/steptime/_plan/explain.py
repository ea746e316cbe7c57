"""`compared`: why the fastest layout wins: what the second does otherwise, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from steptime._plan.chances import beats
from steptime._plan.evaluate import Played
from steptime._plan.parts import PARTS
from steptime._plan.search import FoundLayouts


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
