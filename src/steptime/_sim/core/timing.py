"""What the simulator takes and gives: how long each piece of a program takes, on which ranks, in which scenarios; and when.

Every array is int64 nanoseconds with three axes: (row of the program's table, rank, scenario). The rank and scenario axes may
have length 1, which means "the same for all". Integer arithmetic keeps the simulation exact: same input, same bytes, and laws
(nothing starts before what it waits for) hold without a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from steptime._program.program import Program
from steptime._program.queues import QUEUE_DEPTH

Nanoseconds = npt.NDArray[np.int64]

PER_CALL = ("gap_ns", "call_ns", "return_ns")
PER_WORK = ("latency_ns", "spacing_ns", "release_ns", "duration_ns", "absent_ns")
"""Arrays of a `Timing` with a row per call and with a row per work."""


@dataclass(frozen=True, eq=False)
class Timing:
    """Durations of one program. Blocking and waiting are not in here: the simulator finds them."""

    gap_ns: Nanoseconds  # per call: host work between the previous call (or the hand-over) and this one
    call_ns: Nanoseconds  # per call: the call's own host cost when nothing blocks it
    return_ns: Nanoseconds  # per call: from the end of what a synchronisation waited for to its return
    # Per work: from the end of its launching call to its earliest start; may be negative. For the work of a BLOCKING_COPY,
    # whose call ends after the copy: from when the call has its place in the launch queue (its start, if nothing blocks).
    latency_ns: Nanoseconds
    spacing_ns: Nanoseconds  # per work: least distance after the end of the previous work of the stream; may be negative
    release_ns: Nanoseconds  # per work: from the end of work its stream was told to await to its earliest start
    duration_ns: Nanoseconds  # per work: execution; for a collective, from the last arrival to this rank's end
    waits: npt.NDArray[np.bool_]  # per work: whether a collective's end waits for its peers (1-D)
    absent_ns: Nanoseconds  # per work: when the peers without a program arrive at a collective, or LONG_AGO
    thread_start_ns: Nanoseconds  # per thread: its clock when the window opens
    stream_start_ns: Nanoseconds  # per stream: when it has finished what was enqueued before the window

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if name != "waits" and (values.ndim != 3 or values.dtype != np.int64):
                raise ValueError(f"Timing.{name}: {values.dtype} {values.shape}, expected int64 with 3 axes")

    def of_ranks(self, low: int, high: int) -> Timing:
        """Of the ranks `low` to `high` of a cohort."""
        changes = {}
        for field in fields(self):
            values = getattr(self, field.name)
            narrow = field.name == "waits" or values.shape[1] == 1
            changes[field.name] = values if narrow else values[:, low:high]
        return Timing(**changes)


@dataclass(frozen=True, eq=False)
class Cohort:
    """Ranks that run the same program: one axis of the simulation."""

    program: Program
    ranks: tuple[int, ...]
    timing: Timing
    # Per rank of the cohort, the members of each collective: index into Program.collectives -> global ranks.
    # None: as in the program.
    members: tuple[tuple[tuple[int, ...], ...], ...] | None = None


@dataclass(frozen=True, eq=False)
class CohortTimeline:
    """Start and end of every call and every work of one cohort, as (row, rank, scenario)."""

    cohort: Cohort
    call_start_ns: Nanoseconds  # the host enters the call
    call_end_ns: Nanoseconds  # the host leaves it, blocking included
    work_start_ns: Nanoseconds  # for a collective: this rank's arrival
    work_end_ns: Nanoseconds
    moving_ns: Nanoseconds  # per work: for a collective, the last arrival (waiting is moving - start); else its start

    def of_all(self, cohort: Cohort) -> CohortTimeline:
        """Of the ranks of a cohort, all of which do what the one here does."""
        arrays = {name: values for name, values in vars(self).items() if name != "cohort"}
        shapes = {name: (values.shape[0], len(cohort.ranks), values.shape[2]) for name, values in arrays.items()}
        return CohortTimeline(cohort, **{name: np.broadcast_to(values, shapes[name]) for name, values in arrays.items()})


@dataclass(frozen=True, eq=False)
class Timeline:
    """The cohorts' timelines. `end_ns` is the end of everything, per scenario."""

    cohorts: tuple[CohortTimeline, ...]
    end_ns: Nanoseconds  # (scenario,)
    queue_depth: int | None = QUEUE_DEPTH  # what it was played with
