"""Launches as rows of numbers: sizes, bytes by where they come from, the grid, and every fact by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.launches import ARGUMENT, HOT, Launch, Operand
from steptime._models.kernels.launches.facts import DEFAULTS, FACTS
from steptime._units import dtype_bytes

Numbers = npt.NDArray[np.float64]

# Pairs of a grid that are kept.
PAIRS = 8
# The numbers every launch has; the facts follow, then the pairs of the grid: blocks, work of a block.
SIZES = (
    "elements",
    "cold_bytes",
    "warm_bytes",
    "hot_bytes",
    "written_bytes",
    "produced_bytes",
    "since_bytes",
    "item_bytes",
    "result_bytes",
    "reads",
    "occurrence",
)
# What stands for a fact that a launch does not have, where FACTS do not say; facts themselves are never negative.
_ABSENT = -1.0


@dataclass(frozen=True)
class LaunchColumns:
    """The order of the numbers of a launch. `facts` starts with FACTS."""

    facts: tuple[str, ...]

    @property
    def width(self) -> int:
        """Numbers of a launch."""
        return len(SIZES) + len(self.facts) + 2 * PAIRS

    @property
    def features(self) -> int:
        """Numbers before the grid: those that trees see."""
        return len(SIZES) + len(self.facts)

    def rows(self, call: Call, launches: Sequence[Launch], warm: bool) -> list[list[float]]:
        """The numbers of every launch of a call."""
        produced = _produced_bytes(call) if warm else 0.0
        seen: dict[str, int] = {}
        first = len(SIZES)
        results = []
        for launch in launches:
            seen[launch.kernel] = seen.get(launch.kernel, 0) + 1
            row = self._blank.copy()
            row[:first] = _sizes(call, launch, warm)
            row[5], row[10] = produced, seen[launch.kernel]
            for name, value in launch.facts.items():
                index = self._places.get(name)
                if index is not None:
                    row[index] = value
            for pair, (blocks, work) in enumerate(launch.grids[:PAIRS], self.features):
                row[pair], row[pair + PAIRS] = max(1.0, blocks), work
            results.append(row)
        return results

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.facts, len(SIZES))}

    @cached_property
    def _blank(self) -> list[float]:
        facts = [DEFAULTS.get(name, 0.0) if name in FACTS else _ABSENT for name in self.facts]
        return [0.0] * len(SIZES) + facts + [0.0] * (2 * PAIRS)


def _sizes(call: Call, launch: Launch, warm: bool) -> list[float]:
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
        float(launch.elements),
        cold_bytes,
        warm_bytes,
        hot_bytes,
        written_bytes,
        0.0,
        since_bytes,
        float(item),
        float(result),
        float(len(launch.reads)),
        0.0,
    ]


def _device_bytes(one: Operand) -> float:
    return float(one.nbytes) if one.device == "device" else 0.0


def _produced_bytes(call: Call) -> float:
    """Bytes of the arguments that were written just before."""
    return float(sum(_argument_bytes(call, index) for index in call.written if index < len(call.args)))


def _argument_bytes(call: Call, index: int) -> int:
    given = call.args[index]
    every = given if isinstance(given, tuple) else (given,)
    return sum(_distinct_bytes(item) for item in every if isinstance(item, TensorArg) and item.device == "device")


def _distinct_bytes(tensor: TensorArg) -> int:
    if tensor.strides is None:
        return tensor.nbytes
    distinct = 1
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        distinct *= size if stride else 1
    return distinct * dtype_bytes(tensor.dtype)
