"""Lookups ready to run, on rows and gradients that are drawn once; and whether their kernels compute what they should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from steptime._lookups.statistics import Statistics
from steptime._units import MIB
from steptime_lab.measure.device_profile import reason_of
from steptime_lab.measure.lookups.cases import LookupCase, LookupLimits
from steptime_lab.workloads.table_batched import plain
from steptime_lab.workloads.table_batched.layout import Layout
from steptime_lab.workloads.table_batched.lookup import TableBatchedLookup
from steptime_lab.workloads.torch_arrays import TorchArrays, side_by_side
from steptime_lab.workloads.torch_statistics import statistics_of_launch

# Of the memory that a rank has: elements of the tables of one case, in any dtype.
_ELEMENTS_PER_BYTE = 0.035
# How many times that much the buffers have: tables of consecutive cases lie in different places.
_ROOM = {torch.float32: 1.4, torch.float16: 1.0, torch.bfloat16: 1.0}
# Whole-GPU limits; a rank of several has its share.
_MOST_LOOKUPS, _MOST_READ_BYTES, _MOST_OUTPUTS = 30_000_000, 3_000_000_000, 1 << 27
# Several times any last-level cache.
_FLUSH_BYTES = 256 * MIB
_CPU_ELEMENTS = 1 << 21
_ALIGNMENT = 64


class Memory:
    """What all cases of a process share."""

    def __init__(self, device: torch.device, share: int) -> None:
        self.device = device
        cuda = device.type == "cuda"
        self.limits = limits_of(torch.cuda.mem_get_info(device)[1] if cuda else 0, share)
        self._rows = {
            dtype: torch.empty(int(room * self.limits.elements) + (1 << 12), dtype=dtype, device=device).normal_(std=0.1)
            for dtype, room in _ROOM.items()
        }
        self._place = dict.fromkeys(_ROOM, 0)
        self._gradients = torch.randn(self.limits.outputs, device=device)
        self._flush = torch.randn((_FLUSH_BYTES if cuda else MIB) // 4, device=device)

    def rows(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat view for tables of so many elements in all."""
        buffer, index = self._rows[dtype], self._place[dtype]
        if index + elements > buffer.numel():
            index = 0
        self._place[dtype] = -(-(index + elements) // _ALIGNMENT) * _ALIGNMENT
        return buffer[index : index + elements]

    def gradient(self, batch: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Random values in the shape of an output."""
        return self._gradients[: batch * columns].view(batch, columns).to(dtype)

    def flush(self) -> None:
        """Reads more than the caches hold. Reading leaves nothing that the next kernel would have to write back."""
        self._flush.sum()


def limits_of(memory_bytes: int, share: int) -> LookupLimits:
    """What fits one of `share` parts of a device with so much memory; 0: the CPU."""
    if not memory_bytes:
        return LookupLimits(_CPU_ELEMENTS, 1 << 16, 1 << 22, 1 << 21)
    elements = int(_ELEMENTS_PER_BYTE * memory_bytes / share)
    return LookupLimits(elements, _MOST_LOOKUPS // share, _MOST_READ_BYTES // share, _MOST_OUTPUTS // share)


# Small, so that rows that are updated again and again stay what they were drawn as.
_LEARNING_RATE = 1e-3


class PreparedLookup:
    """One case, forward and backward with update, as a training step runs it."""

    def __init__(self, case: LookupCase, memory: Memory) -> None:
        self.case = case
        indices, offsets = drawn(case, memory.device)
        self.statistics: tuple[Statistics, ...] = statistics_of_launch(indices, offsets, case.rows, case.batch)
        scales = torch.rand(indices.numel(), device=memory.device) + 0.5 if case.weighted else None
        self._optimizer: torch.optim.Optimizer | None = None
        self._module: torch.nn.Module
        self._arguments: tuple[torch.Tensor | None, ...]
        if case.implementation == "table_batched":
            self._batch_tables(memory, indices, offsets, scales)
        else:
            self._use_module(memory, indices, offsets, scales)

    def _batch_tables(self, memory: Memory, indices: torch.Tensor, offsets: torch.Tensor, scales: torch.Tensor | None) -> None:
        """All tables in one launch; the backward pass updates them."""
        case = self.case
        rows = memory.rows(Layout.elements_of(case.rows, case.dims), getattr(torch, case.dtype))
        lookup = TableBatchedLookup(case.rows, case.dims, optimizer=case.optimizer, learning_rate=_LEARNING_RATE, weights=rows)
        lookup.prepare(case.batch)
        self._module, self._arguments = lookup, (indices, offsets, scales)
        self._gradient = memory.gradient(case.batch, sum(case.dims), torch.float32)

    def _use_module(self, memory: Memory, indices: torch.Tensor, offsets: torch.Tensor, scales: torch.Tensor | None) -> None:
        """A module of PyTorch and its optimiser: `embedding_bag` sums a bag's rows, `embedding` gives every row it looks up."""
        case = self.case
        rows, dim, dtype = case.rows[0], case.dims[0], getattr(torch, case.dtype)
        weight = memory.rows(rows * dim, dtype).view(rows, dim)
        pooled = case.implementation in ("embedding_bag", "embedding_bag_dense")
        if pooled:
            self._module = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=not case.dense, _weight=weight)
        else:
            self._module = torch.nn.Embedding(rows, dim, sparse=not case.dense, _weight=weight)
        kind: Any = torch.optim.SGD if case.optimizer == "sgd" else torch.optim.Adagrad
        self._optimizer = kind(self._module.parameters(), lr=_LEARNING_RATE)
        self._arguments = (indices, offsets[:-1], None if scales is None else scales.to(dtype)) if pooled else (indices,)
        self._gradient = memory.gradient(case.batch if pooled else indices.numel(), dim, dtype)

    def forward(self) -> torch.Tensor:
        """The sums of looked-up rows, part of a graph."""
        out: torch.Tensor = self._module(*self._arguments)
        return out

    def backward(self, out: torch.Tensor) -> None:
        """From the gradient of the sums to updated rows."""
        out.backward(self._gradient)  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
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


class NoKernelsError(RuntimeError):
    """The kernels cannot be compiled or run here."""


# Sums in another order, and rows of 8 significant bits that are rounded once more or less.
_TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}


def disagreement(cases: Sequence[LookupCase], memory: Memory) -> str:
    """The first table-batched case whose sums or updated rows differ from plain PyTorch's; empty where none does."""
    for case in cases:
        if case.implementation == "table_batched":
            try:
                wrong = _difference(case, memory)
            except Exception as error:
                raise NoKernelsError(reason_of(error)) from error
            if wrong:
                return f"{wrong} of {len(case.dims)} tables, {case.dtype}, {case.optimizer}"
    return ""


def _difference(case: LookupCase, memory: Memory) -> str:
    indices, offsets = drawn(case, memory.device)
    scales = torch.rand(indices.numel(), device=memory.device) + 0.5 if case.weighted else None
    lookup = TableBatchedLookup(
        case.rows, case.dims, optimizer=case.optimizer, dtype=getattr(torch, case.dtype), device=memory.device
    )
    rows, state = lookup.weights.clone(), None if lookup.state is None else lookup.state.clone()
    gradient = memory.gradient(case.batch, sum(case.dims), torch.float32)
    sums = plain.forward(rows, lookup.layout, indices, offsets, scales)
    out = lookup(indices, offsets, scales)
    out.backward(gradient)
    rates = (lookup.learning_rate, lookup.eps)
    plain.backward(rows, state, lookup.layout, (indices, offsets, scales), gradient, rates)
    tolerance = _TOLERANCE[case.dtype]
    if not torch.allclose(out.detach(), sums, rtol=tolerance, atol=tolerance):
        return "the sums"
    return "" if torch.allclose(lookup.weights.float(), rows.float(), rtol=tolerance, atol=tolerance) else "the updated rows"
