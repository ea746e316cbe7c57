"""The accuracy tables of docs/, as `steptime validate` finds them.

    python scripts/accuracy_tables.py [SET ...] [trace.json ...] [--docs]

A SET is kernels, device-time, lookups, collectives, zoo, noise, or a source of steps: trace, config, recorded. A file is what
`steptime validate steps --from SOURCE --json` wrote, named SOURCE.json, or `validate intervals --json`: home.json, public.json
(with `--rows FILE --leave-out`) and per-box.json (with `--per-box` too). `--docs` puts the tables between the markers of their
pages: steps in docs/accuracy.md (the groups that bars are set for) and in docs/models.md (everything), the others in docs/.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from steptime_lab.measure.tables import noise_lines, noises
from steptime_lab.measurements.shipped import FOLDER
from steptime_lab.report.validation import validation_document
from steptime_lab.validate.sets import Models, validated
from steptime_lab.validate.steps.sources import SOURCES
from steptime_lab.validate.steps.steps import BY_VISIT, validate_steps
from steptime_lab.validate.zoo.answers import PREDICTED, SECOND_PREDICTED, ZooAnswers
from steptime_lab.validate.zoo.zoo import DEVICE_TIME, validate_zoo, zoo_cases

ROOT = Path(__file__).parents[1]
PAGES = {"kernels": "models.md", "device-time": "models.md", "lookups": "lookups.md", "collectives": "collectives.md"}
NOISE = "noise"
STEP_GROUPS = (
    "DLRM 2 and 4 ranks", "DLRM 2 and 4 ranks steady", "Transformers", "convnets", "GPU-bound", "host-bound", "wire-bound",
    "mixed",
)  # fmt: skip
TITLES = {
    "trace": "From execution traces",
    "config": "From configs alone, never run",
    "recorded": "From execution traces, host times as profiled",
}
FIGURES = {
    "geomean": "geomean", "mape": "MAPE", "p90": "p90", "max": "max", "interval_coverage": "inside 90 %",
    "sharpness": "half-width", "noise_floor": "repeats' own noise",
}  # fmt: skip
INTERVALS = ("home", "public", "per-box")
INTERVAL_FIGURES = {"gmae": "geomean", "median_error": "median", "interval_coverage": "inside 90 %", "sharpness": "half-width"}
ZOO = "zoo"
ZOO_FIGURES = {"gmae": "geomean", "p90": "p90", "max": "worst"}
KINDS = ("products", "attention", "other")
# More baselines than this have lines of their own.
MOST_BESIDE = 3
Document = Mapping[str, Any]


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def row(name: str, group: Document, beside: list[str]) -> str:
    others = group.get("baselines", {})
    cells = [name, f"{group['rows']:,}", *(percent(group[key]) for key in FIGURES)]
    return "| " + " | ".join([*cells, *(percent(others[one]["geomean"]) if one in others else "" for one in beside)]) + " |"


def table(document: Document, groups: Mapping[str, Document]) -> Iterator[str]:
    every = list(document["baselines"])
    beside = every if len(every) <= MOST_BESIDE else []
    heads = ["%", "cases", *FIGURES.values(), *beside]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    yield row("**all**", {**document["summary"], "baselines": document["baselines"]}, beside)
    for name, group in groups.items():
        yield row(name, group, beside)
    if not beside:
        for name, group in document["baselines"].items():
            yield row(f"instead: {name}", group, [])


def facts(document: Document) -> Iterator[str]:
    for name, value in document["facts"].items():
        if "/" not in name:
            told = f"{value:.2f} x" if name.startswith("times_") else f"{100 * value:.2f} %" if value < 2 else f"{value:,.0f}"
            yield f"- {name.replace('_', ' ')}: {told}"


def steps_text(documents: Mapping[str, Document], *, short: bool) -> str:
    blocks = []
    for source, document in documents.items():
        groups = {f"**all, {BY_VISIT}**": document["parts"][BY_VISIT]}
        groups |= {
            name: group
            for name, group in document["parts"].items()
            if name != BY_VISIT and (name in STEP_GROUPS if short else not name.endswith(BY_VISIT))
        }
        worst = f"\nWorst: {document['summary']['worst']}" if short else "\n" + "\n".join(facts(document))
        blocks.append(f"{TITLES[source]}:\n\n" + "\n".join(table(document, groups)) + "\n" + worst)
        if short:
            break
    return "\n\n".join(blocks) + "\n"


def interval_text(document: Document) -> str:
    """Errors and intervals of every group, and of sources what their errors are made of."""
    facts = document["facts"]
    heads = ["%", "cases", *INTERVAL_FIGURES.values(), *(f"{kind}, times" for kind in KINDS if facts)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, group in {"**all**": document["summary"], **document["parts"]}.items():
        factors = [facts.get(f"times_{kind}_of_{name.replace(' ', '_')}") for kind in KINDS if facts]
        cells = [name, f"{group['rows']:,}", *(percent(group[key]) for key in INTERVAL_FIGURES)]
        lines.append("| " + " | ".join([*cells, *("" if one is None else f"{one:.2f}" for one in factors)]) + " |")
    return "\n".join(lines) + "\n"


def zoo_text(document: Document) -> str:
    """Steps of every group with their intervals, and device times beside."""
    parts = document["parts"]
    heads = ["%", "cases", *(f"step, {name}" for name in ZOO_FIGURES.values()), "inside 90 %", "half-width"]
    heads += [f"device, {name}" for name in ZOO_FIGURES.values()]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, group in {"**all**": document["summary"], **parts}.items():
        if DEVICE_TIME in name:
            continue
        device = parts[DEVICE_TIME] if name == "**all**" else parts.get(f"{name}, {DEVICE_TIME}", {})
        figures = [
            *(group[key] for key in (*ZOO_FIGURES, "interval_coverage", "sharpness")),
            *(device.get(key) for key in ZOO_FIGURES),
        ]
        lines.append("| " + " | ".join([name, f"{group['rows']:,}", *map(percent, figures)]) + " |")
    return "\n".join([*lines, "", *facts(document)]) + "\n"


def zoo(*, docs: bool) -> None:
    committed = {f"{ZOO} committed": PREDICTED, f"{ZOO} second": SECOND_PREDICTED}
    for name, answers in {ZOO: None, **{name: ZooAnswers.read(file) for name, file in committed.items()}}.items():
        text = zoo_text(validation_document(validate_zoo(zoo_cases(answers))))
        print(f"== {name}\n{text}")
        if docs:
            write(ROOT / "docs" / "accuracy.md", f"<!-- {name} -->", f"<!-- /{name} -->", text)


def steps_document(word: str) -> Document:
    if word.endswith(".json"):
        found: Document = json.loads(Path(word).read_text(encoding="utf-8"))
        return found
    return validation_document(validate_steps(word).validation)


def write(page: Path, begin: str, end: str, block: str) -> None:
    before = page.read_text(encoding="utf-8")
    between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not between.search(before):
        sys.exit(f"{page}: no {begin} ... {end} to write between")
    page.write_text(between.sub(lambda _: f"{begin}\n{block}{end}", before), encoding="utf-8")


def main() -> None:
    words, docs = [word for word in sys.argv[1:] if word != "--docs"], "--docs" in sys.argv[1:]
    known = (*PAGES, ZOO, NOISE, *SOURCES, *INTERVALS)
    unknown = [word for word in words if Path(word).stem not in known]
    if unknown:
        sys.exit(f"{unknown[0]}: expected {', '.join(known)}, or a source of steps + .json")
    chosen = words or list(known)
    for what in (word for word in chosen if word in PAGES):
        document = validation_document(validated(what, Models()))
        text = "\n".join([*table(document, document["parts"]), "", *facts(document)]) + "\n"
        print(f"== {what}\n{text}")
        if docs:
            write(ROOT / "docs" / PAGES[what], f"<!-- {what} -->", f"<!-- /{what} -->", text)
    if ZOO in chosen:
        zoo(docs=docs)
    if NOISE in chosen:
        text = "\n".join(noise_lines(noises(FOLDER, parts=False))) + "\n"
        print(f"== {NOISE}\n{text}")
        if docs:
            write(ROOT / "docs" / "measuring.md", "<!-- noise -->", "<!-- /noise -->", text)
    for word in (word for word in words if Path(word).stem in INTERVALS):
        text, name = interval_text(json.loads(Path(word).read_text(encoding="utf-8"))), Path(word).stem
        print(f"== {name}\n{text}")
        if docs:
            write(ROOT / "docs" / "accuracy.md", f"<!-- intervals {name} -->", f"<!-- /intervals {name} -->", text)
    steps = {Path(word).stem: steps_document(word) for word in chosen if Path(word).stem in SOURCES}
    if steps:
        print(steps_text(steps, short=False))
        if docs:
            write(ROOT / "docs" / "accuracy.md", "<!-- steps:begin -->", "<!-- steps:end -->", steps_text(steps, short=True))
            write(ROOT / "docs" / "models.md", "<!-- steps:begin -->", "<!-- steps:end -->", steps_text(steps, short=False))


if __name__ == "__main__":
    main()
