"""Steps that have no part in any model, predicted and committed, then measured.

`python benchmarks/h200/divided_steps.py predict FILE [GROUP]` predicts every held-out case of a group, without a GPU:
`divided` (the usual one), under several ways to divide their tables, and `recommenders`, with dense sides in other precisions,
interactions and optimisers, and `large`, decoders divided by pipelines, contexts, experts, shards and tensors, captured from
the very code that runs; `large_again`, more of them; `configs`, those of `large` that a config says too. On one,
`steptime measure steps --share-gpu --ranks 1,2,4,8 --only timed,GROUP -o DIR` times them.
`... score FILE DIR [GROUP]` compares: errors as committed, and with the calibration that each group of ranks made of its own
machine; of every model with several plans whether these are in the order in which they were measured. `... keep DIR MEASURED
[GROUP]` writes the times of a run as they are committed, which `score FILE MEASURED [GROUP]` reads without calibrations.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, takewhile
from pathlib import Path
from statistics import median
from typing import Any

from steptime import capture
from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.workload import dlrm_workload
from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._measurements.store import read
from steptime._platforms.calibration import Calibration
from steptime._program.workload import Workload
from steptime._sim.modelled.prediction import interval_ns, predict_on
from steptime._sim.modelled.step import modelled
from steptime_lab.measurements.sets import STEPS
from steptime_lab.validate.steps.cases import RunCalibrations, platform_of
from steptime_lab.workloads.case import Case
from steptime_lab.workloads.cases import RANKS, held_out_cases
from steptime_lab.workloads.divided_cases import DIVIDED
from steptime_lab.workloads.large_cases import AGAIN, LARGE
from steptime_lab.workloads.large_configs import as_config

Said = tuple[float, float, float]
"""Milliseconds of a step, and the ends of their interval."""

FLOOR = 0.0004
TIED = 0.02
"""Steps closer than this are in any order."""


CONFIGS = "configs"
"""The decoders of `large` that a config says too, predicted by that."""


def cases(group: str) -> dict[str, Case]:
    """All of a group, by name."""
    known = {case.name: case for ranks in RANKS for case in held_out_cases(ranks)[LARGE if group == CONFIGS else group]}
    return {name: case for name, case in known.items() if group != CONFIGS or as_config(case) is not None}


def workload_of(case: Case, group: str) -> Workload:
    """The case as it is predicted: a DLRM by its config, a decoder by capturing its script or by a config."""
    if group == CONFIGS:
        return build(Transformer.from_dict(as_config(case) or {}, case.name))
    if case.workload == LARGE:
        return captured(case)
    return dlrm_workload(Dlrm.from_dict(case.config).with_batch(case.batch), case.ranks, case.plan)


def captured(case: Case) -> Workload:
    """The step that is timed, as `steptime capture` sees it."""
    import torch

    from steptime_lab.workloads.networks.large import training_step

    return capture(lambda rank: training_step(case, rank, torch.device("cuda")), ranks=case.ranks)


def predict(file: str, group: str = DIVIDED) -> None:
    """Writes what is predicted of every case, uncalibrated."""
    found = {}
    for name, case in cases(group).items():
        said = predict_on(workload_of(case, group), platform_of(case.ranks))
        found[name] = {
            "step_time_ms": round(said.step_time_ms, 4),
            "interval_ms": [round(end, 4) for end in said.interval_ms],
            "bound_by": said.bound_by.partition(":")[0],
        }
    Path(file).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def score(file: str, run: str, group: str = DIVIDED) -> None:
    """Prints every case with the errors, and of every model whether its plans are in order."""
    known = cases(group)
    committed = json.loads(Path(file).read_text(encoding="utf-8"))
    if Path(run).is_dir():
        rows = {name: each for name, each in measured(Path(run)).items() if name in known}
        taken = {name: median(row["time_ns"] for row in each) / 1e6 for name, each in rows.items()}
        calibrations = RunCalibrations(Path(run))
        with_them = {
            "calibrated": {name: calibrated(known[name], calibrations.of_step(each[0]), group) for name, each in rows.items()}
        }
    else:
        kept, with_them = json.loads(Path(run).read_text(encoding="utf-8")), {}
        taken = {name: median(kept[name]["step_ms"]) for name in known if name in kept}
    told = {
        "committed": {name: (committed[name]["step_time_ms"], *committed[name]["interval_ms"]) for name in taken},
        **with_them,
    }
    for name, time_ms in taken.items():
        shown = "  ".join(f"{said[name][0]:8.3f} {100 * (said[name][0] / time_ms - 1):+6.1f} %" for said in told.values())
        print(f"{name:48s} {time_ms:8.3f}  {shown}")
    for how, said in told.items():
        print(f"{how}: {summary(taken, said, known)}")
        if group in (LARGE, AGAIN, CONFIGS):
            for kind in dict.fromkeys(kind_of(known[name]) for name in taken):
                of_kind = {name: time_ms for name, time_ms in taken.items() if kind_of(known[name]) == kind}
                print(f"  {kind:5s} {summary(of_kind, said, known)}")


def kind_of(case: Case) -> str:
    """How a decoder is divided: the letters that its name begins with (pp, cp, ep, hsdp, tp)."""
    return "".join(takewhile(str.isalpha, case.task))


def keep(folder: str, file: str, group: str = DIVIDED) -> None:
    """Writes the times of a run, and what it was made with."""
    known, found = cases(group), {}
    for name, rows in measured(Path(folder)).items():
        if name in known:
            found[name] = {"step_ms": [round(time_ns / 1e6, 4) for row in rows for time_ns in row["times_ns"]]}
            found["recipe"] = {key: rows[0][key] for key in ("torch", "device", "date", "command")}
    Path(file).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measured(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of every case, of one group of processes each."""
    result: dict[str, list[dict[str, Any]]] = {}
    for row in read(folder, STEPS).to_pylist():
        result.setdefault(row["name"], []).append(row)
    return result


def calibrated(case: Case, calibration: Calibration, group: str) -> Said:
    """What is predicted with the calibration that the processes made which then timed the case."""
    step = modelled(workload_of(case, group), platform_of(case.ranks))
    played = step.play(calibration)
    low, high = interval_ns(played)
    return played.step_ns / 1e6, low / 1e6, high / 1e6


def summary(taken: Mapping[str, float], told: Mapping[str, Said], known: Mapping[str, Case]) -> str:
    """Errors and intervals, and the order of plans where models have several."""
    errors = [told[name][0] / time_ms - 1 for name, time_ms in taken.items()]
    gmae = math.exp(sum(math.log(abs(error) + FLOOR) for error in errors) / len(errors))
    inside = sum(told[name][1] <= time_ms <= told[name][2] for name, time_ms in taken.items())
    p90 = sorted(map(abs, errors))[math.ceil(0.9 * len(errors)) - 1]
    text = f"GMAE {gmae:.1%}, p90 {p90:.1%}, middle {median(errors):+.1%}, {inside} of {len(errors)} inside"
    agree, regrets = [], []
    for names in by_model(taken, known):
        agree += ordered([(told[name][0], taken[name]) for name in names])
        best = min(names, key=lambda name: told[name][0])
        regrets.append(taken[best] / min(taken[name] for name in names) - 1)
    if not regrets:
        return text
    told_regrets = ", ".join(f"{regret:.1%}" for regret in regrets)
    return (
        f"{text}; {sum(agree)} of {len(agree)} pairs of plans further than {TIED:.0%} apart in order; the plan picked is "
        f"{told_regrets} slower than the fastest of its model"
    )


def by_model(taken: Mapping[str, float], known: Mapping[str, Case]) -> list[list[str]]:
    """Names of the measured cases of every model that has several plans."""
    tasks = dict.fromkeys(known[name].task for name in taken)
    groups = [[name for name in taken if known[name].task == task] for task in tasks]
    return [names for names in groups if len({known[name].rule for name in names}) > 1]


def ordered(pairs: Sequence[tuple[float, float]]) -> Iterator[bool]:
    """Of every two plans that differ as measured, whether they do so as predicted."""
    for one, other in combinations(pairs, 2):
        if abs(math.log(one[1] / other[1])) > TIED:
            yield (one[0] < other[0]) == (one[1] < other[1])


def main(command: str, *given: str) -> Any:
    """One of them."""
    return {"predict": predict, "score": score, "keep": keep}[command](*given)


if __name__ == "__main__":
    main(*sys.argv[1:])
