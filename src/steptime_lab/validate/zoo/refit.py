"""The zoo captured and predicted, by the shipped models or by models fitted without each group; needs torch."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from steptime import Workload, capture
from steptime._files import write_output
from steptime._measurements.store import read
from steptime._models.kernels.family import families
from steptime._ops.families import WorkFamily
from steptime._platforms.platform import Platform, platform_parts
from steptime._platforms.situation import ARCHITECTURES, KNOWN, Situation, unseen_architecture, written
from steptime._processes import cores, workers
from steptime._sim.modelled.prediction import predict_on
from steptime.errors import SteptimeError
from steptime_lab.fit.kernels.fitting import fit_kernels, with_forms
from steptime_lab.measurements.sets import KERNELS
from steptime_lab.measurements.shipped import FOLDER
from steptime_lab.validate.zoo.answers import LEFT_OUT, PLATFORM, ZooAnswer, ZooAnswers
from steptime_lab.validate.zoo.left_out import SWEEP, groups_of, without
from steptime_lab.validate.zoo.widths import by_models_alone, unseen_situation
from steptime_lab.validate.zoo.zoo import ZooCase, second_visit_cases, zoo_cases
from steptime_lab.workloads.zoo import FIRST_VISIT, SECOND_VISIT, Architecture, architectures, of_visit

_LONGEST = 200  # of a reason
_FOLDERS = re.compile(r"(?<=\s)/\S*/")  # of whoever captured

_HEADER = """What all ops of a family may be off by together in an architecture that nobody measured, on a device that was:
standard deviations of the logarithm below and above a prediction. Written by `steptime validate zoo --refit` from the
architectures of the groups below on an H200: of a first visit, each predicted by models fitted without its group, and of a
second one, by predictions made before anybody had measured it (docs/accuracy.md). Of generated kernels: 16 architectures left
out of their fit (`steptime validate generated`, docs/compile.md)."""

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
    captured: Captured,
    platform: Platform | None = None,
    report: Callable[[str], None] = lambda _: None,
    situation: Situation | None = None,
) -> dict[str, ZooAnswer]:
    """What a platform's models say of captured architectures; `situation`: what may be wrong, if not what is shipped."""
    machine = Platform.of(platform_parts(PLATFORM)) if platform is None else platform
    results = {}
    for name, (each, workload) in captured.items():
        result = ZooAnswer.of(each.group, predict_on(workload, machine, situation=situation))
        guesses = f", {result.fallback:.1%} guessed" if result.fallback else ""
        report(f"{name:28s} {result.step_ms:9.3f} ms, device {result.device_ms:9.3f}, {result.launches:6d} launches{guesses}")
        results[name] = result
    return results


def refitted(report: Callable[[str], None], folder: Path = FOLDER, seed: int = 0) -> tuple[ZooAnswers, Situation]:
    """Every architecture of the first visit by models and with widths fitted without its group; and the widths of all together.

    Where no kernel row is of its kin, the shipped models are those without it. Causes were looked for in the first visit, so
    its errors are smaller than the next architecture's: widths count the second visit too, as it was when nobody had seen it.
    """
    captured, refused = captured_zoo(of_visit(FIRST_VISIT), report)
    table = read(folder, KERNELS)
    platform = Platform.of(platform_parts(PLATFORM))
    kin: dict[str, Captured] = defaultdict(dict)
    for name, item in captured.items():
        kin[item[0].group][name] = item
    machines = _machines(table, tuple(kin), platform, seed, report)
    alone = {
        name: each for group in kin for name, each in answered(kin[group], machines[group], report, Situation(KNOWN)).items()
    }
    cases = [*zoo_cases(ZooAnswers(alone), folder), *_second_visit(platform, folder)]
    results: dict[str, ZooAnswer] = {}
    for group, items in kin.items():
        widths = unseen_situation([case for case in cases if case.answer.group != group])
        results |= answered(items, machines[group], situation=widths)
    return ZooAnswers(results, refused), unseen_situation(cases)


def _second_visit(platform: Platform, folder: Path) -> list[ZooCase]:
    """As it was predicted when nobody had seen it, with intervals as wide as the models alone make them."""
    captured, _ = captured_zoo(of_visit(SECOND_VISIT))
    alone = answered(captured, platform, situation=Situation(KNOWN))
    return [by_models_alone(case, alone[case.name]) for case in second_visit_cases(folder) if case.name in alone]


def keep(answers: ZooAnswers, widths: Situation, left_out: Path = LEFT_OUT, architectures_file: Path = ARCHITECTURES) -> None:
    """Where `validate zoo` reads the answers, and predictions the widths; the width of generated kernels stays."""
    answers.write(left_out)
    generated = {name: error for name, error in unseen_architecture().errors.items() if name == WorkFamily.GENERATED.label}
    write_output(architectures_file, written([replace(widths, errors={**widths.errors, **generated})], _HEADER))


def _rows_of_forms(table: pa.Table) -> Counter[str]:
    """How many rows each form is fitted to."""
    return Counter(families()[name].form for name in table["family"].to_pylist() if name in families())


def _machines(
    table: pa.Table, groups: Sequence[str], platform: Platform, seed: int, report: Callable[[str], None]
) -> dict[str, Platform]:
    """Per group the platform with kernel models that have not seen its kin; groups with the same kin share a fit."""
    known: dict[frozenset[str], Platform] = {frozenset(): platform}
    result = {}
    for group in groups:
        sources = frozenset(source for source in set(table["source"].to_pylist()) if group in groups_of(source or SWEEP))
        if sources not in known:
            rows = without(table, group)
            report(f"{group}: fitting without {len(table) - len(rows):,} rows of its kin")
            forms = [form for form, lost in (_rows_of_forms(table) - _rows_of_forms(rows)).items() if lost]
            with workers(cores()) as executor:
                fitted = fit_kernels(rows, platform.device.limits, seed, forms=forms, report=report, executor=executor)
            models = with_forms(platform.device.models, fitted)
            known[sources] = replace(platform, device=replace(platform.device, models=models))
        result[group] = known[sources]
    return result
