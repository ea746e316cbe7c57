"""The measured sets: those of calibrations, and those that only the lab measures."""

from __future__ import annotations

import pyarrow as pa

from steptime._measurements.sets import COLLECTIVES, HOST, NAME, MeasuredSet
from steptime.errors import InputError

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
        pa.field(
            "busy_ns", pa.float64()
        ),  # median of how long any of its kernels ran; less than their sum where some run beside
    ),
    case=("call", "cache", "tf32", "benchmark", "share", "others"),
    added=("busy_ns",),
)


# Device time of kernels that PyTorch's compiler generates, in the graphs that it generated them for.
# A row: one kernel of one graph with its arguments as far back as they were touched; `times_ns`: of its launches. Times more
# than 15 % above the shortest of a kernel's are left out: other processes compiled, and ran what they had, on the same GPU.
GENERATED = MeasuredSet(
    name="generated",
    columns=(
        pa.field("graph", NAME),  # an architecture of the zoo, or what was drawn with its number: whole ones are left out
        pa.field("kernel", pa.string()),  # `GeneratedKernel.text()` of the source that was launched
        pa.field("sizes", pa.list_(pa.int64())),  # bytes of its arguments; 0 where not known
        pa.field("ages", pa.list_(pa.int64())),  # bytes touched since each was, rounded (`rounded_age`)
        pa.field("launches", pa.int32()),  # in one step
    ),
    case=("graph", "kernel", "sizes", "ages"),
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


# Power and clock of loops of kernels, and times of kernels at other clocks.
# A row: one block of `measure power`; `times_ns`: a round of its loop, or a call of its one piece (load, light, burst).
POWER = MeasuredSet(
    name="power",
    columns=(
        pa.field("block", NAME),
        # duty, steady, mix, anchor: loops. rest: nothing runs (block closed: not even a context is open). load, light: a kernel
        # between stretches of large products, which hold the clock down, or of rest. burst: products from rest on.
        pa.field("kind", NAME),
        pa.field("pieces", pa.string()),  # JSON: calls and probes with how often each runs in a round
        pa.field("duty", pa.float64()),  # share of the time that the device was to work
        pa.field("pause_cycles", pa.int64()),  # of the SM clock, that a round pauses
        pa.field("power_w", pa.float32()),  # mean, by the card's energy counter; null where it was not read
        pa.field("reading_w", pa.float32()),  # mean of power readings
        pa.field("clock_mhz", pa.float32()),  # mean SM clock, by cycles that SMs counted
        pa.field("clock_reading_mhz", pa.float32()),  # mean of clock readings
        pa.field("temperature_c", pa.float32()),
        pa.field("capped", pa.float32()),  # share of readings in which the power cap held the clock
        pa.field("heated", pa.float32()),  # share of readings in which heat did
        pa.field("limit_w", pa.float32()),  # the cap in force
        pa.field("uuid", NAME),  # of the card
        pa.field("clocks_mhz", pa.list_(pa.float32())),  # burst: every eighth round's; else null
    ),
    case=("block", "kind", "pieces", "duty"),
    timed=False,
)


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
        pa.field("precision", NAME),  # fp32 | tf32 | bf16 | fp16 (autocast)
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


# Steps of the zoo's architectures, without a profiler, once the card is warm.
# A row: one architecture; `times_ns` are means over blocks of about 50 ms.
ZOO = MeasuredSet(
    name="zoo",
    columns=(
        pa.field("architecture", NAME),
        pa.field("group", NAME),  # its kin, which are left out together
        pa.field("precision", NAME),  # fp32 | tf32 | bf16 | fp16 (autocast) | pure_bf16
        pa.field("layout", NAME),  # contiguous | channels_last
        pa.field("optimizer", NAME),
        pa.field("parameters", pa.int64()),
        pa.field("warm_up_s", pa.float32()),
        pa.field("seconds", pa.float32()),  # of timing
        pa.field("steps", pa.int32()),  # timed
        pa.field("first_ns", pa.float64()),  # median of the first steps, of a card that was cool
        pa.field("power_w", pa.float32()),  # mean, by the card's energy counter; null where nobody could read it
        pa.field("clock_mhz", pa.float32()),  # mean of clock readings
        pa.field("temperature_c", pa.float32()),
        pa.field("capped", pa.float32()),  # share of readings in which the power cap held the clock
        pa.field("limit_w", pa.float32()),  # the cap in force
        pa.field("uuid", NAME),  # of the card
        pa.field("allocated_bytes", pa.int64()),  # most that the caching allocator had handed out while steps were timed
        pa.field("reserved_bytes", pa.int64()),
        pa.field("left_bytes", pa.int64()),  # still handed out before it was built, of earlier ones
        pa.field("finite", pa.bool_()),  # whether all weights were in the end: others draw less power
    ),
    case=("architecture",),
)


# Kernels of profiled steps of the zoo, summed: lists over distinct (op, around, shapes, kernel), the longest first.
# A row: one architecture; `times_ns` are the device time of each profiled step.
ZOO_KERNELS = MeasuredSet(
    name="zoo_kernels",
    columns=(
        pa.field("architecture", NAME),
        pa.field("group", NAME),
        pa.field("launches", pa.int32()),  # kernels, copies and fills of a step
        pa.field("op", pa.list_(NAME)),  # the innermost op around the launch; empty where none was
        pa.field("around", pa.list_(NAME)),  # the outermost: an optimiser's step, a node of autograd, an op
        pa.field("shapes", pa.list_(NAME)),  # JSON, of the tensors among the op's arguments; empty: several that take little
        pa.field("kernel", pa.list_(NAME)),
        pa.field("count", pa.list_(pa.int32())),  # launches in a step
        pa.field("kernel_ns", pa.list_(pa.float32())),  # of all of them in a step, median over steps
    ),
    case=("architecture",),
)


# Training steps eager and compiled, in turns in one process that had not profiled; then one profiled step of it.
# A row: one case in one form; `times_ns` are rounds of unsynchronised steps, the slowest rank's.
COMPILED = MeasuredSet(
    name="compiled",
    columns=(
        pa.field("name", NAME),  # the case
        pa.field("form", NAME),  # eager | compiled
        pa.field("architecture", NAME),
        pa.field("precision", NAME),  # fp32 | tf32 | bf16 (autocast) | pure_bf16
        pa.field("optimizer", NAME),
        pa.field("mode", NAME),  # of torch.compile: default | reduce-overhead
        pa.field("what", NAME),  # is compiled: model | loss | step | optimizer | layers | inside
        pa.field("layers", NAME),  # plain | checkpointed | watched
        pa.field("ranks", pa.int16()),
        pa.field("share", pa.int16()),  # the device was one of so many equal parts (1: a whole GPU)
        pa.field("steps_per_time", pa.int32()),
        pa.field("prepare_s", pa.float32()),  # until the third step was through: of a compiled step, nearly all compiling
        pa.field("allocated_bytes", pa.int64()),  # most that the caching allocator had handed out in a steady step
        pa.field("reserved_bytes", pa.int64()),  # by the process, the other form's included
        pa.field("left_bytes", pa.int64()),  # of `allocated_bytes`, what the other form held meanwhile
        pa.field("counters", pa.string()),  # JSON: graphs, graph breaks, CUDA graphs skipped, as Dynamo and Inductor count
        pa.field("power_w", pa.float32()),  # mean while both forms were timed; null where nobody could read it
        pa.field("clock_mhz", pa.float32()),
        pa.field("temperature_c", pa.float32()),
        pa.field("capped", pa.float32()),  # share of readings in which the power cap held the clock
        pa.field("limit_w", pa.float32()),  # the cap in force
        pa.field("uuid", NAME),  # of the card
        pa.field("kernel", pa.list_(NAME)),  # of rank 0's profiled step in the order they began; null: it was not profiled
        pa.field("op", pa.list_(NAME)),  # the innermost op around the launch; empty where none was, as in a CUDA graph
        pa.field("stream", pa.list_(pa.int32())),
        pa.field("kernel_ns", pa.list_(pa.int64())),
    ),
    case=("name", "form", "share"),
)

_ALL = (
    COLLECTIVES,
    COMPILED,
    GENERATED,
    HOST,
    KERNELS,
    LOOKUPS,
    MEMORY,
    POWER,
    SHARDING,
    STEP_KERNELS,
    STEPS,
    ZOO,
    ZOO_KERNELS,
)
SETS = {each.name: each for each in _ALL}


def measured_set(name: str) -> MeasuredSet:
    """The set of that name."""
    if name not in SETS:
        raise InputError(f"no measured set is called {name!r}; there are {', '.join(SETS)}")
    return SETS[name]
