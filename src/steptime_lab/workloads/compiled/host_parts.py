"""Tiny steps that wait for their host, each with much of one thing: layers, parameters, saved tensors, breaks, kernels.

What PyTorch's compiler costs a host is fitted on these (`fit/compiled_host.py`), and on nothing else that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.compiled.architecture import Make, Network, Site, near

_WIDTH, _ROWS, _HEADS, _CHANNELS, _SIDE, _WORDS = 64, 16, 4, 16, 8, 256


class TinyPerceptron(nn.Sequential):
    """Layers with a function between them."""

    def __init__(self, layers: int, *, norms: bool = False) -> None:
        every: list[nn.Module] = []
        for _ in range(layers):
            every += [nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), *([nn.LayerNorm(_WIDTH)] if norms else [])]
        super().__init__(*every)


class Repeated(nn.Module):
    """One layer over and over: much is kept for the backward pass, and there are two parameters."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(_WIDTH, _WIDTH), times

    def forward(self, x: Tensor) -> Tensor:
        """All."""
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


class Summed(nn.Module):
    """Many parameters in a single kernel."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(_WIDTH) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        """All."""
        for part in self.parts:
            x = x * part + 0.1
        return x


class Kernels(nn.Module):
    """Reductions along rows and columns in turn, of which no two are one kernel."""

    def __init__(self, times: int, parameters: int = 1) -> None:
        super().__init__()
        self.times = times
        self.parts = nn.ParameterList(torch.randn(_WIDTH) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        """All."""
        for turn in range(self.times):
            for part in self.parts:
                x = x + part
            x = functional.softmax(x, dim=turn % 2)
        return x


class Broken(nn.Module):
    """Layers in pieces, as graph breaks leave them; in a loop they would leave all of it to Python."""

    def __init__(self, layers: int, breaks: int) -> None:
        super().__init__()
        mine = layers // (breaks + 1)
        self.first = TinyPerceptron(mine)
        self.rest = Broken(layers - mine, breaks - 1) if breaks else None

    def forward(self, x: Tensor) -> Tensor:
        """All."""
        x = self.first(x)
        if self.rest is not None:
            torch._dynamo.graph_break()
            x = self.rest(x)
        return x


class Frozen(nn.Module):
    """Layers that learn nothing before one that does."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.before, self.last = TinyPerceptron(layers).requires_grad_(False), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """All."""
        out: Tensor = self.last(self.before(x))
        return out


class TinyConvolutions(nn.Sequential):
    """Convolutions with batch norms, whose statistics are written in every step."""

    def __init__(self, layers: int) -> None:
        every: list[nn.Module] = []
        for _ in range(layers):
            every += [nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(_CHANNELS), nn.ReLU()]
        super().__init__(*every)


class TinyBlock(nn.Module):
    """Of a small Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """All."""
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, _HEADS, width // _HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return out


class Transformer(nn.Module):
    """Words in, vectors out."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(_WORDS, _WIDTH), nn.ModuleList(TinyBlock() for _ in range(layers))

    def forward(self, words: Tensor) -> Tensor:
        """All."""
        x: Tensor = self.words(words)
        for block in self.blocks:
            x = block(x)
        return x


def part(name: str, model: Callable[[], nn.Module], kind: str = "rows") -> Make:
    """Makes a step of one of them, under a name."""

    def make(site: Site) -> Network:
        made = model()
        layers = [each for each in made.children() if isinstance(each, nn.ModuleList) and _equal(each)]
        inputs = (_inputs(site, kind),)
        with torch.no_grad():
            wanted = torch.zeros_like(made(*inputs))
        return Network(made, inputs, near(wanted), layers[0] if layers else None)

    make.__name__ = name
    return make


def _inputs(site: Site, kind: str) -> Tensor:
    if kind == "images":
        return site.floats(_ROWS, _CHANNELS, _SIDE, _SIDE)
    return site.integers(_WORDS, 4, _ROWS) if kind == "words" else site.floats(_ROWS, _WIDTH)


def _equal(modules: Iterable[nn.Module]) -> bool:
    return len({type(each) for each in modules}) == 1


_DEFAULT, _GRAPHS = "default", "reduce-overhead"
_BOTH = (_DEFAULT, _GRAPHS)
# What is made; precision, optimiser, what is compiled, modes
PARTS: tuple[tuple[Make, str, str, str, tuple[str, ...]], ...] = (
    (part("host_layers_2", lambda: TinyPerceptron(2)), "tf32", "sgd", "loss", (_DEFAULT,)),
    (part("host_layers_8", lambda: TinyPerceptron(8)), "tf32", "sgd", "loss", _BOTH),
    (part("host_layers_24", lambda: TinyPerceptron(24)), "tf32", "sgd", "loss", _BOTH),
    (part("host_norms_12", lambda: TinyPerceptron(12, norms=True)), "bf16", "sgd", "model", _BOTH),
    (part("host_repeated_8", lambda: Repeated(8)), "tf32", "sgd", "loss", (_DEFAULT,)),
    (part("host_repeated_40", lambda: Repeated(40)), "tf32", "sgd", "loss", _BOTH),
    (part("host_summed_8", lambda: Summed(8)), "fp32", "sgd", "loss", (_DEFAULT,)),
    (part("host_summed_64", lambda: Summed(64)), "fp32", "sgd", "loss", _BOTH),
    (part("host_kernels_8", lambda: Kernels(8)), "fp32", "sgd", "loss", (_DEFAULT,)),
    (part("host_kernels_32", lambda: Kernels(32)), "fp32", "sgd", "loss", _BOTH),
    (part("host_arguments_12", lambda: Kernels(12, 10)), "fp32", "sgd", "loss", (_DEFAULT,)),
    (part("host_breaks_1", lambda: Broken(8, 1)), "tf32", "sgd", "model", (_DEFAULT,)),
    (part("host_breaks_7", lambda: Broken(8, 7)), "tf32", "sgd", "model", _BOTH),
    (part("host_frozen_16", lambda: Frozen(16)), "tf32", "sgd", "loss", _BOTH),
    (part("host_convolved_6", lambda: TinyConvolutions(6), "images"), "fp32", "sgd", "model", _BOTH),
    (part("host_transformer_3", lambda: Transformer(3), "words"), "bf16", "adamw", "model", _BOTH),
    (part("host_regional_6", lambda: Transformer(6), "words"), "bf16", "sgd", "layers", _BOTH),
    (part("host_step_sgd", lambda: TinyPerceptron(8)), "tf32", "sgd", "step", _BOTH),
    (part("host_step_adamw", lambda: TinyPerceptron(8)), "tf32", "adamw_capturable", "step", _BOTH),
    (part("host_optimizer", lambda: TinyPerceptron(16)), "tf32", "adamw", "optimizer", (_DEFAULT,)),
    (part("host_adamw", lambda: TinyPerceptron(16)), "tf32", "adamw", "loss", (_DEFAULT,)),
    (part("host_adamw_fused", lambda: TinyPerceptron(16)), "tf32", "adamw_fused", "loss", _BOTH),
    (part("host_adamw_capturable", lambda: TinyPerceptron(16)), "tf32", "adamw_capturable", "loss", _BOTH),
)  # fmt: skip
