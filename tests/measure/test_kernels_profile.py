from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from steptime._calibrate.harness.session import Setting
from steptime._models.kernels.call import Call, TensorArg
from steptime_lab.measure.device_profile import DeviceProfile, DeviceWork, HostProfile, MarkersError, cut
from steptime_lab.measure.kernels.bench import row_of
from steptime_lab.measure.kernels.cases import KernelCase

SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def work(*names: str, every_ns: int = 10, lasting_ns: int = 5) -> list[DeviceWork]:
    return [DeviceWork(name, every_ns * place, lasting_ns) for place, name in enumerate(names)]


def names(segments: list[tuple[DeviceWork, ...]]) -> list[list[str]]:
    return [[one.name for one in segment] for segment in segments]


def test_work_belongs_to_the_marker_before_it_whatever_order_it_is_recorded_in() -> None:
    recorded = work("stray", SPIN, "gemm", "splitk", SPIN, SPIN, "Memcpy DtoD", SPIN)
    assert names(cut(reversed(recorded), 3)) == [["gemm", "splitk"], [], ["Memcpy DtoD"]]


def test_waiting_is_not_work() -> None:
    assert names(cut(work(SPIN, "Context Sync", "gemm", SPIN), 1)) == [["gemm"]]


@pytest.mark.parametrize("marks", [0, 2])
def test_lost_markers_are_noticed(marks: int) -> None:
    with pytest.raises(MarkersError, match="2 markers in the profile"):
        cut(work(SPIN, "gemm", SPIN), marks)


@dataclass
class Event:
    """A record as the profiler gives it."""

    text: str
    start: int
    device: torch._C._autograd.DeviceType

    def name(self) -> str:
        return self.text

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return 5

    def device_type(self) -> torch._C._autograd.DeviceType:
        return self.device


class FakeProfiler:
    """Stands for torch's profiler: two device kernels between markers, and the launches of the host beside them."""

    def __init__(self, **options: object) -> None:
        self.options = options
        self.kineto_results = self

    def __enter__(self) -> FakeProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def events(self) -> list[Event]:
        kinds = torch._C._autograd.DeviceType
        device = [Event(text, 10 * place, kinds.CUDA) for place, text in enumerate((SPIN, "first", SPIN, "second", SPIN))]
        return [*device, *(Event("cudaLaunchKernel", 10 * place - 3, kinds.CPU) for place in range(5))]


def test_only_what_ran_on_the_device_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(torch.autograd.profiler, "profile", FakeProfiler)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with DeviceProfile() as profile:
        profile.mark("aten::mm.default")
        profile.mark("aten::mm.default")
    assert names(profile.segments()) == [["first"], ["second"]]
    assert len(slept) == 3


def test_without_a_gpu_an_op_is_one_kernel_of_its_name() -> None:
    with HostProfile() as profile:
        profile.mark("a")
        profile.mark("b")
    segments = profile.segments()
    assert names(segments) == [["a"], ["b"]]
    assert segments[0][0].start_ns + segments[0][0].duration_ns == segments[1][0].start_ns


CALL = Call("aten::relu.default", (TensorArg((3,)),))
CASE = KernelCase(CALL, CALL.to_json(), "activation", "sweep")


def test_a_row_has_the_median_of_every_kernel_and_of_the_span() -> None:
    repeats = [tuple(work("a", "b", every_ns=20, lasting_ns=lasting)) for lasting in (4, 6, 100)]
    row = row_of(CASE, "cold", repeats, Setting())
    assert row is not None
    assert (row["kernel_names"], row["kernel_ns"], row["times_ns"]) == (["a", "b"], [6.0, 6.0], [8.0, 12.0, 200.0])
    assert row["span_ns"] == 26.0


def test_repeats_with_other_kernels_count_in_the_times_but_not_kernel_by_kernel() -> None:
    repeats = [tuple(work("a")), tuple(work("a", "b")), tuple(work("a"))]
    row = row_of(CASE, "cold", repeats, Setting())
    assert row is not None
    assert (row["kernel_names"], row["times_ns"]) == (["a"], [5.0, 10.0, 5.0])


def test_an_op_that_launches_nothing_has_no_row() -> None:
    assert row_of(CASE, "cold", [(), ()], Setting()) is None


def test_the_span_ends_with_the_last_kernel_to_end_which_need_not_be_the_last_to_start() -> None:
    side_by_side = (DeviceWork("a", 100, 50), DeviceWork("b", 110, 5))
    row = row_of(CASE, "cold", [side_by_side], Setting())
    assert row is not None
    assert (row["span_ns"], row["times_ns"]) == (50.0, [55.0])
