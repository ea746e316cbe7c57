"""Step times, memory and lookup statistics, in processes that never profile."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from steptime.measure.group import Group
from steptime.measure.session import Session
from steptime.measure.steps.attempts import Attempts, free, reason_of
from steptime.measure.steps.patience import patience
from steptime.measure.steps.rows import asked, fabric_of, lookups_json
from steptime.measure.steps.timing import FULL, SMALL, Pace, no_collector, time_steps

if TYPE_CHECKING:
    from steptime.workloads.case import Case, Step

_CALIBRATION_S = 60.0


def work(attempts: Attempts, cases: list[Case], plan: Mapping[str, Any]) -> None:
    """Times the cases one after another; a calibration of the same machine comes before them, or before and after them."""
    group, session = attempts.group, attempts.session
    pace = SMALL if plan["small"] else FULL
    with no_collector():
        if plan["calibrate"]:
            calibrate(group, session)
        if cases and not plan["small"] and attempts.time_left():
            # Fresh processes are slower at first, by a few percent to a half (sockets, allocators, clocks): the first case is
            # timed twice, and the first time is forgotten.
            attempts.attempt(cases[0].name, partial(measured, cases[0], group, pace))
        for case in cases:
            if not attempts.time_left():
                break
            row = attempts.attempt(case.name, partial(measured, case, group, pace))
            if row is not None:
                attempts.progress.step()
                if group.rank == 0:
                    session.store.add("steps", row)
        if plan["calibrate"] > 1:
            calibrate(group, session)


def measured(case: Case, group: Group, pace: Pace) -> dict[str, Any]:
    """The row of one case; every rank takes part, rank 0 keeps it."""
    from steptime.workloads.case import build

    reset_peaks(group)
    step = build(case, group, group.device)
    try:
        times_ns, count = time_steps(step, group, pace)
        allocated, reserved = peaks_bytes(step, group)
        lookups = lookups_json(case, step, group)
    finally:
        step.close()
        del step
        free(group)
    return {
        **asked(case, group.share, fabric_of(group.ranks, group.share, group.device_name)),
        "steps_per_time": count,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "lookups": lookups,
        "times_ns": times_ns,
    }


def reset_peaks(group: Group) -> None:
    """Peak memory counts from here."""
    if group.device_name.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats()


def peaks_bytes(step: Step, group: Group) -> tuple[list[int], list[int]]:
    """Peak of allocated and of reserved memory, per rank.

    Cases take table weights and index batches from buffers that they share; what the buffers hold beyond this case
    (`spare_bytes`) is taken off, so that a case costs what it would alone. Empty where no allocator counts.
    """
    if not group.device_name.startswith("cuda"):
        return [], []
    import torch

    spare = step.spare_bytes
    mine = (torch.cuda.max_memory_allocated() - spare, torch.cuda.max_memory_reserved() - spare)
    every = group.gather_rows(mine)
    return [int(allocated) for allocated, _ in every], [int(reserved) for _, reserved in every]


def calibrate(group: Group, session: Session) -> None:
    """A short calibration of host and fabric by the group that times, so that factors can be fitted to this very run."""
    from steptime.measure.calibrate import sample

    with patience(_CALIBRATION_S, "the calibration", session):
        failed = ""
        try:
            sample(group, session)
        except Exception as error:
            failed = reason_of(error)
        if not group.all_agree(not failed):
            session.warn(f"the calibration failed ({failed or 'on another rank'}); the steps are timed without it")
    session.store.flush()
