"""A deep decoder with rotary positions whose layers are recomputed in the backward pass."""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, length, vocab):
        self.length, self.vocab = length, vocab

    def __iter__(self):
        while True:
            tokens = torch.randint(0, self.vocab, (self.length + 1,))
            yield tokens[:-1], tokens[1:]


def rotary(length, dim, device, base=10000.0):
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, device=device).float() / dim)
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x, freqs):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs[None, :, None, :]).flatten(3).type_as(x)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, hidden = heads, int(8 * width / 3) // 256 * 256
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x, freqs):
        b, t, d = x.shape
        h = self.attention_norm(x)
        q, k, v = (w(h).view(b, t, self.heads, -1) for w in (self.wq, self.wk, self.wv))
        q, k, v = rotate(q, freqs).transpose(1, 2), rotate(k, freqs).transpose(1, 2), v.transpose(1, 2)
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Decoder(nn.Module):
    def __init__(self, vocab=32000, width=1536, layers=24, heads=12):
        super().__init__()
        self.head_dim = width // heads
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x, freqs = self.embedding(tokens), rotary(tokens.size(1), self.head_dim, tokens.device)
        for layer in self.layers:
            x = checkpoint(layer, x, freqs, use_reentrant=False)
        return self.output(self.norm(x))


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Decoder().to(device=device, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), foreach=True)
    loader = iter(DataLoader(Stream(2048, 32000), batch_size=4, pin_memory=True))
    for step in range(6):
        start = time.perf_counter()
        tokens, targets = (t.to(device, non_blocking=True) for t in next(loader))
        logits = model(tokens)
        loss = F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        print(f"step {step:3d} | loss {loss.item():.3f} | {tokens.numel() / elapsed:,.0f} tokens/s")
