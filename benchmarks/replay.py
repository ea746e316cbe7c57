"""Replay error of every run at hand: recorded kernel times and host gaps through the simulator against the recorded steps.

Bar: geomean at most 1 %, no case over 3 %. Runs with ranks missing take the absent peers' arrivals as recorded and are
listed apart.
`--docs` writes the table into docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from _cases import REPOSITORY, Case, public, shipped
from steptime._program.load import load
from steptime._report.words import signed_percent
from steptime._sim.recorded.replay import Replay, replay

# Keeps one lucky zero from sinking a geometric mean (the published studies use the same floor).
FLOOR = 4e-4


def geomean(errors: list[float]) -> float:
    """Geometric mean of absolute errors, floored."""
    return math.exp(sum(math.log(abs(e) + FLOOR) for e in errors) / len(errors))


def line(name: str, found: Replay) -> str:
    """One row of the table."""
    workload, errors = found.workload, [s.error for s in found.steps]
    ranks = f"{len(workload.ranks)} of {workload.world_size}" if workload.absent else str(workload.world_size)
    measured = sum(s.measured_ns for s in found.steps) / len(found.steps) / 1e6
    listed = ", ".join(signed_percent(e).removesuffix(" %") for e in errors)
    return (
        f"| {name} | {workload.programs[0].device_name} | {ranks} | {measured:.2f} | {listed} | {100 * geomean(errors):.2f} |"
    )


def table(cases: list[Case]) -> str:
    """The Markdown table and its summary."""
    complete, partial, unscored = [], [], []
    errors: dict[str, list[float]] = {"complete": [], "all": []}
    for case in cases:
        found = replay(load(case.paths))
        row = line(case.name, found)
        steps = [s.error for s in found.steps]
        if not case.scored:
            unscored.append(row)
            continue
        errors["all"] += steps
        (partial if found.workload.absent else complete).append(row)
        errors["complete"] += [] if found.workload.absent else steps
    head = "| run | GPU | ranks | step, ms | error per step, % | geomean, % |\n|---|---|---|---|---|---|\n"
    text = head + "\n".join(complete)
    text += f"\n\nGeomean over {len(errors['complete'])} steps {100 * geomean(errors['complete']):.2f} %, "
    text += f"worst {100 * max(map(abs, errors['complete'])):.2f} %."
    for title, rows in (("Ranks missing (their arrivals as recorded)", partial), ("Not scored", unscored)):
        if rows:
            text += f"\n\n{title}:\n\n{head}" + "\n".join(rows)
    if partial:
        worst = 100 * max(map(abs, errors["all"]))
        text += f"\n\nAll scored runs together: geomean {100 * geomean(errors['all']):.2f} %, worst {worst:.2f} %."
    return text


def write(page: Path, marker: str, text: str) -> None:
    """Put text between a pair of markers of a page."""
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def main() -> None:
    """Print the table; with --docs, also write it into docs/accuracy.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--docs", action="store_true", help="write the table into docs/accuracy.md")
    parser.add_argument("folders", nargs="*", type=Path, help="further runs, a folder each")
    arguments = parser.parse_args()
    text = table([*shipped(), *public(), *(Case(f.name, (f,)) for f in arguments.folders)])
    print(text)
    if arguments.docs:
        write(REPOSITORY / "docs" / "accuracy.md", "replay-table", text)


if __name__ == "__main__":
    main()
