"""A diffusion transformer on latents with adaptive layer norms and class labels that are sometimes dropped."""

import argparse
import logging
from time import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(c).chunk(6, dim=1)
        b, n, d = x.shape
        q, k, v = (
            self.qkv(modulate(self.norm1(x), shift1, scale1)).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + gate1.unsqueeze(1) * self.proj(attended)
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    def __init__(self, width, depth, heads, size=32, patch=2, channels=4, classes=1000):
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2, width) * 0.02, requires_grad=False)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.labels, self.classes = nn.Embedding(classes + 1, width), classes
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, patch * patch * channels)

    def forward(self, x, t, y):
        half = torch.exp(-9.21 * torch.arange(128, dtype=torch.float32, device=t.device) / 128)
        angles = t[:, None].float() * half[None]
        drop = torch.rand(y.shape[0], device=y.device) < 0.1
        c = self.time(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)) + self.labels(
            torch.where(drop, self.classes, y)
        )
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, c)
        x = self.head(self.norm(x))
        b, n, _ = x.shape
        side = int(n**0.5)
        return torch.einsum("nhwpqc->nchpwq", x.reshape(b, side, side, 2, 2, 4)).reshape(b, 4, side * 2, side * 2)


def main(args):
    assert torch.cuda.is_available(), "Training currently requires at least one GPU."
    logging.basicConfig(level=logging.INFO)
    logger = logging.getLogger(__name__)
    torch.set_float32_matmul_precision("high")
    device = torch.cuda.current_device()
    torch.cuda.set_device(device)
    model = DiT(768, 12, 12).to(device)
    logger.info(f"DiT parameters: {sum(p.numel() for p in model.parameters()):,}")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    data = TensorDataset(torch.randn(256, 4, 32, 32), torch.randint(0, 1000, (256,)))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=args.num_workers, pin_memory=True)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).to(device)
    train_steps, log_steps, running_loss, start = 0, 0, 0, time()
    for _ in range(args.epochs):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            t = torch.randint(0, 1000, (x.shape[0],), device=device)
            noise, a = torch.randn_like(x), alphas[t].view(-1, 1, 1, 1)
            loss = (model(a.sqrt() * x + (1 - a).sqrt() * noise, t, y) - noise).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            running_loss += loss.item()
            log_steps, train_steps = log_steps + 1, train_steps + 1
            if train_steps % args.log_every == 0:
                torch.cuda.synchronize()
                logger.info(
                    f"(step={train_steps:07d}) loss {running_loss / log_steps:.4f}, steps/s {log_steps / (time() - start):.2f}"
                )
                running_loss, log_steps, start = 0, 0, time()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--log-every", type=int, default=4)
    main(parser.parse_args())
