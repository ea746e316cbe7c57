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
from steptime._report.layout import body_width, grid, literal, print_body, print_line, print_notices, print_section, width_of
from steptime._report.text import print_header, print_prediction, print_verdict
from steptime._report.verdict import Verdict, verdict_of
from steptime._report.words import percent, span_words, time_ms
from steptime._sim.prediction import PredictedStep

if TYPE_CHECKING:
    import pyarrow as pa

    from steptime._whatif.savings import Saving, WhatIf

# Of a critical path, what is worth naming.
_WORTH_SAYING = 0.05
_NAME_AT_LEAST = 18


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
            facts[f"What if {saving.changes[0]}"] = f"{_signed(saving.saves_ms)} ms saved alone ({percent(saving.share)})"
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
    savings: tuple[Saving, ...]
    tried: int
    notes: Mapping[str, str] = field(default_factory=dict)  # change -> what it means

    @property
    def verdict(self) -> Verdict:
        """Of the step as it is."""
        return verdict_of(self.prediction)

    def __repr__(self) -> str:
        name = self.prediction.workload.name or "workload"
        best = self.savings[0] if self.savings else None
        said = "nothing helps" if best is None else f"most by {best.changes[0]!r}: {time_ms(best.saves_ms)} ms"
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
            "changes": [
                {**saving_document(saving), "meaning": self.notes.get(saving.changes[0], "")} for saving in self.savings
            ],
            "tried": self.tried,
            **step.notices.to_dict(),
        })  # fmt: skip

    def to_table(self) -> pa.Table:
        """A row for every change."""
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
        print_line(console, "What if", f"none of {answer.tried} changes would make the step shorter")
    else:
        note = f"the changes that save most of the step, each simulated alone; {answer.tried} tried"
        print_section(console, "What if", note)
        _print_savings(console, answer.savings, {})
        _print_meanings(console, {each.changes[0]: answer.notes.get(each.changes[0], "") for each in answer.savings})
    print_notices(console, step.notices)


def _print_meanings(console: Console, meanings: Mapping[str, str]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, max_width=body_width(console) // 2)
    table.add_column(overflow="fold", style="dim")
    for change, meaning in meanings.items():
        table.add_row(literal(change), literal(meaning))
    print_section(console, "Meaning", "", table)


def _print_savings(console: Console, savings: Sequence[Saving], names: Mapping[str, str]) -> None:
    heads = tuple(Text(head, "dim") for head in ("saves, ms", "of it", "90 % interval"))
    rows: list[tuple[Text, ...]] = []
    for saving in savings:
        low, high = saving.interval_ms
        span = Text(f"{_signed(low)} to {_signed(high)}", "dim")
        rows.append((Text(_signed(saving.saves_ms), "bold"), Text(percent(saving.share)), span))
    room = body_width(console) - width_of([heads, *rows])
    said = [literal(names.get("; ".join(saving.changes), "; ".join(saving.changes))) for saving in savings]
    widest = min(max(text.cell_len for text in said), max(room * 2 // 3, _NAME_AT_LEAST))
    table = grid("left", "right", "right", "right", "left")
    table.add_row(Text(), *heads, Text("critical path then", "dim"))
    for text, numbers, saving in zip(said, rows, savings, strict=True):
        path = ", ".join(f"{kind} {percent(share)}" for kind, share in saving.path.items() if share >= _WORTH_SAYING)
        leads = Text(path, "dim")
        text.truncate(widest, overflow="ellipsis")
        leads.truncate(max(room - widest - 2, _NAME_AT_LEAST), overflow="ellipsis")
        table.add_row(text, *numbers, leads)
    print_body(console, table)


def _signed(value_ms: float) -> str:
    return time_ms(value_ms) if value_ms >= 0 else f"-{time_ms(-value_ms)}"
