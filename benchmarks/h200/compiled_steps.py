"""Predicts steps eager and compiled for an H200 before they are measured: captures each without a GPU.

`python benchmarks/h200/compiled_steps.py [FILE] [--only a,b]` writes the answers, by default where `steptime validate compiled`
reads them; those that it is not asked for stay. Each case is captured in a process of its own, as a user's script would be.
`--kept DIR` keeps captured steps and takes those that are there, to predict them again with `--calibration DIR`.
`steptime measure compiled -o DIR --share-gpu` then measures the same cases on the card. None of them has a part in any fit.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

from steptime_lab.validate.compiled.answers import PREDICTED, CaseAnswer, CompiledAnswers


def one(name: str, kept: Path | None, calibration: Path | None) -> tuple[str, CaseAnswer, dict[str, str]]:
    """One case, in this process."""
    from steptime_lab.validate.compiled.predict import predicted
    from steptime_lab.workloads.compiled import cases

    return (name, *predicted(cases()[name], lambda line: print(line, flush=True), kept, calibration))


def main() -> None:
    """Captures, predicts and writes."""
    from steptime_lab.workloads.compiled import cases

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", default=PREDICTED)
    parser.add_argument("--only", default="", help="names of cases or architectures with commas between")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kept", type=Path, help="folder of captured steps")
    parser.add_argument("--calibration", type=Path, help="what `steptime calibrate` wrote, for cases of one rank")
    given = parser.parse_args()
    wanted = {name for name in given.only.split(",") if name}
    names = [each.name for each in cases().values() if not wanted or {each.name, each.architecture} & wanted]
    before = CompiledAnswers.read(given.file) if given.file.exists() else CompiledAnswers({})
    answers, refused = dict(before.cases), dict(before.refused)
    with ProcessPoolExecutor(given.processes, max_tasks_per_child=1) as executor:
        for done in as_completed([executor.submit(one, name, given.kept, given.calibration) for name in names]):
            name, answer, why = done.result()
            answers[name] = answer
            refused = {key: value for key, value in refused.items() if not key.startswith(f"{name},")} | why
            order = [each for each in cases() if each in answers]
            CompiledAnswers({each: answers[each] for each in order}, made_with(), refused).write(given.file)


def made_with() -> dict[str, str]:
    """The commit and PyTorch that the answers are by."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": head.stdout.strip(),
        "torch": version("torch"),
        "triton": version("triton"),
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
    }


if __name__ == "__main__":
    main()
