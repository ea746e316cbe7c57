"""The backward pass of a layer beside PyTorch's own: the same nodes in the same order, checkpointed or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from tests.support.op_names import backward_nodes, called_names

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer

torch = pytest.importorskip("torch")

WIDTH, HEADS, KEYS, INNER, LENGTH, WORDS, BATCH = 64, 4, 2, 128, 16, 96, 2


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


KEPT = ("mm.default", "_scaled_dot_product_flash_attention_for_cpu.default")


def selective() -> Any:
    """Contexts that keep attention and of every two products the first, as torchtitan's selective checkpointing by op."""
    counts = Counter[bool]()

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> Any:
        name = str(op).removeprefix("aten.")
        if name == "mm.default":
            counts[context.is_recompute] += 1
        kept = name in KEPT and not (name == "mm.default" and counts[context.is_recompute] % 2 == 0)
        choices = torch.utils.checkpoint.CheckpointPolicy
        return choices.MUST_SAVE if kept else choices.PREFER_RECOMPUTE

    return torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)


def step_of(recompute: str) -> Callable[[], None]:
    """A step of such a model on a CPU."""
    torch.manual_seed(0)
    embedding, layers = torch.nn.Embedding(WORDS, WIDTH), [Layer(), Layer()]
    norm, head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)
    angles = [torch.rand(1, 1, LENGTH, WIDTH // HEADS) for _ in range(2)]
    ids = torch.randint(WORDS, (BATCH, LENGTH))

    def step() -> None:
        x = embedding(ids)
        for layer in layers:
            options = {"context_fn": selective} if recompute == "ops" else {}
            run = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False, **options)
            x = layer(x, *angles) if recompute == "none" else run(layer, x, *angles)
        torch.nn.functional.cross_entropy(head(norm(x)).view(-1, WORDS), ids.view(-1)).backward()
        for module in (embedding, *layers, norm, head):
            module.zero_grad()

    return step


class Executed(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc,name-defined]
    """Counts what runs: a mode outside that of selective checkpointing, which does not hand on what it kept."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts an op and runs it."""
        self.counts[f"aten::{op.overloadpacket.__name__}"] += 1
        return op(*args, **(kwargs or {}))


@cache
def executed(recompute: str) -> Counter[str]:
    """How often ops run in a step."""
    mode = Executed()
    with mode:
        step_of(recompute)()
    return Counter(mode.counts)


@cache
def recorded(recompute: str) -> tuple[str, ...]:
    """Names of what PyTorch calls in the second step of such a model."""
    return tuple(called_names(step_of(recompute)))


@cache
def built(recompute: str) -> tuple[str, ...]:
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
        recompute=recompute,
    )
    program = build(config).programs[0]
    return tuple(program.names[row] for row in program.ops.name)


@pytest.mark.parametrize("recompute", ["none", "full", "ops"])
def test_the_engine_runs_the_same_nodes_in_the_same_order(recompute: str) -> None:
    assert backward_nodes(built(recompute)) == backward_nodes(recorded(recompute))


def test_gradients_of_one_tensor_are_added_in_place_or_not_as_often() -> None:
    mine, theirs = (Counter(names)["aten::add"] for names in (built("none"), recorded("none")))
    assert mine == theirs


@pytest.mark.parametrize("recompute", ["full", "ops"])
def test_recomputation_repeats_what_pytorch_runs_again(recompute: str) -> None:
    for name in ("mm", "silu", "mul", "native_layer_norm", "neg", "cat", "clone"):
        op = f"aten::{name}"
        mine = Counter(built(recompute))[op] - Counter(built("none"))[op]
        assert mine == executed(recompute)[op] - executed("none")[op], name


def test_attention_that_is_kept_does_not_run_again() -> None:
    names = Counter(built("ops"))
    assert names["aten::_scaled_dot_product_efficient_attention"] == 2
    assert Counter(built("full"))["aten::_scaled_dot_product_efficient_attention"] == 4
