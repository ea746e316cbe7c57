"""Launches as rows of numbers, and what each has to do as terms of about a nanosecond: its time is a non-negative sum of them.

Numbers are sizes, bytes by where they come from, the grid, and every fact by name. Terms are bytes by residency, elements,
waves of blocks over the SMs at several occupancies, and what latency leaves beyond bandwidth. A share of a GPU has its SMs, and
memory, cache and arithmetic are slower for what the others do meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.launches import ARGUMENT, DEFAULTS, FACTS, HOT, Gpu, Launch, Operand
from steptime._units import dtype_bytes

Numbers = npt.NDArray[np.float64]

# Pairs of a grid that are kept.
PAIRS = 8
# The numbers every launch has; the facts follow, then the pairs of the grid: blocks, work of a block.
SIZES = (
    "elements", "cold_bytes", "warm_bytes", "hot_bytes", "written_bytes", "produced_bytes", "since_bytes", "item_bytes",
    "result_bytes", "reads", "occurrence",
)  # fmt: skip
# What stands for a fact that a launch does not have, where FACTS do not say; facts themselves are never negative.
_ABSENT = -1.0


@dataclass(frozen=True)
class LaunchColumns:
    """The order of the numbers of a launch. `facts` starts with FACTS."""

    facts: tuple[str, ...]

    @property
    def features(self) -> int:
        """Numbers before the grid: those that trees see."""
        return len(SIZES) + len(self.facts)

    @property
    def width(self) -> int:
        """Numbers of a launch."""
        return self.features + 2 * PAIRS

    def rows(self, call: Call, launches: Sequence[Launch], warm: bool) -> list[list[float]]:
        """The numbers of every launch of a call."""
        produced = _produced_bytes(call) if warm else 0.0
        seen: dict[str, int] = {}
        rows = []
        for launch in launches:
            seen[launch.kernel] = seen.get(launch.kernel, 0) + 1
            row = self._blank.copy()
            row[: len(SIZES)] = _sizes(call, launch, warm, produced, seen[launch.kernel])
            for name, value in launch.facts.items():
                index = self._places.get(name)
                if index is not None:
                    row[index] = value
            for pair, (blocks, work) in enumerate(launch.grids[:PAIRS], self.features):
                row[pair], row[pair + PAIRS] = max(1.0, blocks), work
            rows.append(row)
        return rows

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.facts, len(SIZES))}

    @cached_property
    def _blank(self) -> list[float]:
        facts = [DEFAULTS.get(name, 0.0) if name in FACTS else _ABSENT for name in self.facts]
        return [0.0] * len(SIZES) + facts + [0.0] * (2 * PAIRS)


def _sizes(call: Call, launch: Launch, warm: bool, produced_bytes: float, occurrence: int) -> list[float]:
    cold_bytes = warm_bytes = hot_bytes = since_bytes = 0.0
    for entry in launch.reads:
        nbytes = _device_bytes(entry)
        if entry.origin == HOT:
            hot_bytes += nbytes
            since_bytes = max(since_bytes, entry.since_bytes)
        elif warm and entry.origin == ARGUMENT and entry.argument in call.written:
            warm_bytes += nbytes
        else:
            cold_bytes += nbytes
    written_bytes = sum(_device_bytes(entry) for entry in launch.writes)
    result = launch.writes[0].item_bytes if launch.writes else 0
    item = launch.reads[0].item_bytes if launch.reads else result or 4
    return [
        *(float(launch.elements), cold_bytes, warm_bytes, hot_bytes, written_bytes, produced_bytes, since_bytes),
        *(float(item), float(result), float(len(launch.reads)), float(occurrence)),
    ]


def _device_bytes(operand: Operand) -> float:
    return float(operand.nbytes) if operand.device == "device" else 0.0


def _produced_bytes(call: Call) -> float:
    """Bytes of the arguments that were written just before, broadcast ones once."""
    written = [call.args[index] for index in call.written if index < len(call.args)]
    tensors = (tensor for argument in written for tensor in (argument if isinstance(argument, tuple) else (argument,)))
    return float(
        sum(_distinct_bytes(tensor) for tensor in tensors if isinstance(tensor, TensorArg) and tensor.device == "device")
    )


def _distinct_bytes(tensor: TensorArg) -> int:
    if tensor.strides is None:
        return tensor.nbytes
    distinct = 1
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        distinct *= size if stride else 1
    return distinct * dtype_bytes(tensor.dtype)


# What is scaled on a part: what does not grow with the work, bytes read, written and from L2, elements, blocks, and the bytes
# that stay in L2. The scale is exp(step) * share ** power, with both numbers of its own for every kind of company.
SCALED = ("latency", "memory", "written", "cache", "work", "blocks", "cache_bytes")


@dataclass(frozen=True)
class LaunchShares:
    """Per launch: SMs, and what the terms of each kind are multiplied by."""

    sms: Numbers
    latency: Numbers
    memory: Numbers
    written: Numbers
    cache: Numbers
    work: Numbers
    blocks: Numbers
    cache_bytes: Numbers


def shares_of(sms: float, share: Numbers, others: npt.NDArray[np.int64], scales: Numbers) -> LaunchShares:
    """The shares of a GPU that launches run on, by company: places in `OTHERS`."""
    step, power = scales[others, :, 0], scales[others, :, 1]
    scale = np.where(share[:, None] > 1, np.exp(step + power * np.log(share)[:, None]), 1.0)
    return LaunchShares(sms / share, *scale.T)


# Warm times of the measured rows rise to cold ones from 0.6 to 1.6 of the bytes that stay in L2.
_GONE = 1.6
# Blocks of one SM at a time that a kernel may reach: at most 32 (CUDA, compute capability 9.0), which those of one warp do.
_RESIDENT = (1, 2, 4, 8, 16, 32)
_MULTIPLES = (1.0, 2.0, 4.0, 8.0, 16.0)
# Sizes where copies from the host change their way: seen in the measured rows.
_STAGED_BYTES, _PAGED_BYTES, _SMALL_BYTES = 1.2e6, 1.3e6, (1_000, 30_000)

_GRID = 2 + len(_RESIDENT)  # terms of a pair
_PLAIN = 20 + len(_MULTIPLES) + 7 + 2
TERMS = _PLAIN + _GRID * PAIRS


@dataclass(frozen=True)
class LaunchConstants:
    """Of the device that launches run on."""

    sms: float
    read_bytes_per_ns: float
    write_bytes_per_ns: float
    cache_bytes_per_ns: float  # of warm reads
    kept_bytes: float  # that stay in L2 until they are read again
    l2_bytes: float
    peak_bytes_per_ns: float
    threads_per_sm: float
    l1_bytes: float  # of each SM

    @cached_property
    def gpu(self) -> Gpu:
        """What libraries see of it."""
        return Gpu(int(self.sms), int(self.threads_per_sm), int(self.l1_bytes))


@dataclass(frozen=True)
class LaunchTraffic:
    """Bytes by where they are when a launch asks for them, each per launch."""

    memory_bytes: Numbers
    cache_bytes: Numbers
    written_bytes: Numbers
    cold_share: Numbers

    def least_ns(self, device: LaunchConstants, shares: LaunchShares) -> Numbers:
        """What the bytes alone take."""
        read = self.memory_bytes / device.read_bytes_per_ns * shares.memory
        moved = read + self.written_bytes / device.write_bytes_per_ns * shares.written
        return moved + self.cache_bytes / device.cache_bytes_per_ns * shares.cache

    def at_peak_ns(self, device: LaunchConstants) -> Numbers:
        """What is beyond L2 cannot be moved faster than at the memory's bandwidth on paper."""
        beyond: Numbers = np.maximum(0.0, self.memory_bytes + self.written_bytes - device.l2_bytes)
        return beyond / device.peak_bytes_per_ns


def traffic(rows: Numbers, device: LaunchConstants, shares: LaunchShares) -> LaunchTraffic:
    """How much of what was written before is still in L2."""
    cold, warm, hot, written, produced, since = rows[:, 1:7].T
    cache_bytes = device.kept_bytes * shares.cache_bytes
    stays_warm = np.where(warm > 0, np.clip(_GONE - (np.maximum(produced, warm) + written / 2) / cache_bytes, 0, 1), 0.0)
    stays_hot = np.where(hot > 0, np.clip(_GONE - since / cache_bytes, 0, 1), 0.0)
    kept = warm * stays_warm + hot * stays_hot
    read, gone = cold + warm + hot, cold + warm * (1 - stays_warm)
    return LaunchTraffic(read - kept, kept, written, np.divide(gone, read, out=np.zeros_like(read), where=read > 0))


def terms(
    columns: LaunchColumns, rows: Numbers, moved: LaunchTraffic, device: LaunchConstants, shares: LaunchShares
) -> Numbers:
    """Terms of every launch (launches x TERMS)."""
    fact = {name: rows[:, index] for index, name in enumerate(FACTS, len(SIZES))}
    result = np.empty((len(rows), TERMS))
    for index, term in enumerate(_plain(rows[:, 0], fact, moved, device, shares)):
        result[:, index] = term
    grid = rows[:, columns.features :]
    blocks, work = grid[:, :PAIRS], grid[:, PAIRS:]
    waves = _waves(blocks, work * shares.blocks[:, None], shares.sms)
    result[:, _PLAIN - 2 : _PLAIN] = waves[:, :2, -1] * moved.cold_share[:, None]
    result[:, _PLAIN:] = waves.reshape(len(rows), TERMS - _PLAIN)
    return result


def _plain(
    elements: Numbers, fact: dict[str, Numbers], moved: LaunchTraffic, device: LaunchConstants, shares: LaunchShares
) -> list[Numbers]:
    memory, kept, written = moved.memory_bytes, moved.cache_bytes, moved.written_bytes
    least_ns, host = moved.least_ns(device, shares), fact["host_bytes"]
    every = (memory * shares.memory + written * shares.written + kept * shares.cache) / device.read_bytes_per_ns
    fixed_ns, work = 1000.0 * shares.latency, shares.work / 1e4
    return [
        fixed_ns,
        memory / device.read_bytes_per_ns * shares.memory,
        kept / device.cache_bytes_per_ns * shares.cache,
        written / device.write_bytes_per_ns * shares.written,
        elements * work,
        np.sqrt(memory * shares.memory + written * shares.written) / 10,
        every,
        fact["sector_bytes"] / device.cache_bytes_per_ns * shares.cache,
        elements * fact["casts"] * work,
        fixed_ns * fact["tail"],
        fact["rows"] * 1e3 * work,
        fact["gathered_bytes"] / 5000 * shares.memory,
        fact["reuse"] * shares.latency,
        np.maximum(0, elements - 5e5) * work,
        fact["items"] * 1e3 * work,
        host / 50,
        fact["pageable_bytes"] / 10,
        fixed_ns * (fact["split"] > 1),
        (fact["split"] - 1) * shares.latency,
        fixed_ns * np.log2(1 + fact["block_height"]) / 10,
        *(np.maximum(0, fact["chain_ns"] * multiple * shares.latency - least_ns) for multiple in _MULTIPLES),
        np.maximum(0, host - _STAGED_BYTES) / 20,
        1000.0 * (host > _PAGED_BYTES),
        1000.0 * ((host > _SMALL_BYTES[0]) & (host < _SMALL_BYTES[1])),
        fixed_ns * moved.cold_share,
        fixed_ns * np.log2(1 + fact["footprint_bytes"] / 1e6) / 10,
        10.0 * fact["tensors"] * shares.latency,
        elements * np.minimum(1, fact["odd_share"]) * work,
    ]


def _waves(blocks: Numbers, work: Numbers, sms: Numbers) -> Numbers:
    """Of every pair: even over all SMs, whole waves at several occupancies, and at least one block after the other."""
    result = np.empty((*blocks.shape, _GRID))
    across = sms[:, None]
    result[:, :, 0] = blocks * work / across
    for index, resident in enumerate(_RESIDENT, 1):
        result[:, :, index] = np.ceil(blocks / (across * resident)) * work
    result[:, :, _GRID - 1] = np.maximum(1, blocks / (4 * across)) * work
    return result
