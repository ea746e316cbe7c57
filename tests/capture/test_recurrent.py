"""Recurrent layers as captured, and what is said of their time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from steptime._capture.capture import capture  # noqa: E402
from steptime._hardware.device import reference_device  # noqa: E402
from steptime._models.estimate import Source  # noqa: E402
from steptime._models.kernels.recurrent import Recurrent  # noqa: E402
from steptime._ops.operations import operations_of  # noqa: E402
from steptime._ops.table import op_table  # noqa: E402
from steptime._platforms.platform import Platform  # noqa: E402
from steptime._program.one_step import OneStep  # noqa: E402
from steptime._program.program import Program  # noqa: E402
from steptime._sim.modelled.device_work import device_work  # noqa: E402

_FORWARD, _BACKWARD = "aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"


def layer(kind: str, *, autocast: bool = False, packed: bool = False, length: int = 20, **options: Any) -> Program:
    def make() -> Callable[[], None]:
        model = getattr(nn, kind)(64, 256, **options).to("cuda")
        optimizer = torch.optim.Adam(model.parameters())
        shape = (16, length, 64) if options.get("batch_first") else (length, 16, 64)
        x = torch.randn(*shape, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", enabled=autocast):
                first = options.get("batch_first", False)
                lengths = [length - index for index in range(16)]
                given = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=first) if packed else x
                result = model(given)[0]
                result = nn.utils.rnn.pad_packed_sequence(result)[0] if packed else result
            result.float().sum().backward()
            optimizer.step()

        return step

    return capture(make)


def arguments(program: Program, name: str) -> list[Any]:
    table = op_table(program)
    return [table.signatures[row].inputs for row, each in enumerate(table.names) if each == name]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {}), ("LSTM", {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.1}), ("GRU", {}),
        ("RNN", {"nonlinearity": "relu"}), ("LSTM", {"proj_size": 32}), ("GRU", {"bias": False}), ("LSTM", {"packed": True}),
        ("GRU", {"packed": True, "batch_first": True}), ("LSTM", {"autocast": True}),
    ],
)  # fmt: skip
def test_a_recurrent_layer_is_one_call_of_cudnn_each_way(kind: str, options: dict[str, Any]) -> None:
    names = Counter(op_table(layer(kind, **options)).names)
    assert names[_BACKWARD] == 1
    assert names[_FORWARD] == (2 if options.get("autocast") else 1)  # around the casts, and as it runs
    assert names["aten::addmm"] == names["aten::mm"] == 0


def test_weights_lie_in_one_buffer_and_their_gradients_too() -> None:
    program = layer("LSTM", num_layers=2)
    (_, weights, *_), *_ = arguments(program, _FORWARD)
    assert len(weights) == 8
    assert len({weight.storage for weight in weights}) == 1
    table = op_table(program)
    made: Any = table.signatures[table.names.index(_BACKWARD)].outputs[3]
    assert len({gradient.storage for gradient in made}) == 1


def test_under_autocast_a_layer_runs_in_half_precision() -> None:
    outer, inner = arguments(layer("LSTM", autocast=True), _FORWARD)
    assert (outer[0].dtype, inner[0].dtype) == ("float32", "float16")


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell"])
def test_a_cell_is_two_products_and_one_kernel(kind: str) -> None:
    def make() -> Callable[[], None]:
        model, x = getattr(nn, kind)(32, 64).to("cuda"), torch.randn(5, 16, 32, device="cuda")

        def step() -> None:
            hidden: Any = None
            for each in x:
                hidden = model(each, hidden)
            (hidden[0] if kind == "LSTMCell" else hidden).sum().backward()

        return step

    names = Counter(op_table(capture(make)).names)
    fused = f"aten::_thnn_fused_{kind.removesuffix('Cell').lower()}_cell"
    assert names[fused] == names[f"{fused}_backward"] == 5


def test_time_grows_with_steps_and_is_said_to_be_added_up() -> None:
    device = Platform.load("1xh200").device
    times = []
    for length in (20, 40):
        program = layer("LSTM", length=length)
        (work,) = device_work([OneStep(program)], device)
        found = {program.names[program.ops.name[each.op]]: each for each in work.works}
        assert found[_FORWARD].estimate.source is Source.ANALYTIC
        assert len(found[_FORWARD].launches) == 2 * length + 1  # a product and gates a step, and one product of all inputs
        times.append(found[_FORWARD].estimate.time_ns)
        assert any("recurrent layers or cells, added up" in each for each in work.warnings)
    assert 1.5 < times[1] / times[0] < 2.0


def test_small_layers_are_one_kernel() -> None:
    (values,) = arguments(layer("LSTM"), _FORWARD)
    usual = Recurrent.of(_FORWARD, values)
    assert usual is not None
    assert not usual.stays_on_chip
    small = Recurrent.of(_FORWARD, (*values[:7], 128, *values[8:]))
    assert small is not None
    assert small.stays_on_chip
    assert [part.calls for part in small.parts(reference_device()) if part.question is None] == [1]


def test_operations_are_those_of_every_weight_and_row() -> None:
    (values,) = arguments(layer("LSTM"), _FORWARD)
    expected = 2 * 20 * 16 * (4 * 256 * 64 + 4 * 256 * 256)
    assert operations_of(_FORWARD, values, [values[0]]) == expected


def test_directions_and_layers_beside_each_other_take_less_than_one_after_the_other() -> None:
    device = Platform.load("1xh200").device

    def steps_ns(layers: int, both: bool) -> float:
        (values,) = arguments(layer("LSTM"), _FORWARD)
        asked = Recurrent.of(_FORWARD, (*values[:9], layers, *values[10:13], both, *values[14:]))
        assert asked is not None
        parts = asked.parts(device.limits)
        return sum(part.calls * part.time_ns for part in parts if part.question is None)

    one, deep, wide = steps_ns(1, False), steps_ns(2, False), steps_ns(1, True)
    assert one < deep < 2 * one
    assert one < wide < 2 * one


def test_products_of_a_layer_may_use_tf32_unless_told_otherwise() -> None:
    (values,) = arguments(layer("LSTM"), _FORWARD)
    for tf32, expected in ((None, True), (True, True), (False, False)):
        asked = Recurrent.of(_FORWARD, values, tf32=tf32)
        assert asked is not None
        questions = [part.question for part in asked.parts(reference_device()) if part.question is not None]
        assert questions
        assert {question.tf32 for question in questions} == {expected}
