"""The zoo captured and predicted, by the shipped models or by models fitted without each group; needs torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from steptime import Workload, capture
from steptime._measurements.store import read
from steptime._platforms.platform import Platform, platform_parts
from steptime._sim.modelled.prediction import predict_on
from steptime.errors import SteptimeError
from steptime_lab.fit.kernels.fitting import fit_kernels
from steptime_lab.measurements.sets import KERNELS
from steptime_lab.measurements.shipped import FOLDER
from steptime_lab.validate.zoo.answers import PLATFORM, ZooAnswer, ZooAnswers
from steptime_lab.validate.zoo.left_out import without
from steptime_lab.workloads.zoo import Architecture, architectures

_LONGEST = 200  # of a reason
_FOLDERS = re.compile(r"(?<=\s)/\S*/")  # of whoever captured

Captured = dict[str, tuple[Architecture, Workload]]


def captured_zoo(names: Iterable[str] = (), report: Callable[[str], None] = lambda _: None) -> tuple[Captured, dict[str, str]]:
    """The zoo's architectures as captured without a GPU, or some of them; and why some were not."""
    chosen = {name: architectures()[name] for name in names or architectures()}
    results: Captured = {}
    refused: dict[str, str] = {}
    for name, each in chosen.items():
        try:
            results[name] = (each, capture(each.build))
        except (SteptimeError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            refused[name] = _FOLDERS.sub("", " ".join(str(error).split()))[:_LONGEST]
            report(f"{name}: not captured: {refused[name]}")
    return results, refused


def answered(
    captured: Captured, platform: Platform | None = None, report: Callable[[str], None] = lambda _: None
) -> dict[str, ZooAnswer]:
    """What a platform's models say of captured architectures."""
    machine = Platform.of(platform_parts(PLATFORM)) if platform is None else platform
    results = {}
    for name, (each, workload) in captured.items():
        result = ZooAnswer.of(each.group, predict_on(workload, machine))
        guesses = f", {result.fallback:.1%} guessed" if result.fallback else ""
        report(f"{name:28s} {result.step_ms:9.3f} ms, device {result.device_ms:9.3f}, {result.launches:6d} launches{guesses}")
        results[name] = result
    return results


def refitted(report: Callable[[str], None], folder: Path = FOLDER, seed: int = 0) -> ZooAnswers:
    """Every architecture predicted by models fitted without its group; where no row is of its kin, by the shipped ones."""
    captured, refused = captured_zoo(report=report)
    table = read(folder, KERNELS)
    platform = Platform.of(platform_parts(PLATFORM))
    results: dict[str, ZooAnswer] = {}
    for group in dict.fromkeys(each.group for each, _ in captured.values()):
        rows = without(table, group)
        machine = platform
        if len(rows) < len(table):
            report(f"{group}: fitting without {len(table) - len(rows):,} rows of its kin")
            models = fit_kernels(rows, platform.device.limits, seed, report=report)
            machine = replace(platform, device=replace(platform.device, models=models))
        kin = {name: item for name, item in captured.items() if item[0].group == group}
        results |= answered(kin, machine, report)
    return ZooAnswers(results, refused)
