"""Language models of few layers: decoders and encoders of several makes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.compiled.architecture import Network, Site, classes, network, next_words


def heads_of(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, width) to (batch, heads, tokens, size)."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


class HeadsAttention(nn.Module):
    """Fused attention with as many keys as asked, rotary or not, with normed queries or not."""

    def __init__(
        self,
        width: int,
        heads: int,
        keys: int = 0,
        *,
        causal: bool = True,
        rotary: int = 0,
        normed: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.keys, self.causal, size = heads, keys or heads, causal, width // heads
        self.query, self.out = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)
        self.key_value = nn.Linear(width, 2 * self.keys * size, bias=bias)
        self.norms = nn.ModuleList([nn.RMSNorm(size), nn.RMSNorm(size)]) if normed else None
        self.rotary = rotary
        if rotary:
            rates = 500_000.0 ** (-torch.arange(0, size, 2).float() / size)
            turns = torch.outer(torch.arange(rotary).float(), rates)
            self.register_buffer("cosine", turns.cos().repeat(1, 2), persistent=False)
            self.register_buffer("sine", turns.sin().repeat(1, 2), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        """Queries or keys by their positions."""
        first, second = x.chunk(2, -1)
        other = torch.cat((-second, first), -1)
        tokens = x.shape[-2]
        cosine, sine = self.get_buffer("cosine")[:tokens], self.get_buffer("sine")[:tokens]
        return x * cosine.to(x.dtype) + other * sine.to(x.dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        """Of tokens among themselves."""
        query = heads_of(self.query(x), self.heads)
        key, value = (heads_of(part, self.keys) for part in self.key_value(x).chunk(2, -1))
        if self.norms is not None:
            query, key = self.norms[0](query), self.norms[1](key)
        if self.rotary:
            query, key = self.turned(query), self.turned(key)
        if self.keys != self.heads:
            key, value = (part.repeat_interleave(self.heads // self.keys, 1) for part in (key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=self.causal and mask is None)
        return self.out(attended.transpose(1, 2).flatten(2))


class GatedUnit(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        """Of every token."""
        gate, up = self.both(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class SmallLayer(nn.Module):
    """Norm first, attention, norm, perceptron, with dropout where asked."""

    def __init__(
        self, width: int, attention: nn.Module, perceptron: nn.Module, norm: type[nn.Module], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attention, self.perceptron = attention, perceptron
        self.first, self.second, self.dropout = norm(width), norm(width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        x = x + self.dropout(self.attention(self.first(x)))
        return x + self.dropout(self.perceptron(self.second(x)))


class SmallDecoder(nn.Module):
    """Words in, scores out."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: list[nn.Module],
        norm: type[nn.Module],
        tokens: int = 0,
        *,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width)) if tokens else None
        self.layers, self.norm = nn.ModuleList(layers), norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Any:
        """Of every word at every place."""
        x = self.embedding(words)
        if self.positions is not None:
            x = x + self.positions[: words.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _perceptron(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width))


def _trained(at: Site, model: SmallDecoder, vocabulary: int, batch: int, tokens: int) -> Network:
    words = at.integers(vocabulary, at.batch(batch), at.tokens(tokens))
    return Network(model, (words,), next_words(words), model.layers)


@network
def gpt_dropout(at: Site) -> Network:
    """GPT with learned positions, dropout and a tied head: 4 layers of 640."""
    layers = [SmallLayer(640, HeadsAttention(640, 10, bias=True), _perceptron(640, 2560), nn.LayerNorm, 0.1) for _ in range(4)]
    return _trained(at, SmallDecoder(32_000, 640, [*layers], nn.LayerNorm, 1024, tied=True), 32_000, 8, 512)


@network
def llama_gqa(at: Site) -> Network:
    """Rotary positions, grouped queries, SwiGLU: 3 layers of 1,024."""
    layers = [SmallLayer(1024, HeadsAttention(1024, 16, 4, rotary=1024), GatedUnit(1024, 2816), nn.RMSNorm) for _ in range(3)]
    return _trained(at, SmallDecoder(16_384, 1024, [*layers], nn.RMSNorm), 16_384, 4, 1024)


@network
def qwen_tied(at: Site) -> Network:
    """Normed queries and keys, two groups of keys, a tied head over 65,536 words: 5 layers of 768."""
    layers = [
        SmallLayer(768, HeadsAttention(768, 12, 2, rotary=768, normed=True), GatedUnit(768, 2048), nn.RMSNorm) for _ in range(5)
    ]
    return _trained(at, SmallDecoder(65_536, 768, [*layers], nn.RMSNorm, tied=True), 65_536, 4, 768)


class Adapted(nn.Module):
    """A frozen product with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Any:
        """Both, added."""
        return self.base(x) + 2.0 * self.up(self.down(self.dropout(x)))


@network
def low_rank(at: Site) -> Network:
    """Adapters of rank 16 on a frozen decoder: 4 layers of 1,280."""
    layers = [SmallLayer(1280, HeadsAttention(1280, 20, 5, rotary=512), GatedUnit(1280, 3456), nn.RMSNorm) for _ in range(4)]
    model = SmallDecoder(24_000, 1280, [*layers], nn.RMSNorm).requires_grad_(False)
    for layer in layers:
        attention = layer.attention
        assert isinstance(attention, HeadsAttention)
        attention.query, attention.out = Adapted(attention.query, 16), Adapted(attention.out, 16)  # type: ignore[assignment]
    return _trained(at, model, 24_000, 4, 512)


class ChunkedAttention(nn.Module):
    """Attention by a feature map: sums of outer products within chunks and across them, without a softmax."""

    def __init__(self, width: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.mixed, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        """Of tokens to those before."""
        query, key, value = (heads_of(part, self.heads) for part in self.mixed(x).chunk(3, -1))
        query, key = functional.elu(query) + 1, functional.elu(key) + 1
        batch, heads, tokens, size = query.shape
        chunks = (batch, heads, tokens // self.chunk, self.chunk, size)
        query, key, value = (part.reshape(chunks) for part in (query, key, value))
        states = (key.transpose(-1, -2) @ value).cumsum(2)
        before = functional.pad(states[:, :, :-1], (0, 0, 0, 0, 1, 0))
        within = (query @ key.transpose(-1, -2)).tril() @ value
        result = (within + query @ before) / math.sqrt(self.chunk)
        return self.out(result.flatten(2, 3).transpose(1, 2).flatten(2))


@network
def chunked_sums(at: Site) -> Network:
    """A decoder without a softmax: 3 layers of 512, chunks of 32 tokens."""
    layers = [SmallLayer(512, ChunkedAttention(512, 8, 32), _perceptron(512, 1536), nn.LayerNorm) for _ in range(3)]
    return _trained(at, SmallDecoder(12_000, 512, [*layers], nn.LayerNorm), 12_000, 8, 1024)


class DoublingScan(nn.Module):
    """A state that decays by what is read: gated convolution, then a scan by doubling in plain operations."""

    def __init__(self, width: int, state: int) -> None:
        super().__init__()
        self.both = nn.Linear(width, 2 * width, bias=False)
        self.near = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.step, self.inputs = nn.Linear(width, width), nn.Linear(width, 2 * state, bias=False)
        self.rates = nn.Parameter(torch.rand(width, state))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        """Of tokens in their order."""
        x, gate = self.both(x).chunk(2, -1)
        tokens = x.shape[1]
        x = functional.silu(self.near(x.transpose(1, 2))[..., :tokens]).transpose(1, 2)
        step = functional.softplus(self.step(x))[..., None]
        read, shown = self.inputs(x)[:, :, None].chunk(2, -1)
        decay = torch.exp(-step * self.rates.exp())
        state = step * read * x[..., None]
        reach = 1
        while reach < tokens:
            pad = (0, 0, 0, 0, reach, 0)
            state = state + decay * functional.pad(state[:, :-reach], pad)
            decay = decay * functional.pad(decay[:, :-reach], pad)
            reach *= 2
        return self.out((state * shown).sum(-1) * functional.silu(gate))


@network
def doubling_scan(at: Site) -> Network:
    """A state-space decoder in plain operations: 2 layers of 256 with states of 8."""
    layers = [SmallLayer(256, DoublingScan(256, 8), _perceptron(256, 768), nn.RMSNorm) for _ in range(2)]
    return _trained(at, SmallDecoder(8_000, 256, [*layers], nn.RMSNorm), 8_000, 8, 256)


class FixedExperts(nn.Module):
    """Each token to its best expert, each expert taking a fixed number: what a table says that does not fit is left out."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.experts, self.router = experts, nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, inner, width) / math.sqrt(inner))

    def forward(self, x: Tensor) -> Any:
        """Of every token."""
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).float().softmax(-1).max(-1)
        mine = functional.one_hot(chosen, self.experts)
        place = (mine.cumsum(0) * mine).sum(-1) - 1
        capacity = 2 * flat.shape[0] // self.experts
        kept = place < capacity
        slot = torch.where(kept, chosen * capacity + place, self.experts * capacity)
        buffer = flat.new_zeros(self.experts * capacity + 1, flat.shape[1]).index_add(0, slot, flat)
        inner = functional.gelu(torch.bmm(buffer[:-1].view(self.experts, capacity, -1), self.up.to(buffer.dtype)))
        given = torch.bmm(inner, self.down.to(inner.dtype)).flatten(0, 1)
        back = functional.pad(given, (0, 0, 0, 1))[slot]
        return (back * weights.to(back.dtype)[:, None]).view_as(x)


@network
def fixed_experts(at: Site) -> Network:
    """Experts of fixed capacity, one of 8 for each token: 2 layers of 512."""
    layers = [SmallLayer(512, HeadsAttention(512, 8, rotary=512), FixedExperts(512, 1024, 8), nn.RMSNorm) for _ in range(2)]
    return _trained(at, SmallDecoder(16_000, 512, [*layers], nn.RMSNorm), 16_000, 8, 512)


class MaskedEncoder(nn.Module):
    """Words and segments in, norms last, with padding left out of attention."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.segments, self.norm, self.dropout = nn.Embedding(2, width), nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(MaskedLayer(width, heads) for _ in range(layers))
        self.transform, self.last, self.head = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, words: Tensor, segments: Tensor, lengths: Tensor) -> Any:
        """Scores of every word at every place."""
        places = torch.arange(words.shape[1], device=words.device)
        x = self.dropout(self.norm(self.words(words) + self.segments(segments) + self.places(places)))
        mask = (places < lengths[:, None])[:, None, None]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.last(functional.gelu(self.transform(x))))


class MaskedLayer(nn.Module):
    """Attention, norm, perceptron, norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.perceptron = HeadsAttention(width, heads, causal=False, bias=True), _perceptron(width, 4 * width)
        self.first, self.second, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        """One layer."""
        x = self.first(x + self.dropout(self.attention(x, mask)))
        return self.second(x + self.dropout(self.perceptron(x)))


@network
def masked_encoder(at: Site) -> Network:
    """An encoder with padding and dropout, norms last: 6 layers of 512."""
    batch, tokens = at.batch(32), at.tokens(192)
    model = MaskedEncoder(20_000, 512, 8, 6, tokens)
    words, segments = at.integers(20_000, batch, tokens), at.integers(2, batch, tokens)
    lengths = at.integers(tokens // 2, batch) + tokens // 2
    return Network(model, (words, segments, lengths), next_words(words), model.layers)


class BucketedAttention(nn.Module):
    """Attention with a learned bias by distance, written out, of its own tokens or of others'."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, biased: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.bias = nn.Embedding(32, heads) if biased else None

    def forward(self, x: Tensor, others: Tensor | None = None) -> Any:
        """Of tokens to theirs or to others."""
        others = x if others is None else others
        query, key, value = (heads_of(part, self.heads) for part in (self.query(x), self.key(others), self.value(others)))
        scores = (query @ key.transpose(-1, -2)).float()
        if self.bias is not None:
            places = torch.arange(x.shape[1], device=x.device)
            apart = places[None] - places[:, None]
            near = apart.abs().clamp(max=15) + 16 * (apart > 0)
            scores = scores + self.bias(near).permute(2, 0, 1)
            if self.causal:
                scores = scores.masked_fill(apart > 0, -1e9)
        weights = scores.softmax(-1).to(value.dtype)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Translator(nn.Module):
    """An encoder and a decoder that looks at it."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
        self.encoder = nn.ModuleList(
            SmallLayer(width, BucketedAttention(width, heads), GatedUnit(width, 2 * width), nn.RMSNorm) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            SmallLayer(width, BucketedAttention(width, heads, causal=True), GatedUnit(width, 2 * width), nn.RMSNorm)
            for _ in range(layers)
        )
        self.cross = nn.ModuleList(BucketedAttention(width, heads, biased=False) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Any:
        """Scores of every target word."""
        x, y = self.embedding(source), self.embedding(target)
        for layer in self.encoder:
            x = layer(x)
        for layer, cross, norm in zip(self.decoder, self.cross, self.norms, strict=True):
            y = layer(y)
            y = y + cross(norm(y), x)
        return self.head(self.last(y))


@network
def relative_bias(at: Site) -> Network:
    """An encoder and a decoder with biases by distance: 2 and 2 layers of 512."""
    model = Translator(16_000, 512, 8, 2)
    source, target = (at.integers(16_000, at.batch(16), at.tokens(tokens)) for tokens in (256, 192))
    return Network(model, (source, target), next_words(target))


class Pooled(nn.Module):
    """PyTorch's own encoder layers, and one class of the mean."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_000, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 6, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 20)

    def forward(self, words: Tensor) -> Any:
        """Scores of 20 classes."""
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@network
def text_classes(at: Site) -> Network:
    """PyTorch's `TransformerEncoderLayer`: 4 of 384."""
    model = Pooled(384, 4)
    batch = at.batch(64)
    return Network(model, (at.integers(10_000, batch, at.tokens(128)),), classes(at.integers(20, batch)), model.layers)
