"""A prediction as the page gets it: the keys of `predict --json`, sections as `--html` has them, and the timeline to draw."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steptime._explore.controls import WrongValueError
from steptime._explore.files import config_text
from steptime._explore.subject import Subject, Values
from steptime._report.answers import Prediction
from steptime._report.compare_text import compare_page, compare_sections
from steptime._report.html import sections
from steptime._report.html.markup import join
from steptime._report.html.page import drawn
from steptime._report.html.summary import summary
from steptime._report.html.timeline import timeline_document
from steptime._report.json import dumps
from steptime._sim.explain.critical_path import critical_path
from steptime.errors import SteptimeError

PREDICT, SUGGEST, HELPS = "predict", "suggest", "helps"
COMPARE, COMPARISON = "compare", "comparison"
"""Variants side by side: as the page shows them, and as a page of their own."""

EXPORTS = {"json": "application/json", "html": "text/html", "toml": "application/toml", COMPARISON: "text/html"}
# What is drawn beside controls: as many lanes as a screen has, and events that are sent and drawn within a few milliseconds.
_RANKS_DRAWN, _EVENTS_DRAWN = 8, 40_000
_SUGGESTED = 8


def answered(subject: Subject, form: str, values: Values) -> bytes:
    """What is asked about a variant, as bytes: everything the page shows (`PREDICT`), or a file. Mistakes are an answer too."""
    try:
        return _answered(subject, form, values)
    except SteptimeError as error:
        wrong = {"error": str(error), "control": error.control if isinstance(error, WrongValueError) else None}
    except MemoryError:
        wrong = {"error": "out of memory: choose fewer ranks or a smaller model", "control": None}
    except Exception as error:  # a page that is answered nothing would show the variant before for ever
        wrong = {"error": f"steptime cannot predict this, which is a mistake of its own: {error!r}"[:400], "control": None}
    return _encoded(wrong)


def _answered(subject: Subject, form: str, values: Values) -> bytes:
    began, cpu = time.perf_counter(), time.process_time()
    if form == "toml":
        return config_text(subject, values).encode()
    if form in (COMPARE, COMPARISON):
        comparison = subject.compared(values["variants"])
        if form == COMPARISON:
            return compare_page(comparison).encode()
        return _encoded({"names": comparison.names, "sections": join(compare_sections(comparison))})
    if form == SUGGEST:
        changes = subject.suggested(values).to_dict()["changes"][:_SUGGESTED]
        return _encoded(
            {"changes": [{key: each[key] for key in ("change", "saves_ms", "speedup", "meaning")} for each in changes]}
        )
    if form == HELPS:
        prediction = subject.predicted(values)
        remedies = [subject.remedied(values, each) for each in prediction.helps]
        return _encoded({"summary": summary(prediction), "remedies": remedies})
    prediction = subject.predicted(values, helps=form != PREDICT)
    if form == "json":
        return dumps(prediction.to_dict()).encode()
    if form == "html":
        with tempfile.TemporaryDirectory(prefix="steptime-") as folder:
            file = Path(folder) / "page.html"
            prediction.html(file)
            return file.read_bytes()
    document = _document(subject, prediction, values)
    took = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    return _encoded({**document, "took": {name: round(value, 4) for name, value in took.items()}})


def _document(subject: Subject, prediction: Prediction, values: Values) -> Mapping[str, Any]:
    chosen = drawn(prediction, ranks_at_most=_RANKS_DRAWN, events_at_most=_EVENTS_DRAWN)
    path = critical_path(prediction.timeline)
    return {
        "answer": prediction.to_dict(),
        "sections": {
            "summary": summary(prediction),
            "families": sections.families(prediction.breakdown),
            "ranks": sections.ranks(prediction),
            "path": sections.critical_path(prediction.critical_path),
            "memory": sections.memory_section(prediction),
            "coverage": sections.coverage(prediction.coverage),
        },
        "timeline": timeline_document(prediction.timeline, chosen.ranks, path, chosen.alike),
        "note": chosen.note,
        "command": subject.command(values),
        "derived": subject.derived(prediction),
    }


def _encoded(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
