"""Streams the events of a Chrome trace: typed decoding, a few megabytes at a time, so that memory does not grow with the file.

A chunk ends where one event ends and the next begins. A chunk that is no valid JSON (bad escapes, bytes that are no UTF-8,
NaN, wrong types) is repaired, and failing that read event by event; what is lost is counted and said.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from steptime._program.formats import BREAKS_OFF, TraceReader
from steptime.errors import TraceError

CHUNK_BYTES = 512 * 1024  # small enough to stay in the cache: 2 MiB reads 10-20 % slower
# So much text is looked at to choose the type of the events: many times the longest event seen (about 6 kB).
HEAD_BYTES = 1 << 16
# One event larger than this is no trace event.
EVENT_BYTES_AT_MOST = 64 * 1024 * 1024
# Finding out that text is nested too deep is slow; after so many times the rest of a chunk is given up.
TOO_DEEP_AT_MOST = 100

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BOUNDARY = re.compile(rb'\}\s*+,\s*+(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|bp|s)")')
_CLOSING = re.compile(rb'\}\s*+\](?=\s*+(?:,\s*+"|\}?\s*+$))')
# Kineto writes a few keys behind the events; far less than this.
_TAIL_BYTES = 1 << 16
# Counted from 1.
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_CONTROL = re.compile(r"[\x00-\x1f]")
_BARE_NUMBER = re.compile(r"(?<=[:\[,])(\s*)-?(?:NaN|nan|Infinity|inf)\b")

EventT = TypeVar("EventT", bound=msgspec.Struct)


@dataclass
class EventStream(Generic[EventT]):
    """Iterate over chunks of events; afterwards `header` holds the other top-level keys, the rest what was not readable."""

    reader: TraceReader
    choose_type: Callable[[bytes], type[EventT]]  # from the first events' text to the type they decode into
    header: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    lost_events: int = 0
    repaired_chunks: int = 0

    def chunks(self) -> Iterator[list[EventT]]:
        """Lists of events, a few megabytes of text each."""
        buffer = self._open_array()
        while len(buffer) < HEAD_BYTES and (block := self.reader.read(CHUNK_BYTES)):
            buffer += block
        self.event_type = self.choose_type(buffer)
        self._decoder = msgspec.json.Decoder(list[self.event_type])  # type: ignore[name-defined]
        while True:
            block = self.reader.read(CHUNK_BYTES)
            buffer += block
            if not block:
                yield self._last_chunk(buffer)
                return
            cut = self._boundary(buffer)
            if cut is None:
                continue
            events = self._decode(b"[" + buffer[: cut[0]] + b"]")
            buffer = buffer[cut[1] :]
            yield events

    def _open_array(self) -> bytes:
        buffer = b""
        while True:
            block = self.reader.read(CHUNK_BYTES)
            buffer += block
            stripped = buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
            if stripped.startswith(b"["):
                return stripped[1:]
            match = _EVENTS_KEY.search(buffer)
            if match:
                self._parse_header(buffer[: match.start()].rstrip().rstrip(b",") + b"}")
                return buffer[match.end() :]
            if not block or len(buffer) > EVENT_BYTES_AT_MOST:
                raise TraceError(f"{self.reader.source}: no traceEvents; expected a Kineto (Chrome) trace")

    def _boundary(self, buffer: bytes) -> tuple[int, int] | None:
        """Where the last complete event ends and the next begins."""
        window = 1 << 15
        while True:
            start = max(0, len(buffer) - window)
            last = _last(_BOUNDARY, buffer, start)
            if last is not None:
                return last.start() + 1, last.end()
            if start == 0:
                if len(buffer) > EVENT_BYTES_AT_MOST:
                    raise TraceError(
                        f"{self.reader.source}: no end of an event within {EVENT_BYTES_AT_MOST} bytes; not a trace"
                    )
                return None
            window *= 4

    def _decode(self, text: bytes) -> list[EventT]:
        try:
            return self._decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._repair(text)

    def _last_chunk(self, rest: bytes) -> list[EventT]:
        """The events up to the end of the array, and the top-level keys behind it."""
        text = b"[" + rest
        closing = _closing_bracket(text)
        end = len(text) if closing is None else closing + 1
        try:
            events = self._decoder.decode(text[:end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            trailing = _TRAILING.search(str(error))
            if trailing is None and closing is None:
                return self._broken_end(text)
            end = text.rfind(b"]", 0, int(trailing.group(1)) - 1) + 1 if trailing else end
            events = self._decode(text[:end])
        self._parse_header(b"{" + text[end:].strip().lstrip(b",").rstrip().removesuffix(b"}") + b"}")
        return events

    def _broken_end(self, text: bytes) -> list[EventT]:
        cut = self._boundary(text)
        whole = text[: cut[0]] if cut else b"["
        why = f" ({self.reader.damage})" if self.reader.damage else ""
        self.warnings.append(
            f"{self.reader.source}: {BREAKS_OFF} before its end{why}; everything after the last complete event is missing"
        )
        events = self._decode(whole + b"]")
        tail = self._decode_one(text[cut[1] :] if cut else text[1:])
        return events + tail

    def _decode_one(self, text: bytes) -> list[EventT]:
        try:
            return [msgspec.json.decode(text.strip().rstrip(b","), type=self.event_type)]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return []

    def _parse_header(self, text: bytes) -> None:
        try:
            decoded = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            try:
                decoded = msgspec.json.decode(_clean(text).encode())
            except (msgspec.DecodeError, RecursionError):
                self.warnings.append(
                    f"{self.reader.source}: the part around traceEvents is not readable; rank and device may be unknown"
                )
                return
        if isinstance(decoded, dict):
            self.header.update(decoded)

    def _repair(self, text: bytes) -> list[EventT]:
        self.repaired_chunks += 1
        cleaned = _clean(text).encode()
        try:
            return self._decoder.decode(cleaned)
        except (msgspec.DecodeError, RecursionError):
            return self._one_by_one(cleaned)

    def _one_by_one(self, text: bytes) -> list[EventT]:
        """Every event that can be read on its own."""
        events: list[EventT] = []
        position, too_deep = text.find(b"{"), 0
        while 0 <= position < len(text):
            try:
                end = value_end(text, position)
            except RecursionError:
                end, too_deep = None, too_deep + 1
            if too_deep > TOO_DEEP_AT_MOST:
                self.lost_events += 1 + len(_BOUNDARY.findall(text, position))
                break
            if end is None:
                self.lost_events += 1
                following = _BOUNDARY.search(text, position + 1)
                position = following.end() if following else -1
                continue
            try:
                events.append(msgspec.json.decode(text[position:end], type=self.event_type, strict=False))
            except (msgspec.MsgspecError, RecursionError):
                self.lost_events += 1
            position = text.find(b"{", end)
        return events


def value_end(text: bytes, position: int) -> int | None:
    """Where the JSON value that begins here ends, or None where it is no JSON. The cost is that of the value alone."""
    try:
        msgspec.json.decode(memoryview(text)[position:], type=msgspec.Raw)
    except msgspec.DecodeError as error:
        trailing = _TRAILING.search(str(error))
        return position + int(trailing.group(1)) - 1 if trailing else None
    return len(text)


def _closing_bracket(text: bytes) -> int | None:
    """The bracket that most likely closes the event array: the last one behind an object, followed by a key or the end."""
    match = _last(_CLOSING, text, max(0, len(text) - _TAIL_BYTES))
    return match.end() - 1 if match else None


def _last(pattern: re.Pattern[bytes], text: bytes, start: int) -> re.Match[bytes] | None:
    last = deque(pattern.finditer(text, start), maxlen=1)
    return last[0] if last else None


def _clean(text: bytes) -> str:
    """Text with the damage seen in real traces undone: bytes that are no UTF-8, lone backslashes, control characters, NaN."""
    decoded = _CONTROL.sub(" ", text.decode("utf-8", errors="replace"))
    escaped = _ESCAPE.sub(lambda match: match.group() if match.group(1) else r"\\", decoded)
    return _BARE_NUMBER.sub(r"\1null", escaped)
