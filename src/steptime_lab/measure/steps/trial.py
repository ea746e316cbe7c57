"""`Trial`: one case on its way to a row: what it takes by itself, then a repeat in every round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from steptime._calibrate.collectives.fabrics import fabric_of
from steptime._calibrate.harness.group import Group
from steptime_lab.measure.attempts import forget, free
from steptime_lab.measure.steps.rows import asked, lookups_json
from steptime_lab.measure.steps.state import host_ns
from steptime_lab.measure.steps.timing import Pace, steps_for, time_once, warm_up

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
