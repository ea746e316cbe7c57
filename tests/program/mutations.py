"""Damages the cut-down traces, the same way for the same seed, and says what may come of it."""

from __future__ import annotations

import copy
import io
import json
import math
import random
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.program.small_traces import Files, Json

from steptime._program.load import load
from steptime._program.workload import Workload
from steptime._report.answers import Replayed
from steptime._report.inspection import inspect_workload
from steptime._report.json import dumps, prediction_document
from steptime._sim.prediction import predict
from steptime._sim.recorded.replay import replay
from steptime.errors import SteptimeError

# Bytes.


def flip(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20))):
        out[rng.randrange(len(out))] = rng.choice((rng.randrange(256), *b'"\\{}[],:0-9eN\x00\xff'))
    return bytes(out)


def delete(rng: random.Random, data: bytes) -> bytes:
    """A slice missing."""
    low, high = _slice(rng, data)
    return data[:low] + data[high:]


def insert(rng: random.Random, data: bytes) -> bytes:
    """Something in the middle that does not belong there."""
    at = rng.randrange(len(data) + 1)
    junk = rng.choice(
        (b"\x00", b'"', b"{", b"}", b"]", b"\\", b"\\u12", b"NaN", b"},{", b"\xff\xfe", b"1e999", rng.randbytes(9))
    )
    return data[:at] + junk + data[at:]


def repeat(rng: random.Random, data: bytes) -> bytes:
    """A slice twice."""
    low, high = _slice(rng, data)
    return data[:high] + data[low:high] + data[high:]


def swap(rng: random.Random, data: bytes) -> bytes:
    """Two neighbouring slices exchanged."""
    low, high = _slice(rng, data)
    middle = rng.randrange(low, high + 1)
    return data[:low] + data[middle:high] + data[low:middle] + data[high:]


def cut(rng: random.Random, data: bytes) -> bytes:
    """The end missing."""
    return data[: rng.randrange(len(data))]


def _slice(rng: random.Random, data: bytes) -> tuple[int, int]:
    low = rng.randrange(len(data))
    return low, min(len(data), low + rng.choice((1, 2, 10, 100, 5000)))


BYTES: tuple[Callable[[random.Random, bytes], bytes], ...] = (flip, delete, insert, repeat, swap, cut)

# Values.

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 10**6, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, -(2**63), 10**30, 0.5, -1.5, 1e18, 1e300,
    math.nan, math.inf, -math.inf, "", "7", "x", "-", "1e5", "nan", "\ud800", "a\nb\r\x1b[2J", "x" * 3000, "9" * 5000,
    "[0, 1, 99999999999]", "[" * 3000, [], {}, [1], [[1, 2], [3]], ["a"], [None], {"a": 1}, {"rank": 1}, [[[[[[]]]]]],
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A value inside a document: what holds it and under which key."""

    holder: Any
    key: Any

    @property
    def value(self) -> Any:
        """What is there."""
        return self.holder[self.key]


def pick(rng: random.Random, document: Json, many: str) -> Place:
    """A place in the document; mostly in one of its `many` items, half of the time deep in one."""
    holder: Any = document
    if rng.random() < 0.85 and isinstance(document.get(many), list) and document[many]:
        holder = rng.choice(document[many])
    while True:
        keys = list(range(len(holder))) if isinstance(holder, list) else list(holder) if isinstance(holder, dict) else []
        if not keys:
            return Place(document, rng.choice(list(document)))
        key = rng.choice(keys)
        if key == many or not isinstance(holder[key], list | dict) or not holder[key] or rng.random() < 0.3:
            return Place(holder, key)
        holder = holder[key]


def retype(rng: random.Random, document: Json, many: str) -> None:
    """One value becomes something odd."""
    place = pick(rng, document, many)
    place.holder[place.key] = copy.deepcopy(rng.choice(ODD))


def drop_key(rng: random.Random, document: Json, many: str) -> None:
    """One value is missing."""
    place = pick(rng, document, many)
    del place.holder[place.key]


def borrow(rng: random.Random, document: Json, many: str) -> None:
    """One value is that of another place."""
    place, other = pick(rng, document, many), pick(rng, document, many)
    if other.key != many:
        place.holder[place.key] = copy.deepcopy(other.value)


def rename_key(rng: random.Random, document: Json, many: str) -> None:
    """A value under another key."""
    place, other = pick(rng, document, many), pick(rng, document, many)
    if isinstance(place.holder, dict) and isinstance(other.key, str):
        place.holder[other.key] = place.holder.pop(place.key)


def shuffle(rng: random.Random, document: Json, many: str) -> None:
    """The items in another order."""
    if isinstance(document.get(many), list):
        rng.shuffle(document[many])


def duplicate(rng: random.Random, document: Json, many: str) -> None:
    """Some items twice."""
    items = document.get(many)
    if isinstance(items, list) and items:
        items.extend(copy.deepcopy(rng.choices(items, k=rng.choice((1, 10, 100)))))


def thin_out(rng: random.Random, document: Json, many: str) -> None:
    """Items missing: some, most, or all of one kind."""
    items = document.get(many)
    if not isinstance(items, list) or not items:
        return
    if rng.random() < 0.5:
        share = rng.random()
        document[many] = [i for i in items if rng.random() < share]
        return
    key = rng.choice(("cat", "name", "tid", "ph"))
    kind = _get(rng.choice(items), key)
    document[many] = [i for i in items if _get(i, key) != kind]


# Keys that tie events together, and those that place them in time.
_TIES = (
    "correlation", "stream", "device", "External id", "tid", "pid", "cat", "ph", "name", "id", "ctrl_deps", "Group size",
    "Process Group Name", "Process Group Ranks", "Collective name", "rank", "world_size", "Record function id",
)  # fmt: skip
_TIMES = ("ts", "dur")


def retie(rng: random.Random, document: Json, many: str) -> None:
    """Many items get another's value under a key that ties items together."""
    items = _items(document, many)
    key = rng.choice(_TIES)
    holders = [h for i in items for h in (i, i.get("args")) if isinstance(h, dict) and key in h]
    values = [h[key] for h in holders]
    for holder in holders:
        if rng.random() < 0.2:
            holder[key] = copy.deepcopy(rng.choice(values))


def odd_column(rng: random.Random, document: Json, many: str) -> None:
    """The same odd value under one key of every item: a column whose type is wrong throughout."""
    items = _items(document, many)
    key, value = rng.choice((*_TIES, *_TIMES)), rng.choice(ODD)
    for holder in [h for i in items for h in (i, i.get("args")) if isinstance(h, dict) and key in h]:
        holder[key] = copy.deepcopy(value)


def retime(rng: random.Random, document: Json, many: str) -> None:
    """Times of some items changed: shifted, negative, absurd, written as text or as whole nanoseconds."""
    share, key = rng.choice((0.01, 0.1, 1.0)), rng.choice(_TIMES)
    change = rng.choice((
        lambda t: -t, lambda t: t * 1e9, lambda t: t + rng.uniform(-1e5, 1e5), str, lambda t: int(t * 1000), int,
        lambda t: t * 0, lambda t: t - 1e13, lambda t: t + 86_400e6, lambda t: f"{t:.3f}", lambda t: t * 3,
    ))  # fmt: skip
    for item in _items(document, many):
        if isinstance(item.get(key), int | float) and math.isfinite(item[key]) and rng.random() < share:
            item[key] = change(item[key])


def rehead(rng: random.Random, document: Json, many: str) -> None:
    """Rank, size of the job or process groups changed; or a key at the top gone or odd."""
    info = document.get("distributedInfo")
    if isinstance(info, dict) and rng.random() < 0.6:
        change: Json = {"rank": rng.choice((0, 1, 3, 4, -1, 2**23)), "world_size": rng.choice((0, 1, 2, 4, 5, 10**6, -4))}
        change["pg_config"] = rng.choice(([], [{"pg_name": "0", "ranks": [9, 10]}], [{"ranks": {}}], "x", None))
        key = rng.choice(list(change))
        info[key] = change[key]
        return
    key = rng.choice([k for k in document if k != many] or [many])
    document[key] = copy.deepcopy(rng.choice(ODD))


def _items(document: Json, many: str) -> list[Json]:
    items = document.get(many)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _get(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, dict) else None


Change = Callable[[random.Random, Json, str], None]
VALUES: tuple[Change, ...] = (
    retype, retype, drop_key, borrow, rename_key, shuffle, duplicate, thin_out, retie, retie, odd_column, retime, retime,
    rehead,
)  # fmt: skip


def damage(rng: random.Random, data: bytes, many: str | None) -> bytes:
    """One to three mutations of one file; `many` is the key of its items where it is JSON."""
    if many is not None and rng.random() < 0.65:
        document = json.loads(data)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(VALUES)(rng, document, many)
        data = json.dumps(document, ensure_ascii=rng.random() < 0.8).encode("utf-8", errors="surrogatepass")
        if rng.random() < 0.85:
            return data
    return rng.choice(BYTES)(rng, data) if data else data


def tar(files: Files, mode: str = "w:gz") -> bytes:
    """The files as an archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


# What may come out.


def outcome(paths: list[Path]) -> str:
    """What reading, replaying and predicting give: "result", or the one line of an error. Anything else raises."""
    try:
        workload = load(paths)
    except SteptimeError as error:
        return _line(error)
    found = "result"
    for use in (_inspected, _replayed, _predicted, _unprofiled):
        try:
            use(workload)
        except SteptimeError as error:
            found = _line(error)
    return found


def _replayed(workload: Workload) -> None:
    played = replay(workload)
    assert played.steps, "a replay of no step says nothing"
    for step in played.steps:
        assert 0 <= step.predicted_ns < 2**60, step
        assert 0 < step.measured_ns < 2**60, step
    assert set(workload.warnings) <= set(played.workload.warnings), "what was lost must be said with the result"
    strict_json(dumps(Replayed.of(played).to_dict()))


def _predicted(workload: Workload) -> None:
    prediction = predict(workload)
    assert 0 <= prediction.step_time_ms < math.inf, prediction.step_time_ms
    assert all(0 <= share < math.inf for share in prediction.breakdown.values()), prediction.breakdown
    assert set(workload.warnings) <= set(prediction.warnings), "what was lost must be said with the result"
    strict_json(dumps(prediction_document(prediction)))


def _unprofiled(workload: Workload) -> None:
    prediction = predict(workload, profiled=False)
    low, high = prediction.interval_ms
    assert 0 <= low <= prediction.step_time_ms <= high < math.inf, prediction
    strict_json(dumps(prediction_document(prediction)))


def _inspected(workload: Workload) -> None:
    strict_json(dumps(inspect_workload(workload).to_dict()))


def strict_json(text: str) -> Any:
    """What other tools read: JSON without NaN or infinities."""
    return json.loads(text, parse_constant=_no_number)


def _no_number(text: str) -> None:
    raise AssertionError(f"{text} is no number")


def _line(error: SteptimeError) -> str:
    text = str(error)
    assert text.strip(), "an error must say something"
    assert len(text.splitlines()) == 1, text
    return text
