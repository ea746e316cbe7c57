"""`search`: the fastest layouts of a model that fit, by closed forms first and by the simulator for the best of them.

Every layout gets a closed form (`Bounds`). The best are played; how far the played ones are from their closed forms says how
many more could still be the fastest, and these are played too. Some layouts that need less memory are played besides, for the
front of time against memory. Questions go through an executor's `map`, so that processes or a cluster share them; the answer
does not depend on who asks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from steptime._build.transformer.config import Transformer
from steptime._plan.bounds import Bounds, Wires
from steptime._plan.chances import MEASURED_OWN_ERROR, OWN_ERROR, chances
from steptime._plan.evaluate import LayoutEvaluator, Played
from steptime._plan.layers import ActivationKey, LayerKey, LayerTimes, StateKey
from steptime._plan.shortage import shortage
from steptime._plan.space import Choices, ModelLayout, Space, layouts_of

Key = TypeVar("Key")
Answer = TypeVar("Answer")


class Ask(Protocol):
    """As `map` does."""

    def __call__(self, question: Callable[[Key], Answer], keys: Sequence[Key], /) -> Iterator[Answer]:
        """The answers in order of the keys."""


# Played first: the best of each kind by their closed forms; and of those that need less memory, for the front.
_OF_A_KIND, _FRONT = 2, 4
_AT_ONCE = 4  # later
# Layouts are played as long as one could be among so many fastest.
_SURE = 3
# At most, where closed forms leave many that could be the fastest.
MOST_PLAYED = 24
# Of long steps, which are played shortened, so many of the fastest are played whole; and how often, where that changes who is.
_WHOLE, _WHOLE_ROUNDS = 2, 3
# Closed forms of memory were at most so many times what the allocator's play said (docs/plan.md); what is beyond cannot fit.
_MEMORY_ABOVE = 1.2
# Above so many questions processes are worth their start.
_WORTH_PROCESSES = 24


@dataclass(frozen=True)
class FoundLayouts:
    """Layouts that fit, fastest first, with the chance of each to be the fastest; and what the search did."""

    model: Transformer
    gpus: int
    space: Space
    played: tuple[Played, ...]  # that fit
    p_fastest: tuple[float, ...]  # of each
    own_error: float  # that each is taken to be off by for itself
    front: tuple[Played, ...]  # none of them is both slower and larger than another layout
    fitting: int  # layouts that may fit by their closed forms
    plays: int
    ratios: tuple[float, float, float]  # played over closed form: least, median, most
    complete: bool  # whether all were played that could be among the fastest three
    seconds: float

    @property
    def best(self) -> Played:
        """The fastest."""
        return self.played[0]


def search(
    evaluator: LayoutEvaluator,
    gpus: int,
    choices: Choices | None = None,
    *,
    limit_bytes: int | None = None,
    executor: Executor | None = None,
) -> FoundLayouts:
    """The layouts of a model; `limit_bytes` is what a rank may use of its device."""
    began = time.monotonic()
    model = evaluator.model
    space = layouts_of(model, gpus, choices)
    limit = evaluator.platform.device.limits.rank_memory_bytes if limit_bytes is None else limit_bytes
    with _asking(executor, len(space.layouts)) as ask:
        bounds = _sizes_asked(evaluator, space.layouts, ask)
        peaks = {layout: bounds.peak_bytes(layout) for layout in space.layouts}
        fitting = [layout for layout in space.layouts if peaks[layout] <= limit * _MEMORY_ABOVE]
        if not fitting:
            raise shortage(model, gpus, limit, min(peaks.items(), key=lambda each: each[1]))
        keys = {LayerKey.of(layout): None for layout in fitting}
        known = _asked(ask, evaluator.times, (each for key in keys for each in key.asked))
        bounds.times.update({key: LayerTimes.put_together(key, known) for key in keys})
        steps = {layout: bounds.step_ns(layout) for layout in fitting}
        found = _Plays(evaluator, ask, bounds, steps, peaks, limit)
        complete = found.play_best()
        found.play_whole()
    played = list(found.done.values())
    fits = sorted((each for each in played if each.peak_bytes <= limit), key=lambda each: each.step_ns)
    if not fits:
        least = min(played, key=lambda each: each.peak_bytes)
        raise shortage(model, gpus, limit, (least.layout, float(least.peak_bytes)))
    ratios = np.quantile([each.step_ns / steps[each.layout] for each in played], (0.0, 0.5, 1.0))
    own_error = OWN_ERROR if evaluator.platform.device.limits.analytic else MEASURED_OWN_ERROR
    flop = next((each.flop for each in fits if each.whole), fits[0].flop)  # the model's own, whatever the layout
    fits = [replace(each, flop=flop) for each in fits]
    return FoundLayouts(
        model=model,
        gpus=gpus,
        space=space,
        played=tuple(fits),
        p_fastest=tuple(chances([each.step_ns for each in fits], [each.draws_ns for each in fits], own_error)),
        own_error=own_error,
        front=front_of(fits),
        fitting=len(fitting),
        plays=len(played),
        ratios=(float(ratios[0]), float(ratios[1]), float(ratios[2])),
        complete=complete,
        seconds=time.monotonic() - began,
    )


def _sizes_asked(evaluator: LayoutEvaluator, layouts: Sequence[ModelLayout], ask: Ask) -> Bounds:
    """What memory depends on; times are asked for where a layout may fit."""
    return Bounds(
        evaluator.model,
        Wires(evaluator.platform),
        times={},
        sizes=_asked(ask, evaluator.sizes, (LayerKey.of(layout).shared for layout in layouts)),
        activations=_asked(ask, evaluator.activations, map(ActivationKey.of, layouts)),
        states=_asked(ask, evaluator.states, map(StateKey.of, layouts)),
    )


@dataclass
class _Plays:
    """Layouts that were played, shortened or whole."""

    evaluator: LayoutEvaluator
    ask: Ask
    bounds: Bounds
    steps: Mapping[ModelLayout, float]  # by closed form
    peaks: Mapping[ModelLayout, float]
    limit: int
    done: dict[ModelLayout, Played] = field(default_factory=dict)

    def play_best(self) -> bool:
        """Plays the best of every kind, and as many more as could be among the fastest; whether those were all."""
        order = sorted(self.steps, key=self.steps.__getitem__)
        of_kind: dict[tuple[bool, ...], list[ModelLayout]] = {}
        for layout in order:
            of_kind.setdefault(_kind(layout), []).append(layout)
        first = [layout for layouts in of_kind.values() for layout in layouts[:_OF_A_KIND]]
        self._shortened(dict.fromkeys([*first, *_bound_front(self.steps, self.peaks)]))
        while True:
            fastest = sorted(each.step_ns for each in self._fitting())
            best = fastest[_SURE - 1] if len(fastest) >= _SURE else np.inf
            least = self._least_ratios()
            hoped = {layout: self.steps[layout] * least[_kind(layout)] for layout in order if layout not in self.done}
            left = [layout for layout, step in hoped.items() if step < best]  # in order of their closed forms
            room = MOST_PLAYED - len(self.done)
            if not left or room <= 0:
                return not left
            self._shortened(left[: min(_AT_ONCE, room)])

    def _least_ratios(self) -> dict[tuple[bool, ...], float]:
        """By kind, the least that a played step was of its closed form."""
        result: dict[tuple[bool, ...], float] = {}
        for layout, played in self.done.items():
            ratio = played.step_ns / self.steps[layout]
            result[_kind(layout)] = min(result.get(_kind(layout), ratio), ratio)
        return result

    def play_whole(self) -> None:
        """Plays the whole step of the fastest, until the first of them were."""
        for _ in range(_WHOLE_ROUNDS):
            first = sorted(self._fitting(), key=lambda each: each.step_ns)[:_WHOLE]
            layouts = [each.layout for each in first if not each.whole and not self.evaluator.long(each.layout)]
            if not layouts:
                return
            self.done.update(zip(layouts, self.ask(self.evaluator.play, layouts), strict=True))

    def _fitting(self) -> list[Played]:
        return [each for each in self.done.values() if each.peak_bytes <= self.limit]

    def _shortened(self, layouts: Iterable[ModelLayout]) -> None:
        """Plays shortened steps, and takes from closed forms how much longer the whole ones are."""
        chosen = list(layouts)
        for layout, played in zip(chosen, self.ask(self.evaluator.play_shortened, chosen), strict=True):
            model = self.evaluator.shortened(layout)
            if model is self.evaluator.model:
                self.done[layout] = played
                continue
            short = replace(self.bounds, model=model)
            longer, larger = self.steps[layout] / short.step_ns(layout), self.peaks[layout] / short.peak_bytes(layout)
            self.done[layout] = played.stretched(longer, larger)


def _kind(layout: ModelLayout) -> tuple[bool, ...]:
    """Layouts of a kind are off from their closed forms alike."""
    parallel = layout.parallel
    return parallel.fsdp > 1, parallel.pipeline > 1, parallel.chunks > 1


def _bound_front(steps: Mapping[ModelLayout, float], peaks: Mapping[ModelLayout, float]) -> list[ModelLayout]:
    """By closed forms, the fastest of each memory, spread over them."""
    front: list[ModelLayout] = []
    for layout in sorted(steps, key=lambda each: (peaks[each], steps[each])):
        if not front or steps[layout] < steps[front[-1]]:
            front.append(layout)
    places = np.unique(np.linspace(0, len(front) - 1, min(_FRONT, len(front))).round().astype(int))
    return [front[place] for place in places.tolist()]


def front_of(played: Sequence[Played]) -> tuple[Played, ...]:
    """Fastest first, each with less memory than all before it."""
    front: list[Played] = []
    for each in sorted(played, key=lambda item: (item.step_ns, item.peak_bytes)):
        if not front or each.peak_bytes < front[-1].peak_bytes:
            front.append(each)
    return tuple(front)


# Asking


def _asked(ask: Ask, question: Callable[[Key], Answer], keys: Iterator[Key]) -> dict[Key, Answer]:
    """Each distinct question once."""
    distinct = list(dict.fromkeys(keys))
    return dict(zip(distinct, ask(question, distinct), strict=True))


@contextmanager
def _asking(executor: Executor | None, questions: int) -> Iterator[Ask]:
    """By an executor, by processes of its own where that is quicker, or here."""
    if executor is not None:
        yield executor.map
    elif questions < _WORTH_PROCESSES or _workers() == 1:
        yield map
    else:
        with ProcessPoolExecutor(_workers()) as pool:
            yield pool.map


def _workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
