"""A decoder whose feed-forward layers are mixtures of experts; each expert takes the tokens that chose it."""

import torch
import torch.nn.functional as F
from torch import nn


class Expert(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
            nn.Linear(width, hidden, bias=False),
        )

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    def __init__(self, width, hidden, experts=8, top_k=2):
        super().__init__()
        self.gate, self.top_k = nn.Linear(width, experts, bias=False), top_k
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        probabilities = F.softmax(self.gate(flat), dim=-1, dtype=torch.float)
        weights, chosen = torch.topk(probabilities, self.top_k)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, nth = torch.where(chosen == i)
            out.index_add_(0, token, weights[token, nth, None] * expert(flat[token]))
        load = F.one_hot(chosen, len(self.experts)).float().mean(dim=(0, 1))
        self.balance_loss = len(self.experts) * (load * probabilities.mean(dim=0)).sum()
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.moe = MoE(width, hidden)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    def __init__(self, vocab=32000, width=1024, layers=8, heads=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, 2816) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for step in range(10):
        tokens = torch.randint(0, 32000, (8, 1025), device=device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            balance = sum(layer.moe.balance_loss for layer in model.layers)
        (loss + 0.01 * balance).backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f} balance {balance.item():.3f} norm {grad_norm.item():.3f}")


if __name__ == "__main__":
    main()
