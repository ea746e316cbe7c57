"""Denoising diffusion of small images: a U-Net with time embeddings and attention, and an average of its weights."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
T = 1000


class ResBlock(nn.Module):
    def __init__(self, inputs, outputs, time_dim):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time_dim, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(32, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.conv2(F.dropout(F.silu(self.norm2(h)), 0.1, self.training)) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(32, channels),
            nn.Conv2d(channels, 3 * channels, 1),
            nn.Conv2d(channels, channels, 1),
        )

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, c, h * w).unbind(1)
        weights = torch.softmax(torch.einsum("bci,bcj->bij", q, k) * c**-0.5, dim=-1)
        return x + self.out(torch.einsum("bij,bcj->bci", weights, v).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, width=128, multipliers=(1, 2, 2)):
        super().__init__()
        self.width, dims = width, [width * m for m in multipliers]
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down, previous = nn.ModuleList(), width
        for dim in dims:
            self.down.append(nn.ModuleList([ResBlock(previous, dim, 4 * width), Attention(dim), nn.Conv2d(dim, dim, 3, 2, 1)]))
            previous = dim
        self.middle = ResBlock(previous, previous, 4 * width)
        self.up = nn.ModuleList()
        for dim in reversed(dims):
            self.up.append(nn.ModuleList([ResBlock(previous + dim, dim, 4 * width), Attention(dim)]))
            previous = dim
        self.out = nn.Sequential(nn.GroupNorm(32, previous), nn.SiLU(), nn.Conv2d(previous, 3, 3, padding=1))

    def forward(self, x, t):
        freqs = torch.exp(-math.log(10000) * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = t[:, None].float() * freqs[None]
        t = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x, skips = self.stem(x), []
        for block, attention, shrink in self.down:
            x = attention(block(x, t))
            skips.append(x)
            x = shrink(x)
        x = self.middle(x, t)
        for block, attention in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = attention(block(torch.cat([x, skips.pop()], dim=1), t))
        return self.out(x)


betas = torch.linspace(1e-4, 0.02, T)
alpha_bar = torch.cumprod(1.0 - betas, dim=0).to(device)
model = UNet().to(device)
ema = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
loader = DataLoader(TensorDataset(torch.rand(1024, 3, 32, 32) * 2 - 1), batch_size=128, shuffle=True)
for epoch in range(2):
    for step, (x0,) in enumerate(loader):
        x0 = x0.to(device)
        t = torch.randint(0, T, (x0.shape[0],), device=device)
        noise = torch.randn_like(x0)
        a = alpha_bar[t][:, None, None, None]
        loss = F.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for p_ema, p in zip(ema.parameters(), model.parameters(), strict=True):
                p_ema.mul_(0.9999).add_(p, alpha=1 - 0.9999)
        if step % 4 == 0:
            print(f"epoch {epoch} step {step}: {loss.item():.4f}")
