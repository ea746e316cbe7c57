"""`CrossLayers`: DCN v2's interaction, as TorchRec's `LowRankCrossNet` computes it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class CrossLayers(nn.Module):
    """x -> x0 * (W (V x) + b) + x, layer by layer; without a rank W V is one matrix.

    Parameters lie by kind, all V first, and are registered in that order.
    """

    def __init__(self, width: int, layers: int, rank: int | None, device: torch.device) -> None:
        super().__init__()
        inner = width if rank is None else rank

        def weights(*shape: int) -> nn.ParameterList:
            made = (torch.empty(shape, device=device) for _ in range(layers))
            return nn.ParameterList([nn.Parameter(nn.init.xavier_normal_(each)) for each in made])

        self.narrow = None if rank is None else weights(inner, width)
        self.wide = weights(width, inner)
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(width, device=device)) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same shape, [batch, width]."""
        first = x
        for layer, (wide, bias) in enumerate(zip(self.wide, self.biases, strict=True)):
            inner = x if self.narrow is None else functional.linear(x, self.narrow[layer])
            x = first * (functional.linear(inner, wide) + bias) + x
        return x
