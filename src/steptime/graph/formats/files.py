"""Opening what users point at: plain files, gzip, members of tar archives; always as a stream, never all at once."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from steptime.errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
# What may hold a trace, by suffix. Anything else in a folder is left alone.
TRACE_SUFFIXES = (".json", ".json.gz", ".et", ".et.gz", *_TAR_SUFFIXES)
# rank3, rank-3, rank_3, worker3, name_3.json, name.3.json; not the date or process id that `.pt.trace.json` names end in.
_RANK_IN_NAME = (re.compile(r"(?:rank|worker)[-_]?(\d{1,6})(?!\d)", re.IGNORECASE), re.compile(r"[_.](\d{1,5})\.(?:json|et)"))


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One readable file: on disk, or a member of an archive."""

    path: Path
    member: str | None = None

    @property
    def name(self) -> str:
        """The file's own name, without folders."""
        return Path(self.member).name if self.member else self.path.name

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)


def rank_in_name(source: str) -> int | None:
    """The rank in a file's name, or None; `source` is a `TraceFile` as text."""
    name = source.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    found = next((match for pattern in _RANK_IN_NAME if (match := pattern.search(name))), None)
    return int(found.group(1)) if found else None


@contextmanager
def open_stream(file: TraceFile) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file."""
    try:
        with _open_raw(file) as raw:
            buffered = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)  # type: ignore[type-var]
            if buffered.peek(2)[:2] == _GZIP_MAGIC:
                with gzip.GzipFile(fileobj=buffered) as unzipped:
                    yield cast(IO[bytes], unzipped)
            else:
                yield buffered
    except (OSError, tarfile.TarError) as error:
        raise InputError(f"{file}: cannot be opened ({_first_line(error)}); check the path and permissions") from error


@contextmanager
def _open_raw(file: TraceFile) -> Iterator[IO[bytes]]:
    if file.member is None:
        with file.path.open("rb") as raw:
            yield raw
        return
    with tarfile.open(file.path) as archive:
        extracted = archive.extractfile(file.member)
        if extracted is None:
            raise InputError(f"{file}: is not a regular file inside the archive")
        with extracted:
            yield extracted


@dataclass
class TolerantReader:
    """Reads blocks until the end or the first damage; remembers the damage instead of raising it."""

    stream: IO[bytes]
    damage: str | None = None

    def read(self, size: int) -> bytes:
        """The next block, or b"" at the end or where the compressed data breaks off."""
        if self.damage is not None:
            return b""
        try:
            return self.stream.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError, OSError) as error:
            self.damage = _first_line(error)
            return b""


def find_files(paths: list[Path]) -> list[TraceFile]:
    """Every trace file behind the given files, folders and archives, in a stable order."""
    found: list[TraceFile] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(TRACE_SUFFIXES))
            if not inside:
                raise InputError(f"{path}: no trace files in this folder; expected one of {', '.join(TRACE_SUFFIXES)}")
            for file in inside:
                found += _members(file)
        elif path.exists():
            found += _members(path)
        else:
            raise InputError(f"{path}: no such file or folder")
    return found


def _members(path: Path) -> list[TraceFile]:
    if not path.name.endswith(_TAR_SUFFIXES):
        return [TraceFile(path)]
    try:
        with tarfile.open(path) as archive:
            names = [m.name for m in archive.getmembers() if m.isfile() and m.name.endswith(TRACE_SUFFIXES)]
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: not a readable tar archive ({_first_line(error)})") from error
    if not names:
        raise InputError(f"{path}: no trace files inside this archive")
    return [TraceFile(path, name) for name in sorted(names)]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
