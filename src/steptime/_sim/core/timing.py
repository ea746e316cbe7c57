"""What the simulator needs to know besides the program: how long each piece takes, on which ranks, in which scenarios.

Every array is int64 nanoseconds with three axes: (row of the program's table, rank, scenario). The rank and scenario axes may
have length 1, which means "the same for all". Integer arithmetic keeps the simulation exact: same input, same bytes, and laws
(nothing starts before what it waits for) hold without a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._program.program import Program

Nanoseconds = npt.NDArray[np.int64]


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


@dataclass(frozen=True, eq=False)
class Cohort:
    """Ranks that run the same program: one axis of the simulation."""

    program: Program
    ranks: tuple[int, ...]
    timing: Timing
    # Per rank of the cohort, the members of each collective: index into Program.collectives -> global ranks.
    # None: as in the program.
    members: tuple[tuple[tuple[int, ...], ...], ...] | None = None
