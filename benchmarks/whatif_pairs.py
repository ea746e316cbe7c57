"""What-ifs against the change made for real: recordings of steps, and how long they and the changed ones take unprofiled.

    python benchmarks/whatif_pairs.py FOLDER [-o FILE]

FOLDER holds `changes.json` (name, what_if, before_ms and after_ms of unprofiled repeats, saved_ms) and, per name, the
recording of the step before the change; `benchmarks/h200/changed_cases.py` is the code of every step. Nothing of a changed run
is read but its step time, to compare with. A saving counts as foretold within 25 % of the measured one. Repeats come in two
rounds of processes; where the savings of the rounds are further than that from their median, no prediction can be judged by it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import steptime
from steptime._report.whatif import ChangedPrediction

WITHIN = 0.25


def main() -> None:
    """Prints a line per pair and how many savings are foretold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", default="", help="pairs whose name holds this")
    given = parser.parse_args()
    rows = []
    for pair in json.loads((given.folder / "changes.json").read_text(encoding="utf-8")):
        if given.only in pair["name"]:
            rows.append(scored(given.folder, pair))
            print(line(rows[-1]), flush=True)
    answered = [row for row in rows if row["error"] is not None]
    good = sum(abs(row["error"]) <= WITHIN for row in answered)
    inside = sum(row["interval_ms"][0] <= row["saved_ms"] <= row["interval_ms"][1] for row in answered)
    print(f"{good} of {len(rows)} savings within {WITHIN:.0%}; {inside} inside their interval")
    sure = [row for row in answered if row["repeatable"]]
    good = sum(abs(row["error"]) <= WITHIN for row in sure)
    print(f"{good} of the {len(sure)} that were measured to {WITHIN:.0%} themselves")
    if given.output is not None:
        given.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def scored(folder: Path, pair: dict[str, Any]) -> dict[str, Any]:
    """What is foretold of one pair, and what was measured."""
    before, after = median(pair["before_ms"]), median(pair["after_ms"])
    halves = [_halves(pair[key]) for key in ("before_ms", "after_ms")]
    rounds = [round(one - other, 4) for one, other in zip(*halves, strict=True)]
    row = {"name": pair["name"], "what_if": pair["what_if"], "before_ms": before, "saved_ms": round(before - after, 4)}
    repeatable = all(abs(each / (before - after) - 1) <= WITHIN for each in rounds)
    row |= {"rounds_saved_ms": rounds, "repeatable": repeatable}
    row |= {"predicted_before_ms": None, "saves_ms": None, "interval_ms": None, "error": None}
    try:
        answer = steptime.predict(folder / pair["name"], what_if=[pair["what_if"]])
    except steptime.InputError as error:
        return {**row, "said": str(error)}
    assert isinstance(answer, ChangedPrediction)
    found = answer.to_dict()
    saves = found["together"]["saves_ms"]
    row |= {"predicted_before_ms": found["before"]["step_time_ms"], "saves_ms": saves}
    return {**row, "interval_ms": found["together"]["interval_ms"], "error": saves / (before - after) - 1}


def _halves(times: list[float]) -> tuple[float, float]:
    """The medians of the two rounds."""
    return median(times[: len(times) // 2]), median(times[len(times) // 2 :])


def line(row: dict[str, Any]) -> str:
    """A pair in one line."""
    head = f"{row['name']:20s} {row['what_if']:26s} step {row['before_ms']:8.3f} ms, saved {row['saved_ms']:8.3f}"
    if row["error"] is None:
        return f"{head}: {row['said']}"
    low, high = row["interval_ms"]
    foretold = f"step {row['predicted_before_ms']:8.3f}, saves {row['saves_ms']:8.3f} ({low:.3f} to {high:.3f})"
    rounds = " and ".join(f"{each:.2f}" for each in row["rounds_saved_ms"])
    return f"{head} ({rounds} in rounds): {foretold}, error {row['error']:+.0%}"


if __name__ == "__main__":
    main()
