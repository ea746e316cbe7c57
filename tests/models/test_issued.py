"""Laws of finding device work in a program's ops, on small programs and on shipped traces."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import Any

import pytest

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.family import families
from steptime._models.kernels.from_ops import IssuedWork, questions_of
from steptime._ops.catalogue import overload_of, overloads_of
from steptime._program.execution import to_program
from steptime._program.formats.execution_trace import read
from steptime._program.program import Program, Tensor, Value
from steptime_lab.measurements.shipped import FOLDER, shipped_programs

HEAD = (
    {"id": 1, "name": "[pytorch|profiler|execution_trace|process]", "ctrl_deps": 1},
    {"id": 2, "name": "main", "ctrl_deps": 1},
)


class Trace:
    """An execution trace in the making; tensors are given as (shape, storage), lists of them as lists."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []

    def op(self, name: str, *inputs: Any, outputs: tuple[Any, ...] = (), inside: int = 2) -> int:
        """Adds an op; gives its id."""
        id = 10 + len(self.nodes)
        self.nodes.append(
            {"id": id, "name": name, "ctrl_deps": inside, "inputs": _side(inputs), "outputs": _side(outputs),
             "attrs": [{"name": "tid", "type": "uint64", "value": 1}]}
        )  # fmt: skip
        return id

    def works(self) -> list[IssuedWork]:
        """What its ops launch."""
        return questions_of(self.program())

    def program(self) -> Program:
        """The trace as a program."""
        text = {"schema": "1.1.1-chakra.0.0.4", "pid": 0, "time": "", "start_ts": 0, "nodes": [*HEAD, *self.nodes]}
        return to_program(read(json.dumps(text).encode(), "et.json"), rank=0, world_size=1)


def on(device: str, shape: list[int], storage: int, kind: str = "float") -> dict[str, Any]:
    """A tensor argument."""
    count = 1
    for size in shape:
        count *= size
    strides = [1] * len(shape)
    for place in range(len(shape) - 2, -1, -1):
        strides[place] = strides[place + 1] * shape[place + 1]
    return {"value": [storage, storage, 0, count, 4, device], "shape": shape, "type": f"Tensor({kind})", "strides": strides}


def gpu(shape: list[int], storage: int, kind: str = "float") -> dict[str, Any]:
    return on("cuda:0", shape, storage, kind)


SPARSE = {"value": [9, 0, 0, 0, 0, ""], "shape": [], "type": "Tensor(float)", "strides": []}


def _side(arguments: tuple[Any, ...]) -> dict[str, Any]:
    parts = [_argument(each) for each in arguments]
    return {key: [part[place] for part in parts] for place, key in enumerate(("values", "shapes", "types", "strides"))}


def _argument(each: Any) -> tuple[Any, Any, str, Any]:
    if isinstance(each, dict):
        return each["value"], each["shape"], each["type"], each["strides"]
    if isinstance(each, list):
        inner = [_argument(one) for one in each]
        kinds = ",".join(part[2] for part in inner)
        return [part[0] for part in inner], [part[1] for part in inner], f"GenericList[{kinds}]", [part[3] for part in inner]
    if each is None:
        return "<None>", [], "None", []
    return each, [], {bool: "Bool", int: "Int", float: "Double", str: "String"}[type(each)], []


def names(works: list[IssuedWork]) -> list[tuple[str, str]]:
    return [(work.kind, work.question.call.op if work.question else work.name) for work in works]


def test_an_op_that_launches_stands_for_what_is_inside_it() -> None:
    trace = Trace()
    relu = trace.op("aten::relu", gpu([4, 8], 3), outputs=(gpu([4, 8], 4),))
    trace.op("aten::clamp_min", gpu([4, 8], 3), 0, outputs=(gpu([4, 8], 4),), inside=relu)
    assert names(trace.works()) == [("compute", "aten::relu.default")]


def test_the_copy_that_autograd_keeps_of_what_is_overwritten_is_launched_too() -> None:
    trace = Trace()
    silu = trace.op("aten::silu_", gpu([4, 8], 3), outputs=(gpu([4, 8], 3),))
    trace.op("aten::clone", gpu([4, 8], 3), None, outputs=(gpu([4, 8], 4),), inside=silu)
    assert names(trace.works()) == [("compute", "aten::silu_.default"), ("compute", "aten::clone.default")]


def test_how_a_mask_becomes_indices_is_no_part_of_what_is_indexed() -> None:
    trace = Trace()
    mask = gpu([4], 4, "bool")
    index = trace.op("aten::index", gpu([4, 8], 3), [mask], outputs=(gpu([2, 8], 5),))
    trace.op("aten::nonzero", mask, outputs=(gpu([2, 1], 6, "long int"),), inside=index)
    assert names(trace.works()) == [("compute", "aten::index.Tensor"), ("compute", "aten::nonzero.default")]


def test_attention_by_plain_products_launches_these_and_dropout_in_place_only_what_is_inside() -> None:
    trace = Trace()
    query = gpu([2, 4, 8, 16], 3)
    around = trace.op("aten::_scaled_dot_product_attention_math", query, query, query, outputs=(gpu([2, 4, 8, 16], 9),))
    trace.op("aten::bmm", gpu([8, 8, 16], 3), gpu([8, 16, 8], 3), outputs=(gpu([8, 8, 8], 5),), inside=around)
    trace.op("aten::dropout_", gpu([4], 9), 0.0, True, outputs=(gpu([4], 9),))
    assert names(trace.works()) == [("compute", "aten::bmm.default")]


@pytest.mark.parametrize(("kind", "launched"), [("float", "aten::mm.out"), ("c10::BFloat16", "aten::_grouped_mm.default")])
def test_grouped_products_are_one_kernel_in_bfloat16_alone(kind: str, launched: str) -> None:
    trace = Trace()
    tokens, weights, result = gpu([32, 16], 3, kind), gpu([1, 16, 8], 4, kind), gpu([32, 8], 6, kind)
    grouped = trace.op("aten::_grouped_mm", tokens, weights, gpu([1], 5, "int"), outputs=(result,))
    trace.op("aten::mm", tokens, gpu([16, 8], 4, kind), result, outputs=(result,), inside=grouped)
    assert names(trace.works()) == [("compute", launched)]


def test_an_op_made_of_others_launches_what_they_launch() -> None:
    trace = Trace()
    linear = trace.op("aten::linear", gpu([4, 8], 3), gpu([2, 8], 4), gpu([2], 5), outputs=(gpu([4, 2], 6),))
    trace.op("aten::t", gpu([2, 8], 4), outputs=(gpu([8, 2], 4),), inside=linear)
    trace.op("aten::addmm", gpu([2], 5), gpu([4, 8], 3), gpu([8, 2], 4), 1, 1, outputs=(gpu([4, 2], 6),), inside=linear)
    assert names(trace.works()) == [("compute", "aten::addmm.default")]


def test_autocast_shows_an_op_twice_and_it_launches_once() -> None:
    trace = Trace()
    bfloat16 = [gpu([4, 4], 6, "c10::BFloat16"), gpu([4, 4], 7, "c10::BFloat16")]
    outer = trace.op("aten::mm", gpu([4, 4], 3), gpu([4, 4], 4), outputs=(gpu([4, 4], 5, "c10::BFloat16"),))
    trace.op("aten::_to_copy", gpu([4, 4], 3), 15, 0, "cuda:0", None, False, None, outputs=(bfloat16[0],), inside=outer)
    trace.op("aten::mm", *bfloat16, outputs=(gpu([4, 4], 5, "c10::BFloat16"),), inside=outer)
    works = trace.works()
    assert names(works) == [("compute", "aten::_to_copy.default"), ("compute", "aten::mm.default")]
    assert [work.question.call.dtype for work in works if work.question] == ["float32", "bfloat16"]


def test_views_reservations_and_ops_on_the_host_launch_nothing() -> None:
    trace = Trace()
    trace.op("aten::view", gpu([4, 8], 3), [32], outputs=(gpu([32], 3),))
    trace.op("aten::empty", [4], 6, 0, "cuda:0", False, None, outputs=(gpu([4], 4),))
    trace.op("aten::add_", on("cpu", [4], 5), on("cpu", [4], 6), 1, outputs=(on("cpu", [4], 5),))
    assert trace.works() == []


def test_an_op_nobody_knows_is_said_to_be_unknown_unless_others_inside_it_launch() -> None:
    trace = Trace()
    trace.op("mylib::fused", gpu([4], 3), outputs=(gpu([4], 4),))
    trace.op("mylib::alias", gpu([4], 3), outputs=(gpu([2], 3),))
    around = trace.op("mylib::twice", gpu([4], 3), outputs=(gpu([4], 5),))
    trace.op("aten::neg", gpu([4], 3), outputs=(gpu([4], 5),), inside=around)
    assert names(trace.works()) == [("unknown", "mylib::fused"), ("compute", "aten::neg.default")]


def test_lookups_and_updates_of_looked_up_rows_are_counted_apart() -> None:
    trace = Trace()
    bags = trace.op("aten::_embedding_bag", gpu([9, 4], 3), gpu([6], 4, "long int"), outputs=(gpu([2, 4], 5),))
    trace.op("aten::neg", gpu([2, 4], 5), outputs=(gpu([2, 4], 5),), inside=bags)
    trace.op("TableBatchedLookupFunction", gpu([6], 4, "long int"), outputs=(gpu([2, 4], 6),))
    update = trace.op("aten::add_", gpu([9, 4], 3), SPARSE, -0.01, outputs=(gpu([9, 4], 3),))
    trace.op("aten::index_add_", gpu([9, 4], 3), 0, gpu([6], 4, "long int"), gpu([6, 4], 8), -0.01, inside=update)
    assert [kind for kind, _ in names(trace.works())] == ["lookup", "lookup", "lookup"]


def test_the_overload_follows_from_the_arguments() -> None:
    tensor = Tensor((4,), "float32", device="cuda:0")
    calls: dict[str, tuple[str, tuple[Value, ...]]] = {
        "aten::mul.Tensor": ("aten::mul", (tensor, tensor)),
        "aten::mul.Scalar": ("aten::mul", (tensor, 2.0)),
        "aten::mul.out": ("aten::mul", (tensor, tensor, tensor)),
        "aten::sum.default": ("aten::sum", (tensor, None)),
        "aten::sum.dim_IntList": ("aten::sum", (tensor, (0,), True, None)),
        "aten::_foreach_add_.List": ("aten::_foreach_add_", ((tensor,), (tensor,), 1)),
        "aten::_foreach_add_.Scalar": ("aten::_foreach_add_", ((tensor,), 1.0)),
        "aten::index.Tensor": ("aten::index", (tensor, (None, tensor))),
    }
    found = {expected: overload_of(name, values) for expected, (name, values) in calls.items()}
    assert {expected: overload.op if overload else None for expected, overload in found.items()} == {op: op for op in calls}
    assert overload_of("aten::mul", ("text", tensor)) is None


def test_every_op_of_every_family_is_declared() -> None:
    for op in (op for family in families().values() for op in family.ops):
        assert op in {overload.op for overload in overloads_of(op.partition(".")[0])}


def test_defaults_are_left_out_and_named_arguments_are_named() -> None:
    trace = Trace()
    trace.op("aten::addmm", gpu([2], 5), gpu([4, 8], 3), gpu([8, 2], 4), 1, 2, outputs=(gpu([4, 2], 6),))
    trace.op(
        "aten::avg_pool2d", gpu([1, 1, 8, 8], 3), [3, 3], [1, 1], [0, 0], False, True, None, outputs=(gpu([1, 1, 6, 6], 7),)
    )
    product, pool = [work.question.call for work in trace.works() if work.question]
    assert len(product.args) == 3 and product.kwargs == (("alpha", 2),)
    assert pool.args[1:] == ((3, 3), (1, 1))


def test_what_indices_point_into_is_known_where_shapes_say_it() -> None:
    trace = Trace()
    indices = gpu([6], 4, "long int")
    trace.op("aten::embedding", gpu([90, 4], 3), indices, -1, False, False, outputs=(gpu([6, 4], 5),))
    square = [None, gpu([3], 6, "long int"), gpu([3], 7, "long int")]
    trace.op("aten::index", gpu([2, 3, 3], 8), square, outputs=(gpu([2, 3], 9),))
    embedding, index = [work.question.call for work in trace.works() if work.question]
    assert [tensor.high for tensor in embedding.tensors()] == [0, 90]
    assert [tensor.values for tensor in index.tensors()] == ["normal", "lower_row", "lower_column"]


def test_an_index_that_arange_made_counts_until_something_else_is_written_there() -> None:
    trace = Trace()
    table, index, values = gpu([8, 16], 1), gpu([4], 2, "long int"), gpu([8, 4], 3)
    outer = trace.op("aten::arange", 4, 4, None, "cuda:0", False, outputs=(index,))
    trace.op("aten::arange", 0, 4, 1, index, outputs=(index,), inside=outer)
    trace.op("aten::view", index, [4], outputs=(index,))
    trace.op("aten::index_select", table, 1, index, outputs=(values,))
    trace.op("aten::index_add_", table, 1, index, values, 1, outputs=(table,))
    trace.op("aten::argmax", values, 1, False, outputs=(index,))
    trace.op("aten::index_select", table, 1, index, outputs=(values,))
    calls = [work.question.call for work in trace.works() if work.question is not None and "index_" in work.name]
    assert [(call.args[2].values, call.args[2].high) for call in calls if isinstance(call.args[2], TensorArg)] == [
        ("ordered", 16),
        ("ordered", 16),
        ("normal", 16),
    ]


def test_an_input_is_warm_until_more_is_touched_than_the_cache_holds() -> None:
    trace = Trace()
    big = [1_000_000]
    trace.op("aten::neg", gpu(big, 3), outputs=(gpu(big, 4),))
    trace.op("aten::neg", gpu(big, 4), outputs=(gpu(big, 5),))
    for storage in range(6, 12):
        trace.op("aten::exp", gpu(big, storage), outputs=(gpu(big, storage + 10),))
    trace.op("aten::abs", gpu(big, 5), outputs=(gpu(big, 40),))
    program = trace.program()
    states = {limit: _warm(questions_of(program, cached_bytes=limit)) for limit in (0, 30_000_000, 60_000_000)}
    assert states[0]["aten::neg.default"] == [False, True]
    # Six times four million bytes read and as many written: 48 MB.
    assert [states[limit]["aten::abs.default"] for limit in states] == [[False], [False], [True]]


def _warm(works: list[IssuedWork]) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = {}
    for work in works:
        assert work.question is not None
        found.setdefault(work.question.call.op, []).append(work.question.warm)
    return found


def test_a_list_given_twice_moves_once() -> None:
    trace = Trace()
    squares, gradients, others = [gpu([64], 3)], [gpu([64], 4)], [gpu([64], 5)]
    trace.op("aten::_foreach_addcmul_", squares, gradients, gradients, 0.001)
    trace.op("aten::_foreach_addcmul_", squares, gradients, others, 0.001)
    assert [work.moved for work in trace.works()] == [0.75, 1.0]


def test_convolutions_of_single_precision_may_use_tf32_and_products_may_not() -> None:
    trace = Trace()
    image, weight = gpu([1, 8, 8, 8], 3), gpu([8, 8, 1, 1], 4)
    arguments = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    trace.op("aten::convolution", image, weight, *arguments, outputs=(gpu([1, 8, 8, 8], 5),))
    trace.op("aten::mm", gpu([8, 8], 6), gpu([8, 8], 7), outputs=(gpu([8, 8], 8),))
    assert [work.question.tf32 for work in trace.works() if work.question] == [True, False]


@cache
def recorded(kind: str) -> Counter[str]:
    content = json.loads((FOLDER / "workload_calls.json").read_text(encoding="utf-8"))
    counted: Counter[str] = Counter()
    for text, count in content[kind]:
        counted[_shapes(Call.from_json(text))] += count
    return counted


def _shapes(call: Call) -> str:
    # Recording keeps what a step would overwrite, so that sums of gradients are not in place there.
    base = call.op.partition(".")[0].removesuffix("_")
    return base + " ".join(f"{tensor.shape}{tensor.dtype}{tensor.strides}{tensor.device}" for tensor in call.tensors())


@pytest.mark.parametrize(("case", "kind"), [("bert-b8-r1", "bert-fp32"), ("resnet50-b32-r1-bf16", "resnet50-bf16")])
def test_a_trace_asks_for_the_calls_that_were_recorded_in_the_step_itself(case: str, kind: str) -> None:
    programs = shipped_programs(case)
    program = to_program(read(programs.traces[0].encode(), case), rank=0, world_size=1)
    works = questions_of(program)
    asked = Counter(_shapes(work.question.call) for work in works if work.question)
    assert {work.kind for work in works} == {"compute"}
    assert asked == recorded(kind)
