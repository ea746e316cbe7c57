"""A change made to the cohorts of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from steptime._program.program import CallKind, WorkKind
from steptime._sim.core.timing import Cohort
from steptime._whatif.edits import (
    SYNCHRONISING,
    Mask,
    scaled_host,
    scaled_works,
    set_works,
    without_synchronisations,
    without_works,
)
from steptime._whatif.grammar import GRAPH, LEVEL, NO_OVERLAP, OVERLAP, PROFILER, REMOVE, SCALE, SET, Change, Target, error
from steptime._whatif.overlap import overlapped, waited_for
from steptime._whatif.targets import RANK, SYNC, Selection, menu, select

Cohorts = tuple[Cohort, ...]


def applied(change: Change, cohorts: Cohorts) -> Cohorts:
    """The cohorts with a change that needs no models."""
    target = change.target
    if target is None:
        if change.action == GRAPH:
            return tuple(_in_a_graph(cohort) for cohort in cohorts)
        if change.action == PROFILER:
            return cohorts  # what is predicted of a recording is without the profiler
        raise error(change.text, "needs models of the device; give --platform NAME")
    if target.kind == RANK:
        return _rank_changed(change, target, cohorts)
    selected = selections(change, cohorts)
    if change.action in (OVERLAP, NO_OVERLAP) and not any(_communicates(*each) for each in selected):
        kinds = sorted({each.kind for cohort in cohorts for each in cohort.program.collectives})
        raise error(
            change.text, f"only collectives overlap with computation; there is {', '.join(kinds) or 'none in this step'}"
        )
    return tuple(_changed(change, cohort, each) for cohort, each in selected)


def selections(change: Change, cohorts: Cohorts) -> list[tuple[Cohort, Selection]]:
    """What a change is about in every cohort; an error that says what there is where that is nothing."""
    target = change.target
    assert target is not None
    selected = [(cohort, select(cohort.program, target)) for cohort in cohorts]
    if all(each.empty for _, each in selected):
        what = f"nothing here is called {target.name!r}" if target.name else f"no {target} in this step"
        raise error(change.text, f"{what}; there is {menu(cohorts, target)}")
    return selected


def _communicates(cohort: Cohort, selected: Selection) -> bool:
    return bool((cohort.program.works.kind[selected.works] == WorkKind.COLLECTIVE).any())


def _changed(change: Change, cohort: Cohort, selected: Selection) -> Cohort:
    assert change.target is not None
    if change.action == SCALE:
        scaled = scaled_works(cohort, selected.works, change.amount)
        return scaled_host(scaled, selected.gaps, selected.calls, change.amount)
    if change.action == SET:
        return set_works(cohort, selected.works, change.amount)
    if change.action == REMOVE:
        if change.target.kind == SYNC:
            return without_synchronisations(cohort, selected.calls)
        return scaled_host(without_works(cohort, selected.works), selected.gaps, selected.calls, 0.0)
    communicating = selected.works & (cohort.program.works.kind == WorkKind.COLLECTIVE)
    return overlapped(cohort, communicating) if change.action == OVERLAP else waited_for(cohort, communicating)


def _in_a_graph(cohort: Cohort) -> Cohort:
    """All that a step launches is launched at once: no op costs the host anything but the ones in which it waits."""
    calls = cohort.program.calls
    waiting = np.isin(calls.kind, (*SYNCHRONISING, CallKind.BLOCKING_COPY))
    outside = np.isin(calls.kind, (CallKind.STEP_BEGIN, CallKind.STEP_END)) | waiting
    return scaled_host(cohort, ~outside, ~outside, 0.0)


def _rank_changed(change: Change, target: Target, cohorts: Cohorts) -> Cohorts:
    """One rank's host and kernels take so many times as long; `level`: as the median of the others do."""
    rank = int(target.name)
    if not any(rank in cohort.ranks for cohort in cohorts):
        raise error(change.text, f"no rank {rank} in this step; there is {menu(cohorts, target)}")
    device = host = change.amount
    if change.action == LEVEL:
        device, host = _level(change, rank, cohorts)
    return tuple(_of_rank(cohort, rank, device, host) for cohort in cohorts)


def _level(change: Change, rank: int, cohorts: Cohorts) -> tuple[float, float]:
    """What brings a rank's kernels and its host to the median of the other ranks'."""
    totals: dict[int, tuple[float, float]] = {}
    for cohort in cohorts:
        kernels = cohort.program.works.kind != WorkKind.COLLECTIVE
        for index, each in enumerate(cohort.ranks):
            timing = cohort.timing.of_ranks(index, index + 1)
            host_ns = timing.gap_ns[:, 0, 0].sum() + timing.call_ns[:, 0, 0].sum()
            totals[each] = float(timing.duration_ns[kernels, 0, 0].sum()), float(host_ns)
    others = np.array([total for each, total in totals.items() if each != rank])
    if not len(others):
        raise error(change.text, "there is no other rank to be level with")
    device, host = np.median(others, axis=0) / np.maximum(totals[rank], 1.0)
    return float(device), float(host)


def _of_rank(cohort: Cohort, rank: int, device: float, host: float) -> Cohort:
    if rank not in cohort.ranks:
        return cohort
    timing, count = cohort.timing, len(cohort.ranks)
    mine = np.array(cohort.ranks)[None, :, None] == rank
    kernels = (cohort.program.works.kind != WorkKind.COLLECTIVE)[:, None, None]

    def changed(name: str, factor: float, rows: Mask | bool = True) -> None:
        values = getattr(timing, name)
        each = np.broadcast_to(values, (len(values), count, values.shape[2]))
        changes[name] = np.rint(np.where(mine & rows, each * factor, each)).astype(np.int64)

    changes: dict[str, Any] = {}
    changed("gap_ns", host)
    changed("call_ns", host)
    changed("duration_ns", device, kernels)
    return replace(cohort, timing=replace(timing, **changes))
