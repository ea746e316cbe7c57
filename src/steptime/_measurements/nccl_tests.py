"""What `nccl-tests` prints, its text table or its JSON, as points.

Bytes are as nccl-tests counts them, like those of the measured set `collectives`: the larger of a rank's two buffers. Its
`sendrecv` of more than two ranks is a ring: each sends to the next.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptime._files import read_whole
from steptime._hardware.description import MOST_RANKS
from steptime.errors import InputError

# As the measured set `collectives` has them; its programs, and tables made from them, write them with and without underscores.
_KINDS = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter", "broadcast", "reduce", "send_recv")
_KIND_OF = {spelling: kind for kind in _KINDS for spelling in (kind, kind.replace("_", ""))}
_HEADER = ("size", "count", "type", "redop", "root", "time")  # since nccl-tests 2.13
_RANK_LINE = re.compile(r"#\s*Rank\s+(\d{1,7})\s.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)")
_STARTING = re.compile(r"#\s*Collective test starting:\s*(\S+)")
_VERSION = re.compile(r"nccl-library=(\d{1,9})\b|^NCCL version (\d+\.\d+\.\d+)")
_ROW = re.compile(r"\s*\d+\s")
# Beyond, a row is garbled: more bytes than a machine holds, longer than a run.
_MOST_BYTES, _MOST_NS = 1 << 48, 1e14
# Longer names first: all_reduce and reduce_scatter are no reduce.
_IN_NAME = re.compile(rf"(?<![a-z])({'|'.join(sorted(_KIND_OF, key=len, reverse=True))})(?![a-z])")


@dataclass(frozen=True, slots=True)
class Point:
    """One timed collective. `nodes` is 0 where the output does not say."""

    kind: str
    ranks: int
    nodes: int
    bytes: int
    ns: float  # out of place
    nccl: str = ""
    device: str = ""
    source: str = ""  # of published tables: the log within them


@dataclass(frozen=True, slots=True)
class TimedPoints:
    """What is in some output, and how many of its rows could not be used."""

    points: tuple[Point, ...]
    skipped: int

    @classmethod
    def of(cls, rows: Sequence[Point | None]) -> TimedPoints:
        """From rows, None where one could not be used."""
        points = tuple(row for row in rows if row is not None)
        return cls(points, len(rows) - len(points))


@dataclass(slots=True)
class TestRun:
    """One run of nccl-tests: what the lines before a table say of it."""

    kind: str | None
    ranks: int = 0
    hosts: frozenset[str] = frozenset()
    device: str = ""
    nccl: str = ""
    header: tuple[str, ...] = _HEADER


def kind_of(name: str) -> str | None:
    """A collective by the name of its test, its file or its column; None if it is none that steptime models."""
    return _KIND_OF.get(name.lower().rsplit("/", 1)[-1].removesuffix("_perf").replace("-", "_"))


def _kind_in(stem: str) -> str | None:
    """The one collective that a file is named after, as in `8_gpus.all-reduce-perf`; None if there is none or several."""
    results = {_KIND_OF[name] for name in _IN_NAME.findall(stem.lower().replace("-", "_"))}
    return results.pop() if len(results) == 1 else None


def read_nccl_tests(file: Path, kind: str | None = None) -> TimedPoints:
    """A file that nccl-tests wrote. Old versions do not print which collective they ran: the file's name or `kind` says it."""
    try:
        text = read_whole(file).decode(errors="replace")
    except OSError as error:
        raise InputError(f"{file}: not readable ({error.strerror})") from error
    named = kind or _kind_in(file.stem)
    result = _from_json(file, text, named) if text.lstrip().startswith("{") else _from_text(text.splitlines(), named)
    if not result.points:
        why = f"{result.skipped} damaged or unknown rows, no others" if result.skipped else "no row of a table, no JSON results"
        if result.skipped and named is None and not _STARTING.search(text):
            why += "; where the output does not say which collective it timed the file's name has to, as all_reduce_8.log does"
        raise InputError(f"{file}: nothing that nccl-tests printed is in it ({why})")
    return result


def _from_text(lines: Iterable[str], kind: str | None) -> TimedPoints:
    run, rows = TestRun(kind), []
    for line in lines:
        if _ROW.match(line):
            rows.append(_point(run, line.split()))
        else:
            _note(run, line)
    return TimedPoints.of(rows)


def _note(run: TestRun, line: str) -> None:
    """What a line above a table says."""
    if version := _VERSION.search(line):
        run.nccl = dotted(version[1]) if version[1] else str(version[2])
    if starting := _STARTING.search(line):
        run.kind = kind_of(starting[1])
    if "Using devices" in line:
        run.ranks, run.hosts = 0, frozenset()
    if rank := _RANK_LINE.search(line):
        run.ranks = max(run.ranks, int(rank[1]) + 1)
        run.hosts |= {rank[2]}
        run.device = rank[3].strip()
    words = line.lstrip("# ").split()
    if words[:2] == ["size", "count"]:
        run.header = tuple(words)


def _point(run: TestRun, words: Sequence[str]) -> Point | None:
    """A row of the table, or None where it is cut off, garbled, or of what steptime does not model."""
    index = next((index for index, name in enumerate(run.header) if name in ("time", "cputime")), None)
    if run.kind is None or run.ranks < 1 or index is None or len(words) < max(len(run.header), index + 3):
        return None
    return timed_point(run, words[0], words[index])


def timed_point(run: TestRun, size: object, time_us: object) -> Point | None:
    """A row of a run, or None where it is garbled or of what steptime does not model."""
    try:
        size_bytes, ns = int(str(size)), 1e3 * float(str(time_us))
    except ValueError:
        return None
    if run.kind is None or not 1 <= run.ranks <= MOST_RANKS or not 0 <= size_bytes <= _MOST_BYTES or not 0 < ns <= _MOST_NS:
        return None
    return Point(run.kind, run.ranks, len(run.hosts), size_bytes, ns, run.nccl, run.device)


def dotted(version: str) -> str:
    """22902: 2.29.2."""
    number = int(version)
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _from_json(file: Path, text: str, kind: str | None) -> TimedPoints:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not readable as the JSON of nccl-tests ({error})") from error
    run = _json_run(content, kind)
    return TimedPoints.of([_json_point(run, row) for row in _results(content)])


def _json_run(content: Mapping[str, Any], kind: str | None) -> TestRun:
    config = content.get("config")
    config = config if isinstance(config, dict) else {}
    # It lists one device per process, which may drive several.
    listed = config.get("devices")
    devices = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    each = math.prod(count for name in ("nthreads", "ngpus") if isinstance(count := config.get(name), int))
    program = content.get("args")
    named = kind_of(str(program[0])) if isinstance(program, list) and program else None
    version = content.get("nccl_version")
    return TestRun(
        kind=named or kind,
        ranks=len(devices) * each,
        hosts=frozenset(str(item.get("hostname")) for item in devices),
        device=str(devices[0].get("device_info", "")).strip() if devices else "",
        nccl=dotted(str(version)) if type(version) is int and 0 <= version < 10**9 else "",
    )


def _results(content: object) -> Iterator[Mapping[str, Any]]:
    """Its rows, wherever its version puts them."""
    if isinstance(content, dict):
        if "size" in content and ("out_of_place" in content or "in_place" in content):
            yield content
            return
        content = list(content.values())
    if isinstance(content, list):
        for item in content:
            yield from _results(item)


def _json_point(run: TestRun, row: Mapping[str, Any]) -> Point | None:
    timed = row.get("out_of_place")
    if not isinstance(timed, dict):
        return None
    return timed_point(run, row.get("size"), timed.get("time", timed.get("cpu_time")))
