"""Errors of predicted training steps as `steptime validate steps` finds them, as Markdown with the worst case of every group.

    python benchmarks/step_errors.py [trace config recorded] [trace.json ...] [--docs]

A word is a source to predict from; a file is what `steptime validate steps --from SOURCE --json` wrote, named SOURCE.json.
`--docs` puts the tables between the markers of README.md (a group a line) and docs/models.md (everything).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from steptime_lab.report.validation import validation_document
from steptime_lab.validate.steps.sources import SOURCES
from steptime_lab.validate.steps.steps import BY_VISIT, validate_steps

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- steps:begin -->", "<!-- steps:end -->"
# Of README.md: the groups that bars are set for.
GROUPS = (
    "DLRM 2 and 4 ranks",
    "DLRM 2 and 4 ranks steady",
    "Transformers",
    "convnets",
    "GPU-bound",
    "host-bound",
    "wire-bound",
    "mixed",
)
TITLES = {
    "trace": "From execution traces",
    "config": "From configs alone, never run",
    "recorded": "From execution traces, host times as profiled",
}
Document = Mapping[str, Any]


def found(source: str) -> Document:
    def said(done: int, every: int) -> None:
        if done % 10 == 0:
            print(f"{source}: {done} of {every} cases", file=sys.stderr)

    return validation_document(validate_steps(source, said=said).validation)


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def row(name: str, part: Mapping[str, Any]) -> str:
    told = (part[key] for key in ("geomean", "mape", "p90", "max", "interval_coverage", "noise_floor"))
    beside = (percent(one["geomean"]) for one in part["baselines"].values())
    return f"| {name} | {part['rows']:,} | " + " | ".join([*map(percent, told), *beside, part["worst"]]) + " |"


def table(document: Document, *, short: bool) -> Iterator[str]:
    parts = document["parts"]
    heads = [
        "%",
        "cases",
        "geomean",
        "MAPE",
        "p90",
        "max",
        "inside 90 %",
        "repeats' own noise",
        *document["baselines"],
        "worst",
    ]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    yield row("**all**", {**document["summary"], "baselines": document["baselines"]})
    yield row("**all, by visit**", parts[BY_VISIT])
    for name, part in parts.items():
        if name != BY_VISIT and (name in GROUPS if short else not name.endswith(BY_VISIT)):
            yield row(name, part)
    if not short:
        yield ""
        for name, value in document["facts"].items():
            yield f"- {name.replace('_', ' ')}: {100 * value:.1f} %"


def text(documents: Mapping[str, Document], *, short: bool) -> str:
    shown = {source: one for source, one in documents.items() if not short or source == next(iter(documents))}
    blocks = (f"{TITLES[source]}:\n\n" + "\n".join(table(one, short=short)) for source, one in shown.items())
    return "\n\n".join(blocks) + "\n"


def write(page: Path, block: str) -> None:
    before = page.read_text(encoding="utf-8")
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not between.search(before):
        sys.exit(f"{page}: no {BEGIN} ... {END} to write between")
    page.write_text(between.sub(lambda _: f"{BEGIN}\n{block}{END}", before), encoding="utf-8")


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--docs"] or list(SOURCES)
    unknown = [word for word in words if Path(word).stem not in SOURCES]
    if unknown:
        sys.exit(
            f"{unknown[0]}: is no source and no file named after one; expected {', '.join(SOURCES)}, or one of them + .json"
        )
    documents = {
        Path(word).stem: json.loads(Path(word).read_text(encoding="utf-8")) if word.endswith(".json") else found(word)
        for word in words
    }
    print(text(documents, short=False))
    if "--docs" in sys.argv[1:]:
        write(ROOT / "README.md", text(documents, short=True))
        write(ROOT / "docs" / "models.md", text(documents, short=False))


if __name__ == "__main__":
    main()
