"""The measured sets: which columns their rows have and which of them say what was asked."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pyarrow as pa

from steptime._measurements.recipe import Recipe
from steptime.errors import InputError

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
    timed: bool = True  # whether `times_ns` are what is asked

    @property
    def required(self) -> tuple[str, ...]:
        """Columns that have a value in every row: what was asked, and the times."""
        return ("times_ns", *(name for name in self.case if name not in self.optional and name not in self.added))

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
    added=("reference_cpu_ns", "reference_launch_ns"),
)


# Device time of every kernel an op launches.
# A row: one op call in one cache state on one device or part of it.
KERNELS = MeasuredSet(
    name="kernels",
    columns=(
        pa.field("family", NAME),
        pa.field("op", NAME),
        pa.field("call", pa.string()),  # JSON of `models.kernels.call.Call`: enough to run it again
        pa.field("cache", NAME),  # cold | warm: whether the call's `written` arguments had just been written
        pa.field("tf32", pa.bool_()),  # whether matrix products and convolutions of fp32 may use TF32
        pa.field("benchmark", pa.bool_()),  # whether cuDNN tried its algorithms and kept the fastest
        pa.field("source", NAME),  # sweep | the workload whose step has this very call
        pa.field("share", pa.int16()),  # the device was one of so many equal parts (1: a whole GPU)
        pa.field("others", NAME),  # what the other parts did meanwhile: none | idle | same | streaming
        pa.field("kernel_names", pa.list_(NAME)),  # in launch order
        pa.field("kernel_ns", pa.list_(pa.float64())),  # median per kernel; `time_ns` is the median of their sum
        pa.field("span_ns", pa.float64()),  # median from the first kernel's start to the last one's end
        pa.field("event_ns", pa.float64()),  # the same call timed with CUDA events, where it was in the sample; else null
    ),
    case=("call", "cache", "tf32", "benchmark", "share", "others"),
)


# Embedding lookups, forward and backward with update.
# A row: one lookup of one or many tables, in one direction.
LOOKUPS = MeasuredSet(
    name="lookups",
    columns=(
        # embedding_bag (sparse gradients) | table_batched | embedding_bag_dense | embedding_dense | embedding_sparse
        pa.field("implementation", NAME),
        pa.field("direction", NAME),  # forward | backward (with the optimiser's update)
        pa.field("optimizer", NAME),  # none (forward) | sgd | adagrad (PyTorch's, per element) | rowwise_adagrad
        pa.field("dtype", NAME),  # of the rows
        pa.field("weighted", pa.bool_()),  # per-sample weights
        pa.field("batch", pa.int32()),
        pa.field("tables", pa.int16()),
        pa.field("series", NAME),  # cases of one series differ in nothing but which rows are looked up; null: in none
        pa.field("rows", pa.list_(pa.int64())),  # from here on one entry per table
        pa.field("dims", pa.list_(pa.int32())),
        pa.field("pooling", pa.list_(pa.float32())),  # mean lookups per sample
        pa.field("pooling_spread", pa.list_(pa.float32())),  # standard deviation of the bags' lengths
        pa.field("lookups", pa.list_(pa.int64())),
        pa.field("unique", pa.list_(pa.int64())),
        pa.field("reuse", pa.list_(pa.list_(pa.float32()))),  # the 17-bin reuse histogram
        pa.field("generators", pa.list_(pa.string())),  # JSON of `lookups.generators.Generator`, with version and seed
        # cold: rows, indices and gradient had left the caches. warm: forward, the same lookup ran just before; backward,
        # the forward pass of the same lookup did.
        pa.field("cache", NAME),
        pa.field("share", pa.int16()),  # the device was one of so many equal parts (1: a whole GPU)
        pa.field("others", NAME),  # what the other parts did meanwhile: none | idle | same | streaming
        pa.field("kernel_names", pa.list_(NAME)),  # in launch order
        pa.field("kernel_ns", pa.list_(pa.float64())),  # median per kernel; `time_ns` is the median of their sum
        pa.field("span_ns", pa.float64()),  # median from the first kernel's start to the last one's end
        pa.field("event_ns", pa.float64()),  # the same lookup timed with CUDA events, where it was in the sample; else null
    ),
    case=("implementation", "direction", "optimizer", "dtype", "weighted", "batch", "rows", "dims", "generators", "cache",
          "share", "others"),
)  # fmt: skip


# Peak memory of training steps: a row per case and rank.
# A row: peak memory of one rank of one step case that has the process to itself; `times_ns`: how long measuring it took.
MEMORY = MeasuredSet(
    name="memory",
    columns=(
        pa.field("workload", NAME),
        pa.field("name", NAME),  # the case in `steps`
        pa.field("ranks", pa.int16()),
        pa.field("share", pa.int16()),  # the device was one of so many equal parts (1: a whole GPU, or turns on one)
        pa.field("fabric", NAME),
        pa.field("steps", pa.int16()),  # over how many steps the peaks are
        pa.field("allocated_bytes", pa.int64()),  # most that the caching allocator had handed out
        # Most that it had taken from the device; null where blocks that an earlier case left kept segments alive.
        pa.field("reserved_bytes", pa.int64()),
        pa.field("built_bytes", pa.int64()),  # handed out before the first step: model, tables, inputs
        # Most handed out in each of the first steps, ranks waiting for one another after each; then in the rest of them, not
        # waiting. Optimiser state comes with the first, and former gradient buckets go some time after the second.
        pa.field("step_allocated_bytes", pa.list_(pa.int64())),
        pa.field("left_bytes", pa.int64()),  # still handed out before the case was built, of earlier ones; 0 in a new process
        # What nvidia-smi says the rank's process holds of the device, less what its allocator had reserved then: context,
        # kernels, NCCL. Null where nobody asked or nvidia-smi did not say.
        pa.field("outside_bytes", pa.int64()),
    ),
    case=("name", "share", "fabric", "rank"),
    timed=False,
)


# Every kernel of every profiled step: a row per case and rank, its columns are lists over the kernels.
#
# An entry of three steps takes about 24 bytes; a row per kernel would add a key, a spread and a median to each. `op`, `kernel`,
# `stream`, `launch_ns`, `start_ns` and `kernel_ns` of a row are equally long and unnest side by side.
# A row: kernels, copies and collectives of one profiled step on one rank; `times_ns` are their sums, one per step.
STEP_KERNELS = MeasuredSet(
    name="step_kernels",
    columns=(
        pa.field("workload", NAME),
        pa.field("name", NAME),  # the case in `steps`
        pa.field("ranks", pa.int16()),
        pa.field("share", pa.int16()),
        pa.field("fabric", NAME),
        pa.field("op", pa.list_(NAME)),  # in the order of launches: the innermost op around the launch; empty where none
        pa.field("kernel", pa.list_(NAME)),
        pa.field("stream", pa.list_(pa.int32())),
        pa.field("launch_ns", pa.list_(pa.int64())),  # of the last profiled step, from the rank's step begin on its host
        pa.field("start_ns", pa.list_(pa.int64())),
        pa.field("kernel_ns", pa.list_(pa.list_(pa.int32()))),  # per kernel one entry per profiled step
        pa.field("host_ns", pa.list_(pa.int64())),  # the host's time in each profiled step, which the profiler inflates
    ),
    case=("name", "share", "fabric", "rank"),
)


# Training steps: unprofiled step times, kernel times, memory, lookup statistics.
# A row: one training step of one workload configuration, timed in a process that never profiled.
STEPS = MeasuredSet(
    name="steps",
    columns=(
        pa.field("workload", NAME),  # dlrm | bert | gpt2 | xlnet | resnet50 | inception_v3
        pa.field("name", NAME),  # the case, unique: also the name of its trace files
        pa.field("config", NAME),  # JSON, enough to build it again
        pa.field("precision", NAME),  # fp32 | bf16
        pa.field("batch", pa.int32()),  # global
        pa.field("ranks", pa.int16()),
        pa.field("share", pa.int16()),
        pa.field("fabric", NAME),
        pa.field("plan", NAME),  # JSON table -> rank; null where nothing is sharded
        pa.field("task", NAME),  # of which the case is one plan or one batch size; null otherwise
        pa.field("rule", NAME),  # the sharding rule that made the plan; null otherwise
        pa.field("block", pa.int16()),  # in sharding: the block of interleaved plans this row was timed in; else 0
        pa.field("steps_per_time", pa.int16()),  # `times_ns` are means over so many unsynchronised steps, the slowest rank's
        # Peak per rank as the allocator counts, less what buffers shared by the cases of a process hold beyond this case.
        pa.field("allocated_bytes", pa.list_(pa.int64())),
        pa.field("reserved_bytes", pa.list_(pa.int64())),
        # JSON: per iteration an object table -> [lookups, distinct rows, [17 bins of reuse]]; null without tables.
        pa.field("lookups", pa.string()),
        # The state of the machine, one per repeat: a fixed loop of calls on the CPU right before it, and an all_reduce of
        # 1 MiB before its round; the slowest rank's. Null: nobody looked; the latter also for one rank.
        pa.field("host_probe_ns", pa.list_(pa.float64())),
        pa.field("wire_probe_ns", pa.list_(pa.float64())),
    ),
    case=("workload", "config", "precision", "batch", "ranks", "share", "fabric", "plan"),
    optional=("plan",),
    added=("host_probe_ns", "wire_probe_ns"),
)


# Sharding: the same task under several plans, interleaved in blocks so that differences are paired.
# A row: one plan of one task in one block; rows of one task, block and process were timed together, in random order.
SHARDING = MeasuredSet(
    name="sharding",
    columns=(
        *(column for column in STEPS.columns if column.name not in STEPS.added),
        # Other rules that give this very plan, with commas between: it is timed once, under `rule`; empty where none.
        pa.field("aliases", NAME),
        pa.field("turn", pa.int16()),  # when within its block, from 0
    ),
    case=(*STEPS.case, "block"),
    repeats=("block",),
)

SETS = {each.name: each for each in (COLLECTIVES, HOST, KERNELS, LOOKUPS, MEMORY, SHARDING, STEP_KERNELS, STEPS)}


def measured_set(name: str) -> MeasuredSet:
    """The set of that name."""
    if name not in SETS:
        raise InputError(f"no measured set is called {name!r}; there are {', '.join(SETS)}")
    return SETS[name]
