"""What passes between kernels that wait for each other, without a profiler: periods less what the profiler says they take.

    python benchmarks/h200/gaps.py

Chains of kernels that each read what the one before wrote, behind one that holds the GPU until all are enqueued; launched one
by one and as one CUDA graph. Durations are the profiler's, of the same chain. Of products of 4,096 it says nothing: they run at
another clock while they are profiled.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity, profile

Kernel = Callable[[int], object]
_LENGTH, _REPEATS, _HOLD_CYCLES = 200, 5, 20_000_000
_FLOATS_OF_MIB = (1 << 20) // 4


def _floats(mib: float) -> torch.Tensor:
    return torch.randn(int(mib * _FLOATS_OF_MIB), device="cuda")


def _chains() -> Iterator[tuple[str, Kernel]]:
    """By name, what the kernel at a place of the chain is."""
    for mib in (0.01, 1, 4, 16, 24, 32, 48, 64, 256):
        x, y = _floats(mib), _floats(mib)
        yield f"add {mib} MiB", lambda at, x=x, y=y: torch.add(x, 1.0, out=y) if at % 2 else torch.add(y, 1.0, out=x)
    for side in (256, 1024, 2048, 4096):
        a, b, c = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) * 0.01 for _ in range(3))
        yield f"mm {side}", lambda at, a=a, b=b, c=c: torch.mm(a, b, out=c) if at % 2 else torch.mm(c, b, out=a)
        yield f"mm, add {side}", lambda at, a=a, b=b, c=c: torch.mm(a, b, out=c) if at % 2 else torch.add(c, 1.0, out=a)
    for rows in (1024, 16384, 65536):
        x, y = (torch.randn(rows, 1024, device="cuda") for _ in range(2))
        yield f"softmax, add {rows}", lambda at, x=x, y=y: torch.softmax(x, -1, out=y) if at % 2 else torch.add(y, 1.0, out=x)
    yield from _large_beside_small()


def _large_beside_small() -> Iterator[tuple[str, Kernel]]:
    """Kernels that only write or only read, alone and in turns with tiny ones."""
    large, middle, tiny = _floats(256), _floats(32), _floats(0.004)
    rows, sums = large.view(1 << 16, 1 << 10), torch.zeros(1 << 16, device="cuda")
    yield "fill 256 MiB", lambda _: large.fill_(1.0)
    yield "fill 32 MiB", lambda _: middle.fill_(1.0)
    yield "sum rows 256 MiB", lambda _: torch.sum(rows, -1, out=sums)
    yield "sum rows 256 MiB, tiny", lambda at: torch.sum(rows, -1, out=sums) if at % 2 else tiny.add_(1.0)
    yield "fill 256 MiB, tiny", lambda at: large.fill_(1.0) if at % 2 else tiny.add_(1.0)


def _period_us(run: Callable[[], None]) -> float:
    times = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        torch.cuda._sleep(_HOLD_CYCLES)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / _LENGTH)
    return statistics.median(times)


def _profiled_us(run: Callable[[], None]) -> tuple[float, float]:
    """Mean duration of the chain's kernels and mean gap between them, by the profiler."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        torch.cuda._sleep(_HOLD_CYCLES)
        run()
        torch.cuda.synchronize()
    events = [event for event in found.profiler.kineto_results.events() if "CUDA" in str(event.device_type())]
    spans = sorted((event.start_ns(), event.start_ns() + event.duration_ns()) for event in events if event.duration_ns() > 0)
    spans = spans[-_LENGTH:]
    gaps = [after[0] - before[1] for before, after in pairwise(spans)]
    return statistics.fmean(end - start for start, end in spans) / 1e3, statistics.fmean(gaps) / 1e3


def main() -> None:
    """Measures all chains."""
    for name, kernel in _chains():

        def run(kernel: Kernel = kernel) -> None:
            for place in range(_LENGTH):
                kernel(place)

        run()
        launched, (duration, profiled) = _period_us(run), _profiled_us(run)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replayed, (within, _) = _period_us(graph.replay), _profiled_us(graph.replay)
        print(
            f"{name:24s} {duration:8.2f} us each, {launched - duration:5.2f} between ({profiled:5.2f} profiled), "
            f"in a graph {replayed - within:5.2f}"
        )


if __name__ == "__main__":
    main()
