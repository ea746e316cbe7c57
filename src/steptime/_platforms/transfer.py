"""Times on a device that was not measured: those of a measured device, scaled by the data sheets of both.

A launch takes what it would at the limits of its device (its *book* time), and longer by what no limit shows: SMs that wait
for memory, chains of instructions, tails. Both go on at once in part, so squares add up; each is scaled by what it is due to:

    time(there)^2 = book(there)^2 + (time(here)^2 - book(here)^2) * (rate(here) / rate(there))^2,        rate = SMs * clock
    book          = start / clock + the longest of  operations / peak,  bytes / bandwidth,  bytes to the host / link

A launch that is faster than its book is scaled as its book is. Peaks and bandwidths are those of the data sheets times the
fraction of them that the largest measured kernels reach, or products are published to reach (`reached_flop_per_s`);
products run in tiles (`product_ns`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from steptime._hardware.device import DeviceLimits, Reached, TransferBasis
from steptime._lookups.table import Floats, TableColumns, TableStatistics
from steptime._lookups.workload import STATE_BYTES, STATE_PER_WEIGHT
from steptime._lookups.workload import row_bytes as bytes_of_row
from steptime._models.engine.constants import constants_of
from steptime._models.estimate import Estimate, Source
from steptime._models.kernels.call import Call, TensorArg, base_of, flop_of, moved_bytes, precision_of
from steptime._models.kernels.family import families, launches_of
from steptime._models.kernels.forms.launched.terms import LaunchColumns, LaunchConstants, LaunchShares, traffic
from steptime._models.kernels.forms.matmul.products import of_questions
from steptime._models.kernels.launches import Launch
from steptime._models.kernels.question import LaunchTime, Question
from steptime._models.lookups.caches import misses
from steptime._models.lookups.fitted import LookupEstimate
from steptime._models.lookups.question import EMBEDDING_BAG, FORWARD, TABLE_BATCHED, Lookup
from steptime._ops.catalogue import ATEN
from steptime._ops.operations import PRODUCTS
from steptime._ops.operations import TF32_BY_DEFAULT as CONVOLUTIONS
from steptime.errors import InputError

_SIZES_ONLY = LaunchColumns(())
_ATTENTION = ("flash", "cudnn", "efficient")
_AS_PUBLISHED = ("flash", "cudnn")
_ON_TENSOR_CORES = ("tf32", "float16", "bfloat16", "float8", "float4")
# Matrix products, and how many elements an element of the 16-bit product is that one of fewer bits is taken for.
_PER_HALF = {"float8": 2, "float4x2": 2}
_MULTIPLIED = (*PRODUCTS, *(f"{ATEN}{name}" for name in ("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")))
_INDEX_BYTES = 8
SHORT_NS = 10_000.0  # below, kernels take what starting takes
# Of a cache, what rows have beside indices and results: as bytes of measured steps stay in 30 of an H200's 50 MB.
_KEPT = 0.6
_FLOAT_BYTES = 4
_POOLED = (TABLE_BATCHED, EMBEDDING_BAG, "embedding_bag_dense")
# Rows and columns of tiles, in the kernel names of libraries for both architectures.
_TILE_SIZES = (
    (256, 128), (128, 256), (192, 128), (128, 192), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64), (32, 32),
)  # fmt: skip
# And what of the largest one's rate they reach. A small one loads more per operation: it is the operations per byte of its
# operands against the largest's, to the power of 1/3.
_LARGEST = 256 * 128 / (256 + 128)
_TILES = tuple((rows, columns, (rows * columns / (rows + columns) / _LARGEST) ** (1 / 3)) for rows, columns in _TILE_SIZES)
# Blocks that share the sum over k of one tile, where the tiles are fewer than the SMs.
_SPLITS = (1, 2, 4, 8, 16)
_LEAST_K = 128  # of each of them


@dataclass(frozen=True, slots=True)
class Product:
    """(m x k) times (k x n), `batch` of them; a launch may do a `share` of it."""

    m: int
    n: int
    k: int
    batch: int
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch does."""

    flop: float = 0.0
    product: Product | None = None  # what the operations are, where they are a matrix product
    precision: str = "float32"
    flop_per_s: float = 0.0  # that such a kernel reaches, where that is known and no peak
    memory_bytes: float = 0.0
    cache_bytes: float = 0.0
    host_bytes: float = 0.0


def works_of(
    question: Question, family: str, launches: Sequence[LaunchTime], timed_on: DeviceLimits, cache: float
) -> list[Work]:
    """Of every launch, on a device whose cache is `cache` times the one that the launches were timed on.

    Families that go by rules say it launch by launch; of products, convolutions and attention the whole call is known, and each
    launch has its share of it by its time.
    """
    if family and families()[family].rules is not None:
        device = constants_of(timed_on, "launched", LaunchConstants)
        try:
            by_rule = launches_of(question.call, device.gpu)
        except InputError:
            by_rule = ()
        if len(by_rule) == len(launches):
            return _by_rule(question, by_rule, device, cache)
    return _shared(question, launches, timed_on.reach)


def _by_rule(question: Question, launches: Sequence[Launch], device: LaunchConstants, cache: float) -> list[Work]:
    if not launches:
        return []
    rows = np.asarray(_SIZES_ONLY.rows(question.call, launches, question.warm), dtype=np.float64)
    same = np.ones(len(launches))
    moved = traffic(rows, device, LaunchShares(same, same, same, same, same, same, same, cache * same))
    memory_bytes, cache_bytes = (moved.memory_bytes + moved.written_bytes).tolist(), moved.cache_bytes.tolist()
    return [
        Work(memory_bytes=memory, cache_bytes=cached, host_bytes=float(launch.facts.get("host_bytes", 0.0)))
        for launch, memory, cached in zip(launches, memory_bytes, cache_bytes, strict=True)
    ]


def _shared(question: Question, launches: Sequence[LaunchTime], reached: Reached) -> list[Work]:
    """The call's work, in proportion to the times of its launches."""
    call = question.call
    kind, direction = attention_of(call)
    warm_bytes = float(_written_bytes(call)) if question.warm else 0.0
    total = Work(
        flop=flop_of(call),
        product=_product(question) if base_of(call.op) in _MULTIPLIED else None,
        precision=precision_of(call, question.tf32),
        flop_per_s=reached.attention_flop_per_s[kind][direction].value if kind and call.dtype != "float32" else 0.0,
        memory_bytes=max(moved_bytes(call) - warm_bytes, 0.0),
        cache_bytes=warm_bytes,
    )
    time_ns = sum(launch.time_ns for launch in launches)
    shares = [launch.time_ns / time_ns if time_ns else 0.0 for launch in launches]
    return [
        replace(
            total,
            flop=total.flop * share,
            product=None if total.product is None else replace(total.product, share=share),
            memory_bytes=total.memory_bytes * share,
            cache_bytes=total.cache_bytes * share,
        )
        for share in shares
    ]


def _product(question: Question) -> Product | None:
    try:
        result = of_questions([question])
    except InputError:
        return None
    inner = int(result.k[0]) * _PER_HALF.get(question.call.dtype, 1)
    return Product(int(result.m[0]), int(result.n[0]), inner, int(result.batch[0]))


def _written_bytes(call: Call) -> int:
    written = [call.args[index] for index in call.written if index < len(call.args)]
    return sum(item.nbytes for item in written if isinstance(item, TensorArg) and item.device == "device")


def attention_of(call: Call) -> tuple[str, str]:
    """Kind and direction of attention in one kernel, or nothing."""
    base = base_of(call.op)
    kind = next((kind for kind in _ATTENTION if f"{kind}_attention" in base), "")
    return kind, ("" if not kind else "backward" if base.endswith("backward") else "forward")


def carried_kind(question: Question, time_ns: float) -> str:
    """Which errors of carrying over a call has that takes so long."""
    base = base_of(question.call.op)
    if attention_of(question.call)[0]:
        return "attention"
    if base in _MULTIPLIED:
        return "product"
    if base in CONVOLUTIONS:
        return "other"
    return "short" if time_ns < SHORT_NS else "memory"


def lookup_works(lookups: Sequence[Lookup], cache_bytes: float) -> list[Work]:
    """Bytes from memory and from the cache, of each; the tables of a lookup have equal shares of the cache."""
    places: dict[tuple[int, str, int], int] = {}
    tables: list[TableStatistics] = []
    for lookup in lookups:
        for table in lookup.tables:
            if places.setdefault((id(table), lookup.dtype, len(lookup.tables)), len(tables)) == len(tables):
                tables.append(table)
    if not tables:
        return []
    columns = TableColumns.of(tables)
    row_bytes = np.array([float(bytes_of_row(table.dim, dtype)) for table, (_, dtype, _) in zip(tables, places, strict=True)])
    together = np.array([float(count) for _, _, count in places])
    missed = misses(columns, _KEPT * cache_bytes / together / np.maximum(row_bytes, 1.0))
    results = []
    for lookup in lookups:
        of_lookup = np.array([places[id(table), lookup.dtype, len(lookup.tables)] for table in lookup.tables])
        results.append(_work(lookup, columns.take(of_lookup), row_bytes[of_lookup], missed[of_lookup]))
    return results


def _work(lookup: Lookup, tables: TableColumns, row_bytes: Floats, missed: Floats) -> Work:
    looked_up = float(tables.lookups @ row_bytes)
    # Table-batched lookups give single precision, whatever the type of the rows.
    result_bytes = _FLOAT_BYTES * tables.dim if lookup.implementation == TABLE_BATCHED else row_bytes
    results = float(result_bytes @ (tables.batch if lookup.implementation in _POOLED else tables.lookups))
    indices = float(_INDEX_BYTES * tables.lookups.sum())
    if lookup.direction == FORWARD:
        read = float(missed @ row_bytes)
        return Work(memory_bytes=read + results + indices, cache_bytes=max(looked_up - read, 0.0))
    # Gradients are read for every lookup, mostly from the cache; every distinct row is read and written, its state too.
    state_bytes = STATE_BYTES * STATE_PER_WEIGHT.get(lookup.optimizer, 0) * tables.dim  # a row-wise one is a number
    updated = 2.0 * float(tables.unique @ (row_bytes + state_bytes))
    return Work(memory_bytes=results + indices + updated, cache_bytes=max(looked_up - results, 0.0))


def product_ns(
    limits: DeviceLimits, product: Product, flop_per_s: float, cache_bytes_per_s: float, *, whole_waves: bool
) -> float:
    """What the operations take with the tile that takes the least.

    With `whole_waves` the last round of tiles over the SMs takes as long as a full one; else tiles are divided until all SMs
    end together, as libraries for Hopper do.
    """
    sms = limits.sms.value
    of_one_sm = flop_per_s / sms
    result = math.inf
    for rows, columns, reached in _TILES:
        tiles = product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns)
        for split in _SPLITS:
            if split > 1 and (product.k < split * _LEAST_K or tiles * split > 2 * sms):
                break
            waves = tiles * split / sms
            rounds = math.ceil(waves) if whole_waves else max(1.0, waves)
            each_s = 2.0 * rows * columns * math.ceil(product.k / split) / (of_one_sm * reached)
            # Partial sums in single precision, written and read once.
            joined_s = 0.0 if split == 1 else 8.0 * split * product.batch * product.m * product.n / cache_bytes_per_s
            result = min(result, rounds * each_s + joined_s)
    return 1e9 * result * product.share


@dataclass(frozen=True)
class Transfer:
    """From times on one device to times on another."""

    here: DeviceLimits  # where the models were fitted
    there: DeviceLimits
    basis: TransferBasis

    @cached_property
    def _slower(self) -> float:
        """How many times as long what is bound by instructions takes there."""
        return instruction_rate(self.here) / instruction_rate(self.there)

    @cached_property
    def cache(self) -> float:
        """How much the cache there holds, of what it holds here."""
        return self.there.cache_bytes.value / self.here.cache_bytes.value

    def launches(self, question: Question, family: str, launches: Sequence[LaunchTime]) -> tuple[LaunchTime, ...]:
        """The launches of a call with their times there."""
        here, there = (works_of(question, family, launches, self.here, cache) for cache in (1.0, self.cache))
        reached = self._attention_flop_per_s(question)
        return tuple(
            replace(launch, time_ns=self._time_ns(launch.time_ns, work, replace(other, flop_per_s=reached)))
            for launch, work, other in zip(launches, here, there, strict=True)
        )

    def _attention_flop_per_s(self, question: Question) -> float:
        """What attention reaches there: between its products is a softmax, which no peak counts.

        As published, or as here: cuDNN's kernels by the peak of tensor cores, the others, whose instructions are those of
        Ampere, by SMs and clock.
        """
        kind, direction = attention_of(question.call)
        if not kind or question.call.dtype == "float32":
            return 0.0
        published = self.basis.attention_flop_per_s.get(direction)
        there, where = (limits.peak_flop_per_s[limits.rated(question.call.dtype)].value for limits in (self.there, self.here))
        most = there * self.here.reach.peak.value  # no more of it than the largest products
        if published is not None and kind in _AS_PUBLISHED:
            return min(published.value, most)
        here = self.here.reach.attention_flop_per_s[kind][direction].value
        if kind != "cudnn":
            return min(here / self._slower, math.inf if published is None else published.value, most)
        return here * there / where

    def lookups(self, lookups: Sequence[Lookup], known: Sequence[LookupEstimate]) -> list[LookupEstimate]:
        """How long each lookup takes there; its launches keep their proportions."""
        here, there = (lookup_works(lookups, limits.cache_bytes.value) for limits in (self.here, self.there))
        results = []
        for item, work, other in zip(known, here, there, strict=True):
            time_ns = self._time_ns(item.estimate.time_ns, work, other)
            scale = time_ns / item.estimate.time_ns if item.estimate.time_ns else 1.0
            launches = tuple(replace(launch, time_ns=launch.time_ns * scale) for launch in item.launches)
            results.append(LookupEstimate(self.estimate(item.estimate, time_ns, "other"), launches))
        return results

    def estimate(self, known: Estimate, time_ns: float, kind: str) -> Estimate:
        """A time there; its interval holds what the models are off by and what carrying kernels of this kind over is."""
        if known.time_ns <= 0:  # nothing is launched
            return replace(known, source=Source.ANALYTIC)
        carried = math.log(self.basis.interval_factor[kind].value)
        # The two are off independently of each other.
        low, high = (math.hypot(carried, math.log(bound / known.time_ns)) for bound in (known.low_ns, known.high_ns))
        return Estimate(time_ns, time_ns * math.exp(-low), time_ns * math.exp(high), Source.ANALYTIC, known.inside)

    def _time_ns(self, time_ns: float, here: Work, there: Work) -> float:
        book = self.book_ns(self.here, here)
        other = self.book_ns(self.there, there, whole_waves=self.basis.whole_waves)
        if time_ns <= book:
            # Some kernels reach more of the limits here than the largest do; none reaches more than there is.
            return max(time_ns * other / book, _least_ns(self.there, there))
        return math.sqrt(other**2 + (time_ns**2 - book**2) * self._slower**2)

    def book_ns(self, limits: DeviceLimits, work: Work, *, whole_waves: bool = False) -> float:
        """What a launch takes at the limits of a device, reached as far as kernels reach them here."""
        reached = self.here.reach
        flop_per_s = work.flop_per_s or reached_flop_per_s(limits, work.precision)
        # L2 is reached through the SMs, so elsewhere it goes with their number and clock.
        cache = reached.cache_bandwidth_bytes_per_s.value * instruction_rate(limits) / instruction_rate(self.here)
        computing = 1e9 * work.flop / flop_per_s
        if work.product is not None:
            computing = product_ns(limits, work.product, flop_per_s, cache, whole_waves=whole_waves)
        bandwidth = reached.bandwidth.value * limits.bandwidth_bytes_per_s.value
        moving = work.memory_bytes / bandwidth + work.cache_bytes / cache
        link = limits.host_bandwidth_bytes_per_s
        crossing = 0.0 if link is None else work.host_bytes / (reached.host_bandwidth.value * link.value)
        start = reached.start_ns.value * self.here.clock_hz.value / limits.clock_hz.value
        if limits.transfer is not None and limits.transfer.start_ns is not None:
            start = limits.transfer.start_ns.value
        return start + max(computing, 1e9 * moving, 1e9 * crossing)


def _least_ns(limits: DeviceLimits, work: Work) -> float:
    """What the operations of a matrix product take at the peak of the data sheet."""
    return 0.0 if work.product is None else 1e9 * work.flop / limits.peak_flop_per_s[limits.rated(work.precision)].value


def reached_flop_per_s(limits: DeviceLimits, precision: str) -> float:
    """What the largest products reach: as published or, of another precision, the published fraction of its peak."""
    rated = limits.rated(precision)
    published = {} if limits.transfer is None else limits.transfer.product_flop_per_s
    peaks = limits.peak_flop_per_s
    if rated in published:
        return min(published[rated].value, peaks[rated].value)  # some cards run above the clock of their data sheet
    alike = [one for one in published if one in peaks and (one in _ON_TENSOR_CORES) == (rated in _ON_TENSOR_CORES)]
    fractions = [published[one].value / peaks[one].value for one in alike]
    return peaks[rated].value * (sum(fractions) / len(fractions) if fractions else limits.reach.peak.value)


def instruction_rate(limits: DeviceLimits) -> float:
    """What is bound by instructions goes with: SMs and clock."""
    return limits.sms.value * limits.clock_hz.value
