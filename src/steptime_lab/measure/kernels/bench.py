"""Runs cases in batches: once unrecorded, then cold and producer-warm repeats in rounds under one profile per batch.

Two sentinels run in every batch: when they drift, the device is not what it was, and the batch is run again. A sample of the
calls is timed with CUDA events too, queued back to back behind a kernel that waits.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from steptime._calibrate.harness.clock import Clock, clock_of
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import Progress, Session, Setting
from steptime._models.kernels.call import Call, TensorArg
from steptime._units import NS_PER_MS
from steptime.errors import InputError
from steptime_lab.measure.device_profile import (
    COLD,
    WARM,
    MarkersError,
    Segment,
    batches_of,
    busy_ns,
    profile_on,
    skip_failed,
    told_by,
)
from steptime_lab.measure.kernels.cases import RECURRENT_OPS, KernelCase, draw_of
from steptime_lab.measure.op_calls import Arena, DoesNotFitError, PreparedCall, torch_dtype
from steptime_lab.measure.restarts import AvoidList
from steptime_lab.measurements.sets import KERNELS

_SQUARE, _HALVES = (4096, 4096), "bfloat16"
# One for the SM clock, one for memory; large enough that launching is no part of them.
CALLS = (
    Call("aten::mm.default", (TensorArg(_SQUARE, _HALVES), TensorArg(_SQUARE, _HALVES))),
    Call("aten::copy_.default", (TensorArg((1 << 26,)), TensorArg((1 << 26,))), written=()),
)
# Drift beyond these gets a batch run again. The product follows the power that its neighbours draw; the copy does not.
_LIMITS = (0.03, 0.01)
# Batches before there is something to compare with.
_FIRST = 3


class Sentinels:
    """Compares each batch's sentinels with the medians of all batches so far."""

    def __init__(self) -> None:
        self.repeated = 0
        self.worst = [0.0] * len(CALLS)
        self._times: list[list[float]] = [[] for _ in CALLS]

    def drifted(self, times_ns: list[list[float]]) -> bool:
        """Whether a batch with these times of its sentinels (one list per call) was measured on a device that had changed."""
        far = False
        for index, (item, limit) in enumerate(zip(times_ns, _LIMITS, strict=True)):
            if not item:
                continue
            known, now = self._times[index], median(item)
            if len(known) >= _FIRST:
                drift = now / median(known) - 1
                self.worst[index] = max(self.worst[index], drift, key=abs)
                far = far or abs(drift) > limit
            known.append(now)
        return far

    def said(self) -> str:
        """One line for the end of a run; empty where nothing was compared."""
        if not any(self.worst):
            return ""
        product, copy = (f"{100 * worst:+.1f} %" for worst in self.worst)
        return f"sentinels: product at most {product} off, copy {copy}; {self.repeated} batches run again"


def row_of(case: KernelCase, cache: str, repeats: Sequence[Segment], setting: Setting) -> dict[str, Any] | None:
    """The row of a case in one cache state; nothing where the op launched nothing."""
    told = told_by(repeats)
    if told is None:
        return None
    busy = float(np.median([busy_ns(segment) for segment in repeats if segment]))
    return {**case.asked(), "cache": cache, "share": setting.share, "others": setting.others, "busy_ns": busy, **told}


# Calls per profile; times six runs. More make parsing wait, fewer make starting and stopping the profiler cost.
BATCH = 400
# What the index tensors and masks of one batch may take, of the arena's size.
_FIXED_SHARE = 0.25

# A call that takes longer than so many seconds is repeated at most so often.
_FEWER_REPEATS = ((0.030, 1), (0.003, 2))


# An op that launches hundreds of kernels on several streams is held back until the host is through: in a step the host is
# ahead, and what runs side by side there would otherwise wait for launches here.
_MOST_HELD_S = 0.01
_CYCLES_PER_S = 2e9  # of the SM clock, about

# First runs of one op may take such a share of the time: cuDNN plans some calls for longer than all others take to run.
_FIRST_RUNS_SHARE, _LEAST_FIRST_RUNS_S = 0.06, 10.0
_OF_FEW = 0.8


@dataclass
class _ReadyCall:
    """A case that ran, with its repeats so far."""

    case: KernelCase
    prepared: PreparedCall
    repeats: int
    cycles: int = 1  # that the device waits before each run
    segments: dict[str, list[Segment]] = field(default_factory=lambda: {COLD: [], WARM: []})


class KernelBench:
    """Measures batches of cases on one rank. `rows` leave through `measure`; keeping them is the caller's matter."""

    def __init__(self, group: Group, session: Session, arena: Arena, progress: Progress) -> None:
        self.group = group
        self._session = session
        self._arena = arena
        self._progress = progress
        self._marker = AvoidList(session.folder, "kernels").marker(session.rank)
        self._sentinels = Sentinels()
        self._warned: set[str] = set()
        self._first_runs_s: defaultdict[str, float] = defaultdict(float)
        self._first_runs_limit_s = max(_LEAST_FIRST_RUNS_S, _FIRST_RUNS_SHARE * session.budget.left_s())
        self._flags: tuple[bool, bool] | None = None

    def batches(self, cases: Sequence[KernelCase]) -> Iterator[list[KernelCase]]:
        """Cut by count and by the bytes of what is drawn per case: the same on every rank."""
        ops = {case.call.op for case in cases}
        if ops:
            # Where few ops are asked, there is nobody whose time they could take.
            self._first_runs_limit_s = max(self._first_runs_limit_s, _OF_FEW * self._session.budget.left_s() / len(ops))
        return batches_of(cases, _fixed_bytes, BATCH, _FIXED_SHARE * self._arena.nbytes)

    def measure(self, batch: Sequence[KernelCase], setting: Setting) -> list[tuple[KernelCase, dict[str, Any]]]:
        """The rows of a batch: up to two for every case that runs."""
        ready = [item for item in (self._prepare(case, setting) for case in batch) if item is not None]
        self._marker.begin("")
        if not self._profiled(ready, setting):
            self._progress.skip("the profile lost records", len(ready))
            return []
        rows = []
        for item in ready:
            results = [row_of(item.case, cache, runs, setting) for cache, runs in item.segments.items() if runs]
            rows += [(item.case, row) for row in results if row is not None]
            if any(results):
                self._progress.step()
            else:
                self._progress.skip("launches nothing on the device")
        return rows

    def alone(self) -> KernelBench:
        """The same, not waiting for other ranks."""
        return KernelBench(replace(self.group, ranks=1), self._session, self._arena, self._progress)

    def close(self) -> None:
        """Nothing is measured any more."""
        self._marker.end()
        if self._sentinels.said() and self.group.rank == 0:
            print(self._sentinels.said(), file=sys.stderr, flush=True)

    def prepare(self, case: KernelCase) -> PreparedCall:
        """A case ready to run under its own settings."""
        self._set_flags(case)
        return PreparedCall(case.call, self._arena)

    def _prepare(self, case: KernelCase, setting: Setting) -> _ReadyCall | None:
        """Runs a case once, or twice where it was slow: plans are made and code is loaded at the first run."""
        if self._first_runs_s[case.call.op] > self._first_runs_limit_s:
            self._progress.skip("its op takes too long to plan")
            return None
        self._marker.begin(case.text)
        try:
            prepared = self.prepare(case)
            took_s = self._first_run(prepared)
            self._first_runs_s[case.call.op] += took_s
            if took_s > _FEWER_REPEATS[-1][0]:
                took_s = self._first_run(prepared)
        except (RuntimeError, TypeError, ValueError, IndexError, InputError, NotImplementedError, AttributeError) as error:
            self._failed(case, error)
            return None
        repeats = next((few for limit_s, few in _FEWER_REPEATS if took_s > limit_s), setting.repeats)
        held_s = min(took_s, _MOST_HELD_S) if case.call.op in RECURRENT_OPS else 0.0
        return _ReadyCall(case, prepared, min(repeats, setting.repeats), max(1, int(_CYCLES_PER_S * held_s)))

    def _first_run(self, prepared: PreparedCall) -> float:
        start = time.perf_counter()
        prepared.run()
        self.group.synchronize()
        return time.perf_counter() - start

    def _failed(self, case: KernelCase, error: Exception) -> None:
        if isinstance(error, DoesNotFitError):
            self._progress.skip(str(error))
            return
        reason = skip_failed(self.group, self._progress, error, case.text[:200])
        if reason and case.call.op not in self._warned:
            self._warned.add(case.call.op)
            self._session.warn(f"{case.call.op} failed: {reason}")

    def _profiled(self, ready: Sequence[_ReadyCall], setting: Setting) -> bool:
        """Profiles a batch, a second time where records were lost or the device had changed; whether there are records."""
        watched = self._watched(setting)
        for last in (False, True):
            for item in ready:
                item.segments = {COLD: [], WARM: []}
            self._arena.refill()
            gc.collect()
            if not last:
                self.group.barrier()
            gc.disable()
            try:
                self._profile([*ready, *watched], setting)
            except MarkersError as error:
                # Run again by one of several ranks, it would run beside others that are elsewhere.
                dropped = last or self.group.ranks > 1
                self._session.warn(f"a batch of {len(ready)} calls is {'dropped' if dropped else 'run again'}: {error}")
                if dropped:
                    return False
                continue
            finally:
                gc.enable()
            times = [[float(sum(work.duration_ns for work in run)) for run in item.segments[COLD]] for item in watched]
            # Ranks that measure together would lose step.
            if not watched or not self._sentinels.drifted(times) or last or self.group.ranks > 1:
                return True
            self._sentinels.repeated += 1
            watched = self._watched(setting)
        return False

    def _watched(self, setting: Setting) -> list[_ReadyCall]:
        """The sentinels of a batch; a CPU is too unsteady for any."""
        if self.group.device.type != "cuda":
            return []
        result = [KernelCase(call, call.to_json(), "", "") for call in CALLS]
        try:
            return [_ReadyCall(case, PreparedCall(case.call, self._arena), setting.repeats) for case in result]
        except DoesNotFitError:
            return []

    def _profile(self, ready: Sequence[_ReadyCall], setting: Setting) -> None:
        random = np.random.default_rng([setting.seed, len(ready)])
        issued: list[tuple[_ReadyCall, str] | None] = []
        with profile_on(self.group.device) as profile:
            for repeat in range(max((item.repeats for item in ready), default=0)):
                # A whole round lies between two repeats of a call, so what it keeps (index tensors) has left the caches.
                for cache in (COLD, WARM):
                    for index in random.permutation(len(ready)):
                        item = ready[index]
                        if repeat < item.repeats and (cache == COLD or (item.case.warm and item.prepared.can_be_warm)):
                            issued += self._run(item, cache, profile.mark)
        for segment, owner in zip(profile.segments(), issued, strict=True):
            if owner is not None:
                owner[0].segments[owner[1]].append(segment)

    def _run(self, one: _ReadyCall, cache: str, mark: Any) -> list[tuple[_ReadyCall, str] | None]:
        """Issues one run; says for every segment it marked whose it is (nobody's: the producer's)."""
        prepared = one.prepared
        self._set_flags(one.case)
        args, kwargs = prepared.fresh()
        owners: list[tuple[_ReadyCall, str] | None] = []
        try:
            if cache == WARM:
                mark("producer")
                owners.append(None)
                prepared.produce(args)
            mark(prepared.call.op, one.cycles)
            owners.append((one, cache))
            prepared.op(*args, **kwargs)
        except RuntimeError:
            # It ran before, so this is memory; what was launched is not a whole run.
            owners[-1] = None
        return owners

    def _set_flags(self, case: KernelCase) -> None:
        flags = (case.tf32, case.benchmark)
        if flags != self._flags:
            torch.backends.cuda.matmul.allow_tf32 = case.tf32
            torch.backends.cudnn.allow_tf32 = case.tf32
            torch.backends.cudnn.benchmark = case.benchmark
            self._flags = flags


def _fixed_bytes(case: KernelCase) -> int:
    return sum(tensor.nbytes for tensor in case.call.tensors() if not _is_floating(tensor.dtype))


def _is_floating(name: str) -> bool:
    try:
        return torch_dtype(name).is_floating_point
    except TypeError:
        return False


# Of the calls long enough that the gaps between launches do not matter.
SAMPLE = 0.03
_LONG_ENOUGH_NS = 20_000
# What fits the launch queue (about 1,024) with room for launches nobody counted.
_LAUNCHES = 600
_MOST_RUNS = 30
_LONGEST_WAIT_NS = 50 * NS_PER_MS


@dataclass
class Sample:
    """Rows kept back until the process profiles no more; then their calls are timed with events too."""

    enabled: bool = True
    held: list[tuple[KernelCase, dict[str, Any]]] = field(default_factory=list)

    def keeps(self, case: KernelCase, row: dict[str, Any]) -> bool:
        """Takes the row where it belongs to the sample."""
        if not self.enabled or row["cache"] != COLD or float(np.median(row["times_ns"])) < _LONG_ENOUGH_NS:
            return False
        # A copy that the host waits for cannot be queued.
        on_device = all(tensor.device == "device" for tensor in case.call.tensors())
        if not on_device or draw_of(case.text, "events") >= SAMPLE:
            return False
        self.held.append((case, row))
        return True

    def release(self, bench: KernelBench, session: Session, *, at_least_s: float = 1.0) -> None:
        """Times what is held, stores it and says how far the two ways of timing lie apart."""
        ratios, clock = [], clock_of(bench.group)
        for case, row in self.held:
            if session.budget.left_s() > at_least_s:
                try:
                    row["event_ns"] = event_ns(bench.prepare(case), len(row["kernel_ns"]), clock)
                    ratios.append(row["event_ns"] / float(np.median(row["times_ns"])))
                except RuntimeError as error:
                    session.warn(f"{case.call.op} could not be timed with events: {str(error).splitlines()[0]}")
            session.store.add(KERNELS, row)
        self.held.clear()
        session.store.flush()
        if ratios and session.rank == 0:
            print(said(ratios), file=sys.stderr, flush=True)


def said(ratios: Sequence[float]) -> str:
    """One line about how events compare with kernel records."""
    low, middle, high = np.quantile(np.asarray(ratios), (0.1, 0.5, 0.9))
    return f"CUDA events / kernel records: median {middle:.3f} (10-90 %: {low:.3f}-{high:.3f}) over {len(ratios)} calls"


def event_ns(prepared: PreparedCall, kernels: int, clock: Clock) -> float:
    """Time per run of several in a row, each on memory of its own, so cold."""
    runs = max(3, min(_MOST_RUNS, _LAUNCHES // max(1, kernels)))
    prepared.run()
    clock.wait(clock.mark())
    start_ns = time.perf_counter_ns()
    prepared.run()
    issue_ns = time.perf_counter_ns() - start_ns
    clock.wait(clock.mark())
    # The host is ahead before the first run starts: what is timed is the device alone.
    clock.run_ahead(min(_LONGEST_WAIT_NS, NS_PER_MS + 2.0 * runs * issue_ns))
    first = clock.mark()
    for _ in range(runs):
        prepared.run()
    last = clock.mark()
    clock.wait(last)
    return clock.between_ns(first, last) / runs
