"""Sequences that ranks share: rounds beside PyTorch's own, and what no way of exchanging changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._ops.operations import operations_of
from steptime._ops.table import arguments_of
from steptime._program.program import Program, Tensor
from steptime.errors import InputError

WAYS = 4
GQA = Transformer(
    layers=1, width=512, heads=8, kv_heads=4, sequence=256, vocabulary=1024, batch=2, norm="rms_norm", activation="swiglu",
    positions="rotary", tied_head=False, precision="bf16", attention="flash", parallel=Parallelism(context=WAYS),
)  # fmt: skip
EXCHANGES = ("ring", "all_to_all", "all_gather")
# Ops that compute or move, by what PyTorch and its functional collectives call them -> as they are compared.
COMPARED = {
    "aten::cat": "cat", "aten::sub": "sub", "aten::sigmoid": "sigmoid", "aten::mul": "mul", "aten::_to_copy": "cast",
    "aten::log_sigmoid_forward": "log_sigmoid", "aten::add_": "add_", "aten::zeros_like": "zeros", "attention": "attention",
    "_c10d_functional::all_to_all_single": "turn", "c10d::send": "turn", "_c10d_functional::all_gather_into_tensor": "gather",
    "c10d::_allgather_base_": "gather", "_c10d_functional::wait_tensor": "wait",
}  # fmt: skip


def with_exchange(config: Transformer, exchange: str) -> Transformer:
    return replace(config, parallel=replace(config.parallel, context_exchange=exchange))


def program(config: Transformer) -> Program:
    (result,) = build(config).programs
    return result


def built_rounds(exchange: str) -> list[tuple[str, tuple[int, ...], str]]:
    """What attention of the only layer writes, forward then backward: the op, and the shape and dtype of its result."""
    made = program(with_exchange(GQA, exchange))
    found: list[tuple[str, tuple[int, ...], str]] = []
    inside = {"ContextParallelAttention", "ContextParallelAttentionBackward"}
    names = [made.names[number] for number in made.ops.name]
    within = [False] * len(names)
    for row, (name, parent) in enumerate(zip(names, made.ops.parent.tolist(), strict=True)):
        within[row] = name in inside or (parent >= 0 and within[parent])
        if not within[row] or name == "aten::add":
            continue
        signature = made.signatures[made.ops.signature[row]] if made.ops.signature[row] >= 0 else None
        if name == "record_param_comms" and signature is not None and "wait" in signature.inputs:
            found.append(("wait", (), ""))
        elif name.startswith("aten::_scaled_dot_product_flash_attention"):
            found.append(("attention", (), ""))
        elif name in COMPARED and signature is not None:
            found.append((COMPARED[name], *_result(name, signature.inputs, signature.outputs)))
    return found


def _result(name: str, inputs: Any, outputs: Any) -> tuple[tuple[int, ...], str]:
    if name.startswith("c10d::"):  # what is sent
        sent = inputs[1] if name == "c10d::_allgather_base_" else inputs[0][0]
        return sent.shape, sent.dtype
    tensor = next(each for each in outputs if isinstance(each, Tensor))
    return tensor.shape, tensor.dtype


@pytest.fixture
def group() -> Iterator[Any]:
    """The first of four ranks that do not exist."""
    dist = pytest.importorskip("torch.distributed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=WAYS)
    yield dist.group.WORLD
    dist.destroy_process_group()


def recorded_rounds(group: Any, exchange: str) -> list[tuple[str, tuple[int, ...], str]]:
    torch = pytest.importorskip("torch")
    rounds = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
    dispatch = pytest.importorskip("torch.utils._python_dispatch")
    found: list[tuple[str, tuple[int, ...], str]] = []

    class Recorder(dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            name = function._schema.name
            if name in COMPARED:
                said = args[0] if name.startswith("_c10d") else result[0] if isinstance(result, tuple) else result
                shape = () if name.endswith("wait_tensor") else tuple(said.shape)
                found.append((COMPARED[name], shape, str(said.dtype).removeprefix("torch.") if shape else ""))
            return result

    def attention(query: Any, *_others: Any, **_options: Any) -> tuple[Any, ...]:
        found.append(("attention", (), ""))
        return torch.empty_like(query), torch.empty(query.shape[:3])

    def attention_backward(query: Any, key: Any, value: Any, **_options: Any) -> tuple[Any, ...]:
        found.append(("attention", (), ""))
        return tuple(torch.empty_like(each) for each in (query, key, value))

    methods = rounds._RotateMethod
    rounds._cp_options.rotate_method = methods.ALL_GATHER if exchange == "all_gather" else methods.ALL_TO_ALL
    q, k, v = (torch.empty(2, heads, 64, 64, dtype=torch.bfloat16) for heads in (8, 4, 4))
    with Recorder():
        out, rows, *_ = rounds._templated_ring_attention(group, 2, attention, q, k, v, is_causal=True)
        rounds._templated_ring_attention_backward(
            group, 2, attention_backward, torch.empty_like(out), "grad_out", q, k, v, out, rows, is_causal=True
        )
    return found


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_rounds_are_those_of_pytorch(group: Any, exchange: str) -> None:
    assert built_rounds(exchange) == recorded_rounds(group, exchange)


def attention_operations(built: Program) -> float:
    """Multiplications and additions of attention."""
    total = 0.0
    for row, name in enumerate(built.names[number] for number in built.ops.name):
        if name.startswith("aten::_scaled_dot_product_"):
            signature = built.signatures[built.ops.signature[row]]
            total += operations_of(name, signature.inputs, arguments_of(signature).inputs)
    return total


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_share_all_products_of_attention(exchange: str) -> None:
    config = replace(with_exchange(GQA, exchange), causal=False)
    alone = attention_operations(program(replace(config, parallel=Parallelism())))
    assert attention_operations(program(config)) * WAYS == pytest.approx(alone)


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_rounds_after_the_first_are_half_of_a_causal_one(exchange: str) -> None:
    """Of WAYS rounds all but the first have half of the queries; a causal mask on the first counts as none."""
    causal = attention_operations(program(with_exchange(GQA, exchange)))
    whole = attention_operations(program(replace(with_exchange(GQA, exchange), causal=False)))
    assert causal / whole == pytest.approx((1 + (WAYS - 1) / 2) / WAYS)


def test_keys_and_values_go_round_once_each_way_and_their_gradients_home() -> None:
    kinds = Counter((each.kind, each.bytes_in) for each in program(with_exchange(GQA, "ring")).collectives)
    keys = 2 * 4 * 64 * 64 * 2 * 2  # batch x heads x tokens x width, keys and values, 2 bytes each
    assert kinds["send_recv", keys] == 2 * (WAYS - 1)
    assert kinds["send_recv", 2 * keys] == WAYS  # in fp32
    kinds = Counter((each.kind, each.bytes_out) for each in program(with_exchange(GQA, "all_gather")).collectives)
    assert kinds["all_gather", WAYS * keys] == 2


def test_fused_rounds_pass_on_what_came_and_add_up_in_place() -> None:
    built = program(replace(with_exchange(GQA, "ring"), fused=True, attention="cudnn"))
    keys = 2 * 4 * 64 * 64 * 2 * 2
    kinds = Counter((each.kind, each.bytes_in, each.dtype) for each in built.collectives if each.kind == "send_recv")
    assert kinds == {("send_recv", keys, "bfloat16"): 2 * (WAYS - 1) + WAYS}
    names = Counter(built.names[number] for number in built.ops.name)
    assert names["aten::addcmul_"] == WAYS
    assert names["aten::cat"] <= 4  # keys and values once forward, they and their gradients once backward


def test_heads_are_exchanged_for_tokens_and_back() -> None:
    sizes = [each.bytes_in for each in program(with_exchange(GQA, "all_to_all")).collectives if each.kind == "all_to_all"]
    queries = 2 * 8 * 64 * 64 * 2
    forward = [queries, queries // 2, queries // 2, queries]
    assert sorted(sizes) == sorted(2 * forward)


@pytest.mark.parametrize(
    "parallel", [Parallelism(context=WAYS), Parallelism(context=2, data=2), Parallelism(context=2, fsdp=2)]
)
def test_gradients_are_reduced_over_the_ranks_of_a_sequence_too(parallel: Parallelism) -> None:
    built = build(replace(GQA, batch=4, parallel=parallel))
    kinds = {"reduce_scatter"} if parallel.fsdp > 1 else {"all_reduce"}
    groups = {each.ranks for each in built.programs[0].collectives if each.kind in kinds}
    assert groups == {tuple(range(4))}


def test_the_exchange_of_a_sequence_and_of_gradients_are_groups_of_their_own() -> None:
    names = {each.kind: each.group for each in program(with_exchange(GQA, "ring")).collectives}
    assert names["send_recv"] != names["all_reduce"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence": 250}, "does not divide by parallel.context 4 x the 2 pieces .* give a multiple of 8"),
        ({"attention": "unfused", "kv_heads": 0}, "attention that is fused"),
        ({"parallel": Parallelism(context=8, context_exchange="all_to_all")}, "kv_heads 4 do not divide by .* multiple of 8"),
    ],
)
def test_what_ranks_cannot_share_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(GQA, **changes)
