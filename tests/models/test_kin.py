"""Ops that no sweep calls, of kernels that calls of sweeps launch: each is declared, belongs to one family and is answered."""

from __future__ import annotations

import pytest
from tests.models.launching import GPU

from steptime._models.estimate import Source
from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime._models.kernels.family import families, family_of, launches_of
from steptime._models.kernels.question import Question
from steptime._ops.catalogue import ATEN, Overload, Parameter, overload_of, overloads_of
from steptime._platforms.platform import Platform
from steptime._program.program import Tensor

X = TensorArg((8, 64, 4, 4))
# Those of products, of pooled volumes and of columns of windows have other dimensions.
OTHERS = {
    "bmm": TensorArg((8, 16, 16)),
    "mm": TensorArg((16, 16)),
    "pool3d": TensorArg((2, 8, 4, 8, 8)),
    "col2im": TensorArg((8, 16, 1)),
}
PLAIN: dict[str, Argument] = {"S": 0.5, "f": 0.5, "i": 1, "b": False, "s": "amax"}


def kin() -> list[tuple[str, Overload]]:
    return [
        (family.name, overload)
        for family in families().values()
        for name in family.kin.split()
        for overload in overloads_of(f"{ATEN}{name.partition('.')[0]}")
        if overload.op in family.ops and overload.op not in family.sweep.ops
    ]


def argument(parameter: Parameter, x: TensorArg) -> Argument:
    one = x if parameter.type == "T" else PLAIN[parameter.type]
    return (one, one) if parameter.many else one


def call(overload: Overload) -> Call:
    """Mostly four dimensions of activations for every tensor, and only what has to be given."""
    x = next((found for name, found in OTHERS.items() if name in overload.op), X)
    needed = [each for each in overload.parameters if each.required and not each.optional]
    positional = tuple(argument(each, x) for each in needed if not each.name)
    return Call(overload.op, positional, tuple((each.name, argument(each, x)) for each in needed if each.name))


def test_every_name_is_declared_and_every_op_belongs_to_one_family() -> None:
    for family in families().values():
        assert all(overloads_of(f"{ATEN}{name.partition('.')[0]}") for name in family.kin.split())
    assert [overload.op for name, overload in kin() if family_of(overload.op) != name] == []


def test_models_answer_every_one_of_them() -> None:
    # But for those that take vectors of channels, numbers that differ, and eight bits with the ends of groups.
    odd = ("batch_norm", "arange", "_scaled_grouped_mm")
    calls = [call(overload) for _, overload in kin() if not any(name in overload.op for name in odd)]
    x, weight = TensorArg((4096, 2048), "float8"), TensorArg((8, 1024, 2048), "float8").transposed()
    scales, ends = (TensorArg((4096,)), TensorArg((8, 1024))), TensorArg((8,), "int32")
    calls.append(Call("aten::_scaled_grouped_mm.default", (x, weight, *scales, ends)))
    answers = Platform.load("1xh200").device.estimates([Question(each) for each in calls])
    assert [each.op for each, answer in zip(calls, answers, strict=True) if answer.estimate.source is not Source.FITTED] == []


@pytest.mark.parametrize(("op", "kernels"), [("glu", 1), ("log_sigmoid_backward", 1), ("smooth_l1_loss", 2), ("aminmax", 1)])
def test_they_launch_as_many_kernels_as_pytorch_does(op: str, kernels: int) -> None:
    (overload,) = (each for each in overloads_of(f"{ATEN}{op}") if each.op.endswith(".default"))
    launches = launches_of(call(overload), GPU)
    assert sum(launch.kernel != "Memset" for launch in launches) == kernels


def test_a_gated_unit_writes_half_of_what_it_reads() -> None:
    (launch,) = launches_of(Call("aten::glu.default", (X, 1)), GPU)
    assert launch.writes[0].numel == X.numel // 2
    (back,) = launches_of(Call("aten::glu_backward.default", (TensorArg((8, 32, 4, 4)), X, 1)), GPU)
    assert sum(each.numel for each in back.writes) == X.numel


def test_numbers_in_order_from_one_to_another_are_a_call_of_their_own() -> None:
    found = overload_of("aten::arange", (3, 9, 4, None, "cuda:0", False))
    assert found is not None and found.op == "aten::arange.start"
    assert overload_of("aten::le", (Tensor((3,), "float32"), 1)) is not None
