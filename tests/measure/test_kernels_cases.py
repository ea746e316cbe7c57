from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.family import families, swept_families
from steptime_lab.measure.kernels import cases
from steptime_lab.measure.kernels.cases import (
    KernelCase,
    part_cases,
    shuffled,
    sweep_cases,
    whole_gpu_cases,
    workload_cases,
    write_calls,
)

NO_FILE = Path("no_such_file.json")
PRODUCT = Call("aten::mm.default", (TensorArg((3, 4)), TensorArg((4, 5))))
CONVOLUTION = Call(
    "aten::convolution.default",
    (TensorArg((1, 3, 8, 8)), TensorArg((4, 3, 3, 3)), None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1),
)


@pytest.fixture(autouse=True)
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "FULL", 600)
    monkeypatch.setattr(cases, "FULL_PART", 120)


def test_the_same_seed_asks_the_same_and_another_one_something_else() -> None:
    asked = [[case.text for case in whole_gpu_cases(NO_FILE, (), seed, small=False)] for seed in (0, 0, 1)]
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]


def test_no_call_is_asked_twice_and_every_family_is_asked() -> None:
    found = whole_gpu_cases(NO_FILE, (), 0, small=False)
    assert max(Counter((case.text, case.tf32) for case in found).values()) == 1
    assert {case.family for case in found} == set(swept_families())


def test_families_are_mixed_so_that_a_run_cut_short_has_some_of_each() -> None:
    found = whole_gpu_cases(NO_FILE, (), 0, small=False)
    large = [name for name, count in Counter(case.family for case in found).items() if count > len(found) / 20]
    assert set(large) <= {case.family for case in found[: len(found) // 3]}


def test_half_of_the_products_in_single_precision_may_use_tf32_and_nothing_else_may() -> None:
    found = sweep_cases([families()["matmul"]], 600, 0)
    single = [case.tf32 for case in found if case.call.dtype == "float32"]
    assert 0.35 < sum(single) / len(single) < 0.65
    assert not any(case.tf32 for case in found if case.call.dtype != "float32")


def test_calls_of_workloads_come_first_with_the_settings_that_torch_has_by_default(tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    write_calls(file, "a_model", {PRODUCT: 2, CONVOLUTION: 1})
    write_calls(file, "b_model", {PRODUCT: 7})
    found = whole_gpu_cases(file, (), 0, small=False)[:2]
    assert {(case.call.op, case.source, case.tf32) for case in found} == {
        ("aten::mm.default", "a_model", False),
        ("aten::convolution.default", "a_model", True),
    }


def test_copies_to_and_from_the_host_are_transfers(tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    here, there = TensorArg((3,)), TensorArg((3,), device="pinned")
    write_calls(file, "a_model", {Call("aten::copy_.default", (here, there)): 1, Call("aten::copy_.default", (here, here)): 1})
    assert {case.family for case in workload_cases(file)} == {"transfer", "copy"}


def test_only_some_families_are_asked_where_some_are_named(tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    write_calls(file, "a_model", {PRODUCT: 2, CONVOLUTION: 1})
    found = whole_gpu_cases(file, ("matmul",), 0, small=False)
    assert {case.family for case in found} == {"matmul"}
    assert workload_cases(file, ["norm"]) == []


def test_what_a_part_is_asked_the_whole_is_asked_too() -> None:
    whole = {(case.text, case.tf32) for case in whole_gpu_cases(NO_FILE, (), 3, small=False)}
    part = part_cases(NO_FILE, (), 3, largest_bytes=10**8, small=False)
    assert 100 <= len(part) <= 140
    assert {(case.text, case.tf32) for case in part} <= whole
    assert max(case.call.nbytes for case in part) <= 10**8


def test_the_order_of_a_few_is_their_order_among_many() -> None:
    many = shuffled(sweep_cases(swept_families().values(), 200, 0), 0)
    few = many[::3]
    assert shuffled(sorted(few, key=lambda case: case.text), 0) == few


def test_small_runs_ask_a_few_of_every_family() -> None:
    counted = Counter(case.family for case in whole_gpu_cases(NO_FILE, (), 0, small=True))
    assert set(counted) == set(swept_families())
    assert max(counted.values()) <= 10


def test_cache_settings_and_device_are_part_of_the_question() -> None:
    case = KernelCase(PRODUCT, PRODUCT.to_json(), "matmul", "sweep")
    allowed = KernelCase(PRODUCT, PRODUCT.to_json(), "matmul", "sweep", tf32=True)
    searched = KernelCase(PRODUCT, PRODUCT.to_json(), "matmul", "sweep", benchmark=True)
    elsewhere = KernelCase(PRODUCT, PRODUCT.to_json(), "matmul", "a_model")
    keys = [
        case.key("cold", 1, "none"),
        case.key("warm", 1, "none"),
        case.key("cold", 2, "same"),
        case.key("cold", 2, "idle"),
        allowed.key("cold", 1, "none"),
        searched.key("cold", 1, "none"),
    ]
    assert len(set(keys)) == len(keys)
    assert elsewhere.key("cold", 1, "none") == keys[0]
