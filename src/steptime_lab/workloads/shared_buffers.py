"""What cases of one process share, so that switching from one to the next takes milliseconds: table weights and index batches.

Weights are random and nobody reads them between cases, so every case takes views of the same buffer. Index batches belong to
a table, not to a plan: all plans of a task find theirs already made.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from steptime._lookups.generators import Bags, Generator
from steptime._lookups.statistics import Statistics
from steptime_lab.workloads.torch_arrays import TorchArrays
from steptime_lab.workloads.torch_statistics import statistics_of_tables

INDEX_BYTES = 6 << 30
"""How much of a device's memory index batches may hold before the ones used longest ago are made anew when needed."""

WEIGHT_SCALE = 0.01
"""Standard deviation of table weights: sums of hundreds of rows stay of order one."""


@dataclass
class SharedBuffers:
    """The buffers of one device."""

    device: torch.device
    exact: bool = False  # no buffer is larger than what the case at hand asks for
    _floats: dict[str, torch.Tensor] = field(default_factory=dict)
    _bags: OrderedDict[tuple[Generator, int, int], Bags] = field(default_factory=OrderedDict)
    _bags_nbytes: int = 0
    _unsettled: bool = False
    _statistics: dict[tuple[Generator, int, int], Statistics] = field(default_factory=dict)

    def floats(self, purpose: str, count: int, at_best: int = 0) -> torch.Tensor:
        """The first `count` elements of the fp32 buffer for that purpose.

        Where it is too small, or not there, it is made anew with random values and at least `at_best` elements. That leaves
        the views of earlier cases on the old buffer: close a case before building a larger one.
        """
        held = self._floats.get(purpose)
        if held is None or held.numel() < count:
            self._floats.pop(purpose, None)
            del held
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            held = torch.empty(max(count, 0 if self.exact else at_best), dtype=torch.float32, device=self.device)
            held.normal_(0.0, WEIGHT_SCALE, generator=torch.Generator(self.device).manual_seed(0))
            self._floats[purpose] = held
            self._unsettled = True
        return held[:count]

    def bags(self, generator: Generator, batch: int, iteration: int) -> Bags:
        """What the table of that generator looks up in that iteration."""
        key = (generator, batch, iteration)
        if key in self._bags:
            self._bags.move_to_end(key)
            return self._bags[key]
        result = generator.bags(batch, iteration, TorchArrays(self.device))
        self._bags[key] = result
        self._unsettled = True
        self._bags_nbytes += nbytes_of(result)
        while self._bags_nbytes > INDEX_BYTES and len(self._bags) > 1:
            self._bags_nbytes -= nbytes_of(self._bags.popitem(last=False)[1])
        return result

    def drop_bags(self) -> None:
        """Keeps no index batch for later cases; those that cases hold stay with them."""
        self._bags.clear()
        self._bags_nbytes = 0

    def statistics(self, generator: Generator, batch: int, iteration: int) -> Statistics:
        """What is to be known of those lookups; computed once."""
        key = (generator, batch, iteration)
        if key not in self._statistics:
            self._statistics[key] = statistics_of_tables([self.bags(*key)], [generator.rows])[0]
        return self._statistics[key]

    def settle(self) -> None:
        """Forgets what making buffers took for a while: it is no part of a step's memory."""
        if self._unsettled and self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        self._unsettled = False

    def nbytes(self) -> int:
        """Bytes of everything held."""
        return self._bags_nbytes + sum(held.nbytes for held in self._floats.values())


def nbytes_of(bags: Bags) -> int:
    """Bytes of a table's index batch."""
    return int(bags.indices.nbytes + bags.offsets.nbytes)


_BY_DEVICE: dict[torch.device, SharedBuffers] = {}


def shared_buffers(device: torch.device) -> SharedBuffers:
    """The one set of buffers of this process on that device."""
    return _BY_DEVICE.setdefault(device, SharedBuffers(device))


def renewed_buffers(device: torch.device) -> SharedBuffers:
    """The same, empty, and from now on no larger than the case at hand needs: for one whose own memory is asked."""
    _BY_DEVICE[device] = SharedBuffers(device, exact=True)
    return _BY_DEVICE[device]
