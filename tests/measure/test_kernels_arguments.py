from __future__ import annotations

import pytest
import torch

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg
from steptime._units import MIB
from steptime.errors import InputError
from steptime_lab.measure.op_calls import Arena, PreparedCall, operator


@pytest.fixture
def arena() -> Arena:
    return Arena(torch.device("cpu"), 4 * MIB, host_bytes=MIB)


def first(call: Call, arena: Arena) -> torch.Tensor:
    tensor = PreparedCall(call, arena).fresh()[0][0]
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.mark.parametrize(
    "name", ["prims::add.default", "aten::from_file.default", "os::system.default", "aten::no_such_op.default"]
)
def test_only_ops_of_aten_that_touch_nothing_but_tensors_are_looked_up(name: str) -> None:
    with pytest.raises(InputError, match="op"):
        operator(name)


def test_shape_strides_and_dtype_are_as_asked(arena: Arena) -> None:
    tensor = first(Call("aten::relu.default", (TensorArg((3, 5), "bfloat16", strides=(1, 3)),)), arena)
    assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == ((3, 5), (1, 3), torch.bfloat16)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "uint64"])
def test_integers_stay_below_high(arena: Arena, dtype: str) -> None:
    tensor = first(Call("aten::relu.default", (TensorArg((500,), dtype, high=7),)), arena)
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert set(tensor.tolist()) == set(range(7))


def test_indices_in_order_count_and_begin_again_where_they_reach_the_end(arena: Arena) -> None:
    tensor = first(Call("aten::relu.default", (TensorArg((5,), "int64", high=3, values="ordered"),)), arena)
    assert tensor.tolist() == [0, 1, 2, 0, 1]


def test_offsets_are_bags_of_equal_size(arena: Arena) -> None:
    tensor = first(Call("aten::relu.default", (TensorArg((4,), "int64", high=20, values="offsets"),)), arena)
    assert tensor.tolist() == [0, 5, 10, 15]


def test_half_of_a_mask_is_set(arena: Arena) -> None:
    tensor = first(Call("aten::relu.default", (TensorArg((4000,), "bool", values="mask"),)), arena)
    assert 0.4 < float(tensor.float().mean()) < 0.6


CALLS: list[tuple[str, tuple[Argument, ...], tuple[tuple[str, Argument], ...]]] = [
    ("aten::addmm.default", (TensorArg((4,)), TensorArg((3, 5)), TensorArg((5, 4), strides=(1, 5))), (("beta", 0.5),)),
    ("aten::cat.default", ((TensorArg((3, 2)), TensorArg((4, 2))), 0), ()),
    ("aten::index.Tensor", (TensorArg((6, 3)), (None, TensorArg((2,), "int64", high=3))), ()),
    (
        "aten::_foreach_add_.List",
        ((TensorArg((3,)), TensorArg((4, 2))), (TensorArg((3,)), TensorArg((4, 2)))),
        (("alpha", -0.1),),
    ),
    ("aten::_to_copy.default", (TensorArg((3,)),), (("dtype", DtypeArg("float16")),)),
    ("aten::clone.default", (TensorArg((2, 3), strides=(1, 2)),), (("memory_format", "contiguous_format"),)),
    ("aten::zeros.default", ((3, 4),), (("device", "device"), ("dtype", DtypeArg("float32")), ("layout", "strided"))),
    ("aten::gelu.default", (TensorArg((3,)),), (("approximate", "tanh"),)),
    ("aten::sum.dim_IntList", (TensorArg((3, 4)), (0,), False), ()),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS, ids=[call[0] for call in CALLS])
def test_calls_with_every_kind_of_argument_run_after_a_trip_through_json(
    op: str, args: tuple[Argument, ...], kwargs: tuple[tuple[str, Argument], ...], arena: Arena
) -> None:
    call = Call.from_json(Call(op, args, kwargs).to_json())
    prepared = PreparedCall(call, arena)
    with torch.inference_mode():
        prepared.run()
        prepared.produce(prepared.fresh()[0])


@pytest.mark.parametrize(
    "tensor",
    [
        TensorArg((6, 8)),
        TensorArg((6, 8), "bfloat16", strides=(1, 6)),
        TensorArg((6, 8), strides=(0, 1)),
        TensorArg((6, 8), strides=(100, 1)),
        TensorArg((6, 8), "int64", high=9),
        TensorArg((6, 8), "bool", values="mask"),
        TensorArg(()),
    ],
    ids=str,
)
def test_a_producer_writes_its_tensor_without_changing_it(tensor: TensorArg, arena: Arena) -> None:
    prepared = PreparedCall(Call("aten::clone.default", (tensor,)), arena)
    assert prepared.can_be_warm
    args, _ = prepared.fresh()
    before, version = args[0].clone(), args[0]._version
    prepared.produce(args)
    assert torch.equal(args[0], before)
    assert args[0]._version == version + 1


@pytest.mark.parametrize("written", [(), (1,), (5,)])
def test_nothing_is_warm_where_nothing_is_written(written: tuple[int, ...], arena: Arena) -> None:
    assert not PreparedCall(Call("aten::add.Tensor", (TensorArg((3,)), 2.0), written=written), arena).can_be_warm
