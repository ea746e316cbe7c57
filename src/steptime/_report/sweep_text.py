"""The report of `steptime sweep`: the best variants first, and what was left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from steptime._report.cost import money
from steptime._report.layout import (
    body_width,
    print_heading,
    print_line,
    print_notices,
    print_numbers,
    print_section,
    width_of,
)
from steptime._report.sweep import PLATFORM, Predictions, SweepVariant, settings_words, value_words
from steptime._report.words import rate, time_ms
from steptime._units import size_words

# Rows of the table; files have all.
_SHOWN = 40
_ON_FRONT, _NO_FIT, _TIGHT, _TIED = "*", "!", "~", "="
_TIED_NAMED = 3
_LEAST = "MFU"  # left out where a table is too wide
# What tables call settings.
_NAMES = {"what_if": "what if", "power_cap_w": "power\ncap, W", "plan_file": "plan"}


def print_sweep(console: Console, answer: Predictions) -> None:
    """All of it."""
    name = answer.variants[0].document.get("workload") or "workload"
    left = f"{len(answer.left_out):,} left out" if answer.left_out else ""
    print_heading(console, "sweep", name, f"{len(answer):,} variant{'s' * (len(answer) > 1)}", left)
    for title, words in best_lines(answer):
        print_line(console, title, words, style="bold" if title in ("Best", "Fits") else "", spaced=title in ("Best", "Fits"))
    best = answer.best_by_platform
    if len(best) > 1:
        print_section(console, "Best of every platform", "")
        print_table(console, *table_cells(answer, tuple(best.values())))
    ranked = answer.ranked
    more = f"; {len(ranked) - _SHOWN:,} more in --csv, --parquet, --json or --html" if len(ranked) > _SHOWN else ""
    print_section(console, "Variants", f"{order_words(answer)}{more}")
    print_table(console, *table_cells(answer, ranked[:_SHOWN]))
    print_notices(console, answer.notices)


def print_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """In one piece where that is possible without the column that is missed least."""
    columns = [(head, *cells) for head, *cells in zip(heads, *rows, strict=True)]
    if width_of([[Text(_longest(cell)) for cell in row] for row in zip(*columns, strict=True)]) > body_width(console):
        columns = [column for column in columns if column[0] != _LEAST]
    print_numbers(console, [head for head, *_ in columns], list(zip(*(cells for _, *cells in columns), strict=True)))


def _longest(cell: str) -> str:
    return max(cell.split("\n"), key=len)


def best_lines(answer: Predictions) -> list[tuple[str, str]]:
    """The verdict: what is best, what is cheapest, how many fit."""
    fitting, known = answer.fitting, [each for each in answer.variants if each.fits is not None]
    if not fitting:
        least = min(answer.variants, key=lambda each: each.peak_bytes or 0)
        needs = size_words(least.peak_bytes or 0)
        return [
            ("Fits", f"none of {len(answer):,}; the smallest, {_named(answer, least)}, needs {needs} of {_capacity(least)}")
        ]
    lines = [("Best", f"{_named(answer, fitting[0])}: {variant_words(fitting[0])}")]
    if answer.tied:
        named = "; ".join(_named(answer, each) for each in answer.tied[:_TIED_NAMED])
        more = f" and {len(answer.tied) - _TIED_NAMED:,} more" if len(answer.tied) > _TIED_NAMED else ""
        lines.append(("Tied", f"errors do not tell it from {named}{more}"))
    roomy = answer.with_room
    if roomy is not None:
        lines.append(("With room", f"{_named(answer, roomy)}: {variant_words(roomy)}"))
    cheapest = answer.cheapest
    if cheapest is not None:
        words = "the same" if cheapest is fitting[0] else f"{_named(answer, cheapest)}: {variant_words(cheapest)}"
        lines.append(("Cheapest", words))
    if known:
        fit = sum(each.fits is True for each in known)
        tight = sum(each.tight for each in known)
        barely = "" if not tight else ", all of them barely" if tight == fit else f", {tight:,} of them barely"
        lines.append(("Memory", f"{'all' if fit == len(known) else f'{fit:,} of {len(known):,}'} fit{barely}"))
    return lines


def order_words(answer: Predictions) -> str:
    """How the table is ordered, and what its star means."""
    unit = "samples" if any(each.samples_per_s is not None for each in answer.variants) else "steps"
    behind = f", then ({_NO_FIT}) what does not fit" if any(each.fits is False for each in answer.variants) else ""
    behind += f"; {_TIGHT} barely fits" if any(each.tight for each in answer.variants) else ""
    behind += f"; {_TIED} tied with the best" if answer.tied else ""
    return f"most {unit} per second first{behind}; {_ON_FRONT} no other is both faster and smaller (cheaper)"


def speed_unit(answer: Predictions) -> str:
    """What variants are ranked by."""
    first = answer.variants[0]
    return "tokens/s" if first.tokens_per_s is not None else "samples/s" if first.samples_per_s is not None else "steps/s"


def variant_words(variant: SweepVariant) -> str:
    """What people compare of one variant."""
    low, high = variant.interval_ms
    words = [f"{time_ms(variant.step_time_ms)} ms per step (90 % interval {time_ms(low)}-{time_ms(high)})"]
    if variant.tokens_per_s is not None:
        words.insert(0, f"{rate(variant.tokens_per_s)} tokens/s")
    elif variant.samples_per_s is not None:
        words.insert(0, f"{rate(variant.samples_per_s)} samples/s")
    if variant.peak_bytes is not None:
        barely = " (barely fits)" if variant.tight else ""
        words.append(f"{size_words(variant.peak_bytes)} of {_capacity(variant)}{barely}")
    if variant.cost is not None:
        words.append(f"{money(variant.cost)} {cost_unit(variant)}")
    return ", ".join(words)


def cost_unit(variant: SweepVariant) -> str:
    """What the cost of a variant buys."""
    if variant.document.get("cost_per_trillion_tokens") is not None:
        return "per trillion tokens"
    return "per million samples" if variant.document.get("cost_per_million_samples") is not None else "per step"


def cost_head(variant: SweepVariant) -> str:
    """What a column of costs is called."""
    heads = {"per trillion tokens": "cost of 1T\ntokens", "per million samples": "cost of 1M\nsamples"}
    return heads.get(cost_unit(variant), "cost of\na step")


def table_cells(answer: Predictions, variants: Sequence[SweepVariant]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of variants: the settings that differ, then numbers; columns that nobody has are left out."""
    varied = [*answer.varied] or [PLATFORM]
    tokens = any(each.tokens_per_s is not None for each in answer.variants)
    fronts = {name: {id(each) for each in answer.front(name)} for name in ("memory", "cost")}
    heads = [*(_NAMES.get(name, name.replace(".", ".\n") if len(name) > 10 else name) for name in varied)]
    heads += ["step\nms", "90 %\ninterval", "tokens/s" if tokens else "samples/s", _LEAST, "memory"]
    heads += [cost_head(answer.variants[0])]
    rows, tied = [], {id(each) for each in answer.tied}
    for each in variants:
        speed = each.tokens_per_s if tokens else each.samples_per_s
        mfu = each.document.get("mfu")
        row = [_cell(each.settings.get(name)) if name in each.settings else "" for name in varied]
        row += [time_ms(each.step_time_ms) + _TIED * (id(each) in tied), around_words(each)]
        row += ["" if speed is None else rate(speed), "" if mfu is None else f"{100 * mfu:.1f} %"]
        row += [memory_words(each) + _ON_FRONT * (id(each) in fronts["memory"])]
        row += ["" if each.cost is None else money(each.cost) + _ON_FRONT * (id(each) in fronts["cost"])]
        rows.append(row)
    shown = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    return [heads[at] for at in shown], [[row[at] for at in shown] for row in rows]


def around_words(variant: SweepVariant) -> str:
    """The interval, in percent of the step."""
    low, high = (round(100 * (value / variant.step_time_ms - 1)) for value in variant.interval_ms)
    return f"{low:+d} {high:+d} %" if -low != high else f"±{high} %"


def memory_words(variant: SweepVariant) -> str:
    """Of the fullest rank, with a mark where it does not fit, or barely does."""
    if variant.peak_bytes is None:
        return ""
    return size_words(variant.peak_bytes) + _NO_FIT * (variant.fits is False) + _TIGHT * variant.tight


def _named(answer: Predictions, variant: SweepVariant) -> str:
    """A variant by the settings that differ."""
    names = answer.varied or {PLATFORM: []}
    return settings_words({name: variant.settings[name] for name in names if name in variant.settings})


def _capacity(variant: SweepVariant) -> str:
    return size_words(variant.document["memory"].get("capacity_bytes") or 0)


def _cell(value: Any) -> str:
    return f"{value:,}" if type(value) is int else value_words(value)
