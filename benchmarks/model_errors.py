"""The errors of the shipped models, as `steptime validate` finds them; `--docs` puts them into their pages under docs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from steptime_lab.validate.shipped import Models, validated
from steptime_lab.validate.summary import Part, Validation

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {
    "kernels": "models.md",
    "device-time": "models.md",
    "host": "models.md",
    "lookups": "lookups.md",
    "collectives": "collectives.md",
}


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def row(name: str, part: Part, baselines: list[str]) -> str:
    one = part.summary
    told = (one.gmae, one.mape, one.p90, one.max, one.interval_coverage, one.noise_floor)
    beside = [percent(part.baselines[other].gmae if other in part.baselines else None) for other in baselines]
    return " | ".join(["", name, f"{one.rows:,}", *map(percent, told), *beside, ""]).strip()


def table(found: Validation) -> Iterator[str]:
    many = len(found.whole.baselines) > 2
    baselines = [] if many else list(found.whole.baselines)
    heads = ["%", "rows", "GMAE", "MAPE", "p90", "max", "inside 90 %", "noise floor", *baselines]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    yield row("**all**", found.whole, baselines)
    for name, part in found.parts.items():
        yield row(name, part, baselines)
    if many:
        for name, one in found.whole.baselines.items():
            yield row(f"instead: {name}", Part(one), [])
        known = {name: part for name, part in found.parts.items() if part.baselines and "," not in name}
        if known:
            others = list(found.whole.baselines)
            yield ""
            yield "| GMAE, % | this | " + " | ".join(others) + " |"
            yield "|" + "---|" * (2 + len(others))
            for name, part in known.items():
                cells = [percent(part.summary.gmae), *(percent(part.baselines[other].gmae) for other in others)]
                yield f"| {name} | " + " | ".join(cells) + " |"
    yield ""
    for name, value in found.facts.items():
        if "/" not in name:
            told = f"{value:.2f} x" if name.startswith("times_") else f"{100 * value:.2f} %" if value < 2 else f"{value:,.0f}"
            yield f"- {name.replace('_', ' ')}: {told}"


def main() -> None:
    chosen = [word for word in sys.argv[1:] if word in PAGES] or list(PAGES)
    for what in chosen:
        text = "\n".join(table(validated(what, Models()))) + "\n"
        print(f"== {what}\n{text}")
        if "--docs" in sys.argv[1:]:
            page = DOCS / PAGES[what]
            block = re.compile(rf"(<!-- {what} -->\n).*?(<!-- /{what} -->)", re.DOTALL)
            written = block.sub(lambda found, text=text: found[1] + text + found[2], page.read_text(encoding="utf-8"))
            page.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
