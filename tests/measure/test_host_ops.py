from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.measure.test_host_runner import a_bench

from steptime._models.kernels.call import Call, DtypeArg, TensorArg
from steptime.errors import InputError
from steptime_lab.measure.host.issued import SMALL_FILE, common, grouped, recorded
from steptime_lab.measure.host.ops import arguments, binding_of, op_probes, python_probes, tensor
from steptime_lab.measure.host.representative import most_calls_of
from steptime_lab.measure.kernels.cases import FILE_NAME, write_calls

CPU = torch.device("cpu")


def relu(size: int) -> Call:
    return Call("aten::relu.default", (TensorArg((size, size)),))


def view(size: int) -> Call:
    return Call("aten::view.default", (TensorArg((size, 8)), (8 * size,)))


def test_the_op_list_is_what_workloads_issue_most_often_first(tmp_path: Path) -> None:
    mm = Call("aten::mm.default", (TensorArg((64, 64)), TensorArg((64, 64))))
    write_calls(tmp_path / FILE_NAME, "bert", {relu(64): 3, mm: 5})
    write_calls(tmp_path / FILE_NAME, "gpt2", {relu(128): 4})
    issued = grouped([*recorded(tmp_path), *common(("float32",))])
    assert [(one.small.op, one.count) for one in issued[:2]] == [("aten::relu.default", 7), ("aten::mm.default", 5)]
    assert issued[0].recorded == relu(128)
    assert issued[0].source == "gpt2"
    assert all(one.count == 0 for one in issued[2:])


def test_small_steps_add_only_ops_that_full_ones_lack(tmp_path: Path) -> None:
    write_calls(tmp_path / FILE_NAME, "bert", {relu(64): 3})
    write_calls(tmp_path / SMALL_FILE, "bert-small", {relu(7): 9, view(64): 2})
    assert [(call.op, count) for call, count, _ in recorded(tmp_path)] == [("aten::relu.default", 3), ("aten::view.default", 2)]


def test_a_file_of_calls_that_is_none_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("[1]")
    with pytest.raises(InputError, match="not a file of recorded calls"):
        recorded(tmp_path)


def test_every_common_op_runs_through_the_dispatcher() -> None:
    failed = []
    for probe in op_probes(grouped(common(("float32",)))):
        try:
            (times,) = probe.measure(a_bench())
            assert len(times) == 2
        except (RuntimeError, TypeError) as error:
            failed.append(f"{probe.op}: {error}")
    assert failed == []


def test_a_call_that_does_not_run_at_small_sizes_is_asked_at_recorded_ones() -> None:
    (probe,) = op_probes(grouped([(view(64), 1, "bert")]))
    with pytest.raises(RuntimeError):
        probe.measure(a_bench())
    assert probe.otherwise is not None
    assert probe.otherwise.call == view(64).to_json()
    assert len(probe.otherwise.measure(a_bench())[0]) == 2


def test_attention_runs_at_recorded_sizes_because_its_kernels_check_none() -> None:
    call = Call("aten::_scaled_dot_product_flash_attention.default", (TensorArg((2, 4, 197, 64)),) * 3)
    (probe,) = op_probes(grouped([(call, 1, "bert")]))
    assert probe.call == call.to_json()


def test_ops_that_people_can_call_are_asked_through_python_too() -> None:
    backward = Call("aten::threshold_backward.default", (TensorArg((8, 8)), TensorArg((8, 8)), 0))
    asked = [probe.op for probe in python_probes(grouped([(relu(8), 2, "x"), (backward, 1, "x")]))]
    assert asked == ["aten::relu.default"]
    assert binding_of("aten::index.Tensor") is None
    assert binding_of("aten::add_.Tensor") is torch.Tensor.add_


def test_a_burst_of_calls_on_lists_fits_into_the_launch_queue() -> None:
    many = (TensorArg((8,)),) * 300
    assert most_calls_of(relu(8)) == 200
    assert most_calls_of(Call("aten::_foreach_add_.List", (many, many))) == 2


def test_arguments_have_the_layout_that_the_call_says() -> None:
    transposed = tensor(TensorArg((4, 6), strides=(1, 4)), CPU)
    assert (tuple(transposed.shape), transposed.stride()) == ((4, 6), (1, 4))
    assert tensor(TensorArg((3,), "int64", high=5), CPU).tolist() == [0, 0, 0]
    assert float(tensor(TensorArg((50,), values="positive"), CPU).min()) > 0
    call = Call("aten::_to_copy.default", (TensorArg((2,)),), (("device", "device"), ("dtype", DtypeArg("float16")),
                ("memory_format", "contiguous_format")))  # fmt: skip
    _, named = arguments(call, CPU)
    assert named == {"device": CPU, "dtype": torch.float16, "memory_format": torch.contiguous_format}
