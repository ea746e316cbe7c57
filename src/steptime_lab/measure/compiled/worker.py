"""One process of one case: `python -m steptime_lab.measure.compiled.worker PLAN`, started by the job.

Makes the step eager and compiled, says that it is ready, waits for its turn, times both in turns, then profiles one step each.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from steptime._calibrate.device.meter import Meter
from steptime._calibrate.harness.conditions import gpus
from steptime._calibrate.harness.group import Group, join, no_collector
from steptime_lab.measure.compiled import FORMS, WITH
from steptime_lab.measure.compiled.kernels import NOTHING, profiled
from steptime_lab.workloads.compiled import CompiledCase, cases, host_cases

# Collectives take long and vary little from round to round; of tiny steps there are many.
_ROUNDS, _FEW_ROUNDS = 10, 6
# A round takes so long at least, after steps that fill the queues; so many at most.
_ROUND_S, _LEAD_S, _MOST = 0.08, 0.02, 400
# Before it is timed a form runs so long, until clocks and caches are as they stay.
_WARM_S = 0.25
# Graphs are recorded in the second or third call.
_FIRST_STEPS = 5
# Of one process; a case of one rank is timed on the first cores and made on any.
_CORES = 4
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h

Step = Callable[[], None]


def main(plan: dict[str, Any]) -> None:
    """The case of a plan."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    case, group, small = {**cases(), **host_cases()}[plan["case"]], join(), bool(plan["small"])
    with _benchmarks_alone(Path(plan["locks"])):
        rows, steps = _prepared(case, group, small)
        group.barrier()
        _my_turn(Path(plan["folder"]), case.name, group)
        if group.ranks == 1:
            _onto_few_cores()
        with no_collector():
            _time(rows, steps, group, _ROUNDS if case.profiled and group.ranks == 1 else _FEW_ROUNDS)
        for form, step in steps.items():
            rows[form] |= profiled(step, group) if case.profiled else NOTHING
    if group.rank == 0:
        _write(Path(plan["folder"]) / f"{case.name}.json", rows)
    group.barrier()
    sys.stdout.flush()
    # Process groups and CUDA graphs take seconds to be taken apart, in the way of the next case.
    os._exit(0)


def _prepared(case: CompiledCase, group: Group, small: bool) -> tuple[dict[str, dict[str, Any]], dict[str, Step]]:
    """Both forms with their first steps behind them, and what is known of their memory."""
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for form in FORMS:
        left = _let_go(group)
        begun_s = time.perf_counter()
        step = case.build(group.device.type, group.rank, group.ranks, compiled=form == WITH, small=small)
        for _ in range(_FIRST_STEPS):
            step()
        group.synchronize()
        taken_s = time.perf_counter() - begun_s
        if group.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step()
        group.synchronize()
        cuda = group.device.type == "cuda"
        rows[form] = {
            "name": case.name, "form": form, "architecture": case.architecture, "precision": case.precision,
            "optimizer": case.optimizer, "mode": case.mode, "what": case.what, "layers": case.layers, "ranks": case.ranks,
            "share": group.ranks, "prepare_s": taken_s, "left_bytes": left, "counters": _counters() if form == WITH else None,
            "allocated_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
            "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else 0,
        }  # fmt: skip
        steps[form] = step
    if group.device.type == "cuda":
        torch.cuda.empty_cache()  # for the others of the wave
    return rows, steps


def _let_go(group: Group) -> int:
    """Bytes that are still allocated once libraries have given back their workspaces."""
    gc.collect()
    group.synchronize()
    if group.device.type != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated())


def _counters() -> str:
    from torch._dynamo.utils import counters

    kept = ("stats", "graph_break", "inductor", "frames")
    return json.dumps({name: dict(counters[name]) for name in kept if counters.get(name)}, default=str)


def _my_turn(folder: Path, name: str, group: Group) -> None:
    """Says that all ranks are ready, and waits to be called."""
    if group.rank == 0:
        (folder / f"{name}.ready").touch()
        while not (folder / f"{name}.go").exists():
            time.sleep(0.01)
    group.decide(1)


def _onto_few_cores() -> None:
    """All threads of this process to the first cores, as a rank that is alone on a part of its host."""
    cores = sorted(os.sched_getaffinity(0))[:_CORES]
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # one that has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


def _time(rows: dict[str, dict[str, Any]], steps: dict[str, Step], group: Group, rounds: int) -> None:
    """Rounds of the two forms in turns; what the card did meanwhile."""
    cuda = group.device.type == "cuda"
    meter = Meter(gpus()[0]["uuid"]) if cuda else Meter("none")
    with meter.watching() as watch:
        counts = {form: _count(step, group) for form, step in steps.items()}
        begun_s = time.perf_counter()
        times: dict[str, list[float]] = {form: [] for form in FORMS}
        for turn in range(rounds):
            for form in FORMS if turn % 2 else reversed(FORMS):
                mine = _round_ns(steps[form], counts[form], group)
                times[form].append(max(group.gather(mine)))
        drawn = watch.between(begun_s, time.perf_counter())
    for form in FORMS:
        rows[form] |= {
            "times_ns": times[form], "steps_per_time": counts[form], "power_w": drawn.power_w,
            "clock_mhz": None if drawn.clock_hz is None else drawn.clock_hz / 1e6, "temperature_c": drawn.temperature_c,
            "capped": drawn.capped, "limit_w": meter.limit_w, "uuid": meter.uuid,
        }  # fmt: skip


def _count(step: Step, group: Group) -> int:
    """Steps of a round, after a warm-up."""
    ends_s, taken = time.perf_counter() + _WARM_S, []
    more = 1
    while more:
        taken.append(_round_ns(step, 3, group))
        more = group.decide(int(time.perf_counter() < ends_s))
    return group.decide(max(4, min(_MOST, round(_ROUND_S * 1e9 / statistics.median(taken)))))


def _round_ns(step: Step, count: int, group: Group) -> float:
    """Nanoseconds of a step: so many that nobody waits for, behind some that fill the queues."""
    group.barrier()
    for _ in range(max(1, round(count * _LEAD_S / _ROUND_S))):
        step()
    if group.device.type != "cuda":
        begun_s = time.perf_counter()
        for _ in range(count):
            step()
        return 1e9 * (time.perf_counter() - begun_s) / count
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(count):
        step()
    last.record()
    last.synchronize()
    return float(1e6 * first.elapsed_time(last) / count)


@contextmanager
def _benchmarks_alone(file: Path) -> Iterator[None]:
    """What Inductor times in order to choose runs while no other process of the wave times something."""
    from torch._inductor.runtime import benchmarking

    kind = type(benchmarking.benchmarker)
    timed = getattr(kind, "benchmark_gpu", None)
    if timed is None:
        yield
        return

    held = False

    def alone(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal held
        if held:
            return timed(self, *arguments, **options)
        with file.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            held = True
            try:
                return timed(self, *arguments, **options)
            finally:
                held = False

    kind.benchmark_gpu = alone  # type: ignore[method-assign]
    yield


def _write(file: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(rows), encoding="utf-8")
    part.rename(file)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
