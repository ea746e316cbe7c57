from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime._units import MIB
from steptime.errors import InputError
from steptime_lab.measure.kernels.cases import read_calls, write_calls
from steptime_lab.measure.kernels.record import OpRecorder, record_calls
from steptime_lab.measure.op_calls import Arena, PreparedCall


def training_step() -> tuple[Callable[[], None], nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, target = torch.randn(4, 6), torch.tensor([0, 2, 1, 1])

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step, model


def by_op(calls: dict[Call, int]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for call, count in calls.items():
        counted[call.op] += count
    return counted


def test_forward_backward_and_optimiser_are_all_seen() -> None:
    counted = by_op(record_calls(training_step()[0]))
    assert counted["aten::addmm.default"] == 2
    assert counted["aten::threshold_backward.default"] == 1
    # Two weight gradients and one input gradient: the data needs none.
    assert counted["aten::mm.default"] == 3
    assert counted["aten::nll_loss_backward.default"] == 1
    assert sum(count for op, count in counted.items() if "_foreach_add_" in op or op.startswith("aten::add_")) >= 1


def test_a_recorded_step_computes_what_it_always_computes() -> None:
    (plain, expected), (recorded, model) = training_step(), training_step()
    for _ in range(3):
        plain()
        record_calls(recorded)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_views_are_left_out_unless_asked_for() -> None:
    step = training_step()[0]
    assert "aten::t.default" not in by_op(record_calls(step))
    assert by_op(record_calls(step, device_only=False))["aten::t.default"] > 0


def test_strides_are_kept_where_a_tensor_is_not_contiguous() -> None:
    calls = record_calls(lambda: (torch.randn(4, 3).t() + 1.0, None)[1])
    (call,) = [call for call in calls if call.op == "aten::add.Tensor"]
    assert call.args == (TensorArg((3, 4), strides=(1, 3)), 1.0)


def test_what_was_just_written_is_known() -> None:
    old = torch.randn(8, 8)

    def step() -> None:
        fresh = torch.relu(old)
        torch.mm(old, fresh)

    (call,) = [call for call in record_calls(step) if call.op == "aten::mm.default"]
    assert call.written == (1,)


@pytest.mark.parametrize(
    ("step", "op", "place", "expected"),
    [
        (
            lambda: nn.functional.embedding(torch.tensor([1, 2]), torch.randn(9, 4)),
            "aten::embedding.default",
            1,
            TensorArg((2,), "int64", high=9),
        ),
        (
            lambda: nn.functional.embedding_bag(torch.tensor([1, 2, 3, 4]), torch.randn(9, 4), torch.tensor([0, 2])),
            "aten::_embedding_bag_forward_only.default",
            2,
            TensorArg((2,), "int64", high=4, values="offsets"),
        ),
        (
            lambda: torch.gather(torch.randn(3, 7), 1, torch.tensor([[1], [2], [0]])),
            "aten::gather.default",
            2,
            TensorArg((3, 1), "int64", high=7),
        ),
        (
            lambda: nn.functional.nll_loss(torch.randn(2, 5), torch.tensor([1, 0])),
            "aten::nll_loss_forward.default",
            1,
            TensorArg((2,), "int64", high=5),
        ),
        (
            lambda: nn.functional.binary_cross_entropy(torch.rand(4), torch.rand(4)),
            "aten::binary_cross_entropy.default",
            0,
            TensorArg((4,), values="unit"),
        ),
        (
            lambda: torch.randn(2, 4, 4)[:, *torch.tril_indices(4, 4, -1)],
            "aten::index.Tensor",
            1,
            (
                None,
                TensorArg((6,), "int64", high=4, values="lower_row"),
                TensorArg((6,), "int64", high=4, values="lower_column"),
            ),
        ),
        (lambda: torch.tensor([3, 12]) + 1, "aten::add.Tensor", 0, TensorArg((2,), "int64", high=13)),
        (
            lambda: torch.tensor([True, False]).logical_not(),
            "aten::logical_not.default",
            0,
            TensorArg((2,), "bool", values="mask"),
        ),
    ],
    ids=["embedding", "offsets", "gather", "target", "probabilities", "triangle", "integers", "mask"],
)
def test_integers_and_probabilities_stay_where_the_op_takes_them(
    step: Callable[[], object], op: str, place: int, expected: Argument
) -> None:
    def ignored() -> None:
        step()

    (call,) = [call for call in record_calls(ignored) if call.op == op]
    assert call.args[place] == expected


def test_what_cannot_be_data_is_counted_and_still_runs() -> None:
    recorder = OpRecorder()
    with recorder:
        result = torch.add(torch.ones(2, 2), torch.eye(2).to_sparse())
    assert torch.equal(result, torch.ones(2, 2) + torch.eye(2))
    assert recorder.unsupported["aten::add.Tensor"] == 1


def test_every_recorded_call_can_be_run_again() -> None:
    arena = Arena(torch.device("cpu"), 8 * MIB, host_bytes=MIB)
    calls = record_calls(training_step()[0])
    assert len(calls) > 8
    for call in calls:
        with torch.inference_mode():
            PreparedCall(Call.from_json(call.to_json()), arena).run()


def test_calls_of_several_workloads_share_a_file(tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    first, second = Call("aten::relu.default", (TensorArg((3,)),)), Call("aten::relu.default", (TensorArg((4,)),))
    write_calls(file, "one", {first: 2})
    write_calls(file, "two", {first: 1, second: 5})
    write_calls(file, "one", {second: 3})
    assert read_calls(file) == {"one": {second: 3}, "two": {first: 1, second: 5}}
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("text", ["", "[]", '{"a": [["{}", 1]]}', '{"a": [3]}'])
def test_a_broken_file_of_calls_is_one_clear_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "calls.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"not a (call|file of recorded calls)"):
        read_calls(file)
