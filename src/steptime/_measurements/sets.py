"""Measured sets: which columns their rows have and which of them say what was asked; those that a calibration measures."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pyarrow as pa

from steptime._measurements.recipe import Recipe

# A name that repeats from row to row.
NAME = pa.dictionary(pa.int32(), pa.string())

# The columns a recipe becomes; strings are dictionaries, so repeating them in every row costs next to nothing.
_RECIPE_TYPES = {"str": NAME, "int": pa.int32(), "float": pa.float32()}
RECIPE_COLUMNS: tuple[pa.Field, ...] = tuple(pa.field(each.name, _RECIPE_TYPES[str(each.type)]) for each in fields(Recipe))

# What every row of every set has besides its recipe.
COMMON_COLUMNS: tuple[pa.Field, ...] = (
    pa.field("key", pa.string()),  # digest of the set's case columns: the same question has the same key on every machine
    pa.field("process", NAME),  # repeats of one key in different processes differ here; `run`-`process` is unique
    pa.field("rank", pa.int16()),  # which rank of `ranks` this row's times were taken on
    pa.field("sm_clock_mhz", pa.float32()),  # while it was measured; null where nobody looked
    pa.field("time_ns", pa.float64()),  # the median of `times_ns`
    pa.field("spread", pa.float32()),  # (90th - 10th percentile) / median of `times_ns`
    pa.field("times_ns", pa.list_(pa.float64())),  # one per repeat, in order
)


@dataclass(frozen=True)
class MeasuredSet:
    """One table of measurements. `case` names the columns that say what was asked; their digest is a row's key."""

    name: str
    columns: tuple[pa.Field, ...]
    case: tuple[str, ...]
    repeats: tuple[str, ...] = ()  # columns of the case that only tell repeats of one question apart
    optional: tuple[str, ...] = ()  # columns of the case that are null where they do not apply
    added: tuple[str, ...] = ()  # columns that older parts lack and rows may leave out: there they are null
    slopes: bool = False  # whether `times_ns` are differences of times, which come out below 0 now and then
    timed: bool = True  # whether `times_ns` are what is asked

    @property
    def required(self) -> tuple[str, ...]:
        """Columns that have a value in every row: what was asked, the times, and the recipe."""
        asked = (name for name in self.case if name not in self.optional and name not in self.added)
        return ("times_ns", *asked, *(column.name for column in RECIPE_COLUMNS))

    @property
    def schema(self) -> pa.Schema:
        """All columns, in the order they are stored."""
        return pa.schema([*COMMON_COLUMNS, *self.columns, *RECIPE_COLUMNS])


# Collectives: alone, uneven, skewed, beside a compute kernel, with idle and busy host threads.
# A row: one collective on one fabric, wait-free.
COLLECTIVES = MeasuredSet(
    name="collectives",
    columns=(
        # all_reduce, all_to_all, all_gather, reduce_scatter, broadcast, reduce, barrier, send_recv (ranks 0 and 1 exchange),
        # send_recv_ring (every rank sends to the next and receives from the one before)
        pa.field("collective", NAME),
        pa.field("ranks", pa.int16()),
        pa.field("fabric", NAME),  # a name for the settings below, e.g. loopback, loopback-2x2, default
        pa.field("settings", NAME),  # NCCL environment that makes the fabric, JSON
        pa.field("dtype", NAME),
        # As nccl-tests counts: the larger of a rank's two buffers (all_gather: received, reduce_scatter: sent), its own share
        # included; uneven all_to_all: the largest send buffer of a rank; send_recv: the message in one direction.
        pa.field("bytes", pa.int64()),
        # Uneven all_to_all: the matrix of sent bytes, row by row (row: sender, column: receiver); else null.
        pa.field("splits", pa.list_(pa.int64())),
        pa.field("share", pa.int16()),  # parts of one GPU; 1: a GPU per rank
        # stream: the mean of `calls` queued ones on the device, after one that waited for everybody.
        # single: one, host to host, from the last rank's call until the last rank's device is done.
        pa.field("mode", NAME),
        pa.field("calls", pa.int16()),  # how many back to back in one repeat
        pa.field("beside", NAME),  # none | gemm | copy: what ran on another stream of every rank meanwhile
        pa.field("host_threads", NAME),  # idle | busy: a thread of each rank computing on the rank's own cores
        pa.field("arrival", NAME),  # together | skewed
        pa.field("skew_ns", pa.float64()),  # how much later than the others one rank was asked to arrive; null where together
        pa.field("late_rank", pa.int16()),  # which one; null where together
        pa.field("waiting_ns", pa.float64()),  # median over repeats of the longest wait of a rank; null where mode is stream
        pa.field("beside_ns", pa.float64()),  # mean time of the kernels that ran wholly beside it; null where none did
        pa.field("beside_alone_ns", pa.float64()),  # how long that kernel takes without the collective, all ranks running it
        pa.field("algorithm", NAME),  # from NCCL's debug output; empty where it did not say, as for send and receive
        pa.field("protocol", NAME),
        pa.field("channels", pa.int16()),  # null where NCCL did not say
        # What an all_reduce of 1 MiB took in the block of cases in which each of `times_ns` was taken. Fabrics drift.
        pa.field("reference_ns", pa.list_(pa.float64())),
    ),
    case=("collective", "ranks", "fabric", "settings", "dtype", "bytes", "splits", "share", "mode", "beside", "host_threads",
          "arrival", "skew_ns", "late_rank"),
    optional=("splits", "skew_ns", "late_rank"),
    added=("reference_ns",),
)  # fmt: skip


# What the CPU spends: per op, per launch, between ops, with and without a profiler.
# A row: one kind of host cost of one op or one mechanism.
HOST = MeasuredSet(
    name="host",
    columns=(
        pa.field("kind", NAME),  # op | op_python | op_autograd | backward_node | launch | ... (all in measure.host.KINDS)
        pa.field("op", NAME),  # the op with its overload, the functional form (linear) or the mechanism (adam_foreach)
        pa.field("call", pa.string()),  # JSON of the call that was run, sizes mostly shrunk; empty where there is none
        pa.field("source", NAME),  # the workload that issues it, sweep, or calibration
        pa.field("phase", NAME),  # forward | backward | optimizer | other
        pa.field("profiler", NAME),  # off | cuda | cpu_cuda | execution_trace | after: a profiler was on before, and is off
        pa.field("launches", pa.float32()),  # kernels, copies and memsets per call; known where `profiler` is cuda, else null
        pa.field("cores", pa.int16()),  # how many cores the process was pinned to
        pa.field("share", pa.int16()),
        # What a fixed call took around each of `times_ns`: one that stays on the CPU, one that launches. Hosts change speed.
        pa.field("reference_cpu_ns", pa.list_(pa.float64())),
        pa.field("reference_launch_ns", pa.list_(pa.float64())),
    ),
    case=("kind", "op", "call", "phase", "profiler", "cores", "share"),
    slopes=True,
    added=("reference_cpu_ns", "reference_launch_ns"),
)
