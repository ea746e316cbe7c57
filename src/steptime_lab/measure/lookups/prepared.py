"""`PreparedLookup`: a lookup ready to run: its indices drawn on the device, its tables in place, its statistics known."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from steptime._lookups.statistics import Statistics
from steptime_lab.measure.lookups.cases import LookupCase
from steptime_lab.measure.lookups.memory import Memory
from steptime_lab.workloads.table_batched.layout import Layout
from steptime_lab.workloads.table_batched.lookup import TableBatchedLookup
from steptime_lab.workloads.torch_arrays import TorchArrays, side_by_side
from steptime_lab.workloads.torch_statistics import statistics_of_launch

# Small, so that rows that are updated again and again stay what they were drawn as.
_LEARNING_RATE = 1e-3


class _Implementation(Protocol):
    def forward(self) -> torch.Tensor: ...

    def backward(self, out: torch.Tensor) -> None: ...


class PreparedLookup:
    """Runs one case, forward and backward with update, as a training step would."""

    def __init__(self, case: LookupCase, memory: Memory) -> None:
        self.case = case
        indices, offsets = drawn(case, memory.device)
        self.statistics: tuple[Statistics, ...] = statistics_of_launch(indices, offsets, case.rows, case.batch)
        scales = torch.rand(indices.numel(), device=memory.device) + 0.5 if case.weighted else None
        kind = _TableBatched if case.implementation == "table_batched" else _Module
        self._run: _Implementation = kind(case, memory, indices, offsets, scales)

    def forward(self) -> torch.Tensor:
        """The sums of looked-up rows, part of a graph."""
        return self._run.forward()

    def backward(self, out: torch.Tensor) -> None:
        """From the gradient of the sums to updated rows."""
        self._run.backward(out)


class _TableBatched:
    def __init__(
        self, case: LookupCase, memory: Memory, indices: torch.Tensor, offsets: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        elements = Layout.elements_of(case.rows, case.dims)
        rows = memory.rows(elements, getattr(torch, case.dtype))
        self._module = TableBatchedLookup(
            case.rows, case.dims, optimizer=case.optimizer, learning_rate=_LEARNING_RATE, weights=rows
        )
        self._module.prepare(case.batch)
        self._arguments = (indices, offsets, scales)
        self._gradient = memory.gradient(case.batch, sum(case.dims), torch.float32)

    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self._module(*self._arguments)
        return out

    def backward(self, out: torch.Tensor) -> None:
        out.backward(self._gradient)  # type: ignore[no-untyped-call]


class _Module:
    """A module of PyTorch and its optimiser: `embedding_bag` sums a bag's rows, `embedding` gives every row it looks up."""

    def __init__(
        self, case: LookupCase, memory: Memory, indices: torch.Tensor, offsets: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        rows, dim, dtype = case.rows[0], case.dims[0], getattr(torch, case.dtype)
        weight = memory.rows(rows * dim, dtype).view(rows, dim)
        pooled = case.implementation in ("embedding_bag", "embedding_bag_dense")
        self._module: torch.nn.Module
        if pooled:
            self._module = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=not case.dense, _weight=weight)
        else:
            self._module = torch.nn.Embedding(rows, dim, sparse=not case.dense, _weight=weight)
        kind: Any = torch.optim.SGD if case.optimizer == "sgd" else torch.optim.Adagrad
        self._optimizer: torch.optim.Optimizer = kind(self._module.parameters(), lr=_LEARNING_RATE)
        self._arguments = (indices, offsets[:-1], None if scales is None else scales.to(dtype)) if pooled else (indices,)
        self._gradient = memory.gradient(case.batch if pooled else indices.numel(), dim, dtype)

    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self._module(*self._arguments)
        return out

    def backward(self, out: torch.Tensor) -> None:
        out.backward(self._gradient)  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()


def held_bytes(case: LookupCase) -> int:
    """What a prepared case keeps in device memory besides the rows."""
    state = 4 * (sum(case.rows) if case.optimizer == "rowwise_adagrad" else case.elements if case.optimizer == "adagrad" else 0)
    gradient = 0 if case.dtype == "float32" or case.implementation == "table_batched" else 2 * case.outputs
    return int((12 if case.weighted else 8) * case.lookups) + 8 * case.batch * len(case.dims) + state + gradient


def drawn(case: LookupCase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of all tables one after the other, and the bags' offsets, table by table, and the end."""
    arrays = TorchArrays(device)
    return side_by_side([generator.bags(case.batch, 0, arrays) for generator in case.generators])
