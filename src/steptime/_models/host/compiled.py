"""What the host spends on what `torch.compile` made: guards, AOTAutograd's functions, Inductor's wrappers, CUDA graphs.

Costs hang on the frames that PyTorch records (`_ops/compiled.py`): each costs a fixed time, and some for every tensor that its
wrapper takes from outside and gives back, which guards are checked of, which are handed over and which autograd keeps. Inside a
wrapper a launch of a generated kernel costs more with every argument. Fitted on compiled functions of known counts
(docs/compile.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from steptime._models.host.model import HostCost, HostModel, read_host
from steptime._ops.compiled import GENERATED, Frame
from steptime._ops.table import OpTable
from steptime._program.program import Tensor

KIND = "compiled"
"""Of its costs in `HostModel.around`, and of the rows they are fitted on."""
_FITTED = "xeon-h200"  # the host of which all of them were measured
_ALWAYS = "region"  # is among them where any are
# How costs of frames are named: once for each, `region`, and for each tensor, `region_taken` and `region_given`.
FRAMES = {Frame.REGION: "region", Frame.FUNCTION: "function", Frame.BACKWARD: "backward", Frame.GRAPH: "graph"}


class Counts(NamedTuple):
    """Tensors that a frame takes from outside, and tensors that it makes and others use after it."""

    taken: int
    given: int


@dataclass(frozen=True)
class CompiledCosts:
    """Costs of one host by name; a host of which none were measured has the reference host's, as fast as it is."""

    model: HostModel

    def of(self, name: str) -> HostCost:
        """One cost at speed 1; none of what was found to cost nothing."""
        around, slower = self.model.around, 1.0
        if f"{KIND} {_ALWAYS}" not in around:
            fitted = read_host(_FITTED)
            around, slower = fitted.around, self.model.reference_cpu_ns / fitted.reference_cpu_ns
        cost = around.get(f"{KIND} {name}", HostCost())
        return HostCost(cost.cpu_ns * slower, cost.launch_ns)

    def frame(self, frame: Frame) -> HostCost:
        """A frame itself, without what is inside it and what tensors cost; guards are part of their region."""
        return self.of(FRAMES[frame]) if frame in FRAMES else HostCost()

    def tensors(self, frame: Frame, counts: Counts) -> HostCost:
        """What a frame costs for the tensors of the wrapper inside it."""
        if frame not in FRAMES:
            return HostCost()
        name = FRAMES[frame]
        return self.of(f"{name}_taken").times(counts.taken) + self.of(f"{name}_given").times(counts.given)

    def replay(self, kernels: float) -> HostCost:
        """Launching a CUDA graph of so many kernels."""
        return self.of("replay") + self.of("replay_kernel").times(kernels)

    def kernel(self, arguments: int) -> HostCost:
        """Launching one generated kernel from a wrapper, the launch itself left out."""
        return self.of("kernel") + self.of("argument").times(arguments)


class FrameCounts:
    """What frames of a program take and give, found once for all of them."""

    def __init__(self, table: OpTable) -> None:
        self._table = table
        self._last_use: dict[int, int] = {}  # storage -> the last row that reads it
        for row in range(len(table)):
            for storage in self._read(row):
                self._last_use[storage] = row

    def of(self, row: int) -> Counts:
        """Of the frame in this row, a wrapper mostly."""
        taken: set[int] = set()
        made: set[int] = set()
        last = self._table.last[row]
        for inside in range(row + 1, last + 1):
            taken.update(storage for storage in self._read(inside) if storage not in made)
            made.update(storage for storage in self._written(inside) if storage not in taken)
        return Counts(len(taken), sum(self._last_use.get(storage, -1) > last for storage in made))

    def _read(self, row: int) -> Iterator[int]:
        arguments = self._table.arguments[row]
        return _storages(arguments.by_input[0] if self._generated(row) else arguments.inputs)

    def _written(self, row: int) -> Iterator[int]:
        arguments = self._table.arguments[row]
        return _storages(arguments.by_input[1] if self._generated(row) else arguments.outputs)

    def _generated(self, row: int) -> bool:
        """Whether a kernel that Inductor generated, whose inputs are what it reads and what it writes."""
        return self._table.names[row].startswith(GENERATED) and len(self._table.arguments[row].by_input) > 1


def _storages(tensors: Sequence[Tensor]) -> Iterator[int]:
    return (tensor.storage for tensor in tensors if tensor.storage is not None)
