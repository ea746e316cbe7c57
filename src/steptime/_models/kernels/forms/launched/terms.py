"""What a launch has to do, as terms of about a nanosecond each: its time is a non-negative sum of them.

Bytes by residency, elements, waves of blocks over the SMs at several occupancies, and what latency leaves beyond bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from steptime._models.kernels.forms.launched.columns import PAIRS, SIZES, LaunchColumns, Numbers
from steptime._models.kernels.forms.launched.shares import LaunchShares
from steptime._models.kernels.launches import Gpu
from steptime._models.kernels.launches.facts import FACTS

# Warm times of the measured rows rise to cold ones from 0.6 to 1.6 of the bytes that stay in L2.
_GONE = 1.6
# Blocks of one SM at a time that a kernel may reach.
_RESIDENT = (1, 2, 4, 8, 16)
_MULTIPLES = (1.0, 2.0, 4.0, 8.0, 16.0)
# Sizes where copies from the host change their way: seen in the measured rows.
_STAGED_BYTES, _PAGED_BYTES, _SMALL_BYTES = 1.2e6, 1.3e6, (1_000, 30_000)

_GRID = 7  # terms of a pair
_PLAIN = 19 + len(_MULTIPLES) + 7 + 2
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
    read = cold + warm + hot
    return LaunchTraffic(read - kept, kept, written, np.divide(cold, read, out=np.zeros_like(read), where=read > 0))


def terms(
    columns: LaunchColumns, rows: Numbers, moved: LaunchTraffic, device: LaunchConstants, shares: LaunchShares
) -> Numbers:
    """Terms of every launch (launches x TERMS)."""
    first = len(SIZES)
    fact = {name: rows[:, first + index] for index, name in enumerate(FACTS)}
    elements = rows[:, 0]
    result = np.empty((len(rows), TERMS))
    for index, term in enumerate(_plain(elements, fact, moved, device, shares)):
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
        every * fact["sector_waste"],
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
