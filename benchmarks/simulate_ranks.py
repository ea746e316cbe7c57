"""Simulates 16,384 ranks of one program in one process: seconds and peak memory, against the bars and a floor.

The program has 2,000 ops, each one launch and one kernel; 50 of the kernels are collectives over all ranks. Every rank has
its own host gaps and kernel durations. The floor is what no simulator can do without: reading those two arrays once and
writing an array of ends for each.

    python benchmarks/simulate_ranks.py [--ranks N] [--ops N] [--collectives N]
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

import numpy as np

from steptime._program.program import CallKind, Calls, Collective, Ops, Program, Stream, Thread, WorkKind, Works
from steptime._sim import LONG_AGO, Cohort, Nanoseconds, Timing
from steptime._sim.core.simulate import simulate

SECONDS_AT_MOST = 5.0
GIB_AT_MOST = 2.0


def peak_gib() -> float:
    """Highest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def program(ranks: int, ops: int, collectives: int) -> Program:
    rows = np.arange(ops)
    meets = np.zeros(ops, dtype=bool)
    meets[np.linspace(0, ops - 1, collectives, dtype=int)] = True
    none, never = np.full(ops, -1), np.full(ops, -1)
    calls = {"kind": np.full(ops, CallKind.LAUNCH), "api": rows * 0, "thread": rows * 0, "op": none, "step": rows * 0}
    calls |= {"start_ns": never, "end_ns": never, "stream": none, "awaits": none, "after": none}
    works = {"kind": np.where(meets, WorkKind.COLLECTIVE, WorkKind.KERNEL), "name": rows * 0, "stream": rows * 0, "call": rows}
    works |= {"step": rows * 0, "start_ns": never, "end_ns": never, "bytes": rows * 0}
    works |= {"collective": np.where(meets, np.cumsum(meets) - 1, -1)}
    everyone = tuple(range(ranks))
    return Program(
        rank=0,
        world_size=ranks,
        names=("op",),
        threads=(Thread(1, "main"),),
        streams=(Stream(7),),
        ops=Ops.from_columns({}),
        calls=Calls.from_columns(calls),
        works=Works.from_columns(works),
        collectives=tuple(Collective("all_reduce", "world", everyone, i) for i in range(int(meets.sum()))),
    )


def noisy(typical_ns: int, ops: int, ranks: int, rng: np.random.Generator) -> Nanoseconds:
    """Per op and rank, within a tenth of the typical time; drawn in integers, because float copies would be the peak memory."""
    return rng.integers(typical_ns * 9 // 10, typical_ns * 11 // 10, size=(ops, ranks, 1), dtype=np.int64)


def timing(ops: int, ranks: int) -> Timing:
    rng = np.random.default_rng(0)

    def same(value: int, rows: int = ops) -> Nanoseconds:
        return np.full((rows, 1, 1), value, dtype=np.int64)

    return Timing(
        gap_ns=noisy(5_000, ops, ranks, rng),
        call_ns=same(4_000),
        return_ns=same(2_000),
        latency_ns=same(1_500),
        spacing_ns=same(1_000),
        release_ns=same(1_500),
        duration_ns=noisy(9_000, ops, ranks, rng),
        waits=np.ones(ops, dtype=np.bool_),
        absent_ns=same(LONG_AGO),
        thread_start_ns=same(0, 1),
        stream_start_ns=same(0, 1),
    )


def floor_seconds(times: Timing) -> float:
    """One pass of plain NumPy over the inputs into ends of the same size, a row at a time like the simulator."""
    begin = time.perf_counter()
    for values in (times.gap_ns, times.duration_ns):
        ends = np.empty_like(values)
        for row in range(1, len(values)):
            np.add(values[row - 1], values[row], out=ends[row])
        del ends
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--ops", type=int, default=2_000)
    parser.add_argument("--collectives", type=int, default=50)
    asked = parser.parse_args()
    baseline = peak_gib()
    cohort = Cohort(
        program(asked.ranks, asked.ops, asked.collectives), tuple(range(asked.ranks)), timing(asked.ops, asked.ranks)
    )
    begin = time.perf_counter()
    timeline = simulate([cohort], keep="ends")
    seconds = time.perf_counter() - begin
    peak = peak_gib()
    floor = floor_seconds(cohort.timing)
    print(f"{asked.ranks:,} ranks x {asked.ops:,} ops, {asked.collectives} collectives: step {timeline.end_ns[0] / 1e6:.3f} ms")
    print(f"seconds          {seconds:6.2f}   bar {SECONDS_AT_MOST:.1f}   {'met' if seconds <= SECONDS_AT_MOST else 'MISSED'}")
    print(f"peak GiB         {peak:6.2f}   bar {GIB_AT_MOST:.1f}   {'met' if peak <= GIB_AT_MOST else 'MISSED'}")
    print(f"above import GiB {peak - baseline:6.2f}")
    print(f"floor seconds    {floor:6.2f}   ratio {seconds / floor:.1f}")


if __name__ == "__main__":
    main()
