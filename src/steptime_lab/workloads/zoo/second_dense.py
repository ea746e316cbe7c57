"""Images in and out of the second visit: written after the models were fitted, as other people write such nets."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import SECOND_VISIT, Place, Trainee, architecture
from steptime_lab.workloads.zoo.second_vision import Residual, conv_bn_act

_arriving = partial(architecture, visit=SECOND_VISIT)


class ChannelNorm(nn.Module):
    """Layer norm over the channels of an image, op by op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Any:
        """Of the same shape."""
        mu = x.mean(1, keepdim=True)
        var = (x - mu).pow(2).mean(1, keepdim=True)
        return self.weight.view(1, -1, 1, 1) * ((x - mu) / (var + 1e-6).sqrt()) + self.bias.view(1, -1, 1, 1)


class GatedConvBlock(nn.Module):
    """No activation: halves of the channels are multiplied with each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = ChannelNorm(width), ChannelNorm(width)
        self.conv1, self.conv2 = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(2 * width, 2 * width, 3, 1, 1, groups=2 * width)
        self.sca = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1))
        self.conv3, self.conv4, self.conv5 = (nn.Conv2d(width, out, 1) for out in (width, 2 * width, width))
        self.beta, self.gamma = (nn.Parameter(torch.zeros(1, width, 1, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        """One block."""
        one, two = self.conv2(self.conv1(self.norm1(x))).chunk(2, dim=1)
        y = one * two
        x = x + self.conv3(y * self.sca(y)) * self.beta
        one, two = self.conv4(self.norm2(x)).chunk(2, dim=1)
        return x + self.conv5(one * two) * self.gamma


class Restoration(nn.Module):
    """Down by convolutions of 2, up by pixel shuffles, what was on the level added."""

    def __init__(self, width: int, counts: tuple[int, ...]) -> None:
        super().__init__()
        widths = [width << level for level in range(len(counts))]
        self.intro, self.ending = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 3, 3, 1, 1)
        blocks = (
            (nn.Sequential(*(GatedConvBlock(w) for _ in range(c))), nn.Conv2d(w, 2 * w, 2, 2))
            for w, c in zip(widths, counts, strict=True)
        )
        self.down = nn.ModuleList(nn.ModuleList(pair) for pair in blocks)
        last = 2 * widths[-1]
        self.middle = nn.Sequential(GatedConvBlock(last), GatedConvBlock(last))
        ups = ((nn.Conv2d(2 * w, 4 * w, 1, bias=False), nn.PixelShuffle(2), GatedConvBlock(w)) for w in reversed(widths))
        self.up = nn.ModuleList(nn.Sequential(*each) for each in ups)

    def forward(self, image: Tensor) -> Any:
        """The image without its noise."""
        x, levels = self.intro(image), []
        for blocks, down in cast("Any", self.down):
            x = blocks(x)
            levels.append(x)
            x = down(x)
        x = self.middle(x)
        for (wide, shuffle, block), level in zip(cast("Any", self.up), reversed(levels), strict=True):
            x = block(shuffle(wide(x)) + level)
        return self.ending(x) + image


@_arriving("dense prediction", "fp32", "adamw")
def restoration(at: Place) -> Trainee:
    """Halves of channels multiplied, norms over channels op by op, widths 36 to 288, decibels as the loss, 22 crops of 144."""
    model = Restoration(36, (2, 2, 4))
    noisy, clean = at.images(22, 144), at.images(22, 144)

    def loss() -> Tensor:
        return 10 / math.log(10) * torch.log(((model(noisy) - clean) ** 2).mean((1, 2, 3)) + 1e-8).mean()

    return Trainee(model, loss)


class SplitStage(nn.Module):
    """Half goes through bottlenecks, and what each of them gave is joined."""

    def __init__(self, first: int, second: int, count: int) -> None:
        super().__init__()
        half = second // 2
        self.cv1, self.cv2 = conv_bn_act(first, second, 1), conv_bn_act((2 + count) * half, second, 1)
        self.m = nn.ModuleList(Residual(conv_bn_act(half, half, 3), conv_bn_act(half, half, 3)) for _ in range(count))

    def forward(self, x: Tensor) -> Any:
        """One stage."""
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(block(y[-1]) for block in self.m)
        return self.cv2(torch.cat(y, 1))


class PooledPyramid(nn.Module):
    """Largest of ever larger surroundings, joined."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cv1, self.cv2, self.m = conv_bn_act(width, width // 2, 1), conv_bn_act(2 * width, width, 1), nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Any:
        """Of the same shape."""
        y = [self.cv1(x)]
        y.extend(self.m(y[-1]) for _ in range(3))
        return self.cv2(torch.cat(y, 1))


class AnchorFree(nn.Module):
    """Stages down, joined up and down again; boxes as odds of distances and classes from two towers on three levels."""

    def __init__(self, widths: tuple[int, int, int], classes: int, bins: int) -> None:
        super().__init__()
        low, mid, high = widths
        self.stem = nn.Sequential(
            conv_bn_act(3, low // 4, 3, 2), conv_bn_act(low // 4, low // 2, 3, 2), SplitStage(low // 2, low // 2, 1)
        )
        self.p3 = nn.Sequential(conv_bn_act(low // 2, low, 3, 2), SplitStage(low, low, 2))
        self.p4 = nn.Sequential(conv_bn_act(low, mid, 3, 2), SplitStage(mid, mid, 2))
        self.p5 = nn.Sequential(conv_bn_act(mid, high, 3, 2), SplitStage(high, high, 1), PooledPyramid(high))
        self.up4, self.up3 = SplitStage(high + mid, mid, 1), SplitStage(mid + low, low, 1)
        self.down4, self.down5 = conv_bn_act(low, low, 3, 2), conv_bn_act(mid, mid, 3, 2)
        self.out4, self.out5 = SplitStage(low + mid, mid, 1), SplitStage(mid + high, high, 1)
        self.up = nn.Upsample(None, 2, "nearest")
        self.boxes = nn.ModuleList(
            nn.Sequential(conv_bn_act(w, 64, 3), conv_bn_act(64, 64, 3), nn.Conv2d(64, 4 * bins, 1)) for w in widths
        )
        self.names = nn.ModuleList(
            nn.Sequential(conv_bn_act(w, low, 3), conv_bn_act(low, low, 3), nn.Conv2d(low, classes, 1)) for w in widths
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Of all places of all levels: odds of distances, and classes."""
        p3 = self.p3(self.stem(images))
        p4 = self.p4(p3)
        p5 = self.p5(p4)
        n4 = self.up4(torch.cat((self.up(p5), p4), 1))
        n3 = self.up3(torch.cat((self.up(n4), p3), 1))
        n4 = self.out4(torch.cat((self.down4(n3), n4), 1))
        n5 = self.out5(torch.cat((self.down5(n4), p5), 1))
        levels = (n3, n4, n5)
        boxes = torch.cat([head(x).flatten(2) for head, x in zip(self.boxes, levels, strict=True)], 2)
        names = torch.cat([head(x).flatten(2) for head, x in zip(self.names, levels, strict=True)], 2)
        return boxes.transpose(1, 2), names.transpose(1, 2)


@_arriving("dense prediction", "fp16", "sgd")
def anchor_free_detector(at: Place) -> Trainee:
    """Split stages joined up and down, boxes as odds of 16 distances, 20 classes, 58 images of 416 pixels, GradScaler."""
    size = 96 if at.small else 416
    model, images = AnchorFree((96, 192, 336), 20, 16), at.images(58, size)
    places = sum((size // stride) ** 2 for stride in (8, 16, 32))
    named = (at.floats(len(images), places, 20) > 2.5).float()
    near = at.floats(len(images), places, 4).abs().clamp(max=14.0)
    inside = named.amax(-1)

    def loss() -> Tensor:
        boxes, names = model(images)
        odds = boxes.reshape(-1, 16)
        left = near.long().view(-1)
        share = (near.view(-1) - left).to(odds.dtype)
        each = functional.cross_entropy(odds, left, reduction="none") * (1 - share)
        each = each + functional.cross_entropy(odds, left + 1, reduction="none") * share
        distances = (each.view(len(images), places, 4).mean(-1) * inside).sum() / inside.sum().clamp(min=1)
        return distances + functional.binary_cross_entropy_with_logits(names, named, reduction="sum") / len(images) / 100

    return Trainee(model, loss)


class NormedResidual(nn.Module):
    """Group norm, swish and convolution twice."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(15, first, 1e-6), nn.GroupNorm(15, second, 1e-6)
        self.conv1, self.conv2 = nn.Conv2d(first, second, 3, 1, 1), nn.Conv2d(second, second, 3, 1, 1)
        self.short = nn.Conv2d(first, second, 1) if first != second else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        """One block."""
        h = self.norm1(x)
        h = self.conv1(h * torch.sigmoid(h))
        h = self.norm2(h)
        return self.short(x) + self.conv2(h * torch.sigmoid(h))


class Quantiser(nn.Module):
    """Every place becomes the nearest of a book of vectors; gradients go past it."""

    def __init__(self, book: int, dim: int) -> None:
        super().__init__()
        self.book = nn.Embedding(book, dim)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Quantised, and how far that is off."""
        places = z.permute(0, 2, 3, 1).contiguous()
        flat, book = places.view(-1, places.shape[-1]).float(), self.book.weight
        apart = flat.pow(2).sum(1, keepdim=True) + book.pow(2).sum(1) - 2 * torch.einsum("bd,nd->bn", flat, book)
        near = self.book(apart.argmin(1)).view(places.shape)
        off = ((near.detach() - places) ** 2).mean() * 0.25 + ((near - places.detach()) ** 2).mean()
        return (places + (near - places).detach()).permute(0, 3, 1, 2).contiguous(), off


@_arriving("dense prediction", "bf16", "adam")
def quantised_gan(at: Place) -> Trainee:
    """Residual blocks around a book of 3,000 vectors against a critic of patches, two optimisers, 26 images of 128 pixels."""
    down = [nn.Conv2d(3, 60, 3, 1, 1), NormedResidual(60, 60), nn.Conv2d(60, 60, 3, 2, 1), NormedResidual(60, 120)]
    down += [nn.Conv2d(120, 120, 3, 2, 1), NormedResidual(120, 240), nn.Conv2d(240, 90, 1)]
    up = [nn.Conv2d(90, 240, 3, 1, 1), NormedResidual(240, 240), nn.Upsample(scale_factor=2), nn.Conv2d(240, 120, 3, 1, 1)]
    up += [NormedResidual(120, 120), nn.Upsample(scale_factor=2), nn.Conv2d(120, 60, 3, 1, 1), NormedResidual(60, 60)]
    encoder, decoder = nn.Sequential(*down), nn.Sequential(*up, nn.GroupNorm(15, 60), nn.SiLU(), nn.Conv2d(60, 3, 3, 1, 1))
    quantiser = Quantiser(3_000, 90)
    patches: list[nn.Module] = [nn.Conv2d(3, 52, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
    for first, second in ((52, 104), (104, 208)):
        patches += [nn.Conv2d(first, second, 4, 2, 1, bias=False), nn.BatchNorm2d(second), nn.LeakyReLU(0.2, inplace=True)]
    critic = nn.Sequential(*patches, nn.Conv2d(208, 1, 4, 1, 1))
    maker = nn.ModuleList((encoder, quantiser, decoder)).to(at.device)
    model = nn.ModuleList((maker, critic.to(at.device)))
    makes, judges = (torch.optim.Adam(part.parameters(), lr=1e-6, betas=(0.5, 0.9)) for part in (maker, critic))
    images = at.images(26, 128)

    def step() -> None:
        with torch.autocast(at.device, torch.bfloat16):
            code, off = quantiser(encoder(images))
            made = decoder(code)
            value = (made - images).abs().mean() + off - 0.1 * critic(made).mean()
        makes.zero_grad()
        value.backward()
        makes.step()
        with torch.autocast(at.device, torch.bfloat16):
            real, fake = critic(images), critic(made.detach())
            judged = 0.5 * (functional.relu(1.0 - real).mean() + functional.relu(1.0 + fake).mean())
        judges.zero_grad()
        judged.backward()  # type: ignore[no-untyped-call]
        judges.step()

    return Trainee(model, step=step)
