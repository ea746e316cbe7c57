"""What changes save of a step, as Python, JSON and text have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from steptime._files import write_output
from steptime._report.answers import Prediction, plain, table_of
from steptime._report.html.page import page
from steptime._report.json import SCHEMA_VERSION, Document, prediction_document
from steptime._report.layout import (
    Paragraph,
    body_width,
    grid,
    literal,
    print_body,
    print_line,
    print_notices,
    print_numbers,
    print_section,
    width_of,
)
from steptime._report.text import print_header, print_prediction, print_verdict
from steptime._report.verdict import Verdict, verdict_of
from steptime._report.words import percent, span_words, time_ms
from steptime._sim.prediction import PredictedStep

if TYPE_CHECKING:
    import pyarrow as pa

    from steptime._whatif.savings import Saving, WhatIf
    from steptime._whatif.suggestions import Suggested

# Of a critical path, what is worth naming.
_WORTH_SAYING = 0.05
# Columns for the name of a change, and for the path that it leaves, side by side.
_WORDS_AT_LEAST = 18


@dataclass(frozen=True, repr=False)
class ChangedPrediction(Prediction):
    """A predicted step with changes, and what each of them saves."""

    what_if: WhatIf | None = field(default=None, compare=False)

    @classmethod
    def after(cls, found: WhatIf) -> ChangedPrediction:
        """The step with all changes."""
        step = found.after
        return cls(**{each.name: getattr(step, each.name) for each in fields(step)}, what_if=found)

    def to_dict(self) -> Document:
        """The keys of `steptime predict --json` for the changed step, the step before, and what every change saves."""
        assert self.what_if is not None
        return plain({**prediction_document(self), **changes_document(self.what_if)})

    def html(self, path: str | Path) -> None:
        """Writes the page of the changed step, which says what every change saves."""
        assert self.what_if is not None
        facts = {"Without the changes": f"{time_ms(self.what_if.before.step_time_ms)} ms"}
        for saving in self.what_if.each:
            facts[f"What if {saving.changes[0]}"] = f"{saving_words(saving)} alone"
        write_output(Path(path), page(self, facts=facts))


def changes_document(found: WhatIf) -> Document:
    """Keys beside those of a prediction."""
    before = found.before
    return {
        "before": {
            "step_time_ms": before.step_time_ms, "interval_ms": list(before.interval_ms), "bound_by": before.bound_by,
            "critical_path": _path(before),
        },
        "changes": [saving_document(saving) for saving in found.each],
        "together": saving_document(found.together),
    }  # fmt: skip


def saving_document(saving: Saving) -> Document:
    """One change, or several together."""
    return {
        "change": "; ".join(saving.changes),
        "saves_ms": saving.saves_ms,
        "interval_ms": list(saving.interval_ms),
        "share": saving.share,
        "speedup": saving.speedup,
        "step_time_ms": saving.after_ms,
        "bound_by": saving.bound_by,
        "critical_path": dict(saving.path),
    }


def _path(step: PredictedStep) -> dict[str, float]:
    return {kind.kind: kind.share for kind in step.critical_path.kinds}


@dataclass(frozen=True, repr=False)
class Suggestions:
    """The changes that would save most of a step, best first."""

    prediction: PredictedStep
    found: Suggested

    @property
    def savings(self) -> tuple[Saving, ...]:
        """Of changes that one can make."""
        return self.found.savings

    @property
    def headroom(self) -> tuple[Saving, ...]:
        """What could be saved at most, where nothing can be switched on."""
        return self.found.headroom

    @property
    def verdict(self) -> Verdict:
        """Of the step as it is."""
        return verdict_of(self.prediction)

    def __repr__(self) -> str:
        name = self.prediction.workload.name or "workload"
        best = self.savings[0] if self.savings else None
        said = "nothing helps" if best is None else f"most by {best.changes[0]!r}: {saving_words(best)}"
        return f"<Suggestions {name}: {time_ms(self.prediction.step_time_ms)} ms per step, {said}>"

    def to_dict(self) -> Document:
        """What `steptime whatif --json` writes."""
        step = self.prediction
        return plain({
            "schema_version": SCHEMA_VERSION,
            "workload": step.workload.name or None,
            "platform": step.platform,
            "verdict": self.verdict.to_dict(),
            "step_time_ms": step.step_time_ms,
            "interval_ms": list(step.interval_ms),
            "bound_by": step.bound_by,
            "critical_path": _path(step),
            "changes": [self._document(saving) for saving in self.savings],
            "headroom": [self._document(saving) for saving in self.headroom],
            "tried": self.found.tried,
            **step.notices.to_dict(),
        })  # fmt: skip

    def _document(self, saving: Saving) -> Document:
        return {**saving_document(saving), "meaning": self.found.meanings[saving.changes[0]]}

    def to_table(self) -> pa.Table:
        """A row for every change that one can make."""
        rows = [{key: value for key, value in each.items() if key != "critical_path"} for each in self.to_dict()["changes"]]
        return table_of(rows)


# --- text ------------------------------------------------------------------------------------------------------------------


def print_changed(console: Console, answer: ChangedPrediction) -> None:
    """The report of `steptime predict --what-if`: the changed step, and what every change saves."""
    found = answer.what_if
    assert found is not None
    before = found.before

    def changes() -> None:
        note = f"of {time_ms(before.step_time_ms)} ms per step without; this report is of the step with"
        print_section(console, "What if", f"{note} {'all changes' if len(found.each) > 1 else 'the change'}")
        several = [found.together] if len(found.each) > 1 else []
        names = {"; ".join(found.together.changes): "all of these together"} if several else {}
        _print_savings(console, [*found.each, *several], names)
        print_line(console, "Before", before.bound_by)

    print_prediction(console, answer, changes)


def print_suggestions(console: Console, answer: Suggestions) -> None:
    """The report of `steptime whatif`."""
    step = answer.prediction
    print_header(console, "whatif", step.workload)
    print_verdict(console, "Step time", step.step_time_ms, answer.verdict, span_words(step))
    if not answer.savings:
        print_line(console, "What if", f"none of {answer.found.tried} changes would make the step shorter")
    notes = {
        "What if": f"what you can switch on or change, each simulated alone; {answer.found.tried} tried",
        "Headroom": "what could be saved at most: bounds, nothing to switch on",
    }
    for (title, note), savings in zip(notes.items(), (answer.savings, answer.headroom), strict=True):
        if savings:
            print_section(console, title, note)
            _print_savings(console, savings, {})
    shown = [each.changes[0] for each in (*answer.savings, *answer.headroom)]
    if shown:
        _print_meanings(console, {change: answer.found.meanings[change] for change in shown})
    print_notices(console, step.notices)


def _print_meanings(console: Console, meanings: Mapping[str, str]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold", max_width=body_width(console) // 2)
    table.add_column(overflow="fold", style="dim")
    for change, meaning in meanings.items():
        table.add_row(literal(change), literal(meaning))
    print_section(console, "Meaning", "", table)


def _print_savings(console: Console, savings: Sequence[Saving], names: Mapping[str, str]) -> None:
    heads = ("", "step, ms", "change", "90 % interval", "samples/s", "critical path then")
    rows: list[tuple[Text, ...]] = []
    for saving in savings:
        low, high = saving.interval_ms
        changes = "; ".join(saving.changes)
        path = ", ".join(f"{kind} {percent(share)}" for kind, share in saving.path.items() if share >= _WORTH_SAYING)
        span = Text(f"{_signed(-high)} to {_signed(-low)}", "dim")
        numbers = (Text(_signed(-saving.saves_ms), "bold"), Text(_percent(-saving.share)), span)
        rows.append((literal(names.get(changes, changes)), *numbers, Text(_percent(saving.speedup - 1)), Text(path, "dim")))
    titles = tuple(Text(head, "dim") for head in heads)
    if body_width(console) - width_of([row[1:-1] for row in (titles, *rows)]) < 2 * _WORDS_AT_LEAST:
        print_numbers(console, heads, rows)
        return
    table = grid("left", "right", "right", "right", "right", "left")
    for words in (table.columns[0], table.columns[-1]):
        words.no_wrap, words.overflow = False, "fold"
    for *cells, path_then in (titles, *rows):
        table.add_row(*cells, Paragraph(path_then))
    print_body(console, table)


def saving_words(saving: Saving) -> str:
    """What becomes of the step and of samples per second."""
    share, faster = _percent(-saving.share), _percent(saving.speedup - 1)
    return f"step {_signed(-saving.saves_ms)} ms ({share}), samples/s {faster}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _signed(value_ms: float) -> str:
    return f"{'-' if value_ms < 0 else '+'}{time_ms(abs(value_ms))}"
