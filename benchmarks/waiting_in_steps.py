"""What collectives do in measured steps: how long ranks wait in them, and how much the kernels beside them slow down.

Prints, per kind and rank count, how far waiting + wait-free time lies from what each rank's NCCL kernel took, and the errors of
the overlap's constants on pairs that they were not fitted to. With `--write` the constants are fitted again and stored.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from steptime._models.collectives.overlap import (
    FILE,
    CollectivePairs,
    KernelPairs,
    Overlap,
    busy_table,
    fit_overlap,
    measured_pairs,
    write_overlaps,
)
from steptime._models.error import gmae
from steptime._models.kernels.rows import FIT, TEST, VALIDATION, split_of
from steptime._platforms.fabric import Fabric
from steptime_lab.measurements.shipped import shipped
from steptime_lab.validate.summary import Summary, Validation
from steptime_lab.validate.waiting import kernels_beside, slowed_beside, step_cases, validation_of, waits

FABRIC = "loopback"
OTHERS = ("loopback-2x2",)
SOURCE = "measured set collectives and profiled steps on parts of an H200, 2026-11-15"
RECIPE = "python benchmarks/waiting_in_steps.py --write"
COLUMNS = (
    "collective", "ranks", "bytes", "splits", "fabric", "share", "mode", "arrival", "beside", "host_threads", "beside_ns",
    "beside_alone_ns", "times_ns", "run",
)  # fmt: skip


def line(name: str, found: Summary) -> str:
    return f"  {name:34s} {found.rows:6d} {found.gmae:7.1%} {found.mape:7.1%} {found.p90:7.1%} {found.bias:+7.1%}"


def print_waiting(found: Validation) -> None:
    print(f"{'':36s} {'rows':>6s} {'GMAE':>7s} {'mean':>7s} {'p90':>7s} {'bias':>7s}")
    for name, part in {"all": found.whole, **found.parts}.items():
        said = [name]
        if (share := found.facts.get("waiting" if name == "all" else f"waiting, {name}")) is not None:
            said.append(f"{share:.0%} of the time is waiting")
        if (apart := found.facts.get(f"ends_apart_us, {name}")) is not None:
            said.append(f"ends {apart:.0f} us apart")
        print("; ".join(said))
        for rule, found_errors in {"wait, estimate x factor": part.summary, **part.baselines}.items():
            print(line(rule, found_errors))


def errors(said: np.ndarray, alone: np.ndarray, beside: np.ndarray) -> str:
    if not len(beside):
        return "   none"
    with_, without = np.abs(said / beside - 1), np.abs(alone / beside - 1)
    return (
        f"{len(beside):5d}  GMAE {gmae(with_.tolist()):6.1%} (as alone {gmae(without.tolist()):6.1%})"
        f"  mean {with_.mean():6.1%} ({without.mean():6.1%})  sum {said.sum() / beside.sum() - 1:+6.1%}"
        f" ({alone.sum() / beside.sum() - 1:+6.1%})"
    )


def main() -> None:
    cases = list(step_cases())
    waited = waits(cases, Fabric.load(FABRIC))
    print_waiting(validation_of(waited))
    by_split = {split: [one for one in waited if split_of(one.collective.case) == split] for split in (FIT, VALIDATION)}
    moving = {split: slowed_beside(some) for split, some in by_split.items()}
    print(f"all_reduces with kernels beside them all the while, in ln of time and its standard error: {moving}")
    in_steps = kernels_beside(cases)
    rows = shipped("collectives").select(COLUMNS).to_pylist()
    pairs = {name: measured_pairs(rows, name) for name in (FABRIC, *OTHERS)}
    kernels = in_steps
    for own, _ in pairs.values():
        # A copy reaches what memory gives without all SMs and says nothing about those that are held.
        kernels = kernels.joined(own.take(own.kernel != "copy"))
    overlap = fit_overlap(kernels.of(FIT), pairs[FABRIC][1].of(FIT), moving=round(moving[FIT][0], 3), source=SOURCE)
    # Other settings of the same wire have less steady rows; the device is the same.
    fitted = {FABRIC: overlap, **{name: replace(overlap, busy=busy_table(pairs[name][1].of(FIT))) for name in OTHERS}}
    if "--write" in sys.argv[1:]:
        write_overlaps(FILE, fitted, RECIPE)
    splits = (FIT, VALIDATION, TEST) if "--test" in sys.argv[1:] else (FIT, VALIDATION)
    for name, overlap in fitted.items():
        print(f"{name}: {overlap.to_dict()}")
        for split in splits:
            print_overlap(overlap, in_steps.of(split), *(some.of(split) for some in pairs[name]), split)


def print_overlap(overlap: Overlap, steps: KernelPairs, kernels: KernelPairs, collectives: CollectivePairs, split: str) -> None:
    said = steps.predicted_ns(overlap)
    for share in (2, 4, 8):
        for dealt in (False, True):
            own = (steps.share == share) & (steps.persistent == dealt)
            what = "persistent" if dealt else "kernels"
            print(f"{split:10s} {what} in steps, 1/{share}: {errors(said[own], steps.alone_ns[own], steps.beside_ns[own])}")
    said = kernels.predicted_ns(overlap)
    for dealt, what in ((True, "product"), (False, "copy")):
        own = kernels.persistent == dealt
        print(f"{split:10s} {what} beside: {errors(said[own], kernels.alone_ns[own], kernels.beside_ns[own])}")
    said = collectives.predicted_ns(overlap)
    for busy, what in ((False, "compute"), (True, "busy host")):
        own = collectives.busy == busy
        print(
            f"{split:10s} collective beside {what}: {errors(said[own], collectives.alone_ns[own], collectives.beside_ns[own])}"
        )


if __name__ == "__main__":
    main()
