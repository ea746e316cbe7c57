"""A recommender's config against steps of it that others published, on many machines: MLPerf's DLRM-DCNv2 and its like.

The file is a CSV with a row for each system: `gpu` (as a submission names it), `nodes`, `per_node` (GPUs of a node), `batch`
(global) and `ms_per_step`; `round`, `org` and `system` name it. Each is predicted as a user would: the config on the shipped
platform of such GPUs, with that batch. What has no such platform is refused in a line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy.stats import kendalltau

from steptime import predict
from steptime.errors import InputError, SteptimeError
from steptime_lab.measurements.published_rows import TableRow, made_of, rows_of_csv
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation, said_of_refused

COLUMNS = ("gpu", "nodes", "per_node", "batch", "ms_per_step")
_UNVERIFIED = "predicted times are not verified by MLCommons; measured ones are wall time between evaluations of published logs"
# What names of GPUs hold, the device that it is, and the fabrics of one node and of several. The GPUs of an NVL72 rack are in
# one NVLink domain, whatever is called a node. A name is taken by the first that it holds.
_DEVICES = (
    ("H100-PCIe", "h100-pcie", None, None),
    ("GB200", "gb200", "gb200-nvlink", "gb200-nvlink"),
    ("B300", "b300", "b200-nvlink", "b200-ib400"),
    ("B200", "b200", "b200-nvlink", "b200-ib400"),
    ("H200", "h200", "h200-nvlink", "h200-ib400"),
    ("H100", "h100", "h100-nvlink", "h100-ib400"),
    ("A100", "a100", "a100-nvlink", "a100-ib200"),
)
_RANKED = {"h100": ("h100",), "h200_and_b200": ("h200", "b200")}
"""Devices whose rows are put in order together."""


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """One row."""

    name: str
    device: str
    fabric: str
    ranks: int
    nodes: int
    batch: int
    measured_ms: float


def validate_recommenders(file: Path, config: Path) -> Validation:
    """All rows that can be predicted, by device and nodes, with how well they are ranked."""
    steps, refused = read_steps(file)

    @cache
    def answer(device: str, fabric: str, ranks: int, batch: int) -> tuple[float, tuple[float, float]]:
        platform = f"{ranks}x{fabric}"
        found = predict(config, platform, ranks=ranks, batch=batch, device=device)
        low, high = found.to_dict()["interval_ms"]
        return found.step_time_ms, (low, high)

    compared, devices = [], defaultdict(list)
    for step in steps:
        try:
            predicted_ms, interval = answer(step.device, step.fabric, step.ranks, step.batch)
        except SteptimeError as error:
            refused.append(f"{step.name}: {error}")
            continue
        case = MeasuredCase(step.name, predicted_ms, step.measured_ms, interval=interval)
        nodes = "one node" if step.nodes == 1 or step.device == "gb200" else "several nodes"
        compared.append(Compared(case, (step.device, nodes)))
        devices[step.device].append(case)
    if not compared:
        raise InputError(f"{file}: no row can be predicted; the first: {refused[0]}")
    return Validation.of(
        "recommenders",
        f"steps of {config.stem} that others published, defaults only",
        compared,
        facts=_facts(devices),
        warnings=[_UNVERIFIED, *said_of_refused(refused)],
    )


def _facts(devices: Mapping[str, Sequence[MeasuredCase]]) -> dict[str, float]:
    every = [case for cases in devices.values() for case in cases]
    facts = {"median_error": float(np.median([abs(case.error) for case in every]))}
    for name, together in _RANKED.items():
        cases = [case for device in together for case in devices.get(device, ())]
        agreement = rank_agreement(cases)
        if agreement is not None:
            facts[f"kendall_tau_{name}"] = agreement
    return facts


def rank_agreement(cases: Sequence[MeasuredCase]) -> float | None:
    """Kendall's tau (b) of systems: those of one prediction are one, whose time is the median of what was measured.

    None where there is nothing to put in order.
    """
    systems: dict[float, list[float]] = defaultdict(list)
    for case in cases:
        systems[case.predicted].append(case.measured)
    medians = [float(np.median(times)) for times in systems.values()]
    return float(kendalltau(list(systems), medians).statistic) if len(set(medians)) > 1 else None


def read_steps(file: Path) -> tuple[list[PublishedStep], list[str]]:
    """The rows that name a known GPU, and a line for each other."""
    return made_of(rows_of_csv(file, "steps", COLUMNS), _step)


def _step(row: TableRow) -> PublishedStep:
    name = " ".join(row.text(key) for key in ("round", "org", "system")).strip() or f"line {row.line}"
    gpu = row.text("gpu")
    nodes, per_node, batch = (row.whole(key) for key in ("nodes", "per_node", "batch"))
    measured_ms = row.number("ms_per_step")
    known = next((known for known in _DEVICES if known[0].lower() in gpu.lower()), None)
    if known is None:
        raise InputError(f"no platform has {gpu[:40]!r}")
    _, device, one, several = known
    fabric = one if nodes == 1 else several
    if fabric is None:
        raise InputError(f"nobody knows how GPUs {gpu[:40]!r} are connected")
    return PublishedStep(f"{name}, batch {batch}", device, fabric, nodes * per_node, nodes, batch, measured_ms)
