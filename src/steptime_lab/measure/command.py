"""`steptime measure JOB ...`: which jobs there are, and what is done with measurements once they are there."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._calibrate.harness.command import CALIBRATE, Job, run_job
from steptime.errors import InputError

_MEASURE = "steptime_lab.measure"
JOBS = {
    job.name: job
    for job in (
        Job("kernels", "device time of every kernel an op launches", f"{_MEASURE}.kernels", (1,), 10.0),
        Job("lookups", "embedding lookups, forward and backward with update", f"{_MEASURE}.lookups", (1,), 5.0),
        Job("host", "what the CPU spends per op, with and without a profiler", f"{_MEASURE}.host", (1,), 3.0),
        Job("collectives", "collectives: even, uneven, skewed, beside compute", f"{_MEASURE}.collectives", (2, 4, 8), 5.0),
        Job("steps", "real training steps, their traces and their memory", f"{_MEASURE}.steps", (4, 2, 1), 10.0),
        Job("sharding", "one task under several plans, interleaved", f"{_MEASURE}.sharding", (4,), 8.0, takes_plans=True),
        Job("memory", "peak memory of the steps' cases, one at a time", f"{_MEASURE}.memory", (4, 2, 1), 5.0),
        Job("power", "power and clock of loops of kernels, times at other clocks", f"{_MEASURE}.power", (1,), 9.0),
        Job("zoo", "step, power, memory and kernels of many architectures", f"{_MEASURE}.zoo", (1,), 9.5, takes_seconds=True),
        Job("compiled", "training steps eager and with torch.compile", f"{_MEASURE}.compiled", (1, 2, 4), 7.0),
        Job("check", "everything small, and checks that it is right", f"{_MEASURE}.check", (1,), 10.0),
        CALIBRATE,
    )
}
# What is done with measurements afterwards; needs no GPU.
AFTERWARDS = ("noise", "merge")


def main(arguments: Sequence[str]) -> int:
    """Runs one job; the first argument names it."""
    name = arguments[0] if arguments else ""
    if name in AFTERWARDS:
        from steptime_lab.measure import tables

        return int(getattr(tables, name)(arguments[1:]))
    if name in JOBS:
        return run_job(JOBS[name], arguments[1:])
    if name in ("-h", "--help"):
        print("usage: steptime measure JOB -o DIR [options]; steptime measure JOB --help says which\n")
        print("\n".join(f"  {job.name:12s} {job.about}" for job in JOBS.values() if job is not CALIBRATE))
        print("  noise        how far repeats lie apart, in these measurements or in the shipped ones")
        print("  merge        the measurements of several folders in one")
        return 0
    known = ", ".join((*(name for name in JOBS if name != CALIBRATE.name), *AFTERWARDS))
    raise InputError(f"unknown job {name!r}; choose one of {known}" if name else f"no job given; choose one of {known}")
