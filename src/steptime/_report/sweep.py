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
    shown = [index for index in range(len(_HEADS)) if any(row[index] for row in rows)]
    print_numbers(console, [_HEADS[index] for index in shown], [[row[index] for index in shown] for row in rows])
    print_warnings(console, answer.warnings)
    console.print()


def _row(variant: SweepVariant) -> tuple[str, ...]:
    result = variant.prediction
    batch, memory = result.workload.description.batch, result.memory
    return (
        str(result.platform),
        "" if batch is None else f"{batch:,}",
        str(result.workload.world_size),
        time_ms(result.step_time_ms),
        "-".join(map(time_ms, result.interval_ms)),
        *("" if value is None else rate(value) for value in (result.samples_per_s, result.tokens_per_s)),
        "" if result.mfu is None else f"{100 * result.mfu:.1f} %",
        "" if memory.get("peak_bytes") is None else size_words(int(memory["peak_bytes"])),
        "" if memory.get("fits") is None else "yes" if memory["fits"] else "no",
    )
