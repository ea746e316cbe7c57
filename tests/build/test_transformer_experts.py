"""Layers with experts: the backward pass beside PyTorch's own, what ranks exchange, and what is refused."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.support.op_names import backward_nodes, called_names, names_of

from steptime._build.config import read_config
from steptime._build.transformer.build import _parameter_counts, build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.parts import Experts, LatentAttention, Lora
from steptime._platforms.platform import Platform
from steptime._program.program import Program, Tensor
from steptime._sim.modelled.prediction import predict_on
from steptime.errors import InputError

WIDTH, HEADS, LENGTH, WORDS, BATCH, COUNT, TOP, INNER = 64, 4, 16, 96, 2, 4, 2, 48
EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"


def model(**changes: Any) -> Transformer:
    values: dict[str, Any] = {
        "layers": 2, "width": WIDTH, "heads": HEADS, "sequence": LENGTH, "vocabulary": WORDS, "batch": BATCH,
        "activation": "swiglu", "bias": False, "projections": "separate", "positions": "rotary", "tied_head": False,
        "precision": "bf16", "attention": "flash", "experts": Experts(count=COUNT, top_k=TOP, width=INNER),
    }  # fmt: skip
    return Transformer(**{**values, **changes})


def program_of(config: Transformer) -> Program:
    return build(config).programs[0]


def shapes_of(program: Program, op: str) -> list[tuple[tuple[int, ...], ...]]:
    rows = [row for row, name in enumerate(names_of(program)) if name == op]
    found = [program.signatures[program.ops.signature[row]].inputs for row in rows]
    return [tuple(each.shape for each in inputs if isinstance(each, Tensor)) for inputs in found]


def rotated(torch: Any, x: Any, cosines: Any, sines: Any) -> Any:
    def turned() -> Any:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-second, first), dim=-1)

    return x * cosines + turned() * sines


def routed(torch: Any, scores: str, x: Any, router: Any, gate: Any, up: Any, down: Any) -> Any:
    x, shape = x.view(-1, WIDTH), x.shape
    found = torch.nn.functional.linear(x, router).float()
    top, chosen = torch.topk(found.softmax(dim=1) if scores == "softmax" else found.sigmoid(), TOP, dim=1)
    top = top / top.sum(-1, keepdim=True)
    ends = torch.cumsum(torch.bincount(chosen.view(-1), minlength=COUNT), 0, dtype=torch.int32)
    order = torch.argsort(chosen.view(-1), stable=True)
    factors, rows = top.view(-1).index_select(0, order), order // TOP
    copies = (x.index_select(0, rows).float() * factors.reshape(-1, 1)).to(x.dtype)
    gated = torch.nn.functional.silu(torch._grouped_mm(copies, gate.transpose(1, 2), offs=ends))
    inner = gated * torch._grouped_mm(copies, up.transpose(1, 2), offs=ends)
    made = torch._grouped_mm(inner, down.transpose(1, 2), offs=ends)
    return x.new_zeros(x.shape).index_add_(0, rows, made).view(shape)


def recorded(scores: str, shared: int) -> list[str]:
    """Names of what PyTorch calls in a step of two such layers on a CPU."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional

    def weight(*shape: int) -> Any:
        return torch.nn.Parameter(torch.randn(*shape, dtype=torch.bfloat16))

    def norm() -> tuple[Any, Any]:
        return weight(WIDTH), weight(WIDTH)

    def layer() -> list[Any]:
        own = [norm(), *(weight(WIDTH, WIDTH) for _ in range(4)), norm(), weight(COUNT, WIDTH)]
        return [*own, weight(COUNT, INNER, WIDTH), weight(COUNT, INNER, WIDTH), weight(COUNT, WIDTH, INNER)] + (
            [weight(shared, WIDTH), weight(shared, WIDTH), weight(WIDTH, shared)] if shared else []
        )

    def ran(x: Any, own: list[Any], angles: list[Any]) -> Any:
        first, to_q, to_k, to_v, out, second = own[:6]
        seen = functional.layer_norm(x, (WIDTH,), *first)
        q, k, v = (functional.linear(seen, each).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for each in (to_q, to_k, to_v))
        q, k = rotated(torch, q, *angles), rotated(torch, k, *angles)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = functional.linear(found.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH), out) + x
        seen = functional.layer_norm(x, (WIDTH,), *second)
        if not shared:
            return x + routed(torch, scores, seen, *own[6:])
        gate, up, down = own[10:]
        by_all = functional.linear(functional.silu(functional.linear(seen, gate)) * functional.linear(seen, up), down)
        return x + (by_all + routed(torch, scores, seen, *own[6:10]))

    torch.manual_seed(0)
    table, layers, last, head = weight(WORDS, WIDTH), [layer(), layer()], norm(), weight(WORDS, WIDTH)
    angles = [torch.rand(1, 1, LENGTH, WIDTH // HEADS, dtype=torch.bfloat16) for _ in range(2)]
    ids = torch.randint(WORDS, (BATCH, LENGTH))

    def step() -> None:
        x = functional.embedding(ids, table)
        for own in layers:
            x = ran(x, own, angles)
        words = functional.linear(functional.layer_norm(x, (WIDTH,), *last), head).view(-1, WORDS)
        functional.cross_entropy(words.float(), ids.view(-1)).backward()

    return called_names(step)


@pytest.mark.parametrize(("scores", "shared"), [("softmax", 0), ("sigmoid", 32)])
def test_the_engine_runs_the_same_nodes_in_the_same_order(scores: str, shared: int) -> None:
    experts = Experts(count=COUNT, top_k=TOP, width=INNER, scores=scores, shared=shared)
    assert backward_nodes(names_of(program_of(model(experts=experts)))) == backward_nodes(recorded(scores, shared))


def test_groups_have_the_rows_of_all_tokens_for_each_of_their_experts() -> None:
    rows = BATCH * LENGTH * TOP
    found = Counter(shapes_of(program_of(model(layers=1)), "aten::_grouped_mm"))
    assert found[((rows, WIDTH), (COUNT, WIDTH, INNER), (COUNT,))] == 3  # gate, up, and the gradient of what goes down
    assert found[((rows, INNER), (COUNT, INNER, WIDTH), (COUNT,))] == 3  # down, and the gradients of what the others take
    assert found[((INNER, rows), (rows, WIDTH), (COUNT,))] == 2 and found[((WIDTH, rows), (rows, INNER), (COUNT,))] == 1


def test_layers_before_the_first_expert_and_between_are_dense() -> None:
    experts = Experts(count=COUNT, top_k=TOP, every=2, first_dense=2)
    config = model(layers=6, experts=experts)
    assert [config.layer_kind(index) for index in range(6)] == ["dense"] * 3 + ["experts", "dense", "experts"]
    assert names_of(program_of(config)).count("aten::topk") == 2


def test_ranks_exchange_tokens_there_and_back_in_both_passes() -> None:
    program = program_of(model(layers=1, batch=8, parallel=Parallelism(data=4, expert=2)))
    exchanges = [each for each in program.collectives if each.kind == "all_to_all"]
    rows = 2 * LENGTH * TOP
    assert [each.bytes_in for each in exchanges[1:]] == [rows * WIDTH * 2] * 4  # after the counts of tokens
    assert len(exchanges[0].ranks) == 2
    assert ((rows, WIDTH), (COUNT // 2, WIDTH, INNER), (COUNT // 2,)) in shapes_of(program, "aten::_grouped_mm")


def test_the_busiest_rank_gets_more_rows_and_everyone_sends_it_more() -> None:
    experts = Experts(count=COUNT, top_k=TOP, width=INNER, imbalance=1.5)
    workload = build(model(layers=1, batch=8, experts=experts, parallel=Parallelism(data=4, expert=2)))
    program, rows = workload.programs[0], 2 * LENGTH * TOP
    there, back = [each for each in program.collectives if each.kind == "all_to_all"][1:3]
    assert there.in_splits == (rows * 3 // 4, rows // 4) and sum(there.out_splits) == rows * 3 // 2
    assert back.in_splits == there.out_splits and back.out_splits == there.in_splits
    assert max(shape[0][0] for shape in shapes_of(program, "aten::_grouped_mm")) == rows * 3 // 2
    assert any("1.5 times the mean" in text for text in workload.warnings)


def test_gradients_of_experts_are_summed_over_the_ranks_that_hold_them() -> None:
    config = model(layers=1, batch=8, parallel=Parallelism(data=8, expert=4))
    program = program_of(config)
    reduced = Counter[int]()
    for each in program.collectives:
        if each.kind == "all_reduce":
            reduced[len(each.ranks)] += each.bytes_in
    assert reduced[2] == 3 * WIDTH * INNER * 4  # one expert of three matrices, in fp32
    dense = 4 * WIDTH * WIDTH + COUNT * WIDTH + 6 * WIDTH + 2 * WORDS * WIDTH
    assert reduced[8] == dense * 4


def test_megatron_moves_tokens_by_kernels_of_their_own() -> None:
    config = model(layers=1, batch=8, fused=True, attention="auto", parallel=Parallelism(data=4, expert=2))
    program, rows = program_of(config), 2 * LENGTH * TOP
    names = names_of(program)
    assert names.count("aten::index_add_") == 1  # the gradient of the scores
    assert names.count("_moe_permute") == names.count("_moe_unpermute") == 1 and names.count("_moe_chunk_sort") == 3
    assert ((rows, WIDTH), (COUNT // 2, WIDTH, 2 * INNER), (COUNT // 2,)) in shapes_of(program, "aten::_grouped_mm")
    sizes = [each.bytes_in for each in program.collectives if each.kind == "all_to_all"][1:]
    assert sorted(sizes) == [rows * 4] * 2 + [rows * WIDTH * 2] * 4  # scores in fp32 beside the tokens


def test_a_capacity_makes_batches_and_no_host_waits() -> None:
    experts = Experts(count=COUNT, top_k=TOP, width=INNER, capacity=1.25)
    program = program_of(model(layers=1, batch=8, experts=experts, parallel=Parallelism(data=4, expert=2)))
    each = math.ceil(1.25 * 2 * LENGTH * TOP / COUNT)
    found = Counter(shapes_of(program, "aten::bmm"))
    assert found[((COUNT // 2, 2 * each, WIDTH), (COUNT // 2, WIDTH, INNER))] == 3  # gate, up, and a gradient
    sizes = [one.bytes_in for one in program.collectives if one.kind == "all_to_all"]
    assert sizes == [COUNT * each * WIDTH * 2] * 4  # no counts before them
    assert "aten::_grouped_mm" not in names_of(program)
    alone = program_of(model(layers=1, experts=experts))
    assert not [one for one in alone.collectives if one.kind == "all_to_all"]


@pytest.mark.parametrize(("ranks", "ways"), [(8, 2), (4, 1)])
def test_fsdp_shards_experts_over_the_ranks_that_hold_them(ranks: int, ways: int) -> None:
    program = program_of(model(layers=1, batch=8, parallel=Parallelism(fsdp=ranks, expert=4)))
    gathers = [each for each in program.collectives if each.kind == "all_gather" and len(each.ranks) == ways]
    whole = 3 * WIDTH * INNER * 2  # one expert of three matrices in two bytes
    assert [each.bytes_out for each in gathers] == ([whole] * 2 if ways > 1 else [])
    scattered = [each for each in program.collectives if each.kind == "reduce_scatter" and len(each.ranks) == ways]
    assert [each.bytes_in for each in scattered] == ([2 * whole] if ways > 1 else [])


def test_split_experts_are_summed_as_a_layer_is() -> None:
    parallel = Parallelism(data=2, tensor=2, expert=2, expert_tensor=2)
    program = program_of(model(layers=1, batch=8, parallel=parallel))
    assert ((4 * LENGTH * TOP, WIDTH), (COUNT // 2, WIDTH, INNER // 2), (COUNT // 2,)) in shapes_of(
        program, "aten::_grouped_mm"
    )


_LATENT = {"heads": 128, "latent_attention": LatentAttention(kv_rank=512, q_rank=1536), "width": 7168, "feed_forward": 18432}
_PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    # Jiang et al., arXiv 2401.04088: 47 B and 13 B; the checkpoint has 46.70 B.
    "mixtral-8x7b": (
        {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "vocabulary": 32000, "feed_forward": 14336,
         "experts": Experts(count=8, top_k=2)}, 46.7, 12.9,
    ),
    # DeepSeek-AI, arXiv 2412.19437: 671 B and 37 B, without the layer that predicts a second token.
    "deepseek-v3": (
        {**_LATENT, "layers": 61, "vocabulary": 129280,
         "experts": Experts(count=256, top_k=8, width=2048, shared=2048, first_dense=3)}, 671.0, 37.5,
    ),
    # Qwen Team, arXiv 2505.09388, table 2: 30.5 B and 3.3 B, 235 B and 22 B.
    "qwen3-30b-a3b": (
        {"layers": 48, "width": 2048, "heads": 32, "kv_heads": 4, "head_width": 128, "vocabulary": 151936, "qk_norm": True,
         "experts": Experts(count=128, top_k=8, width=768)}, 30.5, 3.3,
    ),
    "qwen3-235b-a22b": (
        {"layers": 94, "width": 4096, "heads": 64, "kv_heads": 4, "head_width": 128, "vocabulary": 151936, "qk_norm": True,
         "experts": Experts(count=128, top_k=8, width=1536)}, 235.0, 22.1,
    ),
    # OpenAI, gpt-oss model card: 116.83 B and 5.13 B, the latter without the embedding (0.58 B); biases are left out here.
    "gpt-oss-120b": (
        {"layers": 36, "width": 2880, "heads": 64, "kv_heads": 8, "head_width": 64, "vocabulary": 201088, "window": 128,
         "full_every": 2, "experts": Experts(count=128, top_k=4, width=2880)}, 116.8, 5.7,
    ),
    # Kimi Team, arXiv 2507.20534: 1.04 T and 32.6 B.
    "kimi-k2": (
        {**_LATENT, "heads": 64, "layers": 61, "vocabulary": 163840,
         "experts": Experts(count=384, top_k=8, width=2048, shared=2048, first_dense=1)}, 1026.4, 32.9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _PUBLISHED)
def test_published_models_have_as_many_parameters_and_active_ones(name: str) -> None:
    changes, total, active = _PUBLISHED[name]
    config = model(**{"attention": "auto", "norm": "rms_norm", **changes})
    assert [count / 1e9 for count in _parameter_counts(config)] == pytest.approx([total, active], rel=0.017)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
def test_examples_are_those_models(name: str) -> None:
    config = read_config(EXAMPLES / f"{name}.toml")
    assert isinstance(config, Transformer)
    assert _parameter_counts(config)[0] / 1e9 == pytest.approx(_PUBLISHED[name][1], rel=0.005)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"experts": Experts(count=4, top_k=5)}, "experts.top_k 5 of 4 experts; give at most 4"),
        ({"experts": Experts(count=4, top_k=0)}, "experts.top_k is 0; expected a whole number of 1 or more"),
        ({"experts": Experts(count=4, imbalance=0.5)}, "experts.imbalance is 0.5; expected a number from 1"),
        ({"experts": Experts(count=4, capacity=-1)}, "experts.capacity is -1; expected 0"),
        ({"experts": Experts(count=4, capacity=1.0, imbalance=2.0)}, "leave out experts.imbalance"),
        ({"experts": Experts(count=4, scores="best")}, "experts.scores is 'best'; expected softmax or sigmoid"),
        ({"parallel": Parallelism(data=3, expert=3), "batch": 3}, "experts.count 4 does not divide by parallel.expert 3"),
        ({"experts": Experts(), "parallel": Parallelism(data=2, expert=2)}, "the config has none"),
        ({"parallel": Parallelism(tensor=2)}, "parallel.tensor is 2 and experts are whole"),
        ({"bias": True, "projections": "fused"}, "experts have no biases"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        model(**changes)


def test_a_config_with_experts_comes_back_whole() -> None:
    config = model(parallel=Parallelism(data=2, expert=2))
    assert Transformer.from_dict(config.to_dict()) == config
    with pytest.raises(InputError, match="unknown key 'counts'; did you mean 'count'"):
        Transformer.from_dict({**config.to_dict(), "experts": {"counts": 4}})


def test_anything_in_a_table_is_built_or_refused_in_one_line() -> None:
    random = Random(0)
    tables = {"experts": Experts, "latent_attention": LatentAttention, "lora": Lora}
    odd: list[Any] = [
        0,
        1,
        1,
        2,
        2,
        4,
        4,
        8,
        8,
        3,
        -1,
        1.5,
        10**12,
        True,
        "",
        "softmax",
        [],
        ["query"],
        {},
        float("nan"),
        float("inf"),
    ]
    plain = model(layers=1, attention="auto").to_dict()
    del plain["experts"]
    built = 0
    for _ in range(500):
        values = dict(plain)
        for name in random.sample(sorted(tables), random.randint(1, 2)):
            keys = [each.name for each in fields(tables[name])]
            values[name] = {key: random.choice(odd) for key in random.sample(keys, random.randint(0, min(3, len(keys))))}
        values |= {key: random.choice(odd) for key in random.sample(("window", "full_every", "head_width", "frozen"), 1)}
        try:
            config = Transformer.from_dict(values)
        except InputError as error:
            assert "\n" not in str(error)
        else:
            build(config)
            built += 1
    assert built > 10


# A token once to every rank


def sent_bytes(exchange: str, ways: int) -> int:
    experts = Experts(count=16, top_k=4, width=INNER, exchange=exchange)
    parallel = Parallelism(data=ways, expert=ways)
    made = program_of(model(experts=experts, parallel=parallel, batch=BATCH * ways, fused=True, attention="auto"))
    scores = 4 * 4 * LENGTH * BATCH  # of a token's experts in fp32, which travel apart
    return sum(each.bytes_in for each in made.collectives if each.kind == "all_to_all" and each.bytes_in > scores)


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_a_token_that_goes_to_a_rank_once_is_sent_as_often_as_ranks_have_its_experts(ways: int) -> None:
    """Over all choices of 4 of 16 experts, counted one by one."""
    ranks = [len({expert // (16 // ways) for expert in chosen}) for chosen in combinations(range(16), 4)]
    mean = sum(ranks) / len(ranks)
    assert Experts(count=16, top_k=4).ranks_of_token(ways) == pytest.approx(mean)
    assert sent_bytes("fused", ways) / sent_bytes("all_to_all", ways) == pytest.approx(mean / 4, rel=0.02)


def test_experts_multiply_as_much_however_tokens_come_to_them() -> None:
    parallel, experts = Parallelism(data=2, expert=2), Experts(count=COUNT, top_k=TOP, width=INNER)
    configs = [
        model(experts=replace(experts, exchange=exchange), parallel=parallel, batch=4, fused=True, attention="auto")
        for exchange in ("all_to_all", "fused")
    ]
    apart, once = (program_of(config) for config in configs)
    assert shapes_of(once, "aten::_grouped_mm") == shapes_of(apart, "aten::_grouped_mm")
    assert len(names_of(once)) < len(names_of(apart))
    with pytest.raises(InputError, match="goes with fused = true"):
        model(experts=replace(experts, exchange="fused"))
    with pytest.raises(InputError, match="expected all_to_all or fused"):
        model(experts=replace(experts, exchange="once"))


def test_fused_positions_of_latent_attention_copy_no_heads() -> None:
    latent = {"kv_rank": 16, "q_rank": 24, "nope": 16, "rope": 8, "value": 16}
    apart, joined = (
        program_of(model(latent_attention=LatentAttention(**latent, fused_rope=fused), fused=True, attention="auto"))
        for fused in (False, True)
    )
    products = ("aten::mm", "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_cudnn_attention_backward")
    for op in products:
        assert shapes_of(joined, op) == shapes_of(apart, op)
    assert names_of(joined).count("aten::cat") < names_of(apart).count("aten::cat")


# Exchanges beside another pass


def beside(*, overlap: bool, width: int = WIDTH, sequence: int = LENGTH, **parallel: Any) -> Transformer:
    given = Parallelism(data=4, expert=4, overlap_moe_expert_parallel_comm=overlap, **parallel)
    experts = Experts(count=8, top_k=2, width=width, first_dense=1, exchange="fused")
    shape = {"layers": 8, "heads": max(4, width // 128), "batch": 4 * 16, "gradient_accumulation": 16}
    return model(experts=experts, parallel=given, width=width, sequence=sequence, fused=True, attention="auto", **shape)


LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "interleaved": {"pipeline": 2, "chunks": 2, "schedule": "interleaved", "overlap_p2p_comm": True},
}


def run_in_step(program: Program) -> Counter[str]:
    """How often a step runs each op."""
    assert program.repetition is not None
    counts, names = program.repetition.counts(len(program.ops)), names_of(program)
    result = Counter[str]()
    for name, count in zip(names, counts.tolist(), strict=True):
        result[name] += count
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exchanges_beside_another_pass_change_the_order_of_a_step_and_nothing_else(layout: str) -> None:
    for before, after in zip(*(build(beside(overlap=each, **LAYOUTS[layout])).programs for each in (False, True)), strict=True):
        assert run_in_step(after) == run_in_step(before)
        assert after.repetition is not None
        assert before.repetition is not None
        assert len(set(after.repetition.names)) > len(set(before.repetition.names))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exchanges_beside_another_pass_are_hidden_and_steps_no_longer(layout: str) -> None:
    platform = Platform.load("8xh100-nvlink" if layout != "alone" else "4xh100-nvlink")
    large = {"width": 2048, "sequence": 4096, **LAYOUTS[layout]}
    apart, hidden = (predict_on(build(beside(overlap=each, **large)), platform) for each in (False, True))
    assert hidden.step_time_ms < 1.001 * apart.step_time_ms  # of host time there is a little more
    exposed = [sum(rank.exposed_communication_ms for rank in each.ranks) for each in (apart, hidden)]
    assert layout != "alone" or exposed[1] < 0.8 * exposed[0]  # stages of a pipeline wait for each other besides


def test_exchanges_beside_another_pass_need_one_and_whole_layers() -> None:
    with pytest.raises(InputError, match=r"parallel\.expert of 2 or more"):
        model(parallel=Parallelism(data=2, overlap_moe_expert_parallel_comm=True), fused=True, attention="auto")
    with pytest.raises(InputError, match="2 chunks or more"):
        beside(overlap=True, pipeline=2)
    with pytest.raises(InputError, match="not recomputed"):
        model(
            parallel=Parallelism(data=2, expert=2, overlap_moe_expert_parallel_comm=True),
            fused=True,
            attention="auto",
            recompute="full",
        )
