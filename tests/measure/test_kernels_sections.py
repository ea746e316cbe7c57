"""Laws of the sections of calls beside the families' sweeps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.models.test_kernel_sweeps import NOT_ON_META, built, overload, run_without_memory

from steptime._models.kernels.call import Call
from steptime._units import GIB
from steptime_lab.measure.device_profile import DeviceWork, busy_ns, span_ns
from steptime_lab.measure.kernels.cases import section_cases, whole_gpu_cases
from steptime_lab.measure.kernels.sections import SECTIONS, section_calls

# Ops that torch has no rule of shapes for: their arguments are only counted.
_UNKNOWN_SHAPES = (
    *("_cudnn_rnn_backward", "_unique2", "batch_norm_stats", "batch_norm_elemt", "batch_norm_backward_reduce"),
    *("batch_norm_backward_elemt", "batch_norm_gather_stats_with_counts"),
)


def _bytes_of(call: Call) -> int:
    if call.op.removeprefix("aten::").partition(".")[0] not in _UNKNOWN_SHAPES:
        return run_without_memory(call)
    arguments = overload(call.op)._schema.arguments
    needed = sum(not argument.has_default_value() for argument in arguments)
    assert needed <= len(call.args) <= len(arguments)
    return call.nbytes


@pytest.mark.parametrize("name", SECTIONS)
def test_torch_accepts_every_call_of_a_section_and_none_is_beyond_two_gibibytes(name: str) -> None:
    calls = list(section_calls([name], 120, 0))
    assert len(calls) >= 100
    assert [Call.from_json(call.to_json()) for call in calls] == calls
    assert list(section_calls([name], 120, 0)) == calls
    assert max(_bytes_of(call) for call in calls if call.op not in NOT_ON_META) <= 2 * GIB


def test_a_run_cut_short_has_had_as_much_of_every_section_as_one_that_was_not() -> None:
    names = list(SECTIONS)
    own = {name: {call.to_json() for call in section_calls([name], 600, 0)} for name in names}
    calls = [call.to_json() for call in section_calls(names, 1000, 0)]
    half = len(calls) // 2
    for name in names:
        first, every = (sum(text in own[name] for text in part) for part in (calls[:half], calls))
        assert abs(first - every / 2) <= 2, name


def test_sections_are_named_beside_families_and_come_first(tmp_path: Path) -> None:
    cases = whole_gpu_cases(tmp_path / "none.json", ["fill", "scans"], 0, small=True)
    scans = {case.text for case in section_cases(["scans"], 0, small=True)}
    assert {case.text for case in cases[: len(scans)]} == scans
    assert {case.family for case in cases[len(scans) :]} == {"fill"}


def test_eight_bit_operands_are_never_run_warm() -> None:
    cases = section_cases(["eight_bits_and_groups"], 0, small=False)
    assert not any(case.warm for case in cases if case.call.dtype == "float8")
    assert all(first.text != second.text for first, second in pairwise(cases))


def test_the_forward_pass_of_a_recurrent_layer_takes_the_arguments_of_its_backward_pass() -> None:
    calls = [call for call in section_calls(["recurrent"], 40, 0) if "backward" in call.op]
    assert calls
    for call in calls:
        args = [built(value) for value in call.args]
        output, *_ = overload("aten::_cudnn_rnn.default")(*args[:6], *args[10:20])
        assert output.shape == args[6].shape == args[7].shape
        assert args[-2].dtype == torch.uint8


def test_most_recurrent_layers_of_single_precision_may_use_tf32_and_none_is_run_warm() -> None:
    cases = [case for seed in range(4) for case in section_cases(["recurrent"], seed, small=True)]
    single = [case for case in cases if case.call.dtype == "float32"]
    assert 0.55 < sum(case.tf32 for case in single) / len(single) < 0.85
    assert not any(case.warm or (case.tf32 and case.call.dtype != "float32") for case in cases)


def test_kernels_side_by_side_are_busy_once_and_gaps_not_at_all() -> None:
    works = [DeviceWork("a", 0, 10), DeviceWork("b", 4, 3), DeviceWork("c", 8, 7), DeviceWork("d", 30, 5)]
    assert busy_ns(tuple(works)) == busy_ns(tuple(reversed(works))) == 20
    assert span_ns(tuple(works)) == 35
