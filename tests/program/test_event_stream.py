"""Laws of streaming events: any block size, damage anywhere, and what is lost is counted."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime._program.formats import TraceFile, TraceReader
from steptime._program.formats.kineto import stream as event_stream
from steptime._program.formats.kineto.stream import EventStream
from steptime.errors import TraceError


class Plain(msgspec.Struct):
    """An event with what the tests look at."""

    ph: str = ""
    name: str = ""
    ts: Any = None
    args: dict[str, Any] | None = None


def reader_of(stream: Any) -> TraceReader:
    return TraceReader(TraceFile(Path("here.json")), stream)


def stream_of(text: bytes) -> EventStream[Plain]:
    return EventStream(reader_of(io.BytesIO(text)), lambda _: Plain)


def names(stream: EventStream[Plain]) -> list[str]:
    return [event.name for chunk in stream.chunks() for event in chunk]


def document(count: int, indent: int | None = None, **header: Any) -> bytes:
    events = [{"ph": "X", "name": f"e{i}", "ts": i, "args": {"note": "}, {", "list": [1, {"ph": "X"}]}} for i in range(count)]
    return json.dumps({"schemaVersion": 1, **header, "traceEvents": events, "traceName": "x"}, indent=indent).encode()


EXPECTED = [f"e{i}" for i in range(9)]


@given(st.integers(1, 300), st.sampled_from([None, 2]))
def test_blocks_of_any_size_give_every_event_once_and_in_order(size: int, indent: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_stream, "CHUNK_BYTES", size)
        patch.setattr(event_stream, "HEAD_BYTES", 1)
        stream = stream_of(document(9, indent))
        assert names(stream) == EXPECTED
    assert (stream.header, stream.warnings) == ({"schemaVersion": 1, "traceName": "x"}, [])
    assert (stream.lost_events, stream.repaired_chunks) == (0, 0)


@given(st.integers(0, len(document(9)) - 2))
def test_a_trace_that_breaks_off_gives_its_whole_events_and_says_so(cut: int) -> None:
    text = document(9)
    whole = text[:cut].count(b'"args"')
    stream = stream_of(text[:cut])
    try:
        found = names(stream)
    except TraceError as failure:
        assert str(failure).startswith("here.json: ")
        assert b'"traceEvents": [' not in text[:cut]
        return
    assert found == EXPECTED[: len(found)]
    assert len(found) >= whole - 1
    assert stream.warnings or text[:cut].rstrip(b'"x:}Name, trac').endswith(b"]")


@settings(max_examples=200)
@given(st.integers(0, len(document(9)) - 1), st.binary(min_size=1, max_size=4), st.booleans())
def test_damage_anywhere_never_raises_anything_but_a_clear_line(at: int, junk: bytes, inserted: bool) -> None:
    text = document(9)
    damaged = text[:at] + junk + text[at if inserted else at + len(junk) :]
    stream = stream_of(damaged)
    try:
        found = names(stream)
    except TraceError as failure:
        assert str(failure).startswith("here.json: ")
        assert "\n" not in str(failure)
    else:
        assert len(found) >= 6 or stream.warnings or stream.lost_events


@pytest.mark.parametrize(
    ("damage", "mended"),
    [
        (rb'"name": "C:\path"', "C:\\path"),
        (b'"name": "Gen\xe8ve"', "Gen�ve"),
        (b'"name": "bell\x07"', "bell "),
    ],
)
def test_damage_seen_in_real_traces_is_repaired_and_said(damage: bytes, mended: str) -> None:
    stream = stream_of(document(3).replace(b'"name": "e1"', damage))
    assert names(stream) == ["e0", mended, "e2"]
    assert (stream.repaired_chunks, stream.lost_events) == (1, 0)


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"nan", b"inf"])
def test_numbers_that_are_none_cost_only_themselves(number: bytes) -> None:
    stream = stream_of(document(3).replace(b'"ts": 1,', b'"ts": ' + number + b","))
    assert names(stream) == ["e0", "e1", "e2"]


def test_an_event_of_the_wrong_type_costs_only_itself_and_is_counted() -> None:
    stream = stream_of(document(3).replace(b'"args": {"note"', b'"args": 5, "other": {"note"', 1))
    assert names(stream) == ["e1", "e2"]
    assert stream.lost_events == 1


def test_compressed_data_that_breaks_off_is_read_as_far_as_it_goes() -> None:
    noisy = json.dumps({"traceEvents": [{"ph": "X", "name": f"e{i * 7919 % 9973}"} for i in range(5000)]}).encode()
    data = gzip.compress(noisy)
    reader = reader_of(gzip.GzipFile(fileobj=io.BytesIO(data[: len(data) // 2])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_stream, "CHUNK_BYTES", 4096)
        stream = EventStream(reader, lambda _: Plain)
        found = names(stream)
    assert 1000 < len(found) < 5000
    assert "breaks off" in stream.warnings[0]
    assert reader.damage is not None and reader.damage in stream.warnings[0]


def test_keys_on_both_sides_of_the_events_are_the_header() -> None:
    stream = stream_of(b'{"a": 1, "traceEvents": [{"name": "e0"}], "b": [{"name": "no event"}]}')
    assert names(stream) == ["e0"]
    assert stream.header == {"a": 1, "b": [{"name": "no event"}]}


def test_an_unreadable_header_is_said_and_costs_no_events() -> None:
    stream = stream_of(document(3).replace(b'"schemaVersion": 1', b'"schemaVersion": }1'))
    assert names(stream) == ["e0", "e1", "e2"]
    assert "rank and device may be unknown" in stream.warnings[0]


def test_the_type_is_chosen_from_whole_events_however_the_file_is_cut() -> None:
    seen: list[bytes] = []

    def choose(text: bytes) -> type[Plain]:
        seen.append(text)
        return Plain

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_stream, "CHUNK_BYTES", 3)
        stream = EventStream(reader_of(io.BytesIO(document(9))), choose)
        assert names(stream) == EXPECTED
    assert b'"ts": 8' in seen[0]


def test_progress_hears_of_every_byte() -> None:
    heard: list[tuple[str, int]] = []
    text = document(9)
    reader = reader_of(io.BytesIO(text))
    reader.progress = lambda name, count: heard.append((name, count))
    names(EventStream(reader, lambda _: Plain))
    assert heard[-1] == ("here.json", len(text))


@pytest.mark.parametrize("count", [0, 1])
def test_short_arrays_are_read(count: int) -> None:
    assert names(stream_of(document(count))) == EXPECTED[:count]
