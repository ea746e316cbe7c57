"""Adapters and frozen parts: no gradients, no products for them and no optimiser's state; the order is PyTorch's own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.support.op_names import backward_nodes, called_names, names_of

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.parts import Lora
from steptime._program.program import Program
from steptime.errors import InputError

WIDTH, HEADS, LENGTH, WORDS, BATCH, INNER, RANK = 64, 4, 16, 96, 2, 128, 8


def model(**changes: Any) -> Transformer:
    values: dict[str, Any] = {
        "layers": 2, "width": WIDTH, "heads": HEADS, "sequence": LENGTH, "vocabulary": WORDS, "batch": BATCH,
        "activation": "swiglu", "bias": False, "projections": "separate", "feed_forward": INNER, "tied_head": False,
        "optimizer": "adamw_fused",
    }  # fmt: skip
    return Transformer(**{**values, **changes})


def program_of(config: Transformer) -> Program:
    return build(config).programs[0]


def updated(program: Program) -> int:
    """Elements of the parameters that the optimiser updates."""
    row = names_of(program).index("aten::_fused_adamw_")
    weights: Any = program.signatures[program.ops.signature[row]].inputs[0]
    return sum(each.numel for each in weights)


def recorded() -> list[str]:
    """What PyTorch calls in a step of two layers with adapters of queries and values, all else frozen."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional

    def weight(*shape: int, learnt: bool = False) -> Any:
        return torch.randn(*shape).requires_grad_(learnt)

    def norm() -> tuple[Any, Any]:
        return weight(WIDTH), weight(WIDTH)

    def layer() -> dict[str, Any]:
        sizes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
        sizes |= {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
        adapters = {name: (weight(RANK, WIDTH, learnt=True), weight(WIDTH, RANK, learnt=True)) for name in ("q", "v")}
        made = {name: weight(*size) for name, size in sizes.items()}
        return {**made, "adapters": adapters, "first": norm(), "second": norm()}

    def applied(own: dict[str, Any], name: str, x: Any) -> Any:
        y = functional.linear(x, own[name])
        if name not in own["adapters"]:
            return y
        down, up = own["adapters"][name]
        return y + functional.linear(functional.linear(x, down), up) * 2.0

    def ran(own: dict[str, Any], x: Any) -> Any:
        seen = functional.layer_norm(x, (WIDTH,), *own["first"])
        q, k, v = (applied(own, name, seen).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for name in "qkv")
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = applied(own, "out", found.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)) + x
        seen = functional.layer_norm(x, (WIDTH,), *own["second"])
        return x + applied(own, "down", functional.silu(applied(own, "gate", seen)) * applied(own, "up", seen))

    table, places, last, head = weight(WORDS, WIDTH), weight(LENGTH, WIDTH), norm(), weight(WORDS, WIDTH)
    layers, ids = [layer(), layer()], torch.randint(WORDS, (BATCH, LENGTH))

    def step() -> None:
        x = (functional.embedding(ids, table) + functional.embedding(torch.arange(LENGTH), places)).requires_grad_()
        for own in layers:
            x = ran(own, x)
        words = functional.linear(functional.layer_norm(x, (WIDTH,), *last), head).view(-1, WORDS)
        functional.cross_entropy(words, ids.view(-1)).backward()

    return called_names(step)


def test_the_engine_runs_the_same_nodes_and_products_as_pytorch() -> None:
    built, own = names_of(program_of(model(lora=Lora(rank=RANK)))), recorded()
    assert backward_nodes(built) == backward_nodes(own)
    assert Counter(built)["aten::mm"] == Counter(own)["aten::mm"]


def test_adapters_alone_are_updated() -> None:
    adapters = Lora(rank=RANK, targets=("query", "value", "down"))
    program = program_of(model(lora=adapters))
    assert updated(program) == 2 * (2 * RANK * 2 * WIDTH + RANK * (INNER + WIDTH))
    whole = build(model()).description.parameters
    assert build(model(lora=adapters)).description.parameters == (whole or 0) + updated(program)


def test_fsdp_gathers_frozen_parameters_and_reduces_gradients_of_adapters_alone() -> None:
    program = program_of(model(lora=Lora(rank=RANK), precision="bf16", parallel=Parallelism(fsdp=2)))
    scattered = [each.bytes_in for each in program.collectives if each.kind == "reduce_scatter"]
    assert scattered == [4 * (2 * RANK * 2 * WIDTH)] * 2
    gathered = [each.bytes_out for each in program.collectives if each.kind == "all_gather"]
    assert max(gathered) > 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)


def test_frozen_parts_get_no_gradients_and_others_do() -> None:
    whole, frozen = model(), model(frozen=("embedding", "attention", "norms", "head"))
    assert updated(program_of(frozen)) == 2 * 3 * WIDTH * INNER
    assert Counter(names_of(program_of(whole)))["aten::mm"] - Counter(names_of(program_of(frozen)))["aten::mm"] == 2 * 4 + 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"frozen": ("embedding", "attention", "feed_forward", "norms", "head")}, "nothing is trained"),
        ({"frozen": ("everything",)}, "expected a list of some of embedding"),
        ({"lora": Lora(rank=-1)}, "lora.rank is -1"),
        ({"lora": Lora(rank=4, targets=("queries",))}, "lora.targets is"),
        ({"lora": Lora(rank=4), "projections": "fused"}, "adapters need projections = 'separate'"),
        ({"lora": Lora(rank=4), "parallel": Parallelism(tensor=2)}, "cannot be built with"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        model(**changes)


def test_a_config_comes_back_whole() -> None:
    config = model(lora=Lora(rank=4, targets=("query",)), frozen=("norms",))
    assert Transformer.from_dict(config.to_dict()) == config
