"""What makes one step longer than another, as Python, JSON, text and a page have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from steptime._files import write_output
from steptime._notices import Notices
from steptime._ops.families import WorkFamily
from steptime._report.answers import plain, table_of
from steptime._report.html.markup import Markup, bar, table, tag
from steptime._report.html.static import section, static_page
from steptime._report.html.summary import bound, facts_group, notice_list
from steptime._report.json import SCHEMA_VERSION, Document
from steptime._report.layout import (
    body_width,
    grid,
    literal,
    print_body,
    print_heading,
    print_line,
    print_notices,
    print_section,
)
from steptime._report.words import percent, time_ms
from steptime._sim.explain.bound import family_words
from steptime._sim.prediction import PredictedStep

if TYPE_CHECKING:
    import pyarrow as pa

    from steptime._diff.attribute import Difference, OpDifference

# Parts below this share of the longer step are one line.
_WORTH_SAYING = 0.002
_OPS_LISTED = 12
_NAME_AT_MOST = 60
SMALL_PARTS = "all others"
# Two runs of one model have at least this share of their device time in common, whatever was changed in between.
_SAME_MODEL = 0.5
_GENERATED = WorkFamily.GENERATED.label
_FAMILIES_LISTED = 4


def _notices(found: Difference) -> Notices:
    """What both say, once each; first that the two are hardly the same model."""
    both = (text for step in (found.before, found.after) for texts in step.notices for text in texts)
    return Notices.of((*unlike(found), *both)).without_headline


def unlike(found: Difference) -> Iterator[str]:
    """That the two have so little in common that parts say little about why."""
    eager, compiled = sorted((found.before, found.after), key=lambda step: step.breakdown.get(_GENERATED, 0.0))
    if compiled.breakdown.get(_GENERATED, 0.0) > 0 and not eager.breakdown.get(_GENERATED, 0.0):
        yield _fused(eager.breakdown, compiled.breakdown)
    elif found.matched < _SAME_MODEL:
        yield (
            f"only {percent(found.matched)} of the device time of both is found in the other: these may be different models, "
            "and most parts are just what one has and the other has not"
        )


def _fused(eager: Mapping[str, float], compiled: Mapping[str, float]) -> str:
    """What the kernels of the one that is compiled stand for."""
    less = {family: took_ms - compiled.get(family, 0.0) for family, took_ms in eager.items()}
    families = sorted((family for family, gone in less.items() if gone > 0), key=lambda family: -less[family])
    stand_for = ", ".join(family_words(family) for family in families[:_FAMILIES_LISTED])
    gone_ms = sum(gone for gone in less.values() if gone > 0)
    said = f"{time_ms(compiled[_GENERATED])} ms of kernels that torch.compile generated have no counterpart in the other step"
    return f"one of the two is compiled: {said}" + (f"; there, {time_ms(gone_ms)} ms more are {stand_for}" if families else "")


@dataclass(frozen=True, repr=False)
class Compared:
    """Two steps, and what makes the second longer or shorter than the first."""

    difference: Difference

    @property
    def total_ms(self) -> float:
        """What the second step takes more."""
        return self.difference.total_ms

    @property
    def parts(self) -> dict[str, float]:
        """What it is made of, in milliseconds; the parts add up to the total."""
        return dict(self.difference.parts)

    def __repr__(self) -> str:
        before, after = self.difference.before, self.difference.after
        steps = f"{time_ms(before.step_time_ms)} to {time_ms(after.step_time_ms)} ms per step"
        most = next(iter(self.difference.parts.items()), ("", 0.0))
        return f"<Compared {_called(before)} and {_called(after)}: {steps}, most of it {most[0]} {signed_ms(most[1])} ms>"

    def to_dict(self) -> Document:
        """What `steptime diff --json` writes."""
        found = self.difference
        return plain({
            "schema_version": SCHEMA_VERSION,
            "total_ms": found.total_ms,
            "parts": dict(found.parts),
            "before": _step(found.before),
            "after": _step(found.after),
            "matched": found.matched,
            "ops": [asdict(each) for each in found.ops],
            **_notices(found).to_dict(),
        })  # fmt: skip

    def to_table(self) -> pa.Table:
        """A row for every part."""
        return table_of([{"part": name, "ms": value} for name, value in self.to_dict()["parts"].items()])

    def html(self, path: str | Path) -> None:
        """Writes the page of `steptime diff --html`."""
        write_output(Path(path), diff_page(self.difference))


def _step(step: PredictedStep) -> Document:
    return {
        "workload": step.workload.name or None, "platform": step.platform, "step_time_ms": step.step_time_ms,
        "recorded_step_ms": step.recorded_step_ms,
        "interval_ms": list(step.interval_ms), "bound_by": step.bound_by,
    }  # fmt: skip


def recorded_words(before: PredictedStep, after: PredictedStep) -> str:
    """What both runs took as recorded, and what is left out of it; empty where one never ran."""
    first, second = before.recorded_step_ms, after.recorded_step_ms
    if not first or not second:
        return ""
    words = f"{time_ms(first)} → {time_ms(second)} ms ({100 * (second / first - 1):+.1f} %), with profilers"
    left_out = [
        time_ms(max(recorded_ms - step.step_time_ms, 0.0))
        for step, recorded_ms in ((before, first), (after, second))
        if step.platform is None and not step.profiled
    ]
    return f"{words}; without them {' and '.join(left_out)} ms less" if left_out else words


def _called(step: PredictedStep) -> str:
    name = step.workload.name or "workload"
    return name if step.platform is None else f"{name} on {step.platform}"


def signed_ms(value: float) -> str:
    """Milliseconds with their sign."""
    return f"{'-' if round(value, 3) < 0 else '+'}{time_ms(abs(value))}"


def _listed(found: Difference) -> Iterator[tuple[str, float]]:
    """The parts that are worth a line, and the sum of the others."""
    least = _WORTH_SAYING * max(found.before.step_time_ms, found.after.step_time_ms)
    small = 0.0
    for name, value in found.parts.items():
        if abs(value) >= least:
            yield name.replace("_", " "), value
        else:
            small += value
    if time_ms(abs(small)) != time_ms(0.0):
        yield SMALL_PARTS, small


def _changed_ops(found: Difference) -> list[OpDifference]:
    least = _WORTH_SAYING * max(found.before.step_time_ms, found.after.step_time_ms)
    return [each for each in found.ops if max(abs(each.device_ms), abs(each.host_ms)) >= least][:_OPS_LISTED]


def _pair(before: float, after: float) -> str:
    return time_ms(before) if before == after else f"{time_ms(before)} → {time_ms(after)}"


def _counts(each: OpDifference) -> str:
    before, after = (f"{count:g}" for count in (round(each.before.count, 1), round(each.after.count, 1)))
    return before if before == after else f"{before} → {after}"


# --- text ------------------------------------------------------------------------------------------------------------------


def print_diff(console: Console, answer: Compared) -> None:
    """The report of `steptime diff`."""
    found = answer.difference
    before, after = found.before, found.after
    print_heading(
        console,
        "diff",
        _called(before),
        _called(after),
        f"{percent(found.matched)} of the device time of both is found in the other",
    )
    share = found.total_ms / before.step_time_ms if before.step_time_ms else 0.0
    steps = f"{time_ms(before.step_time_ms)} → {time_ms(after.step_time_ms)} ms: {signed_ms(found.total_ms)} ms"
    print_line(console, "Step time", f"{steps} ({100 * share:+.1f} %)", style="bold")
    if recorded := recorded_words(before, after):
        print_line(console, "Recorded", recorded, spaced=False)
    print_parts(console, answer)
    print_line(console, "Before", before.bound_by)
    print_line(console, "After", after.bound_by, spaced=False)
    print_notices(console, _notices(found))


def print_parts(console: Console, answer: Compared) -> None:
    """What makes the second step longer or shorter, and the ops that changed most."""
    found = answer.difference
    before = found.before
    print_section(console, "Parts", "ms of the step; they add up to the difference")
    rows = grid("left", "right", "right")
    for name, value in (*_listed(found), ("together", found.total_ms)):
        of_it = Text(f"{100 * value / before.step_time_ms:+.1f} %" if before.step_time_ms else "", "dim")
        rows.add_row(literal(name, "bold" if name == "together" else ""), Text(signed_ms(value)), of_it)
    print_body(console, rows)
    changed = _changed_ops(found)
    if changed:
        print_section(console, "Ops that changed most", "per step; ms on the device and on the host, behind other work or not")
        _print_ops(console, changed)


def _print_ops(console: Console, ops: list[OpDifference]) -> None:
    rows = grid("left", "right", "right", "right")
    rows.add_row(Text(), *(Text(head, "dim") for head in ("count", "device", "host")))
    room = max(body_width(console) - 50, 20)
    for each in ops:
        name = literal(each.name)
        name.truncate(room, overflow="ellipsis")
        device = _pair(each.before.device_ms, each.after.device_ms)
        rows.add_row(name, Text(_counts(each)), Text(device), Text(_pair(each.before.host_ms, each.after.host_ms)))
    print_body(console, rows)


# --- page ------------------------------------------------------------------------------------------------------------------


def diff_page(found: Difference) -> str:
    """The page as text, the same for the same answer."""
    before, after = found.before, found.after
    name = _called(before) if _called(before) == _called(after) else f"{_called(before)} and {_called(after)}"
    facts = {
        "First": f"{_called(before)}: {time_ms(before.step_time_ms)} ms",
        "Second": f"{_called(after)}: {time_ms(after.step_time_ms)} ms",
        "Found in the other": percent(found.matched),
        "Before": before.bound_by,
    }
    if recorded := recorded_words(before, after):
        facts["Recorded"] = recorded
    share = f", {100 * found.total_ms / before.step_time_ms:+.1f} %" if before.step_time_ms else ""
    number = tag(
        "p", tag("strong", signed_ms(found.total_ms)), tag("span", f"ms per step{share}", class_="unit"), class_="step"
    )
    summary = [number, bound(f"Now {after.bound_by}"), facts_group("Steps", facts), notice_list(_notices(found))]
    sections = [tag("section", *summary, id="summary", aria_label="Summary"), *diff_sections(found)]
    return static_page("diff", name, "difference", sections, ("Parts", *(["Ops"] if found.ops else [])))


def diff_sections(found: Difference) -> list[Markup]:
    """The parts of the difference, and ops that changed."""
    sections = [section("Parts", "milliseconds of the step; they add up to the difference", _parts_table(found))]
    if found.ops:
        sections.append(section("Ops", "per step; on the device and on the host, behind other work or not", _ops_table(found)))
    return sections


def _parts_table(found: Difference) -> Markup:
    parts = list(_listed(found))
    longest = max((abs(value) for _, value in parts), default=1.0) or 1.0
    rows = [
        (name, signed_ms(value), bar([(abs(value) / longest, _colour(value))], f"{name}: {signed_ms(value)} ms"))
        for name, value in parts
    ]
    return table(
        "Parts of the difference", ("Part", "ms", ""), [*rows, ("together", signed_ms(found.total_ms), "")], words=(0, 2)
    )


def _colour(value: float) -> str:
    return "family optimizer" if value > 0 else "family matmul"


def _ops_table(found: Difference) -> Markup:
    rows = [
        (
            each.name if len(each.name) <= _NAME_AT_MOST else each.name[: _NAME_AT_MOST - 1] + "…",
            _counts(each),
            *(time_ms(value) for value in (each.before.device_ms, each.after.device_ms)),
            signed_ms(each.device_ms),
            *(time_ms(value) for value in (each.before.host_ms, each.after.host_ms)),
            signed_ms(each.host_ms),
        )
        for each in found.ops[:100]
    ]
    heads = ("Op", "count", "device, first", "second", "more", "host, first", "second", "more")
    return table("Ops of both steps, milliseconds per step", heads, rows)
