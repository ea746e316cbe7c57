"""Laws of the sections of calls beside the families' sweeps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from tests.models.test_kernel_sweeps import NOT_ON_META, run_without_memory

from steptime._models.kernels.call import Call
from steptime._units import GIB
from steptime_lab.measure.kernels.cases import section_cases, whole_gpu_cases
from steptime_lab.measure.kernels.sections import SECTIONS, section_calls


@pytest.mark.parametrize("name", SECTIONS)
def test_torch_accepts_every_call_of_a_section_and_none_is_beyond_two_gibibytes(name: str) -> None:
    calls = list(section_calls([name], 120, 0))
    assert len(calls) >= 100
    assert [Call.from_json(call.to_json()) for call in calls] == calls
    assert list(section_calls([name], 120, 0)) == calls
    assert max(run_without_memory(call) for call in calls if call.op not in NOT_ON_META) <= 2 * GIB


def test_a_run_cut_short_has_had_as_much_of_every_section_as_one_that_was_not() -> None:
    names = list(SECTIONS)
    own = {name: {call.to_json() for call in section_calls([name], 4000, 0)} for name in names}
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
