"""A prediction as one page: a single file that needs no network, in which the timeline of all ranks can be looked at.

The content policy in the page's head allows the one script and the one style sheet that are in it, by their digests, and
nothing from outside: a name that got past the escaping could still do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources

from steptime import __version__
from steptime._report.html import sections
from steptime._report.html.iterations import iterations_section
from steptime._report.html.labels import Document
from steptime._report.html.lanes import lanes_table
from steptime._report.html.markup import Markup, escape, tag
from steptime._report.html.memory import memory_section
from steptime._report.html.ranks import drawn
from steptime._report.html.timeline import timeline_document
from steptime._sim.explain.critical_path import critical_path
from steptime._sim.prediction import PredictedStep

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
    document = timeline_document(prediction.timeline, chosen.ranks, path)
    style, script = _part("style.css"), "\n".join(_part(name) for name in SCRIPTS)
    parts = {
        "title": escape(f"{workload.name or 'workload'} · steptime"),
        "policy": Markup(f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}"),
        "style": Markup(style),
        "name": escape(workload.name or "workload"),
        "summary": sections.summary(prediction, facts or {}),
        "iterations": iterations_section(prediction.iterations),
        "families": sections.families(prediction.breakdown),
        "ranks": sections.ranks(prediction.ranks),
        "note": tag("p", chosen.note, class_="note") if chosen.note else Markup(),
        "lanes": lanes_table(prediction.timeline, chosen.ranks),
        "critical_path": sections.critical_path(prediction.critical_path),
        "memory": memory_section(prediction.memory),
        "coverage": sections.coverage(prediction.coverage),
        "version": escape(__version__),
        "data": Markup(_embedded(document)),
        "script": Markup(script),
    }
    return _PLACE.sub(lambda place: parts[place[1]], _part("page.html"))


def _part(name: str) -> str:
    return resources.files("steptime._report").joinpath("page", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """How a content policy names an element's text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(document: Document) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(_IN_SCRIPT)
