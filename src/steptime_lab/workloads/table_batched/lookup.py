"""`TableBatchedLookup`: embedding lookups in any number of tables as one op forward and one op backward, update included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from steptime._lookups.workload import DENSE
from steptime.errors import InputError
from steptime_lab.workloads.table_batched import plain
from steptime_lab.workloads.table_batched.layout import Layout

OPTIMIZERS = ("sgd", "rowwise_adagrad", DENSE)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class TableBatchedLookup(torch.nn.Module):
    """Sums of looked-up rows, table by table side by side: fp32 [batch, summed dims], whatever the dtype of the rows.

    The backward pass updates the rows itself: all gradient of a row is summed, then the row changes once. `sgd` subtracts it
    times the learning rate; `rowwise_adagrad` keeps one fp32 per row, adds the mean of the squared sum to it and divides by
    its root. The weights are therefore no parameter: they get no gradient, and data parallelism leaves them alone; with
    `dense` they are one, and the backward pass leaves a gradient of all rows.

    `weights` may be a flat view of an existing buffer, at least `Layout.elements` long; otherwise it is made and drawn.
    """

    def __init__(
        self,
        rows: Sequence[int],
        dims: Sequence[int],
        *,
        optimizer: str = "sgd",
        learning_rate: float = 0.01,
        eps: float = 1e-8,
        weights: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer is {optimizer!r}; expected one of {', '.join(OPTIMIZERS)}")
        place = torch.device(device) if weights is None else weights.device
        self.layout = Layout(rows, dims, place)
        self.weights = _drawn(self.layout, dtype) if weights is None else _checked(self.layout, weights)
        self.optimizer, self.learning_rate, self.eps = optimizer, learning_rate, eps
        self.state: torch.Tensor | None = None
        if optimizer == "rowwise_adagrad":
            self.state = torch.zeros(sum(rows), dtype=torch.float32, device=place)
        # Autograd calls a backward pass only where an input wants a gradient; this one never gets any.
        self.dense = optimizer == DENSE
        self._anchor = torch.nn.Parameter(self.weights) if self.dense else torch.zeros(0, device=place, requires_grad=True)

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`indices` of all tables one after the other; bag i of table t is `offsets[t * batch + i]` to the next one."""
        return TableBatchedLookupFunction.apply(self._anchor, self, indices, offsets, per_sample_weights)  # type: ignore[no-any-return, no-untyped-call]

    def table(self, number: int) -> torch.Tensor:
        """A table's rows, [rows, dim], as they are in the buffer."""
        return self.layout.view(self.weights, number)

    def prepare(self, batch: int) -> None:
        """Makes what the first forward pass of a batch size would make, so that no pass differs from the others."""
        if self.weights.device.type == "cuda":
            self.layout.programs(batch, _implementation(self.weights).FORWARD_QUADS)

    def look_up(self, indices: torch.Tensor, offsets: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        """The forward pass alone."""
        return _implementation(self.weights).forward(self.weights, self.layout, indices, offsets, scales)  # type: ignore[no-any-return]

    def update(
        self, gradient: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, scales: torch.Tensor | None = None
    ) -> None:
        """The backward pass alone: `gradient` is that of the output."""
        rates = (self.learning_rate, self.eps)
        lookups = (indices, offsets, scales)
        _implementation(self.weights).backward(self.weights, self.state, self.layout, lookups, gradient.contiguous(), rates)

    def gradient(self, gradient: torch.Tensor, *lookups: Any) -> torch.Tensor:
        """The gradient of all rows instead: an update of zeros by what is added to them, at a rate of -1."""
        gradient = gradient.contiguous()
        result = torch.zeros(self.weights.shape, device=self.weights.device)
        _implementation(self.weights).backward(result, None, self.layout, lookups, gradient, (-1.0, self.eps))
        return result


class TableBatchedLookupFunction(torch.autograd.Function):
    """The op as a trace shows it: under this name forward, and with `Backward` behind it."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,  # noqa: ARG004
        module: TableBatchedLookup,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sums of looked-up rows."""
        ctx.module = module
        ctx.save_for_backward(indices, offsets, scales)
        return module.look_up(indices, offsets, scales)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        """Updates the rows, and there is no gradient to hand on; or hands on that of all rows."""
        with torch.no_grad():
            if ctx.module.dense:
                return ctx.module.gradient(gradients[0], *ctx.saved_tensors), None, None, None, None
            ctx.module.update(gradients[0], *ctx.saved_tensors)
        return None, None, None, None, None


def _implementation(weights: torch.Tensor) -> Any:
    if weights.device.type == "cuda":
        from steptime_lab.workloads.table_batched import launch as table_batched_launch

        return table_batched_launch
    return plain


def _drawn(layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(layout.elements, dtype=dtype, device=layout.device).normal_(std=0.1)


def _checked(layout: Layout, weights: torch.Tensor) -> torch.Tensor:
    if weights.dtype not in DTYPES or weights.dim() != 1 or not weights.is_contiguous() or weights.numel() < layout.elements:
        raise InputError(
            f"weights are {weights.dtype} of shape {tuple(weights.shape)}; "
            f"expected a flat fp32, fp16 or bf16 buffer of at least {layout.elements} elements"
        )
    return weights[: layout.elements]
