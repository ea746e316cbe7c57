"""Predictions to make pages of, small ones with names that try to be more than text; and reading pages back."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
from tests.sim.worlds import Draft, constant_timing

from steptime._notices import Notices
from steptime._program.program import CallKind, Ops, Program, Thread
from steptime._program.workload import Workload
from steptime._sim import Cohort, Timeline
from steptime._sim.core.simulate import simulate
from steptime._sim.explain.activity import Window
from steptime._sim.prediction import PredictedStep, explain

HOSTILE = (
    "</script><script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title = 'owned'\">",
    "\"'><svg onload=alert(1)>",
    "{{script}} &lt;b&gt; <!--",
    "a\u2028b\u202ec\x00d\ud800e 你好 ünïcode",
)

Row = dict[str, Any]


def workload_of(timeline: Timeline) -> Workload:
    """The workload of a timeline's programs."""
    programs = {each.cohort.program.rank: each.cohort.program for each in timeline.cohorts}
    ranks = 1 + max(rank for each in timeline.cohorts for rank in each.cohort.ranks)
    return Workload(tuple(programs[rank] for rank in sorted(programs)), ranks)


def predicted(timeline: Timeline, **changes: Any) -> PredictedStep:
    """The explanation of a simulated window of one step."""
    step_ns = max(float(timeline.end_ns[0]), 1.0)
    found = explain(
        workload_of(timeline), timeline, Window(1), step_ns=step_ns, interval_ms=(step_ns * 0.9e-6, step_ns * 1.2e-6)
    )
    return replace(found, **changes)


def program(rank: int = 0, world_size: int = 1, *, works: int = 6, names: tuple[str, ...] = HOSTILE) -> Program:
    """A step of a few kernels on two streams; every name is one of those given, and so is every op's."""
    draft = Draft(threads=1, streams=2)
    draft.call(CallKind.STEP_BEGIN)
    for number in range(works):
        draft.launch(stream=number % 2, op=number, api=number % len(names))
        draft.works[-1]["name"] = number % len(names)
    draft.call(CallKind.STEP_END)
    made = draft.program(rank=rank, world_size=world_size)
    never = [-1] * works
    columns = dict.fromkeys(Ops.TYPES, never) | {"name": [i % len(names) for i in range(works)], "thread": [0] * works}
    ops = Ops.from_columns({**columns, "phase": [0] * works, "step": [0] * works})
    return replace(made, names=names, ops=ops, steps=(0,), device_name=names[0], threads=(Thread(1, names[-1]),))


def cohort(made: Program, ranks: tuple[int, ...]) -> Cohort:
    """Ranks that run a program, every kernel of which takes 40 microseconds."""
    return Cohort(made, ranks, constant_timing(made, duration_ns=40_000, gap_ns=9_000, call_ns=5_000, latency_ns=3_000))


def apart(made: Program, ranks: tuple[int, ...]) -> Cohort:
    """The same, every rank a little later than the one before."""
    later = cohort(made, ranks)
    gap_ns = later.timing.gap_ns + np.array(ranks, dtype=np.int64)[None, :, None]
    return replace(later, timing=replace(later.timing, gap_ns=gap_ns))


def hostile() -> tuple[PredictedStep, Workload]:
    """A prediction in which everything that has a name has a hostile one."""
    made = program()
    prediction = predicted(simulate([cohort(made, (0,))]), notices=Notices(warnings=HOSTILE))
    return prediction, Workload((made,), 1, name=HOSTILE[1])


@dataclass
class Page(HTMLParser):
    """What a browser would see of a page: elements with their attributes, and the text in each kind of them."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    @classmethod
    def of(cls, text: str) -> Page:
        """Read a page."""
        page = cls()
        page.feed(text)
        page.close()
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """An element ends, and whatever was left open in it."""
        if tag in self.open:
            del self.open[len(self.open) - 1 - self.open[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        """Text of the element that is open."""
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    @property
    def body(self) -> str:
        """All text that is shown."""
        hidden = ("script", "style")
        return " ".join(" ".join(" ".join(text) for tag, text in self.texts.items() if tag not in hidden).split())

    @property
    def data(self) -> dict[str, Any]:
        """The timeline's data."""
        found: dict[str, Any] = json.loads(self.texts["script"][0])
        return found


def unpacked(text: str) -> list[int]:
    """A column as `page/data.js` reads it."""
    values, value, weight = [], 0, 1
    for byte in base64.b64decode(text):
        value += (byte & 127) * weight
        weight *= 128
        if byte < 128:
            values.append(-(value + 1) // 2 if value % 2 else value // 2)
            value, weight = 0, 1
    return values


def lanes(data: dict[str, Any], rank: Row) -> list[list[Row]]:
    """Per lane of a rank its rows: begin, middle and end, name and op."""
    shown = []
    program = data["programs"][rank["program"]]
    for times, shared in zip(rank["lanes"], program["lanes"], strict=True):
        before, rows = 0, []
        columns = (unpacked(times[name]) for name in ("lead", "first", "rest"))
        for lead, first, rest, label in zip(*columns, unpacked(shared["labels"]), strict=True):
            begin, said = before + lead, program["labels"][label]
            before = begin + first + rest
            text = data["strings"]
            rows.append({"begin": begin, "middle": begin + first, "end": before, "name": text[said[0]], "op": text[said[2]]})
        shown.append(rows)
    return shown
