"""Recorded runs by what `steptime predict` says of them: each on a machine like its own, without its profiler, and by one rank.

*device time*: kernels, copies and memsets from models, against the recording. *step, profiled*: the step on such a machine with
host times as recorded (`--platform`, `--profiled`), against the mean of the recorded steps after the first. *without a
profiler*: `predict RUN` against `measured.json` beside the traces. *one rank*: the run by each of its ranks alone, against the
answer by all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

from steptime._api.predict import predict
from steptime._hardware.device import device_named
from steptime._platforms.platform import PlatformParts, platform_parts, shipped_platforms
from steptime._program.load import load
from steptime._program.program import Program, WorkKind
from steptime._program.workload import Workload
from steptime._sim.core.timing import CohortTimeline
from steptime._sim.recorded.replay import MEASURED_FILE, read_measured, step_times_ns
from steptime._sim.recorded.timing import recorded
from steptime._units import NS_PER_MS
from steptime.errors import InputError, SteptimeError
from steptime_lab.measurements.shipped import FOLDER as MEASUREMENTS
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation

DEVICE_TIME, STEP, UNPROFILED, ONE_RANK = "device time", "step, profiled", "without a profiler", "one rank for all"
# Of fabrics that join so many of a device, the first that its name ends in.
_USUAL_FABRICS = ("-nvlink", "-xgmi", "loopback")
_TRACES = ("*.json", "*.json.gz")


def validate_recordings(folder: Path | None = None) -> Validation:
    """The runs under a folder: traces of one run in a folder of their own, or a file; without one, the shipped traces."""
    where = MEASUREMENTS / "traces" if folder is None else folder
    compared: list[Compared] = []
    notes: list[str] = []
    for run in runs_in(where):
        try:
            compared += _compared(run)
        except SteptimeError as error:
            notes.append(f"left out: {error}")
    if not compared:
        raise InputError(f"{where}: no recorded run here that can be predicted; {'; '.join(notes[:1]) or 'give traces'}")
    return Validation.of("recordings", f"recorded runs in {where}", compared, notes=tuple(notes))


def runs_in(folder: Path) -> list[list[Path]]:
    """The runs in a folder: itself if `measured.json` lies in it, else its folders and its own files, ranks together."""
    if not folder.is_dir():
        return [[folder]]
    if (folder / MEASURED_FILE).is_file():
        return [[folder]]
    runs = [[each] for each in sorted(folder.iterdir()) if each.is_dir() and any(each.iterdir())]
    by_name: dict[str, list[Path]] = {}
    for file in sorted({file for pattern in _TRACES for file in folder.glob(pattern)}):
        by_name.setdefault(file.name.partition(".rank")[0], []).append(file)
    return [*runs, *by_name.values()]


def own_platform(workload: Workload) -> PlatformParts:
    """A shipped machine like the one that a run was recorded on: its device, or the share of it, and the usual fabric."""
    program = workload.programs[0]
    limits = device_named(program.device_name)
    if limits is None:
        raise InputError(f"{program.source}: recorded on {program.device_name or 'a device that it does not name'}, not known")
    sms = program.meta.get("device_sms")
    share = 1 if not isinstance(sms, int) else max(1, round(limits.sms.value / sms))
    word = {2: "-half", 4: "-quarter", 8: "-eighth"}.get(share, "") if limits.name == "h200" else ""
    device = limits.name + word
    if workload.world_size == 1:
        return platform_parts(f"1x{device}")
    joined = [each for each in shipped_platforms() if each.device == device and each.ranks >= workload.world_size]
    known = [each for end in _USUAL_FABRICS for each in joined if str(each.fabric).endswith(end)] or joined
    if not known:
        raise InputError(f"{program.source}: no shipped fabric joins {workload.world_size} of {device}")
    return known[0]


def _compared(run: Sequence[Path]) -> Iterator[Compared]:
    workload = load(run)
    name = run[0].name.split(".")[0]
    parts = own_platform(workload)
    answer = predict(workload, parts.name, profiled=True)
    steps_ms = [period / NS_PER_MS for period in step_times_ns(recorded(workload)).values()]
    steps_ms = steps_ms[1:] or steps_ms
    cohorts = sorted(answer.timeline.cohorts, key=lambda each: each.cohort.program.rank)
    took = fmean(_recorded_ms(program) for program in workload.programs)
    if took > 0:
        yield Compared(MeasuredCase(f"{name}: {DEVICE_TIME}", fmean(map(_device_ms, cohorts)), took), (DEVICE_TIME,))
    case = MeasuredCase(f"{name}: {STEP}", answer.step_time_ms, fmean(steps_ms), interval=answer.interval_ms)
    yield Compared(case, (STEP,))
    measured = run[0] / MEASURED_FILE
    whole = predict(workload)
    if measured.is_file():
        times = read_measured(measured)
        case = MeasuredCase(f"{name}: {UNPROFILED}", whole.step_time_ms, median(times), interval=whole.interval_ms)
        yield Compared(case, (UNPROFILED,))
    for program in workload.programs if len(workload.programs) > 1 else ():
        alone = predict(replace(workload, programs=(program,)))
        case = MeasuredCase(f"{name}: rank {program.rank}", alone.step_time_ms, whole.step_time_ms, interval=alone.interval_ms)
        yield Compared(case, (ONE_RANK,))


def _recorded_ms(program: Program) -> float:
    """Kernels, copies and memsets per step, as recorded."""
    works = program.works
    rows = (works.kind != WorkKind.COLLECTIVE) & (works.call >= 0) & np.isin(works.step, program.steps)
    return float((works.end_ns - works.start_ns)[rows].sum()) / NS_PER_MS / max(1, len(program.steps))


def _device_ms(played: CohortTimeline) -> float:
    works = played.cohort.program.works
    rows = (works.kind != WorkKind.COLLECTIVE) & (works.call >= 0)
    spent = (played.work_end_ns - played.work_start_ns)[rows, 0, 0]
    return float(spent.sum()) / NS_PER_MS / max(1, len(played.cohort.program.steps))
