"""Texts of the second visit: written after the models were fitted, as other people write such nets."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import SECOND_VISIT, Place, Trainee, architecture

_arriving = partial(architecture, visit=SECOND_VISIT)


class WrittenOutNorm(nn.Module):
    """RMS norm op by op, in float, scaled by one plus a weight."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Any:
        """Of the type of what came in."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Positions as products of complex numbers, (batch, tokens, heads, dim)."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)


def complex_turns(tokens: int, dim: int, device: str) -> Tensor:
    """One complex number per token and pair."""
    freqs = 1.0 / (10000 ** (torch.arange(0, dim, 2, device=device).float() / dim))
    freqs = torch.outer(torch.arange(tokens, device=device).float(), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


class SharedKeyAttention(nn.Module):
    """Queries in groups that share keys, complex rotary positions, fused attention that knows of the groups."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.shape, self.head_dim = (heads, kv_heads, kv_heads), head_dim
        self.wqkv = nn.Linear(dim, sum(self.shape) * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Any:
        """Of tokens to those before."""
        b, t, _ = x.shape
        parts = self.wqkv(x).split([count * self.head_dim for count in self.shape], -1)
        q, k, v = (part.view(b, t, -1, self.head_dim) for part in parts)
        q, k = rotated(q, turns), rotated(k, turns)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class SandwichLayer(nn.Module):
    """Norms before and behind attention and a perceptron gated by GELU."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.attn = SharedKeyAttention(dim, heads, kv_heads, head_dim)
        self.gate_up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)
        self.norms = nn.ModuleList(WrittenOutNorm(dim) for _ in range(4))

    def forward(self, x: Tensor, turns: Tensor) -> Any:
        """One layer."""
        x = x + self.norms[1](self.attn(self.norms[0](x), turns))
        gate, up = self.gate_up(self.norms[2](x)).chunk(2, dim=-1)
        return x + self.norms[3](self.down(functional.gelu(gate, approximate="tanh") * up))


class SoftCapped(nn.Module):
    """A tied language model whose scores are bent by tanh."""

    def __init__(self, vocab: int, dim: int, layers: list[nn.Module], turns: Tensor) -> None:
        super().__init__()
        self.embed, self.layers, self.norm, self.turns = (
            nn.Embedding(vocab, dim),
            nn.ModuleList(layers),
            WrittenOutNorm(dim),
            turns,
        )

    def forward(self, ids: Tensor) -> Any:
        """Scores of every word at every place, in float."""
        x = self.embed(ids) * math.sqrt(self.embed.embedding_dim)
        for layer in self.layers:
            x = layer(x, self.turns)
        logits = functional.linear(self.norm(x), self.embed.weight).float()
        return 30.0 * torch.tanh(logits / 30.0)


def clipped(at: Place, model: nn.Module, loss: Callable[[], Tensor], *, dtype: torch.dtype | None, fused: bool) -> Trainee:
    """Trained by AdamW with decay for matrices alone, the norm of all gradients clipped first."""
    model = model.to(at.device)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-6, betas=(0.9, 0.95), fused=fused)

    def step() -> None:
        with torch.autocast(at.device, dtype or torch.bfloat16, enabled=dtype is not None):
            value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Trainee(model, step=step)


@_arriving("decoders", "bf16", "adamw_fused")
def softcapped_decoder(at: Place) -> Trainee:
    """10 layers of width 1,152 with 12 heads of 96 on 4 keys, norms op by op, bent scores, clipped, 7 texts of 1,500."""
    tokens = at.tokens(1500)
    layers: list[nn.Module] = [SandwichLayer(1152, 12, 4, 96, 3456) for _ in range(at.layers(10))]
    model = SoftCapped(24_000, 1152, layers, complex_turns(tokens, 96, at.device))
    ids = at.integers(24_000, at.batch(7), tokens + 1)

    def loss() -> Tensor:
        return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return clipped(at, model, loss, dtype=torch.bfloat16, fused=True)


class TopTwoExperts(nn.Module):
    """Each token goes to two experts, which are called one after another with the tokens that chose them."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.ModuleList(nn.Linear(dim, 2 * hidden, bias=False) for _ in range(experts))
        self.w2 = nn.ModuleList(nn.Linear(hidden, dim, bias=False) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of every token; and how unevenly experts are chosen."""
        tokens = x.reshape(-1, x.shape[-1])
        weights = self.router(tokens).softmax(-1, dtype=torch.float)
        top, chosen = weights.topk(2, dim=-1)
        top = (top / top.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(tokens)
        mask = functional.one_hot(chosen, len(self.w1)).permute(2, 1, 0)
        for index, (w1, w2) in enumerate(zip(self.w1, self.w2, strict=True)):
            which, rows = torch.where(mask[index])
            gate, up = w1(tokens[rows]).chunk(2, -1)
            out.index_add_(0, rows, w2(functional.silu(gate) * up) * top[rows, which, None])
        balance = (mask.float().mean((1, 2)) * weights.mean(0)).sum() * len(self.w1)
        return out.view_as(x), balance


class RoutedLayer(nn.Module):
    """Attention by PyTorch's own module, then experts."""

    def __init__(self, dim: int, heads: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.attn = nn.MultiheadAttention(dim, heads, bias=False, batch_first=True)
        self.moe = TopTwoExperts(dim, hidden, experts)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """One layer, and the balance of its experts."""
        y = self.ln1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        routed, balance = self.moe(self.ln2(x))
        return x + routed, balance


@_arriving("decoders", "pure_bf16", "adamw")
def routed_decoder(at: Place) -> Trainee:
    """5 layers of width 960 with 10 experts called one by one for the tokens that chose them, 7 texts of 900 tokens."""
    tokens = at.tokens(900)
    layers = nn.ModuleList(RoutedLayer(960, 12, 1600, 10) for _ in range(at.layers(5)))
    embed, norm, head = nn.Embedding(20_000, 960), nn.LayerNorm(960), nn.Linear(960, 20_000, bias=False)
    model, ids = nn.ModuleList((embed, layers, norm, head)), at.integers(20_000, at.batch(7), tokens)
    mask = nn.Transformer.generate_square_subsequent_mask(tokens, torch.device(at.device), torch.bfloat16)

    def loss() -> Tensor:
        x = embed(ids)
        balances = []
        for layer in layers:
            x, balance = layer(x, mask)
            balances.append(balance)
        logits = head(norm(x))[:, :-1].reshape(-1, 20_000)
        return functional.cross_entropy(logits.float(), ids[:, 1:].reshape(-1)) + 0.01 * torch.stack(balances).mean()

    return Trainee(model, loss)


class AlternatingLayer(nn.Module):
    """Attention to all that is no padding or to what is near, and a perceptron gated by GELU, without biases."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wi, self.wo = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, keep: Tensor) -> Any:
        """One layer."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, t, c))
        value, gate = self.wi(self.norm2(x)).chunk(2, -1)
        return x + self.wo(functional.gelu(value) * gate)


@_arriving("encoders", "bf16", "adamw_fused")
def alternating_encoder(at: Place) -> Trainee:
    """9 layers of width 624 with 12 heads of 52, every third sees all, a third of the places asked, 20 texts of 480."""
    batch, tokens, vocab = at.batch(20), at.tokens(480), 28_000
    layers = nn.ModuleList(AlternatingLayer(624, 12, 1664) for _ in range(at.layers(9)))
    embed, norm, head = nn.Embedding(vocab, 624, padding_idx=0), nn.LayerNorm(624), nn.Linear(624, vocab)
    model, ids = nn.ModuleList((embed, layers, norm, head)), at.integers(vocab, batch, tokens)
    places = torch.arange(tokens, device=at.device)
    real = (places < at.integers(tokens // 2, batch, 1) + tokens // 2)[:, None, None]
    near = real & ((places[:, None] - places).abs() <= 64)
    asked = torch.arange(1, batch * tokens, 3, device=at.device)

    def loss() -> Tensor:
        x = embed(ids)
        for index, layer in enumerate(layers):
            x = layer(x, real if index % 3 == 0 else near)
        return functional.cross_entropy(head(norm(x).flatten(0, 1)[asked]), ids.flatten()[asked])

    return Trainee(model, loss)


class BiasedScores(nn.Module):
    """Self-attention with learnt biases by buckets of distance, scores written out, weights dropped out."""

    def __init__(self, dim: int, heads: int, buckets: int) -> None:
        super().__init__()
        self.heads, self.buckets = heads, buckets
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.bias = nn.Embedding(buckets, heads)

    def bucket(self, tokens: int, device: torch.device) -> Tensor:
        """Which bucket the distance of two tokens is in: one each for the near, logarithms for the far."""
        places = torch.arange(tokens, device=device)
        apart = places[None, :] - places[:, None]
        half, exact = self.buckets // 2, self.buckets // 4
        distance = apart.abs()
        far = exact + (torch.log(distance.float().clamp(min=1) / exact) / math.log(128 / exact) * (half - exact)).long()
        near = torch.where(distance < exact, distance, far.clamp(max=half - 1))
        return near + (apart > 0).long() * half

    def forward(self, x: Tensor) -> Any:
        """Of tokens among themselves."""
        b, t, c = x.shape
        q, k, v = (layer(x).view(b, t, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(c // self.heads)
        scores = scores + self.bias(self.bucket(t, x.device)).permute(2, 0, 1)[None]
        weights = functional.dropout(functional.softmax(scores.float(), dim=-1).type_as(scores), 0.1, self.training)
        return self.o(torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, t, c))


class PairLayer(nn.Module):
    """Post-norm, as sentence encoders have it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn, self.ln1, self.ln2 = BiasedScores(dim, heads, 32), nn.LayerNorm(dim, eps=1e-12), nn.LayerNorm(dim, eps=1e-12)
        self.ff, self.drop = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim)), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        x = self.ln1(x + self.drop(self.attn(x)))
        return self.ln2(x + self.drop(self.ff(x)))


@_arriving("encoders", "fp16", "adamw")
def sentence_pairs(at: Place) -> Trainee:
    """6 layers of width 420 with 7 heads of 60, biases by distance, means of 240 pairs of 96 tokens, GradScaler."""
    model = nn.Sequential(nn.Embedding(18_000, 420), nn.Dropout(0.1), *(PairLayer(420, 7) for _ in range(at.layers(6))))
    batch, tokens = at.batch(240), at.tokens(96)
    asked, said = at.integers(18_000, batch, tokens), at.integers(18_000, batch, tokens)

    def loss() -> Tensor:
        one, two = functional.normalize(model(asked).mean(1), dim=1), functional.normalize(model(said).mean(1), dim=1)
        return functional.cross_entropy(20.0 * one @ two.t(), torch.arange(batch, device=at.device))

    return Trainee(model, loss)
