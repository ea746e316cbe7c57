"""What `steptime plan` says to people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from steptime._plan.evaluate import Played
from steptime._plan.space import SHORT_WORDS
from steptime._report.cost import money
from steptime._report.layout import print_heading, print_line, print_notices, print_numbers, print_section, print_title
from steptime._report.plan import SHOWN, Planned
from steptime._report.text import print_verdict
from steptime._report.words import interval_words, numerics_words, percent, rate, time_ms, with_unit
from steptime._units import ms, size_words

# Parts of a step, or of a difference, that are worth a word.
_WORTH_SAYING = 0.005
_REASONS_SHOWN = 3
FRONT_NOTE = "no layout is both faster and smaller than one of these; up to twice the fastest step"


def print_plan(console: Console, planned: Planned) -> None:
    """The verdict first."""
    found, best = planned.found, planned.found.best
    model = found.model
    what = f"batch {model.batch:,}, sequence {model.sequence:,}, {model.precision}"
    print_heading(console, "plan", model.title, f"{found.gpus} GPUs of {planned.platform}", what)
    line = Text().append("Best layout  ", style="bold").append(str(best.layout), style="bold green")
    print_title(console, line)
    print_verdict(console, "Step time", planned.step_time_ms, planned.verdict, interval_words(*planned.interval_ms))
    print_line(console, "Speed", ", ".join(speed_words(planned, best)), spaced=False)
    print_line(console, "Numerics", alike_words(planned), spaced=False)
    cost = planned.cost(best)
    if cost is not None:
        print_line(console, "Cost", cost.text, spaced=False)
    print_line(console, "Winner", sure_words(planned), spaced=False)
    print_section(console, "Where its step goes", "of the busiest stage; communication where it is exposed")
    print_numbers(console, ("part", "ms", "share"), part_cells(best))
    if planned.comparison is not None:
        print_section(console, "Why it beats the second", difference_words(planned))
        print_numbers(console, ("part", "ms longer"), difference_cells(planned))
    print_section(console, "Best layouts", f"P: chance to be the fastest of all played; {SHORT_WORDS}")
    print_numbers(console, _heads(planned), [_row(planned, place) for place in range(min(SHOWN, len(found.played)))])
    print_section(console, "Time against memory", FRONT_NOTE)
    print_numbers(console, ("layout", "step ms", "memory"), front_cells(planned))
    print_line(console, "Searched", searched_words(planned))
    print_notices(console, planned.notices)


def print_written(console: Console, files: Mapping[str, Path | None]) -> None:
    """What was written beside."""
    for title, file in files.items():
        if file is not None:
            print_line(console, title, str(file), spaced=False)


def speed_words(planned: Planned, played: Played) -> list[str]:
    """What people compare."""
    words = [f"{rate(planned.tokens_per_s(played))} tokens/s"]
    words += [] if played.mfu is None else [f"MFU {100 * played.mfu:.1f} %"]
    return words + ([] if played.energy_j is None else [f"{with_unit(played.energy_j, 'J')} a step"])


def alike_words(planned: Planned) -> str:
    """What all layouts have in common: precisions, and the vocabulary as it is padded."""
    model = planned.found.model
    padded = planned.found.best.layout.of(model).vocabulary_rows
    vocabulary = f"; vocabulary padded to {padded:,}" if padded != model.vocabulary else ""
    return f"{numerics_words(model.numerics)}, in all layouts{vocabulary}"


def sure_words(planned: Planned) -> str:
    """How likely the winner wins."""
    chance = f"{percent(planned.found.p_fastest[0])} to be the fastest of {len(planned.found.played)} played layouts"
    if planned.comparison is not None:
        chance += f", {percent(planned.comparison.p_faster)} to beat the second"
    return chance + room_words(planned)


def room_words(planned: Planned) -> str:
    """That the winner barely fits, and the fastest layout that clearly does."""
    best, roomy = planned.found.best, planned.with_room
    if not planned.fit(best).tight:
        return ""
    if roomy is None:
        return "; it barely fits, as all that were played do"
    longer = f"{100 * (roomy.step_ns / best.step_ns - 1):+.1f} %"
    return f"; it barely fits: {roomy.layout} ({longer}) has room, {size_words(roomy.peak_bytes)}"


def part_cells(played: Played) -> list[tuple[str, str, str]]:
    """Parts of a step, as they come."""
    return [
        (name, time_ms(ms(value)), percent(value / played.step_ns))
        for name, value in played.parts_ns.items()
        if value >= _WORTH_SAYING * played.step_ns
    ]


def difference_words(planned: Planned) -> str:
    """The second layout and what it takes longer."""
    comparison = planned.comparison
    assert comparison is not None
    share = comparison.longer_ns / planned.found.best.step_ns
    return f"{comparison.second.layout}: {time_ms(ms(comparison.longer_ns))} ms longer ({100 * share:.1f} %)"


def difference_cells(planned: Planned) -> list[tuple[str, str]]:
    """Largest parts of the difference first."""
    comparison = planned.comparison
    assert comparison is not None
    parts = sorted(comparison.parts_ns.items(), key=lambda each: -abs(each[1]))
    return [(name, f"{ms(value):+,.2f}") for name, value in parts[: 2 * _REASONS_SHOWN]]


def _heads(planned: Planned) -> Sequence[str]:
    return (
        "layout",
        "step ms",
        "more",
        "tokens/s",
        "MFU",
        "memory",
        "P",
        *(("$ per trillion\ntokens",) if planned.price is not None else ()),
    )


def _row(planned: Planned, place: int) -> tuple[str, ...]:
    played, chance = planned.found.played[place], planned.found.p_fastest[place]
    cost = planned.cost(played)
    return (
        played.layout.short,
        time_ms(ms(played.step_ns)),
        f"{100 * (played.step_ns / planned.found.best.step_ns - 1):+.1f} %" if place else "",
        rate(planned.tokens_per_s(played)),
        "" if played.mfu is None else f"{100 * played.mfu:.1f} %",
        size_words(played.peak_bytes),
        percent(chance),
        *(() if cost is None else (money(cost.per_trillion_tokens or 0.0),)),
    )


def front_cells(planned: Planned) -> list[tuple[str, str, str]]:
    """Fastest first."""
    return [(each.layout.short, time_ms(ms(each.step_ns)), size_words(each.peak_bytes)) for each in planned.found.front]


def searched_words(planned: Planned) -> str:
    """What was looked at, and how good the quick look was."""
    found = planned.found
    low, middle, high = found.ratios
    text = (
        f"{len(found.space.layouts):,} layouts by closed form, {found.fitting:,} of which may fit; {found.plays} played, which "
        f"took {low:.2f} to {high:.2f} times their closed form (median {middle:.2f}); {found.seconds:.1f} s"
    )
    refused = sum(found.space.refused.values())
    if not refused:
        return text
    most = next(iter(found.space.refused))
    return f"{text}. {refused:,} combinations were invalid, most because of: {most}"
