"""Step times, memory and lookup statistics, in processes that never profile.

Off the GPU-bound regime times drift by 5 % and more within seconds. So cases are timed several at a time, in rounds: each
once in every round, in random order, and the repeats of a case lie seconds apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from steptime._calibrate.collectives.cases import fabric_of
from steptime._calibrate.harness.group import Group, no_collector
from steptime._calibrate.harness.session import Session, watchdog
from steptime_lab.measure.restarts import Attempts, forget, free, reason_of
from steptime_lab.measure.steps.timing import (
    FULL,
    SMALL,
    Pace,
    asked,
    host_ns,
    lookups_json,
    steps_for,
    time_once,
    warm_up,
    wire_ns,
)
from steptime_lab.measurements.sets import STEPS

if TYPE_CHECKING:
    from steptime_lab.workloads.case import Case, Step


@dataclass
class Trial:
    """A case that ran by itself, so that `columns` hold its memory and lookups; repeats are added round by round."""

    case: Case
    step_s: float
    columns: dict[str, Any]
    step: Step | None = None  # while it is built
    kept: bool = False  # it stayed built after it ran by itself
    failed: bool = False
    times_ns: list[float] = field(default_factory=list)
    host_probe_ns: list[float] = field(default_factory=list)
    wire_probe_ns: list[float] = field(default_factory=list)

    def keep(self, found: tuple[float, float] | None, wire_probe_ns: float | None) -> None:
        """Adds a repeat, the host's state before it and the wire's before its round; None: it failed."""
        if found is None:
            self.failed = True
            return
        self.times_ns.append(found[0])
        self.host_probe_ns.append(found[1])
        if wire_probe_ns is not None:
            self.wire_probe_ns.append(wire_probe_ns)

    def row(self, pace: Pace) -> dict[str, Any]:
        """What is stored."""
        return {
            **self.columns,
            "steps_per_time": pace.steps_of(self.step_s),
            "times_ns": self.times_ns,
            "host_probe_ns": self.host_probe_ns,
            "wire_probe_ns": self.wire_probe_ns or None,
        }

    def close(self) -> None:
        """Lets go of the step, if there is one."""
        if self.step is not None:
            self.step.close()
            self.step = None


def built(case: Case, group: Group) -> Step:
    """The step of this rank."""
    from steptime_lab.workloads.case import build

    return build(case, group, group.device)


def tried_alone(case: Case, group: Group, pace: Pace, *, settle_s: float, keep: bool) -> Trial:
    """Memory, lookups and about the step time of a case while no other is built; `keep`: it stays built."""
    # Dense parts that earlier cases left would count in this one's memory.
    forget()
    free(group)
    reset_peaks(group)
    step = built(case, group)
    try:
        step_s = warm_up(step, group, pace)
        allocated, reserved = peaks_bytes(step, group)
        for _ in range(steps_for(settle_s, step_s, 0)):
            step()
        columns = {
            **asked(case, group.share, fabric_of(group.ranks, group.share, group.device_name)),
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "lookups": lookups_json(case, step, group),
        }
        trial = Trial(case, step_s, columns, step, kept=keep)
    except BaseException:
        step.close()
        raise
    del step
    if not keep:
        trial.close()
        free(group)
    return trial


def repeated(trial: Trial, group: Group, pace: Pace, turn: int, *, hot: bool) -> tuple[float, float]:
    """One repeat: nanoseconds of a step, and the state of the host right before."""
    assert trial.step is not None
    for _ in range(pace.warm_of(trial.step_s, turn, hot=hot)):
        trial.step()
    group.barrier()
    host = host_ns(group)
    return 1e9 * time_once(trial.step, group, pace.steps_of(trial.step_s)), host


def reset_peaks(group: Group) -> None:
    """Peak memory counts from here."""
    if group.device_name.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats()


def peaks_bytes(step: Step, group: Group) -> tuple[list[int], list[int]]:
    """Peak of allocated and of reserved memory, per rank.

    Cases take table weights and index batches from buffers that they share; what the buffers hold beyond this case
    (`spare_bytes`) is taken off, so that a case costs about what it would alone: blocks are larger than what they hold, which
    leaves up to 145 MiB of earlier cases (`measure memory` lets go of them first). Empty where no allocator counts.
    """
    if not group.device_name.startswith("cuda"):
        return [], []
    import torch

    spare = step.spare_bytes
    mine = (torch.cuda.max_memory_allocated() - spare, torch.cuda.max_memory_reserved() - spare)
    every = group.gather_rows(mine)
    return [int(allocated) for allocated, _ in every], [int(reserved) for _, reserved in every]


# How many are timed together: cases with tables share these; of other models each takes all its memory for itself, and on
# several ranks their steps are long and bound by GPU or wire.
_WITH_TABLES, _WITHOUT_TABLES = 12, 2
# A case that is built beside others leaves so much of the device's memory free: activations come and go.
_ROOM = 0.15
# Where time runs out, so many rounds are enough.
_LEAST_ROUNDS = 3
# What a case takes before its step time is known: with tables; without, and more for each rank on its GPU (an H200).
_TABLES_S, _DENSE_S, _DENSE_RANK_S = 1.0, 1.5, 1.0
# Building it again, beside others, takes about this part of that.
_AGAIN = 0.3
# A calibration takes no longer than the first, as a rule, and hangs after the second.
_CALIBRATION_S, _CALIBRATION_HANGS_S = 5.0, 60.0
_PROBE_S = 30.0


def work(attempts: Attempts, cases: list[Case], plan: Mapping[str, Any]) -> None:
    """Times the cases; a calibration of the same machine comes before them, or before and after them."""
    group, session = attempts.group, attempts.session
    pace = SMALL if plan["small"] else FULL
    with no_collector():
        if plan["calibrate"]:
            calibrate(group, session)
        attempts.reserve_s = _CALIBRATION_S if plan["calibrate"] > 1 else 0.0
        settled = False
        for together in chunks(cases, group.ranks):
            trials, enough = _tried(attempts, together, pace, settled=settled)
            settled = settled or bool(trials)
            while trials:
                trials = _timed(attempts, trials, pace, (plan["seed"], plan["turn"]))
            if not enough:
                break
        if plan["calibrate"] > 1:
            calibrate(group, session)


def chunks(cases: Sequence[Case], ranks: int) -> Iterator[list[Case]]:
    """Neighbours that are timed together."""
    waiting: list[Case] = []
    for case in cases:
        if waiting and ((case.plan is None) != (waiting[0].plan is None) or len(waiting) == _most(waiting[0], ranks)):
            yield waiting
            waiting = []
        waiting.append(case)
    if waiting:
        yield waiting


def _most(case: Case, ranks: int) -> int:
    if case.plan is not None:
        return _WITH_TABLES
    return _WITHOUT_TABLES if ranks == 1 else 1


def order_of(names: Sequence[str], turn: int, *seeds: int) -> list[int]:
    """In which order a round times its cases: drawn anew for every round, the same on every rank."""
    drawn = np.random.default_rng([*seeds, zlib.crc32("+".join(names).encode()), turn])
    return [int(at) for at in drawn.permutation(len(names))]


def _tried(attempts: Attempts, cases: Sequence[Case], pace: Pace, *, settled: bool) -> tuple[list[Trial], bool]:
    """Each case by itself: as many as there is time for to go through all their rounds; whether that is all of them."""
    group, alone = attempts.group, len(cases) == 1
    trials: list[Trial] = []
    promised_s = 0.0
    for case in cases:
        if not attempts.time_left(promised_s + _before_s(case, group)):
            return trials, False
        settle_s = 0.0 if settled or trials else pace.settle_s
        trial = attempts.attempt(case.name, partial(tried_alone, case, group, pace, settle_s=settle_s, keep=alone))
        if trial is None:
            continue
        promised_s += pace.cost_s(trial.step_s, hot=alone) + (0.0 if alone else _AGAIN * _before_s(case, group))
        if not attempts.time_left(promised_s):
            trial.close()
            free(group)
            return trials, False
        trials.append(trial)
    return trials, True


def _before_s(case: Case, group: Group) -> float:
    """About what a case takes before its rounds."""
    return _TABLES_S if case.plan is not None else _DENSE_S + _DENSE_RANK_S * group.share


def _timed(attempts: Attempts, trials: Sequence[Trial], pace: Pace, seeds: Sequence[int]) -> list[Trial]:
    """Rows of the trials that fit into memory together; those that do not are left for the next time."""
    group, store = attempts.group, attempts.session.store
    held, left = _held(attempts, trials)
    _rounds(attempts, held, pace, seeds)
    for trial in held:
        trial.close()
        if trial.failed:
            continue
        attempts.progress.step()
        if group.rank == 0:
            store.add(STEPS, trial.row(pace))
    store.flush()
    free(group)
    return left


def _held(attempts: Attempts, trials: Sequence[Trial]) -> tuple[list[Trial], list[Trial]]:
    """Builds the trials beside one another; those that are built, and those for which there was no room."""
    group = attempts.group
    held: list[Trial] = []
    for at, trial in enumerate(trials):
        if trial.step is None:
            if held and not _room(group):
                return held, list(trials[at:])
            # It ran alone: what fails beside others has no room.
            trial.step = attempts.attempt(trial.case.name, partial(built, trial.case, group), count=not held)
            if trial.step is None and held:
                return held, list(trials[at:])
        if trial.step is not None:
            held.append(trial)
    return held, []


def _room(group: Group) -> bool:
    """Whether another case may be built; every rank hears the same."""
    if not group.device_name.startswith("cuda"):
        return True
    import torch

    free_bytes, all_bytes = torch.cuda.mem_get_info()
    return min(group.gather(free_bytes / all_bytes)) > _ROOM


def _rounds(attempts: Attempts, held: Sequence[Trial], pace: Pace, seeds: Sequence[int]) -> None:
    """Every case once in every round; one that fails takes no further part."""
    group, alone = attempts.group, len(held) == 1
    names = [trial.case.name for trial in held]
    for turn in range(max((pace.rounds_of(trial.step_s) for trial in held), default=0)):
        if turn >= _LEAST_ROUNDS and not attempts.time_left(0.0):
            return
        with watchdog(_PROBE_S, "the all_reduce before a round", attempts.session):
            wire = wire_ns(group)
        for at in order_of(names, turn, *seeds):
            trial = held[at]
            if trial.failed or turn >= pace.rounds_of(trial.step_s):
                continue
            hot = alone and (turn > 0 or trial.kept)
            result = attempts.attempt(names[at], partial(repeated, trial, group, pace, turn, hot=hot))
            trial.keep(result, wire)


def calibrate(group: Group, session: Session) -> None:
    """A short calibration of host and fabric by the group that times, so that factors can be fitted to this very run."""
    from steptime._calibrate.calibrate import sample

    with watchdog(_CALIBRATION_HANGS_S, "the calibration", session):
        failed = ""
        try:
            sample(group, session)
        except Exception as error:
            failed = reason_of(error)
        if not group.all_agree(not failed):
            session.warn(f"the calibration failed ({failed or 'on another rank'}); the steps are timed without it")
    session.store.flush()
