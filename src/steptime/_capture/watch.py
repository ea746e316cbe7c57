"""`LoopWatch`: follows a training loop from optimiser step to optimiser step, and observes the iteration that repeats.

Marks are ends of optimisers' steps; where there is no optimiser, of backward passes. A step that is taken within another one or
within backward (an optimiser for each parameter) ends with that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from steptime._capture.assemble import LEAF, LOADING, Note
from steptime._capture.compiled import region
from steptime._capture.device import Parameters, parameters_alive
from steptime._capture.log import TraceRange, of_torch
from steptime._capture.record import Observation, Recorder
from steptime._capture.refusals import no_gpu, user_line
from steptime._capture.steady import SteadyLoop
from steptime._notices import Basis, Caveat
from steptime._program.nesting import ENGINE


@dataclass(frozen=True)
class LoopIteration:
    """One iteration of a training loop: what the observer wrote, what was noted, and what is said of it."""

    data: bytes
    notes: list[Note]
    outside: tuple[int, ...]
    messages: tuple[str, ...]
    parameters: Parameters = field(default_factory=Parameters)
    kept: Any = None  # what the recorder keeps besides

    @classmethod
    def observed(cls, data: bytes, recorder: Recorder, messages: Sequence[str], optimizers: Iterable[Any]) -> LoopIteration:
        """What was observed of one, and noted by the recorder."""
        if LEAF.encode() not in data:
            raise no_gpu()
        untrained = () if ENGINE.encode() in data else (Caveat("no backward pass: nothing is trained"),)
        parameters, outside = parameters_alive(optimizers), recorder.unnamed_bytes()
        return cls(data, recorder.notes, outside, (*untrained, *messages), parameters, recorder.kept())


@dataclass
class Seen:
    """What a loop has done so far."""

    optimizer_steps: int = 0
    backward_passes: int = 0

    def words(self) -> str:
        """In one phrase."""
        return f"{_count(self.optimizer_steps, 'optimiser step')} and {_count(self.backward_passes, 'backward pass')} were seen"


class LoopWatch:
    """Watches one loop. `found` is called with its steady iteration; it does not come back.

    `early`: the second iteration is observed too, for a loop that has no third.
    """

    def __init__(self, recorder: Recorder, found: Callable[[LoopIteration], None], *, early: bool = False) -> None:
        self.seen = Seen()
        self.last: LoopIteration | None = None  # the last that was observed, settled or not
        self._recorder, self._found = recorder, found
        self._steady = SteadyLoop(early)
        self._began = False
        self._observation: Observation | None = None
        self._observed = self._length = 0
        self._depth = 0  # of backward passes and optimisers' steps within each other
        self._stepped: Any = None  # the optimiser that stepped within the outermost of them
        self.optimizers: list[Any] = []  # that were made
        self._stepping: list[int] = []  # of those, which have stepped

    def made(self, optimizer: Any) -> None:
        """An optimiser was made."""
        if not any(each is optimizer for each in self.optimizers):
            self.optimizers.append(optimizer)

    @contextmanager
    def within(self, optimizer: Any = None) -> Iterator[None]:
        """One step of an optimiser, or one backward pass."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if optimizer is None:
            self.seen.backward_passes += 1
        else:
            self.seen.optimizer_steps += 1
            self.made(optimizer)
            self._stepped = optimizer
        if not self._depth and (self._stepped is not None or not self.optimizers):
            stepped, self._stepped = self._stepped, None
            self._mark(stepped)

    def close(self) -> None:
        """Ends whatever is being observed."""
        if self._observation is not None:
            self._observation.end()
            self._observation = None
            self._recorder.end()

    def _mark(self, optimizer: Any) -> None:
        number = next((at for at, each in enumerate(self.optimizers) if each is optimizer), -1)
        if number not in self._stepping:
            self._stepping.append(number)
        part = self._recorder.part(number)
        if self._began:
            self._steady.parts.append(part)
        self._began = True
        if self._observation is not None:
            self._observed += 1
            if self._observed == self._length:
                self._end(self._observation)
        if self._observation is None:
            self._begin()

    def _begin(self) -> None:
        waiting = len(self._stepping) < len(self.optimizers)
        self._length, self._observed = self._steady.length(waiting=waiting), 0
        if self._length:
            self._recorder.list_calls()
            self._recorder.begin()
            self._observation = Observation()

    def _end(self, observation: Observation) -> None:
        data, self._observation = observation.end(), None
        recorder, steady, length = self._recorder, self._steady, self._length
        recorder.end()
        recorder.end_calls()
        self.last = LoopIteration.observed(data, recorder, self._messages(), self.optimizers)
        if steady.settled(length):
            self._found(self.last)

    def _messages(self) -> tuple[str, ...]:
        steps = "optimiser step" if self.seen.optimizer_steps else "backward pass"
        number = self.seen.optimizer_steps or self.seen.backward_passes
        what = f"up to {steps} {number}" if self._length == 1 else f"{self._length} {steps}s up to number {number}"
        text = f"the step is one iteration of the loop, {what}; making the model and loading data are not part of it"
        result: list[str] = [Basis(text)]
        difference = self._steady.difference(self._length)
        if difference:
            result.append(f"no two iterations in a row are alike (they differ in {difference}); the last one seen was taken")
        others = self._steady.others(self._length)
        if others:
            result.append(
                Basis(f"{_count(others, 'iteration')} before it did something else (logging, evaluation), not part of it")
            )
        return (*result, *self._recorder.known.said, *self._recorder.reads.messages())


class FoundError(BaseException):
    """Leaves a loop whose steady iteration was found, past whatever the loop catches."""

    def __init__(self, iteration: LoopIteration) -> None:
        super().__init__()
        self.iteration = iteration


def leave(iteration: LoopIteration) -> None:
    """Raises: the loop goes no further."""
    raise FoundError(iteration)


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


_watch: LoopWatch | None = None


@contextmanager
def watched(watch: LoopWatch) -> Iterator[LoopWatch]:
    """While it lasts, this loop is watched."""
    global _watch  # noqa: PLW0603 (optimisers of the process report to one place)
    before, _watch = _watch, watch
    stack = ExitStack()
    stack.callback(watch.close)
    stack.enter_context(patch.object(Optimizer, "_patch_step_function", _marked_step(Optimizer._patch_step_function)))
    for name in ("backward", "grad"):
        stack.enter_context(patch.object(torch.autograd, name, _marked_backward(getattr(torch.autograd, name))))
    try:
        with stack:
            yield watch
    finally:
        _watch = before


_NOT_SCRIPTED = (
    "torch.jit is not honoured, what it was given is taken as run eagerly; on a GPU it may fuse element-wise kernels"
)


@contextmanager
def tamed(said: dict[str, None]) -> Iterator[None]:
    """While it lasts, data loaders load in this process and are told apart in traces, and checkpoints are not written."""

    def alone(self: Any) -> Any:
        if self.num_workers:
            workers = f"workers of a data loader (num_workers={self.num_workers})"
            said[Basis(f"{workers} were not started; batches were made in the script")] = None
        self.__dict__.update(num_workers=0, timeout=0)
        return _SingleProcessDataLoaderIter(self)

    def following(self: Any) -> Any:
        with TraceRange(LOADING):
            return following_batch(self)

    def not_saved(*_: Any, **__: Any) -> None:
        pickled = of_torch(sys._getframe(1).f_code.co_filename)
        skipped = "a tensor was pickled without its numbers" if pickled else "torch.save was skipped"
        said[Basis(f"{user_line()}: {skipped}")] = None

    def not_scripted(model: Any = None, *_: Any, **__: Any) -> Any:
        if model is None:
            return not_scripted
        text = f"{user_line()}: {_NOT_SCRIPTED}"
        return region.saying(model, lambda: said.setdefault(text))

    following_batch = _BaseDataLoaderIter.__next__
    regions = region.current()
    regions.said, regions.mark = said, _mark
    replaced = (
        (DataLoader, "_get_iterator", alone), (_BaseDataLoaderIter, "__next__", following), (torch, "save", not_saved),
        (torch.jit, "script", not_scripted), (torch.jit, "trace", not_scripted), *regions.replaced(),
    )  # fmt: skip
    with ExitStack() as stack:
        for owner, name, stand_in in replaced:
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def _mark(optimizer: Any) -> None:
    """An optimiser has stepped, in compiled code."""
    if _watch is not None:
        with _watch.within(optimizer):
            pass


def _marked_step(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Optimisers' steps, hooked when one is made: PyTorch wraps the step of its class then too."""

    @wraps(method)
    def run(self: Any) -> None:
        method(self)
        kind = type(self)
        if _watch is not None:
            _watch.made(self)
        if not hasattr(kind.step, "steptime"):
            kind.step = _reporting(kind.step)

    return run


def _reporting(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is traced, and runs without this function
            region.traced.optimizer = self
            return step(self, *args, **kwargs)
        if region.traced.depth:
            result = step(self, *args, **kwargs)
            region.traced.optimizer = self
            return result
        if _watch is None:
            return step(self, *args, **kwargs)
        with _watch.within(self):
            return step(self, *args, **kwargs)

    run.steptime = True  # type: ignore[attr-defined]
    return run


def _marked_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _watch is None:
            return function(*args, **kwargs)
        with _watch.within():
            return function(*args, **kwargs)

    return run
