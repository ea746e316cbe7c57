"""Streams and events of the pretended device, which know the collectives that are behind them.

A collective that is called in order (`async_op=False`) delays what comes next on the stream it was called from. Where that is
not the stream of compute, as in FSDP, compute is delayed once it waits for an event behind the collective: there the captured
step gets the wait that `Work.wait` would have recorded.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from steptime._capture.collectives.log import CommLog, Launch


class Streams:
    """All streams of one captured rank; 0 is where compute is."""

    def __init__(self, log: CommLog) -> None:
        self.log = log
        self.default = Stream(self)
        self.current = self.default
        self.count = 1

    def launched_in_order(self, launch: Launch) -> None:
        """The current stream goes on after the collective."""
        self.current.behind[launch.number] = launch

    def answers(self) -> dict[str, Any]:
        """What stands for the functions and classes of `torch.cuda`."""
        streams = self

        class OwnStream(Stream):  # classes, since annotations name them
            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(streams)

        class OwnEvent(Event):
            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(streams)

        return {
            "Stream": OwnStream,
            "Event": OwnEvent,
            "stream": lambda stream: Switch(self, stream),
            "StreamContext": lambda stream: Switch(self, stream),
            "current_stream": lambda *_, **__: self.current,
            "default_stream": lambda *_, **__: self.default,
            "set_stream": self.switch,
        }

    def switch(self, stream: Stream | None) -> None:
        """Launch on another stream from here on."""
        if stream is not None and stream is not self.current:
            self.current = stream
            self.log.on_stream(stream.number)


class Stream:
    """One stream: the collectives that whatever comes next on it starts after."""

    def __init__(self, streams: Streams) -> None:
        self.number = getattr(streams, "count", 0)
        streams.count = self.number + 1
        self.behind: dict[int, Launch] = {}
        self.device = 0
        self.stream_id = self.cuda_stream = self.number
        self.priority = 0
        self._streams = streams

    def wait_event(self, event: Event) -> None:
        """What comes next starts after what the event is behind."""
        self._go_behind(event.behind)

    def wait_stream(self, stream: Stream) -> None:
        """What comes next starts after all that the other stream was given."""
        self._go_behind(stream.behind)

    def record_event(self, event: Event | None = None) -> Event:
        """An event behind all that this stream was given."""
        event = event or Event(self._streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host never waits for a device that is not there."""

    def query(self) -> bool:
        """Nothing is under way."""
        return True

    def __enter__(self) -> Stream:
        self._before = self._streams.current
        self._streams.switch(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.switch(self._before)

    def _go_behind(self, behind: dict[int, Launch]) -> None:
        fresh = [launch for number, launch in behind.items() if number not in self.behind]
        self.behind.update(behind)
        if self.number == 0:
            for launch in fresh:
                self._streams.log.waited(launch)


class Event:
    """A point in a stream."""

    def __init__(self, streams: Streams) -> None:
        self.behind: dict[int, Launch] = {}
        self._streams = streams

    def record(self, stream: Stream | None = None) -> None:
        """Behind all that the stream was given."""
        self.behind = dict((stream or self._streams.current).behind)

    def wait(self, stream: Stream | None = None) -> None:
        """What comes next on the stream starts after it."""
        (stream or self._streams.current).wait_event(self)

    def synchronize(self) -> None:
        """The host never waits for a device that is not there."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, _: Event) -> float:
        """No time passes on a device that is not there."""
        return 0.0


class Switch:
    """`torch.cuda.stream`: inside it, another stream is current."""

    def __init__(self, streams: Streams, stream: Stream | None) -> None:
        self._streams, self._stream = streams, stream
        self._before = streams.current

    def __enter__(self) -> None:
        self._before = self._streams.current
        self._streams.switch(self._stream)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._streams.switch(self._before)
