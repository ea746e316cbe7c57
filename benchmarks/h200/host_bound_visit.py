"""Host-bound training steps (`host_bound_scripts`) on one GPU, with the calibration of the same visit and without.

`python benchmarks/h200/host_bound_visit.py predict FILE` captures and predicts them for an H200, without a GPU; the file is
committed before anybody measures. `... measure DIR` calibrates, times every script in two processes, and calibrates again, in
150 s on a machine with a GPU, torch, numpy and pyarrow (`PYTHONPATH=src:benchmarks/h200`). `... score FILE DIR...` predicts
them with the calibrations of visits and puts both beside what was measured; the second calibration of a visit says how far one
repeats itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

PLATFORM = "1xh200"
PROCESSES, ROUNDS, SLOT_S, WARM_UP = 2, 2, 0.7, 12
LIMIT_S = 60.0
FLOOR = 4e-4  # of an error in a geometric mean
CALIBRATIONS = ("calibration-before", "calibration-after")


def predict(file: Path) -> None:
    """Every script, uncalibrated."""
    import steptime

    content = {}
    for name, workload in captured().items():
        answer = steptime.predict(workload, PLATFORM).to_dict()
        content[name] = {key: answer[key] for key in ("step_time_ms", "interval_ms", "warnings")}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def captured() -> dict[str, Any]:
    """The workloads of all scripts."""
    from host_bound_scripts import SCRIPTS

    import steptime

    return {name: steptime.capture(make) for name, make in SCRIPTS.items()}


def measure(folder: Path, device: str) -> None:
    """A calibration, the scripts, another calibration."""
    from processes import on_ranks

    from steptime._calibrate.harness.ranks import Layout

    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()

    def calibrated(name: str) -> None:
        words = ["calibrate", "-o", str(folder / name), "--ranks", "1", "--device", device]
        subprocess.run([sys.executable, "-m", "steptime_lab.measure", *words], check=True)
        print(f"{name}: {time.monotonic() - begun:.0f} s")

    calibrated(CALIBRATIONS[0])
    for process in range(PROCESSES):
        plan = {"out": str(folder.absolute()), "process": process}
        on_ranks(__file__, folder, Layout(1, False, device), limit_s=LIMIT_S, **plan)
        print(f"process {process}: {time.monotonic() - begun:.0f} s")
    calibrated(CALIBRATIONS[1])


def work(group: Any, _session: Any, plan: Mapping[str, Any]) -> None:
    """One process: all scripts, in rounds, the garbage collector as it comes."""
    from host_bound_scripts import SCRIPTS

    cuda = group.device_name.startswith("cuda")
    steps = {}
    for name, make in SCRIPTS.items():
        steps[name] = make(device="cuda" if cuda else "cpu")
        for _ in range(WARM_UP if cuda else 1):
            steps[name]()
    gc.collect()
    for number in range(ROUNDS):
        for name, step in steps.items():
            line = {"script": name, "process": plan["process"], "round": number, "step_ms": slot_ms(step, group)}
            with (Path(plan["out"]) / "measured.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def slot_ms(step: Callable[[], None], group: Any) -> float:
    """Milliseconds of a step, from an idle device to an idle device."""
    group.synchronize()
    begun, count = time.perf_counter(), 0
    while time.perf_counter() < begun + SLOT_S:
        step()
        count += 1
    group.synchronize()
    return round((time.perf_counter() - begun) * 1e3 / count, 4)


def score(file: Path, folders: Sequence[Path]) -> None:
    """Errors of every script in every visit, with the visit's calibrations and without."""
    from steptime._models.host.model import STEP
    from steptime._platforms.calibration import Calibration
    from steptime._platforms.platform import Platform
    from steptime._sim.modelled.step import modelled

    platform, committed = Platform.load(PLATFORM), json.loads(file.read_text(encoding="utf-8"))
    steps = {name: modelled(workload, platform) for name, workload in captured().items()}
    errors: dict[str, list[float]] = {"uncalibrated": [], **{name: [] for name in CALIBRATIONS}}
    for folder in folders:
        taken = measured_ms(folder)
        calibrations = {name: Calibration.read(folder / name / "calibration.json", platform) for name in CALIBRATIONS}
        of_visit: dict[str, list[float]] = {name: [] for name in errors}
        for name, times in sorted(taken.items()):
            middle = math.exp(float(np.mean(np.log(times))))
            found = {"uncalibrated": committed[name]["step_time_ms"]}
            found |= {key: steps[name].play(each).step_ns / 1e6 for key, each in calibrations.items()}
            for key, time_ms in found.items():
                of_visit[key].append(time_ms / middle - 1.0)
            shown = "  ".join(f"{time_ms:7.3f} {100 * (time_ms / middle - 1.0):+6.1f}" for time_ms in found.values())
            print(f"{name:26s} {middle:7.3f}  {shown}")
        speeds = ", ".join(f"{each.speed.cpu / STEP.cpu:.3f} +- {each.host_error:.2f}" for each in calibrations.values())
        print(f"{folder.name}: {summary(of_visit)}; hosts {speeds} of the shipped one's time")
        for key, values in of_visit.items():
            errors[key] += values
    print(f"all: {summary(errors)}")


def measured_ms(folder: Path) -> dict[str, list[float]]:
    """Milliseconds of every slot of every script."""
    result: dict[str, list[float]] = {}
    for line in (folder / "measured.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        result.setdefault(row["script"], []).append(row["step_ms"])
    return result


def summary(errors: Mapping[str, Sequence[float]]) -> str:
    """Geometric mean of absolute errors, and the middle of signed ones, in percent."""
    return ", ".join(
        f"{name} {100 * math.exp(float(np.mean(np.log(np.abs(each) + FLOOR)))):.1f} (middle {100 * median(each):+.1f})"
        for name, each in errors.items()
    )


def main() -> None:
    """One of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("predict").add_argument("file", type=Path)
    measuring = commands.add_parser("measure")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    scoring = commands.add_parser("score")
    scoring.add_argument("file", type=Path)
    scoring.add_argument("folders", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "predict":
        predict(given.file)
    elif given.command == "measure":
        measure(given.folder, given.device)
    else:
        score(given.file, given.folders)


if __name__ == "__main__":
    main()
