from __future__ import annotations

from tests.measure.raw_events import RawEvent

from steptime_lab.measure.device_profile import MARKER
from steptime_lab.measure.host.recording import Recording, around_launches, gaps, read_scenes


def kernel(name: str, start: int, duration: int = 10, correlation: int = 0) -> RawEvent:
    return RawEvent(name, start, duration, correlation, on_device=True)


def recorded(*events: RawEvent) -> Recording:
    found = Recording()
    found.read(events)
    return found


def test_launches_are_counted_between_the_marks_of_a_loop_only() -> None:
    mark = f"at::cuda::{MARKER}(long)"
    names = ["fill", mark, "add", "add", mark, "randn", mark, "mm", mark, "fill"]
    assert recorded(*(kernel(name, 100 * i) for i, name in enumerate(names))).launches() == [2, 1]


def test_a_launch_is_followed_to_its_kernel_and_to_the_return() -> None:
    found = recorded(
        RawEvent("aten::neg", 90, 60, correlation=7),
        RawEvent("cudaLaunchKernel", 100, 40, correlation=7),
        kernel("neg", 165, 10, correlation=7),
        RawEvent("cudaDeviceSynchronize", 145, 50, correlation=8),
    )
    assert around_launches(found) == {"launch_call": [40.0], "launch_latency": [25.0], "sync_return": [20.0]}


def test_gaps_are_between_kernels_behind_the_gate() -> None:
    found = recorded(kernel(f"x::{MARKER}", 0, 1000), kernel("a", 1003, 10), kernel("a", 1014, 10), kernel("a", 1026, 10))
    assert gaps(found) == [1.0, 2.0]


def test_scenes_without_events_give_no_kinds() -> None:
    assert read_scenes(Recording(), Recording()) == {}
