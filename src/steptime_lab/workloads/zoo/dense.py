"""Dense prediction and generative models: an image in or out, or both."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import CHANNELS_LAST, Place, Trainee, architecture
from steptime_lab.workloads.zoo.layers import Perceptron, SelfAttention, convolved, regressor

_KIN = "dense prediction"


def _twice(first: int, second: int, dims: int = 2) -> nn.Sequential:
    convolution = nn.Conv2d if dims == 2 else nn.Conv3d
    norm = nn.BatchNorm2d if dims == 2 else nn.InstanceNorm3d
    layers: list[nn.Module] = []
    for before in (first, second):
        layers += [convolution(before, second, 3, padding=1, bias=False), norm(second), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Unet(nn.Module):
    """Down by pooling, up by transposed convolutions, with what was on the same level beside."""

    def __init__(self, widths: tuple[int, ...], channels: int, classes: int, dims: int = 2) -> None:
        super().__init__()
        earlier = (channels, *widths)
        self.down = nn.ModuleList(_twice(first, second, dims) for first, second in zip(earlier, widths, strict=False))
        self.pool = nn.MaxPool2d(2) if dims == 2 else nn.MaxPool3d(2)
        up = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(up(low, high, 2, 2) for low, high in pairs)
        self.joined = nn.ModuleList(_twice(2 * high, high, dims) for _, high in pairs)
        self.head = (nn.Conv2d if dims == 2 else nn.Conv3d)(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Any:
        """A score of every class at every place."""
        levels = []
        for index, layer in enumerate(self.down):
            x = layer(self.pool(x) if index else x)
            levels.append(x)
        for up, layer, beside in zip(self.up, self.joined, levels[-2::-1], strict=True):
            x = layer(torch.cat((up(x), beside), 1))
        return self.head(x)


@architecture(_KIN, "bf16", "adamw", layout=CHANNELS_LAST)
def unet(at: Place) -> Trainee:
    """Five levels of widths 64 to 1,024, 32 images of 256 pixels in channels_last."""
    model, images = Unet((64, 128, 256, 512, 1024), 3, 21), at.images(32, 256)
    labels = at.integers(21, len(images), 256, 256)
    return Trainee(model, lambda: functional.cross_entropy(model(images), labels))


@architecture(_KIN, "bf16", "adam")
def unet_3d(at: Place) -> Trainee:
    """Four levels of volumes, widths 32 to 256, 8 volumes of 64 voxels a side."""
    model, volumes = Unet((32, 64, 128, 256), 4, 4, dims=3), at.floats(at.batch(8), 4, 64, 64, 64)
    labels = at.integers(4, len(volumes), 64, 64, 64)
    return Trainee(model, lambda: functional.cross_entropy(model(volumes), labels))


@architecture(_KIN, "fp32", "adam")
def dcgan(at: Place) -> Trainee:
    """A generator of transposed convolutions and its critic, trained in turn, 512 images of 64 pixels."""
    making: list[nn.Module] = [nn.ConvTranspose2d(100, 512, 4, 1, 0, bias=False)]
    for width in (512, 256, 128):
        making += [nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, width // 2, 4, 2, 1, bias=False)]
    generator = nn.Sequential(*making, nn.BatchNorm2d(64), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh())
    judging: list[nn.Module] = [nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2)]
    for width in (64, 128, 256):
        judging += [nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)]
    critic = nn.Sequential(*judging, nn.Conv2d(512, 1, 4), nn.Flatten())
    model = nn.ModuleList((generator, critic)).to(at.device)
    makes, judges = (torch.optim.Adam(part.parameters(), lr=1e-6, betas=(0.5, 0.999)) for part in (generator, critic))
    images = at.images(512, 64)

    def step() -> None:
        made = generator(torch.randn(len(images), 100, 1, 1, device=at.device))
        judges.zero_grad(set_to_none=True)
        judged = functional.softplus(-critic(images)).mean() + functional.softplus(critic(made.detach())).mean()
        judged.backward()  # type: ignore[no-untyped-call]
        judges.step()
        makes.zero_grad(set_to_none=True)
        functional.softplus(-critic(made)).mean().backward()  # type: ignore[no-untyped-call]
        makes.step()

    return Trainee(model, step=step)


class TimedResidual(nn.Module):
    """Group norm, SiLU and convolution twice, shifted by an embedding of time."""

    def __init__(self, first: int, second: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.GroupNorm(32, first), nn.GroupNorm(32, second)))
        self.one, self.two = nn.Conv2d(first, second, 3, padding=1), nn.Conv2d(second, second, 3, padding=1)
        self.time = nn.Linear(time, second)
        self.side = nn.Conv2d(first, second, 1) if first != second else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Any:
        """One block."""
        inner = self.one(functional.silu(self.norms[0](x))) + self.time(functional.silu(time))[..., None, None]
        return self.side(x) + self.two(functional.silu(self.norms[1](inner)))


class ImageAttention(nn.Module):
    """Attention between all places of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(32, width), SelfAttention(width, width // 64)

    def forward(self, x: Tensor) -> Any:
        """Of the same shape."""
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.attention(tokens).transpose(1, 2).unflatten(2, x.shape[2:])


def sinusoids(times: Tensor, width: int) -> Tensor:
    """Times as sines and cosines."""
    rates = torch.exp(-torch.arange(width // 2, device=times.device) * (9.2 / (width // 2)))
    turns = times[:, None].float() * rates
    return torch.cat((turns.sin(), turns.cos()), -1)


class DiffusionUnet(nn.Module):
    """Residual blocks with time, attention on the lower levels, up by nearest neighbours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.width, self.stem, self.out = width, nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        widths = (width, 2 * width, 4 * width)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        first = width
        for level, now in enumerate(widths):
            block = [TimedResidual(first, now, 4 * width), ImageAttention(now) if level else nn.Identity()]
            self.down.append(nn.ModuleList((*block, nn.Conv2d(now, now, 3, 2, 1) if level < 2 else nn.Identity())))
            first = now
        for level, now in reversed(list(enumerate(widths))):
            block = [TimedResidual(first + now, now, 4 * width), ImageAttention(now) if level else nn.Identity()]
            self.up.append(nn.ModuleList((*block, nn.Conv2d(now, now, 3, padding=1) if level else nn.Identity())))
            first = now

    def forward(self, x: Tensor, times: Tensor) -> Any:
        """The noise in images at some times."""
        time, x = self.time(sinusoids(times, self.width)), self.stem(x)
        levels = []
        downs, ups = cast("Any", self.down), cast("Any", self.up)
        for block, attention, down in downs:
            x = attention(block(x, time))
            levels.append(x)
            x = down(x)
        for index, (block, attention, up) in enumerate(ups):
            x = attention(block(torch.cat((x, levels.pop()), 1), time))
            x = up(functional.interpolate(x, scale_factor=2.0, mode="nearest") if index < 2 else x)
        return self.out(x)


@architecture(_KIN, "bf16", "adamw_fused")
def diffusion_unet(at: Place) -> Trainee:
    """Three levels of widths 192 to 768 with group norms and attention, 128 latent images of 32 pixels."""
    model, images = DiffusionUnet(192), at.images(128, 32, 4)
    times, noise = at.integers(1000, len(images)), at.floats(*images.shape)
    return Trainee(model, lambda: functional.mse_loss(model(images + noise, times), noise))


class ModulatedBlock(nn.Module):
    """A Transformer's layer whose norms are scaled, shifted and gated by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention, self.perceptron = SelfAttention(width, heads), Perceptron(width, 4 * width)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Any:
        """One layer."""
        shift, scale, gate, shift_two, scale_two, gate_two = self.condition(condition)[:, None].chunk(6, -1)
        x = x + gate * self.attention(self.first(x) * (1 + scale) + shift)
        return x + gate_two * self.perceptron(self.second(x) * (1 + scale_two) + shift_two)


class DiffusionTransformer(nn.Module):
    """Patches of latent images through modulated layers."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.width, self.patches, self.classes = width, nn.Conv2d(4, width, 2, 2), nn.Embedding(1000, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(ModulatedBlock(width, heads) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 16)

    def forward(self, images: Tensor, times: Tensor, classes: Tensor) -> Any:
        """The noise in images."""
        condition = self.time(sinusoids(times, self.width)) + self.classes(classes)
        x = self.patches(images)
        height, width = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x, condition)
        x = self.out(self.norm(x)).view(-1, height, width, 2, 2, 4)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(-1, 4, 2 * height, 2 * width)


@architecture(_KIN, "bf16", "adamw_fused")
def diffusion_transformer(at: Place) -> Trainee:
    """12 modulated layers of width 768 over 256 patches, 64 latent images."""
    model, images = DiffusionTransformer(768, 12, at.layers(12)), at.images(64, 32, 4)
    times, classes, noise = at.integers(1000, len(images)), at.integers(1000, len(images)), at.floats(*images.shape)
    return Trainee(model, lambda: functional.mse_loss(model(images + noise, times, classes), noise))


@architecture(_KIN, "fp32", "adam")
def vae(at: Place) -> Trainee:
    """Convolutions down to a mean and a spread, drawn, and up again, 192 images of 128 pixels."""
    down: list[nn.Module] = []
    up: list[nn.Module] = []
    for first, second in ((3, 64), (64, 128), (128, 256), (256, 512)):
        down += [nn.Conv2d(first, second, 3, 2, 1), nn.BatchNorm2d(second), nn.LeakyReLU()]
        last = first == 3
        up = [
            nn.ConvTranspose2d(second, 64 if last else first, 3, 2, 1, 1),
            nn.BatchNorm2d(64 if last else first),
            nn.LeakyReLU(),
            *up,
        ]
    encoder = nn.Sequential(*down, nn.Flatten(), nn.Linear(512 * 64, 2 * 256))
    decoder = nn.Sequential(
        nn.Linear(256, 512 * 64), nn.Unflatten(1, (512, 8, 8)), *up, nn.Conv2d(64, 3, 3, padding=1), nn.Tanh()
    )
    model, images = nn.ModuleList((encoder, decoder)), at.images(192, 128)

    def loss() -> Tensor:
        mean, spread = encoder(images).chunk(2, -1)
        made = decoder(mean + torch.randn_like(mean) * torch.exp(0.5 * spread))
        apart: Tensor = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()
        return functional.mse_loss(made, images) + 1e-3 * apart

    return Trainee(model, loss)


class Scaled(nn.Module):
    """Two convolutions without a norm, added in part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: Tensor) -> Any:
        """One block."""
        return x + 0.1 * self.layers(x)


@architecture(_KIN, "fp32", "adam")
def super_resolution(at: Place) -> Trainee:
    """16 blocks of width 64 and two pixel shuffles, 64 images from 48 to 192 pixels."""
    up = [layer for _ in range(2) for layer in (nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2))]
    blocks = [Scaled(64) for _ in range(at.layers(16))]
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *blocks, *up, nn.Conv2d(64, 3, 3, padding=1))
    return regressor(model, at.images(64, 48), at.images(64, 192))


class Pyramid(nn.Module):
    """A small backbone, its levels joined from the top by interpolation, and a head for boxes and classes on each."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512)
        self.stages = nn.ModuleList(
            nn.Sequential(
                convolved(first, width, 3, 2), nn.BatchNorm2d(width), nn.ReLU(), convolved(width, width, 3), nn.ReLU()
            )
            for first, width in zip((3, *widths), widths, strict=False)
        )
        self.sides = nn.ModuleList(nn.Conv2d(width, 256, 1) for width in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(256, 256, 3, padding=1) for _ in widths)
        tower = [layer for _ in range(2) for layer in (nn.Conv2d(256, 256, 3, padding=1), nn.GroupNorm(32, 256), nn.ReLU())]
        self.tower, self.head = nn.Sequential(*tower), nn.Conv2d(256, 84, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        """Boxes and classes of all places of all levels, (batch, places, 84)."""
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        above: Tensor | None = None
        outs = []
        for side, smooth, level in zip(reversed(self.sides), reversed(self.smooth), reversed(levels), strict=True):
            now = side(level)
            above = now if above is None else now + functional.interpolate(above, scale_factor=2.0, mode="nearest")
            outs.append(self.head(self.tower(smooth(above))).flatten(2).transpose(1, 2))
        return torch.cat(outs, 1)


@architecture(_KIN, "fp32", "sgd")
def feature_pyramid(at: Place) -> Trainee:
    """Four levels joined from the top, focal loss on classes and L1 on boxes, 16 images of 256 pixels."""
    model, images = Pyramid(), at.images(16, 256)
    places = sum((256 >> level) ** 2 for level in (1, 2, 3, 4))
    boxes, named = at.floats(len(images), places, 4), (at.floats(len(images), places, 80) > 2).float()

    def loss() -> Tensor:
        made = model(images)
        each = functional.binary_cross_entropy_with_logits(made[..., 4:], named, reduction="none")
        focal = ((1 - torch.exp(-each)).square() * each).mean()
        return focal + functional.smooth_l1_loss(made[..., :4], boxes)

    return Trainee(model, loss)


class Atrous(nn.Module):
    """Dilated convolutions side by side, scores brought to full size."""

    def __init__(self) -> None:
        super().__init__()
        stem: list[nn.Module] = []
        for first, second, rate in ((3, 64, 1), (64, 128, 1), (128, 256, 2), (256, 512, 4)):
            stem.append(nn.Conv2d(first, second, 3, 2 if rate == 1 else 1, rate, rate, bias=False))
            stem += [nn.BatchNorm2d(second), nn.ReLU()]
        self.stem = nn.Sequential(*stem)
        self.beside = nn.ModuleList(nn.Conv2d(512, 256, 3, padding=rate, dilation=rate, bias=False) for rate in (6, 12, 18))
        self.norm, self.head = nn.BatchNorm2d(768), nn.Conv2d(768, 21, 1)

    def forward(self, images: Tensor) -> Any:
        """A score of every class at every place."""
        x = self.stem(images)
        x = self.head(functional.relu(self.norm(torch.cat([layer(x) for layer in self.beside], 1))))
        return functional.interpolate(x, size=images.shape[2:], mode="bilinear", align_corners=False)


@architecture(_KIN, "fp16", "sgd")
def dilated_segmentation(at: Place) -> Trainee:
    """Dilations of 2 to 18, bilinear to full size, 64 images of 256 pixels, GradScaler."""
    model, images = Atrous(), at.images(64, 256)
    labels = at.integers(21, len(images), 256, 256)
    return Trainee(model, lambda: functional.cross_entropy(model(images), labels))
