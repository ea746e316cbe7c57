"""How long FBGEMM's table-batched lookups take on a device, from its limits and published microbenchmarks.

A kernel takes the time of a launch, of its bytes at memory's rate, of its bytes at the rate of the last-level cache, and of
loads that its warps wait for one after the other. Waiting is most of it: a bag is walked row by row, a run of equal indices is
found through a chain of loads that depend on one another. The four are added, instead of the longest taken: so much a closed
system of waiting warps takes at most. What the kernels do was read in the sources of FBGEMM (2022, codegen/
embedding_forward_split_* and embedding_backward_split_*) and of CUB (device_radix_sort). Public numbers are with the
constants. Two public traces of V100 were in sight when it was settled that the four are added and how many loads a run waits
for; of the numbers, the time of a launch is from one of them. Small lookups come out too short: that kernels start with
nothing in caches of instructions, arguments and translations is not modelled.

Without statistics of the tables, these are assumed alike: rows, elements and lookups are divided evenly, all bags are equally
long, and every row of a table is as likely as any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from steptime._hardware.description import Quantity
from steptime._hardware.device import DeviceLimits
from steptime._lookups.mixture import poisson_shares
from steptime._lookups.statistics import QUANTILES
from steptime._lookups.table import Floats, TableColumns, TableStatistics
from steptime._lookups.workload import row_bytes as bytes_of_row
from steptime._models.estimate import Estimate, Source
from steptime._models.kernels.question import LaunchTime
from steptime._models.lookups.caches import misses
from steptime._models.lookups.fbgemm import DENSE, STATE_ELEMENTS, VECTOR, WARP, FbgemmLookup, KernelTime
from steptime._models.lookups.fitted import LookupEstimate
from steptime.errors import InputError

_VOLTA = "Jia et al., Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking, 2018 (arXiv 1804.06826)"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a data sheet does not say of a device: shares of its rates that programs reach, and cycles they wait."""

    stream_share: Quantity  # of memory bandwidth, by reading and writing in order
    sort_share: Quantity  # of memory bandwidth, by a radix sort
    cache_bytes_per_cycle: Quantity  # of the last level, for each SM
    cache_cycles: Quantity  # until a load that finds its line there returns
    memory_cycles: Quantity  # one that does not
    far_cycles: Quantity  # one that does not find its page's translation either
    near_bytes: Quantity  # that translations at hand cover
    shared_bytes: Quantity  # of one SM
    shared_cycles: Quantity  # until a load from shared memory returns
    launch_ns: Quantity  # of a kernel that does next to nothing


VOLTA = Behaviour(
    stream_share=Quantity(750 / 900, f"{_VOLTA}, table 3.1: 750 of 900 GB/s"),
    sort_share=Quantity(
        0.68, "Adinets and Merrill, Onesweep, 2022 (arXiv 2206.01784): 29.4e9 keys/s, 36 bytes each, of 1555 GB/s"
    ),
    cache_bytes_per_cycle=Quantity(2155e9 / 1.38e9 / 80, f"{_VOLTA}, table 3.1: 2155 GB/s at 1.38 GHz on 80 SMs"),
    cache_cycles=Quantity(193, f"{_VOLTA}, figure 3.2: L2 hit"),
    memory_cycles=Quantity(375, f"{_VOLTA}, figure 3.2: L2 miss, TLB hit"),
    far_cycles=Quantity(1029, f"{_VOLTA}, figure 3.2: L2 and TLB miss"),
    near_bytes=Quantity(32 << 20, f"{_VOLTA}, table 3.1: the first level of translations covers 32 MB"),
    shared_bytes=Quantity(96 << 10, "NVIDIA Tesla V100 GPU Architecture, 2017: up to 96 KB"),
    shared_cycles=Quantity(19, f"{_VOLTA}, section 3.6"),
    launch_ns=Quantity(2_000, "the shortest kernels, fills of a few bytes, in the public trace of TorchRec DLRM on 8 V100"),
)
"""A V100; where nothing better is known, other devices too."""

SECTOR = 32
"""Bytes that move at least (CUDA programming guide: global memory on devices of compute capability 6 and up)."""

# FBGEMM's launches: threads of a block are `kForwardMaxThreads` and `kBackwardMaxThreads` 512, `kMaxThreads` 1024.
_BLOCK_WARPS, _LARGE_BLOCK_WARPS = 16, 32
# Warps that an SM holds where a thread has 64 of its 65,536 registers, as lookups with their sums of rows are taken to have;
# and where registers do not limit them.
_RESIDENT_WARPS, _MOST_WARPS = 32, 64
# Runs of equal indices from this length on get a block of their own (`max_segment_length_per_warp`).
_LONG_RUN = 32
# A block per row uses up to two thirds of shared memory, in steps of 16 KB.
_SHARED_STEP = 16 << 10
# Loads that depend on one another for each run. From memory: where it is, and the samples it is from; then the row and its
# state. From the cache: its number, then what is a table's: width, places in the gradient, of the weights and of the state.
_RUN_OWN_LOADS, _RUN_TABLE_LOADS, _RUN_ROW_LOADS = 2, 5, 2
# CUB, DeviceRadixSort: a single block of 256 threads sorts up to 19 * 4 / 8 keys of eight bytes each, six bits at a time; else
# eight bits at a time.
_SINGLE_TILE, _SINGLE_TILE_BITS, _ONESWEEP_BITS = 256 * 9, 6, 8
# Of ranking and exchanging a thread's nine keys in shared memory, one after the other: about eight accesses each.
_PASS_ACCESSES = 9 * 8
_KEY_BYTES, _INFO_BYTES, _COUNT_BYTES, _GRADIENT_BYTES = 8, 4, 4, 4
# Adding up over a warp takes five shuffles; each takes about as long as an access of shared memory.
_SHUFFLES = 5
# A barrier and the accesses of shared memory around it, in such accesses.
_BARRIER_ACCESSES = 4
# Tables of which what a lookup does to them is kept.
_KEPT = 1 << 12
# How far off a time may be, to either side: 18 % short forward and 11 % backward where tables are many, half where they are few
# and small (two public recordings of V100, benchmarks/fbgemm_lookups.py).
_FACTOR = 2.0


@dataclass(frozen=True)
class _Tables:
    """What a lookup does to each table, [tables]."""

    dim: Floats
    span: Floats  # bytes of the table
    lookups: Floats
    length: Floats  # of bags: of the longest of a block, for which the others wait
    longest: Floats
    unique: Floats
    missed: Floats  # lookups whose row is not in the cache
    runs: Floats  # rows with `_LONG_RUN` lookups or more
    run_lookups: Floats  # that go to them
    hottest: Floats  # lookups of the row with most


@dataclass(frozen=True)
class _Machine:
    """A device, or a part of one, with rates and waits in nanoseconds."""

    device: DeviceLimits
    behaviour: Behaviour

    @property
    def sms(self) -> float:
        return self.device.sms.value / self.device.share

    @property
    def cache_bytes(self) -> float:
        return self.device.cache_bytes.value / self.device.share

    def cycles_ns(self, cycles: float) -> float:
        return 1e9 * cycles / self.device.clock_hz.value

    def moved_ns(self, memory: float, cached: float = 0.0, share: Quantity | None = None) -> float:
        """Of bytes from and to memory, and of bytes from and to the cache."""
        reached = (share or self.behaviour.stream_share).value * self.device.bandwidth_bytes_per_s.value / self.device.share
        per_cycle = self.behaviour.cache_bytes_per_cycle.value * self.sms
        return 1e9 * memory / reached + self.cycles_ns(cached / per_cycle)

    def waited_ns(self, number: Floats, cycles: Floats, at_once: float, longest: float = 0.0) -> float:
        """Of so many chains of loads, so many at a time; no less than the longest of them."""
        real = cycles[number > 0]
        least = max(float(real.max()) if len(real) else 0.0, longest)
        return self.cycles_ns(max(float((number * cycles).sum()) / at_once, least))

    def launches_ns(self, number: int = 1) -> float:
        return number * self.behaviour.launch_ns.value

    def row_cycles(self, span: Floats) -> Floats:
        """Until a row of a table of so many bytes comes from memory."""
        waits = self.behaviour
        return np.where(span > waits.near_bytes.value, waits.far_cycles.value, waits.memory_cycles.value)


def forward_kernels(
    lookup: FbgemmLookup,
    device: DeviceLimits,
    tables: Sequence[TableStatistics] | None = None,
    behaviour: Behaviour = VOLTA,
) -> tuple[KernelTime, ...]:
    """The kernel of the forward pass and what it takes."""
    machine = _Machine(device, behaviour)
    return (KernelTime("forward", _walk_ns(lookup, machine, _tables(lookup, machine, tables))),)


def backward_kernels(
    lookup: FbgemmLookup,
    device: DeviceLimits,
    tables: Sequence[TableStatistics] | None = None,
    behaviour: Behaviour = VOLTA,
) -> tuple[KernelTime, ...]:
    """The kernels of the backward pass with the update of rows, those that belong together in one, and what they take."""
    machine = _Machine(device, behaviour)
    work = _tables(lookup, machine, tables)
    kernels = []
    if lookup.optimizer == DENSE:
        kernels.append(KernelTime("clear", machine.launches_ns() + machine.moved_ns(float(work.span.sum()))))
    total = float(work.lookups.sum())
    if not total:  # FBGEMM returns at once
        return tuple(kernels)
    if lookup.weighted:
        kernels.append(KernelTime("weights' gradient", _walk_ns(lookup, machine, work, _SHUFFLES)))
    kernels.append(KernelTime("linearize", _linearize_ns(lookup, machine, work)))
    kernels.append(KernelTime("sort", _sort_ns(lookup, machine, total) * (2 if lookup.weighted else 1)))
    kernels.append(KernelTime("runs", _runs_ns(machine, work)))
    if lookup.mean:
        both = 2.0 * _GRADIENT_BYTES * lookup.batch * lookup.total_dim
        kernels.append(KernelTime("mean", machine.launches_ns() + machine.moved_ns(both)))
    kernels.append(KernelTime("block per row", _long_ns(lookup, machine, work)))
    kernels.append(KernelTime("warp per row", _short_ns(lookup, machine, work)))
    return tuple(kernels)


def fbgemm_estimate(
    lookup: FbgemmLookup, device: DeviceLimits, tables: Sequence[TableStatistics] | None = None, *, backward: bool
) -> LookupEstimate:
    """Either pass, kernel by kernel; by a device's data sheet, so known to a factor."""
    kernels = (backward_kernels if backward else forward_kernels)(lookup, device, tables)
    time_ns = total_ns(kernels)
    estimate = Estimate(time_ns, time_ns / _FACTOR, time_ns * _FACTOR, Source.ANALYTIC, inside=False)
    return LookupEstimate(estimate, tuple(LaunchTime(kernel.name, kernel.time_ns) for kernel in kernels))


def total_ns(kernels: Sequence[KernelTime]) -> float:
    """Of kernels, one after the other."""
    return sum(kernel.time_ns for kernel in kernels)


def _tables(lookup: FbgemmLookup, machine: _Machine, tables: Sequence[TableStatistics] | None) -> _Tables:
    if tables is None:
        return _alike(lookup, machine)
    expected = (lookup.tables, lookup.total_dim, {lookup.batch})
    results = (len(tables), sum(table.dim for table in tables), {table.batch for table in tables})
    if results != expected:
        texts = [f"{number} tables of {dim} elements and batch {sorted(batch)}" for number, dim, batch in (results, expected)]
        raise InputError(f"FBGEMM lookup: statistics of {texts[0]}; expected {texts[1]}")
    return _told(lookup, machine, tables)


def _alike(lookup: FbgemmLookup, machine: _Machine) -> _Tables:
    """Tables that share everything evenly, and rows that are all as likely."""
    rows, dim, lookups = (total / lookup.tables for total in (lookup.rows, lookup.total_dim, lookup.lookups))
    mean = lookups / rows
    unique = min(rows * -math.expm1(-mean), lookups)
    share_below = poisson_shares(np.array([mean]), np.array([_LONG_RUN - 1, _LONG_RUN - 2]))
    held = machine.cache_bytes / max(_moved(dim, lookup), 1.0)
    missed = unique if unique <= held else max(unique, lookups * (1 - held / rows))
    length = math.ceil(lookups / lookup.batch)
    columns = (
        *(dim, rows * bytes_of_row(math.ceil(dim), lookup.dtype), lookups, length, length, unique, missed),
        *(rows * (1 - float(share_below[0])), lookups * (1 - float(share_below[1])), mean),
    )
    return _Tables(*(np.full(lookup.tables, float(column)) for column in columns))


def _told(lookup: FbgemmLookup, machine: _Machine, tables: Sequence[TableStatistics]) -> _Tables:
    return _Tables(*np.array([_of_table(table, lookup.dtype, machine.cache_bytes) for table in tables]).T)


@lru_cache(maxsize=_KEPT)
def _of_table(table: TableStatistics, dtype: str, cache_bytes: float) -> tuple[float, ...]:
    """The columns of `_Tables`: no table's depend on the others, and a sharding search asks about many subsets of the same."""
    columns, counts = TableColumns.of([table]), table.spectrum.counts
    long = np.array([table.spectrum.rows, table.spectrum.lookups])[:, counts >= _LONG_RUN].sum(axis=1)
    held = cache_bytes / max(_sectors(bytes_of_row(table.dim, dtype)), 1.0)
    return (
        float(table.dim),
        float(table.rows * bytes_of_row(table.dim, dtype)),
        float(columns.lookups[0]),
        float(np.interp(1 - 1 / _BLOCK_WARPS, QUANTILES, table.lengths.quantiles)),
        float(columns.longest[0]),
        float(columns.unique[0]),
        float(misses(columns, np.array([held]))[0]),
        float(long[0]),
        float(long[1]),
        float(columns.hottest[0, 0]),
    )


def _sectors(nbytes: float) -> float:
    """Bytes that move for so many."""
    return SECTOR * math.ceil(nbytes / SECTOR)


def _moved(dim: float, lookup: FbgemmLookup) -> float:
    """Bytes that move for a row."""
    return _sectors(bytes_of_row(math.ceil(dim), lookup.dtype))


def _row_bytes(lookup: FbgemmLookup, work: _Tables) -> Floats:
    return np.array([_moved(dim, lookup) for dim in work.dim.tolist()])


def _walk_ns(lookup: FbgemmLookup, machine: _Machine, work: _Tables, shuffles: int = 0) -> float:
    """A group of lanes walks each bag, row by row; the backward pass of weights also adds up over lanes for each."""
    waits, row_bytes = machine.behaviour, _row_bytes(lookup, work)
    total = float(work.lookups.sum())
    offsets = lookup.index_bytes * lookup.batch * lookup.tables
    streamed = lookup.index_bytes * total + offsets + _GRADIENT_BYTES * lookup.batch * lookup.total_dim
    if lookup.weighted:
        streamed += _GRADIENT_BYTES * total
    share = work.missed / np.maximum(work.lookups, 1.0)
    row_cycles = share * machine.row_cycles(work.span) + (1 - share) * waits.cache_cycles.value
    row_cycles = row_cycles + shuffles * waits.shared_cycles.value

    def chain(length: Floats) -> Floats:
        # Where the bag is, then the indices of as many lookups as there are lanes, then these rows.
        cycles: Floats = waits.memory_cycles.value * (1 + np.ceil(length / lookup.lanes)) + length * row_cycles
        return cycles

    moved = machine.moved_ns(
        float((work.missed * row_bytes).sum()) + streamed, float((work.lookups * row_bytes).sum()) + streamed
    )
    groups = machine.sms * _RESIDENT_WARPS * WARP / lookup.lanes
    bags = np.full(lookup.tables, float(lookup.batch))
    waited = machine.waited_ns(bags, chain(work.length), groups, float(chain(work.longest).max()))
    return machine.launches_ns() + moved + waited


def _linearize_ns(lookup: FbgemmLookup, machine: _Machine, work: _Tables) -> float:
    """A warp takes 32 bags, one after the other: it reads their indices and writes keys and where they are from."""
    per_lookup = lookup.index_bytes + _KEY_BYTES + _INFO_BYTES
    moved = machine.moved_ns(per_lookup * float(work.lookups.sum()) + lookup.index_bytes * lookup.batch * lookup.tables)
    cycles = machine.behaviour.memory_cycles.value * (1 + WARP * np.maximum(np.ceil(work.length / WARP), 1.0))
    warps = np.full(lookup.tables, max(1.0, lookup.batch / WARP))
    return machine.launches_ns() + moved + machine.waited_ns(warps, cycles, machine.sms * _MOST_WARPS)


def _sort_ns(lookup: FbgemmLookup, machine: _Machine, total: float) -> float:
    """Keys with four bytes each: in one block if they are few, else a histogram and one sweep for each eight bits."""
    waits = machine.behaviour
    rank_cycles = _PASS_ACCESSES * waits.shared_cycles.value
    if total <= _SINGLE_TILE:
        passes = math.ceil(lookup.bits / _SINGLE_TILE_BITS)
        return machine.launches_ns() + machine.cycles_ns(2 * waits.memory_cycles.value + passes * rank_cycles)
    passes = math.ceil(lookup.bits / _ONESWEEP_BITS)
    moved = machine.moved_ns((_KEY_BYTES + passes * 2 * (_KEY_BYTES + _INFO_BYTES)) * total, share=waits.sort_share)
    # Two clears, histogram and its sum; then for each sweep a clear and a kernel that loads, ranks, looks back and scatters.
    sweep_cycles = 3 * waits.memory_cycles.value + rank_cycles
    return machine.launches_ns(4 + 2 * passes) + moved + machine.cycles_ns(passes * sweep_cycles)


def _runs_ns(machine: _Machine, work: _Tables) -> float:
    """Lengths of runs of equal keys, where they start, and which are long: nine kernels, most of a few bytes."""
    total, unique, runs = (float(column.sum()) for column in (work.lookups, work.unique, work.runs))
    lengths = (_KEY_BYTES + _COUNT_BYTES) * total + (_KEY_BYTES + _COUNT_BYTES) * unique
    starts = 2 * _COUNT_BYTES * total
    # Long runs are numbered by one counter, which adds one a cycle; encoding and summing each look back once.
    cycles = runs + 2 * 3 * machine.behaviour.memory_cycles.value
    return machine.launches_ns(9) + machine.moved_ns(lengths + starts + _COUNT_BYTES * unique) + machine.cycles_ns(cycles)


def _long_ns(lookup: FbgemmLookup, machine: _Machine, work: _Tables) -> float:
    """A block for each long run: its groups add up a part each, then all together, then one of them updates the row."""
    waits = machine.behaviour
    warps, shared = _large_block(lookup, machine)
    groups = warps * WARP / lookup.lanes
    reduced = math.log2(groups) * _BARRIER_ACCESSES * waits.shared_cycles.value
    own, gradient = _run_cycles(lookup, machine, work)
    cycles = own + reduced + gradient * np.ceil(work.run_lookups / np.maximum(work.runs, 1.0) / groups)
    hottest = np.where(work.hottest >= _LONG_RUN, own + reduced + gradient * np.ceil(work.hottest / groups), 0.0)
    blocks = machine.sms * max(1.0, min(_RESIDENT_WARPS // warps, waits.shared_bytes.value // shared))
    moved = _updated_ns(lookup, machine, work, work.runs, work.run_lookups)
    return machine.launches_ns() + moved + machine.waited_ns(work.runs, cycles, blocks, float(hottest.max()))


def _short_ns(lookup: FbgemmLookup, machine: _Machine, work: _Tables) -> float:
    """A group of lanes for each lookup, as if every one were a run of its own: those beyond the last run only start and end."""
    waits = machine.behaviour
    _, shared = _large_block(lookup, machine)
    at_once = machine.sms * max(1.0, min(_RESIDENT_WARPS // _BLOCK_WARPS, waits.shared_bytes.value // shared))
    groups = _BLOCK_WARPS * WARP / lookup.lanes
    # A block's arguments and the number of runs are loaded, one after the other.
    blocks, empty_cycles = float(work.lookups.sum()) / groups, 2 * waits.memory_cycles.value
    runs, lookups = work.unique - work.runs, work.lookups - work.run_lookups
    own, gradient = _run_cycles(lookup, machine, work)
    cycles = own + gradient * lookups / np.maximum(runs, 1.0)
    empty = machine.cycles_ns(blocks * empty_cycles / at_once)
    moved = _updated_ns(lookup, machine, work, runs, lookups)
    return machine.launches_ns() + empty + moved + machine.waited_ns(runs, cycles, at_once * groups)


def _large_block(lookup: FbgemmLookup, machine: _Machine) -> tuple[int, int]:
    """Warps of the block per row and its bytes of shared memory: as many warps as two thirds of it hold sums of."""
    most = machine.behaviour.shared_bytes.value * 2 // 3 // _SHARED_STEP * _SHARED_STEP
    each = WARP * VECTOR * _GRADIENT_BYTES * lookup.vectors
    warps = _LARGE_BLOCK_WARPS
    while warps > 1 and warps * each >= most:
        warps //= 2
    return warps, warps * each


def _run_cycles(lookup: FbgemmLookup, machine: _Machine, work: _Tables) -> tuple[Floats, Floats]:
    """What a run waits for besides its gradients, and for each gradient, [tables]."""
    waits = machine.behaviour
    row_loads = 0 if lookup.optimizer == DENSE else _RUN_ROW_LOADS
    own = _RUN_OWN_LOADS * waits.memory_cycles.value + _RUN_TABLE_LOADS * waits.cache_cycles.value
    fits = _gradient_share(lookup, machine, work)
    gradient: Floats = fits * waits.cache_cycles.value + (1 - fits) * waits.memory_cycles.value
    return own + row_loads * machine.row_cycles(work.span), gradient


def _gradient_share(lookup: FbgemmLookup, machine: _Machine, work: _Tables) -> Floats:
    """Share of a table's gradient that the cache holds while the runs of the table are gone through."""
    return np.minimum(1.0, machine.cache_bytes / np.maximum(_GRADIENT_BYTES * lookup.batch * work.dim, 1.0))


def _updated_ns(lookup: FbgemmLookup, machine: _Machine, work: _Tables, runs: Floats, lookups: Floats) -> float:
    """Of gradients read for lookups, and of rows and their state read and written for runs."""
    gradient_bytes = np.array([SECTOR * math.ceil(_GRADIENT_BYTES * dim / SECTOR) for dim in work.dim.tolist()])
    per_element, per_row = STATE_ELEMENTS[lookup.optimizer]
    state = per_element * gradient_bytes + per_row * SECTOR
    updated = runs * (_row_bytes(lookup, work) + state) * (1 if lookup.optimizer == DENSE else 2)
    fits = _gradient_share(lookup, machine, work)
    missed = fits * np.minimum(lookups, lookup.batch) + (1 - fits) * lookups
    infos = _INFO_BYTES * lookups * (2 if lookup.weighted else 1)
    memory, cached = updated + infos + missed * gradient_bytes, updated + infos + lookups * gradient_bytes
    return machine.moved_ns(float(memory.sum()), float(cached.sum()))
