"""Contrastive training of an image tower and a text tower with a learned temperature."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Captions(Dataset):
    def __init__(self, count=512):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"image": torch.rand(3, 224, 224), "text": torch.randint(1, 49408, (77,))}


class Tower(nn.Module):
    def __init__(self, width, layers, heads):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)


class ImageTower(Tower):
    def __init__(self, width=768, layers=12, heads=12, out=512, patch=32):
        super().__init__(width, layers, heads)
        self.patches = nn.Conv2d(3, width, patch, patch, bias=False)
        self.cls = nn.Parameter(width**-0.5 * torch.randn(width))
        self.positions = nn.Parameter(width**-0.5 * torch.randn((224 // patch) ** 2 + 1, width))
        self.proj = nn.Parameter(width**-0.5 * torch.randn(width, out))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.size(0), 1, -1), x], dim=1) + self.positions
        return self.norm(self.encoder(x)[:, 0]) @ self.proj


class TextTower(Tower):
    def __init__(self, width=512, layers=12, heads=8, out=512, words=49408, length=77):
        super().__init__(width, layers, heads)
        self.tokens, self.positions = nn.Embedding(words, width), nn.Parameter(torch.empty(length, width).normal_(std=0.01))
        self.proj = nn.Linear(width, out, bias=False)
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu_(1), persistent=False)

    def forward(self, text):
        x = self.norm(self.encoder(self.tokens(text) + self.positions, mask=self.mask, is_causal=True))
        return self.proj(x[torch.arange(x.shape[0]), text.argmax(dim=-1)])


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.text = ImageTower(), TextTower()
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        image = F.normalize(self.visual(image), dim=-1)
        text = F.normalize(self.text(text), dim=-1)
        return self.logit_scale.exp() * image @ text.t()


if __name__ == "__main__":
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = CLIP().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
    loader = DataLoader(Captions(), batch_size=64, shuffle=True, num_workers=2, pin_memory=True, drop_last=True)
    for epoch in range(1):
        for i, batch in enumerate(loader):
            batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(batch["image"], batch["text"])
                labels = torch.arange(logits.size(0), device=device)
                loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))
            print(f"epoch {epoch} step {i} loss {loss.item():.4f} scale {model.logit_scale.exp().item():.2f}")
