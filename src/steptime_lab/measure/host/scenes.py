"""What only a profiler sees: when a kernel starts after its launch, how close kernels follow, when a wait returns."""

from __future__ import annotations

import torch

from steptime._calibrate.host.bench import HostBench
from steptime_lab.measure.host.launches import GATE_CYCLES, QUEUED
from steptime_lab.measure.host.marked_bench import CUDA
from steptime_lab.measure.host.recording import Recording, around_launches, gaps, recording

REPEATS = 50


def scenes(bench: HostBench, mode: str) -> dict[str, list[float]]:
    """Kind -> times; empty where there is no device to look at."""
    if not bench.cuda or mode not in ("cuda", "cpu_cuda"):
        return {}
    x = torch.randn(256, device=bench.group.device)
    out = torch.empty_like(x)
    with recording(mode, read=True) as idle:
        for _ in range(REPEATS):
            torch.neg(x, out=out)
            bench.synchronize()
    with recording(mode, read=True) as queued:
        CUDA._sleep(GATE_CYCLES)
        for _ in range(QUEUED):
            torch.neg(x, out=out)
        bench.synchronize()
    return read_scenes(idle, queued)


def read_scenes(idle: Recording, queued: Recording) -> dict[str, list[float]]:
    """Times by kind from launches on an idle device and from kernels behind a gate; kinds without any are left out."""
    result = {
        **around_launches(idle),
        "kernel_gap": gaps(queued),
        "kernel_duration": [float(e.duration_ns()) for e in idle.device],
    }
    return {kind: times for kind, times in result.items() if times}
