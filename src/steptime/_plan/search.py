"""`search`: the fastest layouts of a model that fit, by closed forms first and by the simulator for the best of them.

Every layout gets a closed form (`Bounds`). The best are played; how far the played ones are from their closed forms says how
many more could still be the fastest, and these are played too. Some layouts that need less memory are played besides, for the
front of time against memory. Questions go through an executor's `map`, so that processes or a cluster share them; the answer
does not depend on who asks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np

from steptime._build.transformer.config import Transformer
from steptime._models.memory.fit import has_room, usable_bytes
from steptime._plan.bounds import Bounds, Wires
from steptime._plan.chances import MEASURED_OWN_ERROR, OWN_ERROR, chances, p_faster_of_others
from steptime._plan.evaluate import LayoutEvaluator, Played
from steptime._plan.layers import ActivationKey, LayerKey, LayerTimes, StateKey
from steptime._plan.shortage import shortage
from steptime._plan.space import Choices, ModelLayout, Space, layouts_of
from steptime._processes import cores, workers

Key = TypeVar("Key")
Answer = TypeVar("Answer")


class Ask(Protocol):
    """As `map` does."""

    def __call__(self, question: Callable[[Key], Answer], keys: Sequence[Key], /) -> Iterator[Answer]:
        """The answers in order of the keys."""


# Played first: the best of each kind by their closed forms, where they are near the shortest of all; the next best whatever
# their kind; and of those that need less memory some for the front.
_NEAR, _FIRST, _FRONT = 1.25, 8, 4
_AT_ONCE = 4  # later
# Layouts are played as long as one could be among so many fastest, which is as many as are shown.
SURE = 10
# At most, where closed forms leave many that could be.
MOST_PLAYED = 24
# Passes of micro-batches through chunks of all stages, at most: 8,192 of them took half a minute and 4 GiB to play, which
# `predict` does and a search does not.
_MOST_PASSES = 1024
# Of those not played the nearest, when it is asked how likely one of them is faster than all that were.
_NEAREST = 256
# Times the fastest step, beyond which nobody trades time for memory: such layouts are not on the front.
_FRONT_AT_MOST = 2.0
# Closed forms of a kind differ from plays by this much at least, of which few tell.
_LEAST_SPREAD = 0.02
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
    left: int  # layouts that were not played and could be among the fastest ten, by how far closed forms of their kind were off
    p_left: float  # that a layout which was not played is faster than all that were
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
    progress: Callable[[str], None] | None = None,
) -> FoundLayouts:
    """The layouts of a model; `limit_bytes` is what a rank may use of its device, `progress` is told how far the search is."""
    began = time.monotonic()
    model = evaluator.model
    space = layouts_of(model, gpus, choices)
    limit = usable_bytes(evaluator.platform.device.limits) if limit_bytes is None else limit_bytes
    with _asking(executor, len(space.layouts)) as unseen:
        ask = _counted(unseen, f"{len(space.layouts):,} layouts", progress) if progress else unseen
        bounds = _sizes_asked(evaluator, space.layouts, ask)
        peaks = {layout: bounds.peak_bytes(layout) for layout in space.layouts}
        fitting = [layout for layout in space.layouts if has_room(peaks[layout], limit * _MEMORY_ABOVE)]
        if not fitting:
            raise shortage(model, evaluator.platform, limit, min(peaks.items(), key=lambda each: each[1]))
        keys = {LayerKey.of(layout): None for layout in fitting}
        known = _asked(ask, evaluator.times, (each for key in keys for each in key.asked))
        bounds.times.update({key: LayerTimes.put_together(key, known) for key in keys})
        steps = bounds.steps_ns(fitting)
        found = _Plays(evaluator, ask, steps, peaks, limit)
        left = found.play_best()
    played = list(found.done.values())
    fits = sorted(found.fitting(), key=lambda each: each.step_ns)
    if not fits:
        least = min(played, key=lambda each: each.peak_bytes)
        raise shortage(model, evaluator.platform, limit, (least.layout, float(least.peak_bytes)))
    ratios = np.quantile([each.step_ns / steps[each.layout] for each in played], (0.0, 0.5, 1.0))
    own_error = OWN_ERROR if evaluator.platform.device.limits.analytic else MEASURED_OWN_ERROR
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
        left=left,
        p_left=found.p_left(own_error),
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
    """Layouts that were played."""

    evaluator: LayoutEvaluator
    ask: Ask
    steps: Mapping[ModelLayout, float]  # by closed form
    peaks: Mapping[ModelLayout, float]
    limit: int
    done: dict[ModelLayout, Played] = field(default_factory=dict)

    def play_best(self) -> int:
        """Plays the best of every kind, and as many more as could be among the fastest; how many of those are left."""
        playable = [layout for layout in self.steps if layout in self._playable]
        order = sorted(playable, key=lambda layout: (not self._has_room(layout), self.steps[layout]))
        near = [layout for layout in order if self.steps[layout] <= _NEAR * self.steps[order[0]]]
        of_kind: dict[tuple[int, ...], ModelLayout] = {}
        for layout in near:
            of_kind.setdefault(_kind(layout), layout)
        front = _bound_front({layout: self.steps[layout] for layout in playable}, self.peaks)
        self._play(dict.fromkeys([*of_kind.values(), *front, *near[:_FIRST]]))
        while True:
            fastest = sorted(each.step_ns for each in self.fitting())
            best = fastest[SURE - 1] if len(fastest) >= SURE else np.inf
            logs = self._ratios()
            hoped = {layout: self.steps[layout] * np.exp(min(logs[_kind(layout)])) for layout in self._others()}
            left = sorted(
                (layout for layout, step in hoped.items() if step < best),
                key=lambda layout: (not self._has_room(layout), self._about(layout, logs)),
            )
            room = max(0, min(_AT_ONCE, MOST_PLAYED - len(self.done)))
            chosen = [layout for layout in left if layout in self._playable][:room]
            if not chosen:
                return len(left)
            self._play(chosen)

    @cached_property
    def _playable(self) -> frozenset[ModelLayout]:
        """Layouts whose steps are not too long to play, or all if they all are."""
        model = self.evaluator.model

        def passes(layout: ModelLayout) -> int:
            parallel = layout.parallel
            return parallel.pipeline * parallel.chunks * model.batch // (parallel.replicas * layout.micro_batch)

        short = frozenset(layout for layout in self.steps if passes(layout) <= _MOST_PASSES)
        return short or frozenset(self.steps)

    def p_left(self, own_error: float) -> float:
        """How likely a layout that was not played is faster than all that were, by what is known of its kind."""
        fits, logs = self.fitting(), self._ratios()
        small = (layout for layout in self._others() if self._has_room(layout))
        others = sorted(small, key=lambda layout: self._about(layout, logs))[:_NEAREST]
        if not fits or not others:
            return 0.0
        spreads = [max(float(np.std(logs[_kind(layout)])), _LEAST_SPREAD) for layout in others]
        about = [self._about(layout, logs) for layout in others]
        return p_faster_of_others([each.step_ns for each in fits], [each.draws_ns for each in fits], about, spreads, own_error)

    def _about(self, layout: ModelLayout, logs: Mapping[tuple[int, ...], Sequence[float]]) -> float:
        """What a play would say, as closed forms of the kind were off in the middle."""
        return float(self.steps[layout] * np.exp(np.median(logs[_kind(layout)])))

    def _ratios(self) -> Mapping[tuple[int, ...], list[float]]:
        """By kind, logarithms of played steps over their closed forms; of a kind without any, all."""
        every = [float(np.log(played.step_ns / self.steps[layout])) for layout, played in self.done.items()]
        result: dict[tuple[int, ...], list[float]] = defaultdict(lambda: every)
        for layout, log in zip(self.done, every, strict=True):
            result[_kind(layout)] = [*result.get(_kind(layout), ()), log]
        return result

    def _others(self) -> list[ModelLayout]:
        """Not played, and may fit."""
        return [layout for layout in self.steps if layout not in self.done]

    def _has_room(self, layout: ModelLayout) -> bool:
        """By its closed form."""
        return has_room(self.peaks[layout], self.limit)

    def fitting(self) -> list[Played]:
        """Return the played layouts that fit."""
        return [each for each in self.done.values() if has_room(each.peak_bytes, self.limit)]

    def _play(self, layouts: Iterable[ModelLayout]) -> None:
        chosen = list(layouts)
        self.done.update(zip(chosen, self.ask(self.evaluator.play, chosen), strict=True))


def _kind(layout: ModelLayout) -> tuple[int, ...]:
    """Layouts of a kind are off from their closed forms alike."""
    parallel = layout.parallel
    return parallel.fsdp > 1, parallel.pipeline > 1, parallel.chunks > 1, parallel.zero


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
        if not front or (each.peak_bytes < front[-1].peak_bytes and each.step_ns <= _FRONT_AT_MOST * front[0].step_ns):
            front.append(each)
    return tuple(front)


# Asking


def _asked(ask: Ask, question: Callable[[Key], Answer], keys: Iterator[Key]) -> dict[Key, Answer]:
    """Each distinct question once."""
    distinct = list(dict.fromkeys(keys))
    return dict(zip(distinct, ask(question, distinct), strict=True))


def _counted(ask: Ask, layouts: str, progress: Callable[[str], None]) -> Ask:
    """Tell how many questions of one kind are answered."""

    def counting(question: Callable[[Key], Answer], keys: Sequence[Key]) -> Iterator[Answer]:
        for number, answer in enumerate(ask(question, keys), 1):
            progress(f"{layouts}, {question.__name__} {number} of {len(keys)}")
            yield answer

    return counting


@contextmanager
def _asking(executor: Executor | None, questions: int) -> Iterator[Ask]:
    """By an executor, by processes of its own where that is quicker, or here."""
    if executor is not None:
        yield executor.map
    elif questions < _WORTH_PROCESSES or cores() == 1:
        yield map
    else:
        with workers(cores()) as pool:
            yield pool.map
