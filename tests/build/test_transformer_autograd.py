"""The backward pass of a layer beside PyTorch's own: the same nodes in the same order, checkpointed or not."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer

torch = pytest.importorskip("torch")

WIDTH, HEADS, KEYS, INNER, LENGTH, WORDS, BATCH = 64, 4, 2, 128, 16, 96, 2
_ENGINE = "autograd::engine::evaluate_function: "


def rotated(x: Any, cosines: Any, sines: Any) -> Any:
    def turned() -> Any:
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        return torch.cat((-second, first), dim=-1)

    return x * cosines + turned() * sines


class Layer(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A layer with grouped queries, rotary positions and a gated feed-forward half."""

    def __init__(self) -> None:
        super().__init__()
        keys = WIDTH * KEYS // HEADS
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        widths = [(WIDTH, WIDTH), (WIDTH, keys), (WIDTH, keys), (WIDTH, WIDTH), (WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)]
        self.linears = torch.nn.ModuleList(torch.nn.Linear(*each, bias=False) for each in widths)

    def forward(self, x: Any, cosines: Any, sines: Any) -> Any:
        """What the layer makes of its input."""
        functional, (to_q, to_k, to_v, out, gate, up, down) = torch.nn.functional, self.linears
        seen = self.norms[0](x)
        q, k, v = heads(to_q(seen)), heads(to_k(seen)), heads(to_v(seen))
        q, k = rotated(q, cosines, sines), rotated(k, cosines, sines)
        found = functional.scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True)
        x = out(found.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)) + x
        seen = self.norms[1](x)
        return x + down(functional.silu(gate(seen)) * up(seen))


def heads(x: Any) -> Any:
    return x.view(BATCH, LENGTH, -1, WIDTH // HEADS).transpose(1, 2)


def repeated(x: Any) -> Any:
    wide = x[:, :, None].expand(BATCH, KEYS, HEADS // KEYS, LENGTH, WIDTH // HEADS)
    return wide.reshape(BATCH, HEADS, LENGTH, WIDTH // HEADS)


@cache
def recorded(checkpointing: bool) -> tuple[str, ...]:
    """Names of what PyTorch calls in the third step of such a model on a CPU."""
    torch.manual_seed(0)
    embedding, layers = torch.nn.Embedding(WORDS, WIDTH), [Layer(), Layer()]
    norm, head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)
    angles = [torch.rand(1, 1, LENGTH, WIDTH // HEADS) for _ in range(2)]
    ids = torch.randint(WORDS, (BATCH, LENGTH))

    def step() -> None:
        x = embedding(ids)
        for layer in layers:
            run = torch.utils.checkpoint.checkpoint
            x = run(layer, x, *angles, use_reentrant=False) if checkpointing else layer(x, *angles)
        torch.nn.functional.cross_entropy(head(norm(x)).view(-1, WORDS), ids.view(-1)).backward()
        for module in (embedding, *layers, norm, head):
            module.zero_grad()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: (event.start_ns(), -event.duration_ns()))
    return tuple(event.name() for event in events)


@cache
def built(checkpointing: bool) -> tuple[str, ...]:
    """Names of the ops of the built step."""
    config = Transformer(
        layers=2,
        width=WIDTH,
        heads=HEADS,
        kv_heads=KEYS,
        feed_forward=INNER,
        sequence=LENGTH,
        vocabulary=WORDS,
        batch=BATCH,
        activation="swiglu",
        positions="rotary",
        bias=False,
        tied_head=False,
        checkpointing=checkpointing,
    )
    program = build(config).programs[0]
    return tuple(program.names[row] for row in program.ops.name)


def nodes(names: tuple[str, ...]) -> list[str]:
    """The nodes of the backward pass in order; the kernels of attention have another name on a CPU."""
    found = [name.removeprefix(_ENGINE) for name in names if name.startswith(_ENGINE)]
    return ["Attention" if name.startswith("ScaledDotProduct") else name for name in found]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_engine_runs_the_same_nodes_in_the_same_order(checkpointing: bool) -> None:
    assert nodes(built(checkpointing)) == nodes(recorded(checkpointing))


def test_gradients_of_one_tensor_are_added_in_place_or_not_as_often() -> None:
    mine, theirs = (Counter(names)["aten::add"] for names in (built(False), recorded(False)))
    assert mine == theirs


def test_checkpointing_repeats_as_many_products() -> None:
    """But for the last of a layer: PyTorch calls it and stops before it runs."""
    mine, theirs = (Counter(names(True))["aten::mm"] - Counter(names(False))["aten::mm"] for names in (built, recorded))
    assert mine == theirs - 2
