from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg
from steptime._models.kernels.family import families, family_of
from steptime_lab.measurements.shipped import shipped

torch = pytest.importorskip("torch", reason="sweeps are checked against torch's own shape rules")

GIB = 1 << 30

NAMES = sorted(name for name, family in families().items() if family.sweep.ops)

# Ops whose shapes torch cannot check without memory.
NOT_ON_META = (
    *("aten::_fused_sgd_.default", "aten::_fused_adagrad_.default"),
    *("aten::_embedding_bag_backward.default", "aten::_local_scalar_dense.default"),
)

# Ops that have no CPU kernel.
CUDA_ONLY = (
    "cudnn",
    "flash",
    "efficient",
    "_fused_rms_norm_backward",
    "_amp_foreach",
    "_masked_scale",
    "_scaled_mm",
    "_grouped_mm",
)


@cache
def swept(name: str, count: int, seed: int = 0) -> tuple[Call, ...]:
    return tuple(families()[name].sweep(np.random.default_rng(seed), count))


def everything(total: int) -> Iterator[tuple[str, Call]]:
    weights = sum(family.weight for family in families().values())
    for name in NAMES:
        family = families()[name]
        for call in swept(name, max(1, round(total * family.weight / weights))):
            yield name, call


def overload(op: str) -> Any:
    name, _, chosen = op.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, name), chosen)


def built(argument: Argument) -> Any:
    """The argument on the meta device: shapes, strides and dtypes without memory."""
    from steptime_lab.measure.op_calls import torch_dtype

    if isinstance(argument, TensorArg):
        strides = argument.strides or torch.empty(argument.shape, device="meta").stride()
        return torch.empty_strided(argument.shape, strides, dtype=torch_dtype(argument.dtype), device="meta")
    if isinstance(argument, DtypeArg):
        return getattr(torch, argument.name)
    if isinstance(argument, tuple):
        return [built(one) for one in argument]
    return argument


def tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)


def _named(name: str, value: Argument) -> Any:
    return getattr(torch, value) if name == "memory_format" and isinstance(value, str) else built(value)


def run_without_memory(call: Call) -> int:
    """Bytes of arguments and outputs together; raises where the op refuses its arguments."""
    args = [built(value) for value in call.args]
    named = {name: "meta" if name == "device" else _named(name, value) for name, value in call.kwargs}
    result = overload(call.op)(*args, **named)
    own = {id(tensor) for tensor in tensors(args)}
    made = sum(int(tensor.numel()) * int(tensor.element_size()) for tensor in tensors(result) if id(tensor) not in own)
    return call.nbytes + made


def test_every_measured_family_is_known_and_every_family_of_pytorch_is_measured() -> None:
    assert set(shipped("kernels")["family"].unique().to_pylist()) == set(NAMES)
    assert all((family.weight > 0) == (name in NAMES) for name, family in families().items())
    others = [op for name, family in families().items() if name not in NAMES for op in family.ops]
    assert not any(op.startswith("aten::") for op in others)


@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_gives_distinct_calls_that_only_its_seed_decides(name: str) -> None:
    first = swept(name, 200)
    assert 180 <= len(first) <= 200
    assert len({call.to_json() for call in first}) == len(first)
    assert tuple(families()[name].sweep(np.random.default_rng(0), 200)) == first
    assert tuple(families()[name].sweep(np.random.default_rng(1), 200)) != first


@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_a_sweep_survives_its_text(name: str) -> None:
    assert all(Call.from_json(call.to_json()) == call for call in swept(name, 200))


def test_an_op_belongs_to_one_family_and_is_known_to_torch() -> None:
    every = [op for family in families().values() for op in family.ops]
    assert [op for op, count in Counter(every).items() if count > 1] == []
    assert all(overload(op) is not None for op in every if op.startswith("aten::"))


@pytest.mark.parametrize("name", NAMES)
def test_a_family_sweeps_every_op_it_answers_for_and_no_other(name: str) -> None:
    drawn = {call.op for call in swept(name, 800)}
    # A transfer is the op of a copy, with one of its tensors on the host.
    shared = {"aten::copy_.default"} if name == "transfer" else set()
    assert drawn == {op for op in families()[name].sweep.ops if family_of(op) == name} | shared
    assert {family_of(op) for op in drawn - shared} == {name}


def test_every_call_is_one_that_torch_accepts_and_stays_below_two_gibibytes() -> None:
    refused: list[str] = []
    most = 0
    for _, call in everything(3000):
        if call.op in NOT_ON_META:
            continue
        try:
            most = max(most, run_without_memory(call))
        except Exception as error:
            refused.append(f"{call.to_json()[:200]}: {error}")
    assert refused == []
    assert most <= 2 * GIB


def runs_on_cpu(call: Call) -> bool:
    if any(part in call.op for part in CUDA_ONLY) or call.nbytes > 2_000_000:
        return False
    asked = {value.name for value in call.args if isinstance(value, DtypeArg)}
    names = asked | {tensor.dtype for tensor in call.tensors()}
    return names.isdisjoint({"float16", "bfloat16", "uint64"})


@pytest.mark.parametrize("name", NAMES)
def test_small_calls_really_run_with_the_values_they_ask_for(name: str) -> None:
    from steptime_lab.measure.op_calls import Arena, PreparedCall

    torch.manual_seed(0)
    arena = Arena.on(torch.device("cpu"), 1)
    ran: Counter[str] = Counter()
    for call in swept(name, 800):
        # Two of each op; an index beyond what it indexes, or a logarithm of what is no probability, is an error here.
        if ran[call.op] < 2 and runs_on_cpu(call):
            PreparedCall(call, arena).run()
            ran[call.op] += 1
    possible = [op for op in families()[name].sweep.ops if not any(part in op for part in CUDA_ONLY)]
    assert len(ran) >= 0.8 * len(possible)


def integers(call: Call) -> Sequence[TensorArg]:
    return [tensor for tensor in call.tensors() if "int" in tensor.dtype]


def test_integers_say_below_what_they_are_drawn() -> None:
    without = [call.to_json() for _, call in everything(3000) if any(tensor.high < 1 for tensor in integers(call))]
    assert without == []


def test_what_a_step_has_just_written_is_a_tensor_argument_on_the_device() -> None:
    for name, call in everything(3000):
        for index in call.written:
            written = call.args[index]
            inside = written if isinstance(written, tuple) else (written,)
            assert all(isinstance(one, TensorArg) and one.device == "device" for one in inside), call.to_json()
        assert call.written or name in ("transfer", "fill", "other")


def test_products_have_aligned_and_unaligned_sizes_both_orders_of_memory_and_every_dtype() -> None:
    calls = swept("matmul", 800)
    inner = [tensor.shape[-1] for call in calls for tensor in call.tensors()]
    odd = sum(size % 2 for size in inner) / len(inner)
    assert 0.05 < odd < 0.5
    assert sum(size % 64 == 0 for size in inner) / len(inner) > 0.3
    assert {50257, 30522, 32000} <= {size for call in calls for tensor in call.tensors() for size in tensor.shape}
    transposed = sum(any(tensor.strides is not None for tensor in call.tensors()) for call in calls) / len(calls)
    assert 0.3 < transposed < 0.9
    assert min(Counter(call.dtype for call in calls).values()) > 0.1 * len(calls)


def test_most_calls_are_small_and_some_are_large() -> None:
    sizes = np.array([call.nbytes for _, call in everything(3000)], dtype=np.float64)
    assert np.median(sizes) < 32e6
    assert (sizes < 64e3).mean() > 0.05
    assert (sizes > 128e6).mean() > 0.02


def test_convolutions_are_few_for_each_is_planned_at_its_first_call() -> None:
    weights = sum(family.weight for family in families().values())
    assert 16_000 * families()["convolution"].weight / weights <= 1_200


def test_convolutions_cover_one_and_two_dimensions_groups_dilation_and_channels_last() -> None:
    calls = [call for call in swept("convolution", 800) if call.op == "aten::convolution.default"]
    forms: Counter[str] = Counter()
    for call in calls:
        x, weight, _, stride, _, dilation, _, _, groups = call.args
        assert isinstance(x, TensorArg) and isinstance(weight, TensorArg) and isinstance(groups, int)
        assert isinstance(stride, tuple) and isinstance(dilation, tuple)
        forms["line" if len(x.shape) == 3 else "image"] += 1
        forms["depthwise" if 1 < groups == x.shape[1] else "grouped" if groups > 1 else "dense"] += 1
        forms["strided"] += max(int(step) for step in stride if isinstance(step, int)) > 1
        forms["dilated"] += max(int(gap) for gap in dilation if isinstance(gap, int)) > 1
        forms["channels last"] += x.strides is not None
    assert min(forms[form] for form in ("line", "depthwise", "grouped", "strided", "dilated", "channels last")) >= 8


def test_attention_in_single_precision_is_left_to_the_kernels_that_have_it() -> None:
    halves = [call for call in swept("attention", 400) if "flash" in call.op or "cudnn" in call.op]
    assert halves
    assert {call.dtype for call in halves} <= {"bfloat16", "float16"}


def test_lists_of_an_optimizer_hold_a_models_parameters() -> None:
    lengths = [len(call.args[0]) for call in swept("optimizer", 400) if isinstance(call.args[0], tuple)]
    assert min(lengths) >= 1
    assert max(lengths) <= 200
    assert np.median(lengths) >= 8
    assert max(call.nbytes for call in swept("optimizer", 400)) <= 400 << 20


def test_bags_share_all_their_indices_equally() -> None:
    bags = [call for call in swept("embedding", 400) if call.op == "aten::_embedding_bag.default"]
    assert bags
    for call in bags:
        _, asked, offsets, *_ = call.args
        assert isinstance(asked, TensorArg) and isinstance(offsets, TensorArg)
        assert offsets.high == asked.numel
        assert asked.numel % offsets.numel == 0


def test_the_triangle_of_an_interaction_is_below_the_diagonal() -> None:
    from steptime_lab.measure.op_calls import fixed

    cpu = torch.device("cpu")
    call = next(call for call in swept("indexing", 200) if call.op == "aten::index.Tensor" and len(call.args[1]) == 3)  # type: ignore[arg-type]
    products, places = call.args
    assert isinstance(products, TensorArg) and isinstance(places, tuple)
    row, column = (fixed(one, cpu) for one in places if isinstance(one, TensorArg))
    features = products.shape[1]
    assert row.numel() == math.comb(features, 2)
    assert bool((column < row).all())
    assert len(set(zip(row.tolist(), column.tolist(), strict=True))) == row.numel()
