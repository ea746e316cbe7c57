"""What a captured step launches beside plain ops: ranges in its trace, collectives and waits for them, and streams.

A trace says which op was called on which tensors; `CommLog` says the rest, in the same order: the process group, and for every
wait the collective that is waited for.

A collective that is called in order (`async_op=False`) delays what comes next on the stream it was called from. Where that is
not the stream of compute, as in FSDP, compute is delayed once it waits for an event behind the collective: there the captured
step gets the wait that `Work.wait` would have recorded.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import Variable
from torch.autograd.profiler import record_function

AFTER_BACKWARD = "steptime_after_backward"
"""A mark in a trace around what runs in backward's thread once all gradients are there."""

_enter = torch._C._autograd._record_function_with_args_enter
_exit = torch._C._autograd._record_function_with_args_exit


class TraceRange:
    """A range that a trace shows like an op, with its name and arguments, opened past the dispatcher and its modes."""

    __slots__ = ("_handle", "_name", "_values")

    def __init__(self, name: str, *values: Any) -> None:
        self._name, self._values = name, values

    def __enter__(self) -> None:
        self._handle = _enter(self._name, *self._values)

    def __exit__(self, *_: object) -> None:
        _exit(self._handle)


@contextmanager
def ranges() -> Iterator[None]:
    """While it lasts, `torch.profiler.record_function` opens such ranges: an op of the dispatcher would end inside its mode."""

    def enter(self: Any) -> Any:
        self.record = _enter(self.name)
        return self

    def leave(self: Any, *_: object) -> None:
        _exit(self.record)

    with (
        patch.object(record_function, "__enter__", enter),
        patch.object(record_function, "__exit__", leave),
        patch.object(Variable, "_execution_engine", _Engine(Variable._execution_engine)),
    ):
        yield


class _Engine:
    """PyTorch's engine, whose callbacks at the end of backward are marked as such."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Call it in backward's thread, last."""

        def marked() -> None:
            with TraceRange(AFTER_BACKWARD):
                callback()

        self._engine.queue_callback(marked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


COMM = "steptime_comm"
"""What `record_param_comms` is called while it is recorded: PyTorch's observer looks for more in a range of that name."""

ORDER = "steptime_order:"
"""Begins the name of a mark in a trace: who waits for what from here on, by numbers of streams and events."""

# What such a mark says: ops launch on a stream; a stream waits for an event, or for another stream; an event is recorded on a
# stream; the host waits for an event, a stream, everything.
LAUNCH_ON, EVENT, FOLLOW, RECORD = "on", "event", "follow", "record"
EVENT_SYNC, STREAM_SYNC, DEVICE = "event_sync", "stream_sync", "device_sync"

STREAM = "steptime_stream:"
"""Begins the name of a mark in a trace: what follows it is launched on the stream of that number."""


@dataclass(frozen=True, slots=True)
class CollectiveLaunch:
    """One collective: its group, its index within that group, and whether a peer is named."""

    number: int
    group: str
    sequence: int
    rank: int  # as PyTorch records it: the caller's in the group; the root's; the peer's
    point_to_point: bool = False


@dataclass
class CommLog:
    """In order of call. Numbers count from the first collective of the run, kept are those of the step that is recorded."""

    recording: bool = False
    calls: list[CollectiveLaunch] = field(default_factory=list)  # one per recorded node of a collective or a wait
    waits: list[bool] = field(default_factory=list)  # whether that node is a wait
    last: CollectiveLaunch | None = None
    _count: int = 0
    _sequences: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def begin(self) -> None:
        """Keeps collectives from here on."""
        self.recording = True
        self.calls.clear()
        self.waits.clear()

    def launched(self, group: str, rank: int, *, point_to_point: bool = False) -> CollectiveLaunch:
        """One more collective."""
        sequence = self._sequences[group, point_to_point] + 1
        self._sequences[group, point_to_point] = sequence
        self._count += 1
        self.last = CollectiveLaunch(self._count, group, sequence, rank, point_to_point)
        self._note(self.last, wait=False)
        return self.last

    def waited(self, launch: CollectiveLaunch) -> None:
        """Compute waits for it from here on."""
        if self.recording:
            self._note(launch, wait=True)
            with TraceRange(COMM):
                pass

    def on_stream(self, number: int) -> None:
        """What comes next goes to that stream; 0 is where compute is."""
        if self.recording:
            with TraceRange(f"{STREAM}{number}"):
                pass

    def ordered(self, kind: str, *numbers: int) -> None:
        """Marks in the trace who waits for what from here on."""
        if self.recording:
            with TraceRange(f"{ORDER}{' '.join((kind, *map(str, numbers)))}"):
                pass

    def _note(self, launch: CollectiveLaunch, *, wait: bool) -> None:
        if self.recording:
            self.calls.append(launch)
            self.waits.append(wait)


_TORCH = str(Path(torch.__file__).parent)


def of_torch(file: str) -> bool:
    """Whether a file is one of PyTorch's."""
    return file.startswith(_TORCH)


class Streams:
    """All streams of one captured rank; 0 is where compute is."""

    def __init__(self, log: CommLog) -> None:
        self.log = log
        self.events = 0
        self.default = PretendedStream(self)
        self.current = self.default
        self.count = 1

    def launched_in_order(self, launch: CollectiveLaunch) -> None:
        """The current stream goes on after the collective."""
        self.current.behind[launch.number] = launch

    def answers(self) -> dict[str, Any]:
        """What stands for the functions and classes of `torch.cuda`."""
        streams = self

        class OwnStream(PretendedStream):  # classes, since annotations name them
            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(streams)

        class OwnEvent(PretendedEvent):
            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(streams)

        return {
            "Stream": OwnStream,
            "Event": OwnEvent,
            "stream": lambda stream: stream or nullcontext(),
            "StreamContext": lambda stream: stream or nullcontext(),
            "current_stream": lambda *_, **__: self.current,
            "default_stream": lambda *_, **__: self.default,
            "set_stream": self.switch,
            "synchronize": lambda *_, **__: self.log.ordered(DEVICE),
        }

    def switch(self, stream: PretendedStream) -> None:
        """Launch on another stream from here on."""
        if stream is self.current:
            return
        before, self.current = self.current, stream
        self.log.on_stream(stream.number)
        if stream.own or before.own:
            self.log.ordered(LAUNCH_ON, stream.number if stream.own else 0)


class _Idle:
    """What streams and events have in common: collectives that lie before them; nothing else is ever under way.

    Those of the script (`own`) are told from those of PyTorch's wrappers, of which it is known what their streams do.
    """

    own = False
    number = 0

    def __init__(self, streams: Streams) -> None:
        self.behind: dict[int, CollectiveLaunch] = {}
        self._streams = streams

    def query(self) -> bool:
        """Nothing is under way."""
        return True


class PretendedStream(_Idle):
    """One stream: the collectives that whatever comes next on it starts after. As a context, it is the current one."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(streams)
        self.number = getattr(streams, "count", 0)
        streams.count = self.number + 1
        self.own = not of_torch(sys._getframe(2).f_code.co_filename)
        self.device = 0
        self.stream_id = self.cuda_stream = self.number
        self.priority = 0
        self._before: list[PretendedStream] = []

    def wait_event(self, event: _Idle) -> None:
        """What comes next starts after what the event, or all that another stream was given, is behind."""
        if self.own and event.own:
            self._streams.log.ordered(EVENT if isinstance(event, PretendedEvent) else FOLLOW, self.number, event.number)
        fresh = [launch for number, launch in event.behind.items() if number not in self.behind]
        self.behind.update(event.behind)
        if self.number == 0:
            for launch in fresh:
                self._streams.log.waited(launch)

    wait_stream = wait_event

    def is_capturing(self) -> bool:
        """No graph is being recorded."""
        return False

    def synchronize(self) -> None:
        """The host waits for what the stream was given."""
        if self.own:
            self._streams.log.ordered(STREAM_SYNC, self.number)

    def record_event(self, event: PretendedEvent | None = None) -> PretendedEvent:
        """An event behind all that this stream was given."""
        event = event or PretendedEvent(self._streams)
        event.record(self)
        return event

    def __enter__(self) -> PretendedStream:
        self._before.append(self._streams.current)
        self._streams.switch(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.switch(self._before.pop())


class PretendedEvent(_Idle):
    """A point in a stream."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(streams)
        streams.events += 1
        self.number = streams.events

    def record(self, stream: PretendedStream | None = None) -> None:
        """Behind all that the stream was given."""
        stream = stream or self._streams.current
        self.behind, self.own = dict(stream.behind), stream.own
        if self.own:
            self._streams.log.ordered(RECORD, self.number, stream.number)

    def synchronize(self) -> None:
        """The host waits for it."""
        if self.own:
            self._streams.log.ordered(EVENT_SYNC, self.number)

    def wait(self, stream: PretendedStream | None = None) -> None:
        """What comes next on the stream starts after it."""
        (stream or self._streams.current).wait_event(self)

    def elapsed_time(self, _: PretendedEvent) -> float:
        """No time passes on a device that is not there."""
        return 0.0
