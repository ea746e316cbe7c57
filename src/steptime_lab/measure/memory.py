"""`measure memory`: peak memory of the step cases, each with a process that holds nothing of the cases before it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from steptime._calibrate.collectives.cases import fabric_of
from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.conditions import Smi, nvidia_smi
from steptime._calibrate.harness.group import Group, no_collector
from steptime._calibrate.harness.ranks import QUIET, Layout
from steptime._calibrate.harness.session import Session
from steptime._measurements.store import key_of
from steptime._units import MIB
from steptime_lab.measure.restarts import CASE_S, Attempts, CaseGroup, CrashMarker, SharedMps, forget, free
from steptime_lab.measure.steps import cases_of
from steptime_lab.measure.steps.timed import reset_peaks
from steptime_lab.measurements.sets import MEMORY

if TYPE_CHECKING:
    from steptime_lab.workloads.case import Case, Step

# Steps with the ranks waiting for one another after each, then without: more than there are input batches.
WAITING, RUNNING = 4, 8
# NCCL's watchdog lets go of what finished collectives moved every 100 ms (kWatchdogThreadSleepMillis in
# torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp).
_WATCHDOG_S = 0.25
# Between allocated and reserved once a case is built, in new processes: 54 MiB at most. More is kept alive by what was left.
_PINNED_BYTES = 64 * MIB


def run(session: Session, options: Options) -> None:
    """One group per number of ranks goes through its cases; one that dies is started again behind its case."""
    with SharedMps(session, options) as daemon:
        for ranks in sorted(set(options.ranks), reverse=True):
            _run_group(session, options, ranks, daemon)


def names(options: Options) -> list[str]:
    """What `--only` may name: workloads, and the cases of the ranks that are asked."""
    from steptime_lab.workloads.case import workloads

    return [*workloads(), *(case.name for ranks in options.ranks for case in cases_of(ranks, small=options.small, only=()))]


def _run_group(session: Session, options: Options, ranks: int, daemon: SharedMps) -> None:
    def plan(waiting: Sequence[str], _start: int) -> dict[str, Any]:
        return session.to_plan(cases=waiting, small=options.small, only=list(options.only), phase=marker.group)

    marker, layout = CrashMarker(session.folder, f"memory{ranks}"), Layout(ranks, options.share_gpu, options.device)
    group = CaseGroup(session, __name__, layout, daemon, marker, QUIET, grace_s=2 * CASE_S)
    group.run(session.budget, lambda: due(session, options, ranks), plan, skipped=set())


def due(session: Session, options: Options, ranks: int) -> list[str]:
    """Names of the cases of which a rank has no row."""
    share = ranks if options.share_gpu else 1
    fabric = fabric_of(ranks, share, options.device)
    done = session.store.done(MEMORY)
    cases = cases_of(ranks, small=options.small, only=options.only)
    return [case.name for case in cases if not all(done[_key(case.name, share, fabric, rank)] for rank in range(ranks))]


def _key(name: str, share: int, fabric: str, rank: int) -> str:
    return key_of(MEMORY, {"name": name, "share": share, "fabric": fabric, "rank": rank})


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """One rank's part: every rank has a row of its own."""
    wanted = set(plan["cases"])
    cases = [case for case in cases_of(group.ranks, small=plan["small"], only=plan["only"]) if case.name in wanted]
    attempts = Attempts(group, session, CrashMarker(session.folder, plan["phase"]), session.progress("memory", len(cases)))
    with no_collector():
        for case in cases:
            if not attempts.time_left():
                break
            row = attempts.attempt(case.name, partial(measured, case, group))
            if row is not None:
                session.store.add(MEMORY, row)
                attempts.progress.step()
    attempts.close()


def measured(case: Case, group: Group, smi: Smi = nvidia_smi) -> dict[str, Any]:
    """The row of this rank."""
    from steptime_lab.workloads.case import build

    begun = time.monotonic()
    left = let_go(group)
    group.barrier()
    step = build(case, group, group.device)
    try:
        _settle(step, group)
        group.barrier()
        built, reserved = _allocator_bytes(group)
        peaks = _peaks(step, group)
        outside = _outside(group, smi)
        group.barrier()
    finally:
        step.close()
    pinned = left > 0 and reserved - built > _PINNED_BYTES
    return {
        "workload": case.workload,
        "name": case.name,
        "ranks": case.ranks,
        "rank": group.rank,
        "share": group.share,
        "fabric": fabric_of(group.ranks, group.share, group.device_name),
        "steps": WAITING + RUNNING,
        "allocated_bytes": max(allocated for allocated, _ in peaks),
        "reserved_bytes": None if pinned else max(reserved for _, reserved in peaks),
        "built_bytes": built,
        "step_allocated_bytes": [allocated for allocated, _ in peaks],
        "left_bytes": left,
        "outside_bytes": outside,
        "times_ns": [1e9 * (time.monotonic() - begun)],
    }


def let_go(group: Group) -> int:
    """Lets go of everything that cases leave for later ones; bytes that are still allocated."""
    from steptime_lab.workloads.shared_buffers import renewed_buffers

    forget()
    renewed_buffers(group.device)
    gc.collect()
    group.synchronize()
    if not _counted(group):
        return 0
    import torch

    time.sleep(_WATCHDOG_S if group.ranks > 1 else 0.0)
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated())


def _settle(step: Step, group: Group) -> None:
    """Nothing of how a case was made stays."""
    from steptime_lab.workloads.networks.dlrm import DlrmStep
    from steptime_lab.workloads.shared_buffers import shared_buffers

    if isinstance(step, DlrmStep):
        shared_buffers(group.device).drop_bags()
        step.tables.renew_inputs()
    free(group)


def _peaks(step: Step, group: Group) -> Sequence[tuple[int, int]]:
    """Most allocated and reserved in each of the first steps, then in all that follow."""
    results = []
    for count in (*(1 for _ in range(WAITING)), RUNNING):
        if count == RUNNING and _counted(group):
            time.sleep(_WATCHDOG_S)
        reset_peaks(group)
        for _ in range(count):
            step()
        group.barrier()
        results.append(_allocator_bytes(group, "max_memory"))
    return results


def _counted(group: Group) -> bool:
    """Whether there is an allocator that counts."""
    return group.device_name.startswith("cuda")


def _allocator_bytes(group: Group, what: str = "memory") -> tuple[int, int]:
    """Allocated and reserved, now or (`max_memory`) at most since the peaks were reset; 0 where no allocator counts."""
    if not _counted(group):
        return 0, 0
    import torch

    return getattr(torch.cuda, f"{what}_allocated")(), getattr(torch.cuda, f"{what}_reserved")()


def _outside(group: Group, smi: Smi) -> int | None:
    """What this process holds of the device besides its allocator; None where nvidia-smi does not say."""
    if not _counted(group):
        return None
    for line in smi(["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]).splitlines():
        pid, _, used = line.partition(",")
        if pid.strip() == str(os.getpid()) and used.strip().isdigit():
            return int(used) * MIB - _allocator_bytes(group)[1]
    return None
