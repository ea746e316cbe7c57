"""What `steptime sweep` says to people: a table, most samples per second first."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from steptime._report.answers import Predictions, SweepVariant
from steptime._report.document import asked_facts, rate
from steptime._report.layout import literal, print_numbers, print_section, print_title, time_ms
from steptime._report.sizes import size_words
from steptime._report.text import print_warnings

_HEADS = ("platform", "batch", "ranks", "step\nms", "90 %\ninterval", "samples/s", "tokens/s", "MFU", "peak\nmemory", "fits")


def print_sweep(console: Console, answer: Predictions) -> None:
    """Every variant with what people compare."""
    first = answer.variants[0].prediction
    line = Text().append("steptime sweep", style="bold")
    fixed = [fact.words for fact in asked_facts(first) if fact.name in ("Sequence", "Precision", "Parameters")]
    for part in (first.workload.name, *fixed, f"{len(answer)} variants"):
        if part:
            line.append(" · ", style="dim").append_text(literal(part))
    print_title(console, line)
    print_section(console, "Variants", "most samples per second first")
    rows = [_row(variant) for variant in answer.ranked]
    shown = [place for place in range(len(_HEADS)) if any(row[place] for row in rows)]
    print_numbers(console, [_HEADS[place] for place in shown], [[row[place] for place in shown] for row in rows])
    print_warnings(console, answer.warnings)
    console.print()


def _row(variant: SweepVariant) -> tuple[str, ...]:
    found = variant.prediction
    batch, memory = found.workload.description.batch, found.memory
    return (
        str(found.platform),
        "" if batch is None else f"{batch:,}",
        str(found.workload.world_size),
        time_ms(found.step_time_ms),
        "-".join(map(time_ms, found.interval_ms)),
        *("" if value is None else rate(value) for value in (found.samples_per_s, found.tokens_per_s)),
        "" if found.mfu is None else f"{100 * found.mfu:.1f} %",
        "" if memory.get("peak_bytes") is None else size_words(int(memory["peak_bytes"])),
        "" if memory.get("fits") is None else "yes" if memory["fits"] else "no",
    )
