"""Decoders: language models that see what came before."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from steptime_lab.workloads.zoo.architecture import Place, Trainee, architecture
from steptime_lab.workloads.zoo.layers import PreNormBlock, language_model

_KIN = "decoders"


class Decoder(nn.Module):
    """Embedding, positions, layers, norm, head."""

    def __init__(
        self, vocabulary: int, width: int, layers: list[nn.Module], norm: nn.Module, tokens: int = 0, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(tokens, width) if tokens else None
        self.layers, self.norm = nn.ModuleList(layers), norm
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Any:
        """Scores of every word at every place."""
        x = self.embedding(words)
        if self.positions is not None:
            x = x + self.positions.weight[: words.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@architecture(_KIN, "bf16", "adamw_fused")
def gpt2_medium(at: Place) -> Trainee:
    """24 layers of width 1,024 with tied embeddings, learnt positions, 8 texts of 1,024 tokens."""
    layers: list[nn.Module] = [PreNormBlock(1024, 16, 4096, causal=True) for _ in range(at.layers(24))]
    model = Decoder(50_257, 1024, layers, nn.LayerNorm(1024), 1024, tied=True)
    return language_model(at, model, 50_257, 8, 1024)
