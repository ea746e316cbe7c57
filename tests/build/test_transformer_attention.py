"""Kinds of attention: latent keys and values, norms of heads, windows; the backward pass beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.op_names import backward_nodes, called_names, names_of

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.parts import LatentAttention
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.forms.attention import heads_of
from steptime._program.program import Program, Tensor
from steptime.errors import InputError

WIDTH, HEADS, LENGTH, WORDS, BATCH, SIZE = 64, 4, 16, 96, 2, 24
LATENT = LatentAttention(kv_rank=20, q_rank=28, nope=8, rope=8, value=16)


def model(**changes: Any) -> Transformer:
    values: dict[str, Any] = {
        "layers": 1, "width": WIDTH, "heads": HEADS, "sequence": LENGTH, "vocabulary": WORDS, "batch": BATCH,
        "activation": "swiglu", "norm": "rms_norm", "positions": "rotary", "tied_head": False, "feed_forward": 32,
    }  # fmt: skip
    return Transformer(**{**values, **changes})


def inputs_of(program: Program, op: str) -> list[tuple[Any, ...]]:
    rows = [row for row, name in enumerate(names_of(program)) if name == op]
    return [program.signatures[program.ops.signature[row]].inputs for row in rows]


def nodes(names: list[str]) -> list[str]:
    """The nodes of the backward pass; norms and attention have other names on a CPU."""
    known = {"NativeLayerNormBackward0": "Norm", "FusedRmsNormBackward0": "Norm"}
    return [known.get(name, name) for name in backward_nodes(names)]


def recorded(attended: Callable[[Any, Callable[..., Any]], Callable[[Any], Any]]) -> list[str]:
    """Names of what PyTorch calls in a step of one layer with such attention on a CPU."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional

    def weight(*shape: int) -> Any:
        return torch.nn.Parameter(torch.randn(*shape, dtype=torch.bfloat16))

    torch.manual_seed(0)
    table, first, second, last, head = weight(WORDS, WIDTH), *(weight(WIDTH) for _ in range(3)), weight(WORDS, WIDTH)
    gate, up, down = weight(32, WIDTH), weight(32, WIDTH), weight(WIDTH, 32)
    attend = attended(torch, weight)
    ids = torch.randint(WORDS, (BATCH, LENGTH))

    def normed(x: Any, scale: Any) -> Any:
        return functional.layer_norm(x, (x.shape[-1],), scale, None)

    def step() -> None:
        x = functional.embedding(ids, table)
        x = attend(normed(x, first)) + x
        seen = normed(x, second)
        x = x + functional.linear(functional.silu(functional.linear(seen, gate)) * functional.linear(seen, up), down)
        words = functional.linear(normed(x, last), head).view(-1, WORDS)
        functional.cross_entropy(words.float(), ids.view(-1)).backward()

    return called_names(step)


def rotated(torch: Any, x: Any, angles: list[Any]) -> Any:
    def turned() -> Any:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-second, first), dim=-1)

    return x * angles[0] + turned() * angles[1]


def latent(torch: Any, weight: Callable[..., Any]) -> Callable[[Any], Any]:
    functional, of_query, turned = torch.nn.functional, LATENT.nope + LATENT.rope, LATENT.rope
    weights = (weight(LATENT.q_rank, WIDTH), weight(LATENT.q_rank), weight(HEADS * of_query, LATENT.q_rank))
    down, norm = weight(LATENT.kv_rank + turned, WIDTH), weight(LATENT.kv_rank)
    up, out = weight(HEADS * (LATENT.nope + LATENT.value), LATENT.kv_rank), weight(WIDTH, HEADS * LATENT.value)
    angles = [torch.rand(1, 1, LENGTH, turned, dtype=torch.bfloat16) for _ in range(2)]

    def attend(x: Any) -> Any:
        narrow = functional.layer_norm(functional.linear(x, weights[0]), (LATENT.q_rank,), weights[1], None)
        q = functional.linear(narrow, weights[2]).view(BATCH, LENGTH, HEADS, of_query).transpose(1, 2)
        still, moving = q.split((LATENT.nope, turned), dim=-1)
        both, key = functional.linear(x, down).split((LATENT.kv_rank, turned), dim=-1)
        made = functional.linear(functional.layer_norm(both, (LATENT.kv_rank,), norm, None), up)
        still_key, value = made.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2).split((LATENT.nope, LATENT.value), dim=-1)
        key = key.view(BATCH, 1, LENGTH, turned)
        moving, key = rotated(torch, moving, angles), rotated(torch, key, angles)
        key = key.expand(BATCH, HEADS, LENGTH, turned)
        q, k = torch.cat((still, moving), dim=-1), torch.cat((still_key, key), dim=-1)
        found = functional.scaled_dot_product_attention(q, k, value, is_causal=True)
        return functional.linear(found.transpose(1, 2).reshape(BATCH, LENGTH, -1), out)

    return attend


def normed(torch: Any, weight: Callable[..., Any]) -> Callable[[Any], Any]:
    functional = torch.nn.functional
    to_q, to_k, to_v, out = *(weight(HEADS * SIZE, WIDTH) for _ in range(3)), weight(WIDTH, HEADS * SIZE)
    norms, angles = (weight(SIZE), weight(SIZE)), [torch.rand(1, 1, LENGTH, SIZE, dtype=torch.bfloat16) for _ in range(2)]

    def heads(x: Any, norm: Any = None) -> Any:
        x = x.view(BATCH, LENGTH, HEADS, SIZE)
        return (x if norm is None else functional.layer_norm(x, (SIZE,), norm, None)).transpose(1, 2)

    def attend(x: Any) -> Any:
        q, k = heads(functional.linear(x, to_q), norms[0]), heads(functional.linear(x, to_k), norms[1])
        v = heads(functional.linear(x, to_v))
        q, k = rotated(torch, q, angles), rotated(torch, k, angles)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.linear(found.transpose(1, 2).reshape(BATCH, LENGTH, -1), out)

    return attend


@pytest.mark.parametrize(
    ("changes", "attended"), [({"latent_attention": LATENT}, latent), ({"qk_norm": True, "head_width": SIZE}, normed)]
)
def test_the_engine_runs_the_same_nodes_in_the_same_order(changes: dict[str, Any], attended: Any) -> None:
    assert nodes(names_of(build(model(**changes, precision="bf16")).programs[0])) == nodes(recorded(attended))


def test_values_may_be_narrower_than_queries_and_ranks_share_the_heads() -> None:
    config = model(latent_attention=LatentAttention(kv_rank=16, nope=128, rope=64, value=128), precision="bf16")
    (q, k, v, *_), *_ = inputs_of(build(config).programs[0], "aten::_scaled_dot_product_cudnn_attention")
    assert q.shape == k.shape == (BATCH, HEADS, LENGTH, 192) and v.shape == (BATCH, HEADS, LENGTH, 128)
    split = build(model(latent_attention=LATENT, precision="bf16", parallel=Parallelism(tensor=2, sequence=True))).programs[0]
    (q, *_), *_ = inputs_of(split, "aten::_scaled_dot_product_cudnn_attention")
    assert q.shape == (BATCH, HEADS // 2, LENGTH, 16)


def test_a_window_is_of_all_layers_but_every_so_many() -> None:
    config = model(layers=4, window=4, full_every=2, precision="bf16")
    program = build(config).programs[0]
    windowed = inputs_of(program, "aten::_flash_attention_forward")
    assert len(windowed) == len(inputs_of(program, "aten::_scaled_dot_product_cudnn_attention")) == 2
    assert windowed[0][11:13] == (3, 0) and isinstance(windowed[0][0], Tensor)
    assert [config.layer_kind(index) for index in range(4)] == ["dense window", "dense"] * 2
    assert not inputs_of(build(model(window=LENGTH, precision="bf16")).programs[0], "aten::_flash_attention_forward")


def test_a_window_limits_the_keys_of_a_call() -> None:
    x = TensorArg((2, 4096, 8, 128), "bfloat16")
    lengths = (None, None, 4096, 4096, 0.0, True, False)
    whole = heads_of(Call("aten::_flash_attention_forward.default", (x, x, x, *lengths), (), ()))
    window = (("window_size_left", 127), ("window_size_right", 0))
    forward = heads_of(Call("aten::_flash_attention_forward.default", (x, x, x, *lengths), window, ()))
    assert (whole.queries, whole.keys, whole.causal) == (4096, 4096, True)
    assert (forward.queries, forward.causal) == (4096, False) and 128 <= forward.keys <= 256
    given = (x, x, x, x, x, TensorArg((2, 8, 4096)), None, None, 4096, 4096, 0.0, True)
    backward = heads_of(Call("aten::_flash_attention_backward.default", given, window, ()))
    assert (backward.queries, backward.keys) == (forward.keys, 4096)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"window": 4}, "window needs causal attention in 16 bits"),
        ({"full_every": 2}, "no layer has a window"),
        ({"latent_attention": LatentAttention(kv_rank=8, rope=7)}, "rope is 7; rotary positions turn pairs"),
        ({"latent_attention": LatentAttention(kv_rank=-1)}, "latent_attention.kv_rank is -1"),
        ({"latent_attention": LATENT, "kv_heads": 2}, "as many heads of keys as of queries"),
        ({"latent_attention": LATENT, "positions": "learned"}, "latent_attention needs"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        model(**changes)


def test_a_config_comes_back_whole() -> None:
    for config in (model(latent_attention=LATENT), model(head_width=SIZE, qk_norm=True, window=4, precision="bf16")):
        assert Transformer.from_dict(config.to_dict()) == config
