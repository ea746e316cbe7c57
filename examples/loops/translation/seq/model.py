"""The transformer of translation: embeddings, positions and torch.nn.Transformer."""

import math

import torch
from torch import nn

from .data import PAD


class Positions(nn.Module):
    def __init__(self, width, dropout, longest=5000):
        super().__init__()
        rate = torch.exp(-torch.arange(0, width, 2) * math.log(10000) / width)
        angles = torch.arange(0, longest).reshape(longest, 1) * rate
        table = torch.zeros((longest, width))
        table[:, 0::2], table[:, 1::2] = torch.sin(angles), torch.cos(angles)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("table", table)

    def forward(self, x):
        return self.dropout(x + self.table[: x.size(1)])


class Translator(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.source = nn.Embedding(config.source_words, config.width, padding_idx=PAD)
        self.target = nn.Embedding(config.target_words, config.width, padding_idx=PAD)
        self.positions, self.scale = Positions(config.width, 0.1), math.sqrt(config.width)
        self.transformer = nn.Transformer(config.width, config.heads, 6, 6, 4 * config.width, 0.1, batch_first=True)
        self.generator = nn.Linear(config.width, config.target_words)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, source, target):
        causal = torch.triu(torch.ones(target.size(1), target.size(1), device=target.device, dtype=torch.bool), diagonal=1)
        out = self.transformer(
            self.positions(self.source(source) * self.scale),
            self.positions(self.target(target) * self.scale),
            tgt_mask=causal,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return self.generator(out)
