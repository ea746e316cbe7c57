"""How long a step takes when steps follow each other without a pause: the period of the repeated window.

What carries over from window to window: the clocks of the host threads, the streams, the launch queue, and waits still open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._program.queues import QUEUE_DEPTH
from steptime._sim.core.schedule import find_schedule
from steptime._sim.core.sections import Sectioned, SectionLayout
from steptime._sim.core.simulate import Departures, Playback
from steptime._sim.core.timing import Cohort, Nanoseconds, Timeline
from steptime._units import LONG_AGO

# Longest cycle of increments looked for, in windows.
LONGEST_CYCLE = 8
# Long steps that are laid out from samples: the last of so many windows is as the next one to a thousandth.
_SECTION_WINDOWS = 3


@dataclass(frozen=True, eq=False)
class Steady:
    """The steady state of a repeated window."""

    period_ns: npt.NDArray[np.float64]  # (scenario,): time per step
    first_ns: Nanoseconds  # (scenario,): the first step, from empty queues
    timeline: Timeline  # the last window played; its timings start where the window before left off
    iterations: int
    converged: bool  # whether every scenario repeated exactly


def steady(
    cohorts: Sequence[Cohort],
    *,
    queue_depth: int | None = QUEUE_DEPTH,
    iterations_at_most: int = 64,
    departures: Departures | None = None,
) -> Steady:
    """Repeat the window, all ranks starting together with empty queues, until it repeats itself."""
    layouts = _laid_out(cohorts, departures)
    if layouts:
        step = Sectioned(cohorts, layouts)
        fronts, cycle = _sections_repeated(step, iterations_at_most)
        first, period = np.asarray(fronts[0].max(axis=0), dtype=np.int64), _period(fronts, cycle)
        return Steady(period, first, step.timeline(period, queue_depth), len(fronts), bool(cycle.all()))
    idle = [_idle(cohort) for cohort in cohorts]
    playback = Playback(idle, find_schedule(idle, queue_depth=queue_depth, repeated=True), departures)
    history = [_History(playback, number) for number in range(len(idle))]
    playback.play(continued=False)
    first = _first_step(playback)
    fronts = [_fronts(playback)]
    cycle = np.zeros(playback.scenarios, dtype=np.int64)
    while not cycle.all() and len(fronts) < max(iterations_at_most, 1):
        for of_cohort in history:
            of_cohort.carry_over()
        playback.play(continued=True)
        fronts.append(_fronts(playback))
        cycle = _cycle(fronts)
    period = _period(fronts, cycle) / max(1, *(len(cohort.program.steps) for cohort in cohorts))
    return Steady(period, first, _last_window(playback, history, queue_depth), len(fronts), bool(cycle.all()))


def play_again(timeline: Timeline, cohorts: Sequence[Cohort]) -> Steady:
    """Play what a timeline shows with other durations."""
    return steady(cohorts, queue_depth=timeline.queue_depth)


def steady_period(cohorts: Sequence[Cohort], *, iterations_at_most: int = 64) -> npt.NDArray[np.float64]:
    """The period alone, per scenario: of many scenarios of a long step a timeline is most of the work."""
    layouts = _laid_out(cohorts, None)
    if not layouts:
        return steady(cohorts, iterations_at_most=iterations_at_most).period_ns
    return _period(*_sections_repeated(Sectioned(cohorts, layouts, timeline=False), iterations_at_most))


def _laid_out(cohorts: Sequence[Cohort], departures: Departures | None) -> list[SectionLayout]:
    """How all cohorts were laid out from samples; empty where one was not, or where ranks leave exchanges one at a time."""
    layouts = [SectionLayout.of(cohort) for cohort in cohorts] if departures is None else [None]
    known = [layout for layout in layouts if layout is not None]
    return known if len(known) == len(layouts) else []


def _sections_repeated(step: Sectioned, iterations_at_most: int) -> tuple[list[Nanoseconds], npt.NDArray[np.int64]]:
    """Fronts of all windows that were played, and the cycle of each scenario."""
    step.play()
    fronts = [step.lanes]
    cycle = np.zeros(step.scenarios, dtype=np.int64)
    while not cycle.all() and len(fronts) < min(max(iterations_at_most, 1), _SECTION_WINDOWS):
        step.play()
        fronts.append(step.lanes)
        cycle = _cycle(fronts)
    return fronts, cycle


def _idle(cohort: Cohort) -> Cohort:
    """The cohort without what holds at one absolute time only: backlog, absent peers' arrivals, clocks."""
    timing, program = cohort.timing, cohort.program
    backlog = program.works.call < 0
    if backlog.any():
        timing = replace(
            timing,
            duration_ns=np.where(backlog[:, None, None], 0, timing.duration_ns),
            spacing_ns=np.where(backlog[:, None, None], 0, timing.spacing_ns),
            waits=timing.waits & ~backlog,
        )
    timing = replace(
        timing,
        absent_ns=np.full((len(program.works), 1, 1), LONG_AGO, dtype=np.int64),
        thread_start_ns=np.zeros((len(program.threads), 1, 1), dtype=np.int64),
        stream_start_ns=np.zeros((len(program.streams), 1, 1), dtype=np.int64),
    )
    return replace(cohort, timing=timing)


class _History:
    """Ends of one cohort in earlier windows, as far as later ones ask for them."""

    def __init__(self, playback: Playback, cohort: int) -> None:
        self.graph = playback.graphs[cohort]
        self.ends = playback.ends[cohort]
        self.opened = self.ends[self.graph.opening]
        self.rows, self.row_of = np.unique(self.graph.carried_from, return_inverse=True)
        self.windows: deque[Nanoseconds] = deque(maxlen=int(self.graph.carried_back.max(initial=1)))

    def carry_over(self) -> None:
        """End this window and open the next where its lanes left off."""
        graph = self.graph
        self.windows.appendleft(self.ends[self.rows])
        for back in range(1, len(self.windows) + 1):
            chosen = np.flatnonzero(graph.carried_back == back)
            self.ends[graph.carried_row + chosen] = self.windows[back - 1][self.row_of[chosen]]
        self.ends[graph.opening] = self.ends[graph.stop - 1]
        self.opened = self.ends[graph.opening]


def _fronts(playback: Playback) -> Nanoseconds:
    """How far every lane of every rank has come: (lane and rank, scenario)."""
    fronts = [
        playback.ends[number][graph.stop - 1].reshape(-1, playback.scenarios) for number, graph in playback.graphs.items()
    ]
    return np.concatenate(fronts)


def _first_step(playback: Playback) -> Nanoseconds:
    """The end of the window's first step."""
    latest = np.zeros(playback.scenarios, dtype=np.int64)
    for number, cohort in enumerate(playback.cohorts):
        graph, ends, program = playback.graphs[number], playback.ends[number], cohort.program
        many = len(program.steps) > 1
        for rows, step in ((graph.call_row, program.calls.step), (graph.work_row, program.works.step)):
            chosen = rows[step == program.steps[0]] if many else rows
            latest = np.maximum(latest, ends[chosen].max(axis=(0, 1), initial=0))
    return latest


def _cycle(fronts: Sequence[Nanoseconds]) -> npt.NDArray[np.int64]:
    """Per scenario: the shortest cycle after which all lanes advanced as they did the cycle before; 0 if none."""
    result = np.zeros(fronts[0].shape[1], dtype=np.int64)
    for cycle in range(1, LONGEST_CYCLE + 1):
        compared = max(cycle, 2)  # one repetition of a single increment may be chance
        if len(fronts) < cycle + compared + 1:
            break
        recent = np.diff(np.stack(fronts[-(cycle + compared + 1) :]), axis=0)
        same = (recent[cycle:] == recent[:compared]).all(axis=(0, 1))
        result = np.where((result == 0) & same, cycle, result)
    return result


def _period(fronts: Sequence[Nanoseconds], cycle: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Per scenario: time per window of the slowest lane, over its cycle; over the second half where none was found.

    The slowest lane, not the latest: a backlog on the device can hide for many windows that the host is slower.
    """
    back = np.where(cycle > 0, cycle, max(1, (len(fronts) - 1) // 2))
    period = np.zeros(len(back))
    for scenario, windows in enumerate(back.tolist()):
        earlier = fronts[-1 - windows][:, scenario] if len(fronts) > windows else np.zeros(len(fronts[-1]), dtype=np.int64)
        period[scenario] = (fronts[-1][:, scenario] - earlier).max(initial=0) / windows
    return period


def _last_window(playback: Playback, history: Sequence[_History], queue_depth: int | None) -> Timeline:
    """The window played last, with timings that start where it did."""
    opened = []
    for cohort, of_cohort in zip(playback.cohorts, history, strict=True):
        starts = np.split(of_cohort.opened, [of_cohort.graph.threads])
        timing = replace(cohort.timing, thread_start_ns=starts[0], stream_start_ns=starts[1])
        opened.append(replace(cohort, timing=timing))
    playback.cohorts = tuple(opened)
    return playback.timeline(queue_depth=queue_depth, keep="all")
