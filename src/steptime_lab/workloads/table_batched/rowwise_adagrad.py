"""Row-wise Adagrad, which PyTorch has no optimiser for: one number of state per row of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adds the mean square of a row's gradient to the row's state and divides the gradient by its root.

    Rows looked up more than once have to be summed first, and how many distinct ones there are decides the size of
    what follows: PyTorch's `coalesce` waits for the device to learn it, here as in the published DLRM. Dense gradients are
    those of all rows; `tables_of` then gives the tables, [rows, dim] each, that lie in a parameter or in its gradient.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        eps: float = 1e-8,
        tables_of: Callable[[torch.Tensor], list[torch.Tensor]] = lambda weight: [weight],
    ) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})
        self._tables_of = tables_of
        for weight in self._weights():
            sums = [torch.zeros(len(rows), device=weight.device) for rows in tables_of(weight.detach())]
            self.state[weight]["sum"] = sums

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every row that has a gradient."""
        if closure is not None:
            raise ValueError("the gradient is there already; a closure has nothing to do")
        with torch.no_grad():
            for weight in self._weights():
                if weight.grad is not None:
                    (self._update if weight.grad.is_sparse else self._update_all)(weight, weight.grad)

    def _update(self, weight: nn.Parameter, gradient: torch.Tensor) -> None:
        group, gradient = self.param_groups[0], gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()  # [distinct], [distinct, dim]
        state: torch.Tensor = self.state[weight]["sum"][0]
        state.index_add_(0, rows, values.square().mean(1))
        roots = state.index_select(0, rows).sqrt_().add_(group["eps"])
        weight.index_add_(0, rows, values / roots[:, None], alpha=-group["lr"])

    def _update_all(self, weight: nn.Parameter, gradient: torch.Tensor) -> None:
        group, parts = self.param_groups[0], (self._tables_of(weight), self._tables_of(gradient), self.state[weight]["sum"])
        for rows, values, state in zip(*parts, strict=True):
            state.add_(values.square().mean(1))
            roots = state.sqrt().add_(group["eps"])
            rows.add_(values / roots[:, None], alpha=-group["lr"])

    def _weights(self) -> list[Any]:
        return [weight for group in self.param_groups for weight in group["params"]]
