"""The calls below ops: launching, allocating, waiting, copying, events and streams; and what the device adds around kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from steptime_lab.measure.host.bench import Action, HostBench, Probe, Times, burst_ns, line
from steptime_lab.measure.host.representative import representative_probes

# Streams, events and the spinning kernel; torch gives them no types.
CUDA: Any = torch.cuda
# A gate of about 2 ms at 1.98 GHz, behind which kernels are queued so that the host does not limit them.
GATE_CYCLES = 4_000_000
# Kernels that spin for about 1 and 10 us.
SHORT_CYCLES, LONG_CYCLES = 2_000, 20_000
QUEUED = 100
COPIES = {"4B": 4, "4KiB": 4 << 10, "64KiB": 64 << 10, "1MiB": 1 << 20}


def launch_probes() -> list[Probe]:
    """Everything between an op and the device."""
    copies = [
        Probe(("copy",), f"{way}_{memory}_{size}", partial(_copy, way, memory, COPIES[size]))
        for way in ("h2d", "d2h") for memory in ("pinned", "pageable") for size in COPIES
    ]  # fmt: skip
    calls = {"event_record": _event_record, "event_query": _event_query, "stream_wait": _stream_wait,
             "stream_switch": _stream_switch, "synchronize": _synchronize, "item": _item}  # fmt: skip
    return [
        Probe(("empty_call",), "python", _empty_call),
        *(probe for probe in representative_probes() if probe.kinds[0] in ("alloc", "launch", "launch_to_return")),
        Probe(("kernel_gap",), "spin", _gap),
        Probe(("kernel_period",), "neg_out", _period),
        *(Probe((kind,), kind, measure) for kind, measure in calls.items()),
        *copies,
    ]


def _empty_call(bench: HostBench) -> Times:
    """The loop and a Python call: what is taken off every other time."""
    return ([burst_ns(partial(_nothing, 1, 2), bench.calls) for _ in range(bench.bursts)],)


def _nothing(*_args: object) -> None:
    pass


def _device_ns(bench: HostBench, action: Action, count: int) -> float:
    """Device time of so many actions in a row, queued behind a gate; the host's time where there is no device."""
    if not bench.cuda:
        return burst_ns(action, count) * count
    begun, ended = CUDA.Event(enable_timing=True), CUDA.Event(enable_timing=True)
    bench.synchronize()
    CUDA._sleep(GATE_CYCLES)
    begun.record()
    for _ in range(count):
        action()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) * 1e6


def _gap(bench: HostBench) -> Times:
    """What a kernel in a full stream takes besides its work: the intercept over kernels that spin for two lengths of time."""
    if bench.cuda:
        kernel: Callable[[int], Action] = lambda cycles: partial(CUDA._sleep, cycles)  # noqa: E731
    else:
        kernel = lambda cycles: partial(_spin, cycles)  # noqa: E731
    for cycles in (SHORT_CYCLES, LONG_CYCLES):
        _device_ns(bench, kernel(cycles), 4)
    repeats = range(2 * bench.bursts)
    low = [_device_ns(bench, kernel(SHORT_CYCLES), QUEUED) / QUEUED for _ in repeats]
    high = [_device_ns(bench, kernel(LONG_CYCLES), QUEUED) / QUEUED for _ in repeats]
    return (line(SHORT_CYCLES, low, LONG_CYCLES, high)[1],)


def _spin(cycles: int) -> None:
    until = time.perf_counter_ns() + cycles // 2
    while time.perf_counter_ns() < until:
        pass


def _period(bench: HostBench) -> Times:
    """From one smallest kernel to the next in a full stream."""
    x = torch.randn(256, device=bench.group.device)
    action = partial(torch.neg, x, out=torch.empty_like(x))
    _device_ns(bench, action, 4)
    return ([_device_ns(bench, action, QUEUED) / QUEUED for _ in range(2 * bench.bursts)],)


def _event_record(bench: HostBench) -> Times:
    return (bench.per_op(CUDA.Event().record if bench.cuda else _nothing),)


def _event_query(bench: HostBench) -> Times:
    if not bench.cuda:
        return (bench.per_op(_nothing),)
    event = CUDA.Event()
    event.record()
    return (bench.per_op(event.query),)


def _stream_wait(bench: HostBench) -> Times:
    """Another stream waits for this one: an event is recorded and waited for."""
    if not bench.cuda:
        return (bench.per_op(_nothing),)
    return (bench.per_op(CUDA.Stream().wait_stream, CUDA.current_stream()),)


def _stream_switch(bench: HostBench) -> Times:
    """Entering a stream's context and leaving it."""
    stream = CUDA.Stream() if bench.cuda else None

    def switch() -> None:
        with CUDA.stream(stream):
            pass

    return (bench.per_op(switch),)


def _synchronize(bench: HostBench) -> Times:
    """Waiting for a device that has nothing to do."""
    return (bench.per_op(bench.synchronize),)


def _item(bench: HostBench) -> Times:
    """Fetching one number from an idle device."""
    return (bench.per_op(torch.ones((), device=bench.group.device).item),)


def _copy(way: str, memory: str, size: int, bench: HostBench) -> Times:
    """The call alone: it is asked not to wait. Pageable memory makes it wait for its own copy all the same."""
    there = torch.randn(size // 4, device=bench.group.device)
    here = torch.randn(size // 4)
    if memory == "pinned" and bench.cuda:
        here = here.pin_memory()
    target, source = (there, here) if way == "h2d" else (here, there)
    return (bench.per_op(target.copy_, source, non_blocking=True),)
