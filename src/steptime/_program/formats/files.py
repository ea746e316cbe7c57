"""Opening what users point at: plain files, gzip, members of tar archives; always as a stream, never all at once."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from steptime.errors import InputError, TraceError

_GZIP_MAGIC = b"\x1f\x8b"
# What reading damaged archives and compressed files raises.
_DAMAGE = (OSError, EOFError, zlib.error, tarfile.TarError)
# What a header with an absurd size raises besides.
_BAD_SIZES = (ValueError, OverflowError, MemoryError)
_BLOCK_BYTES = 1 << 20
# Formats that are read whole need several times this much memory; the largest traces of one rank seen are a tenth of it.
WHOLE_BYTES_AT_MOST = 2 << 30
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
    result = next((match for pattern in _RANK_IN_NAME if (match := pattern.search(name))), None)
    return int(result.group(1)) if result else None


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
    except _DAMAGE as error:
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
        pieces: list[bytes] = []
        missing = size
        # Piece by piece: what was decompressed before the damage is not lost with it.
        while missing and self.damage is None:
            try:
                piece = self.stream.read1(missing)  # type: ignore[attr-defined]
            except _DAMAGE as error:
                self.damage = _first_line(error)
                break
            if not piece:
                break
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def read_all(self, progress: Callable[[int], None] | None = None) -> bytes:
        """Everything up to the end or the first damage, for formats that cannot be read piece by piece."""
        data = bytearray()
        while block := self.read(_BLOCK_BYTES):
            data += block
            if len(data) > WHOLE_BYTES_AT_MOST:
                raise TraceError(
                    f"{getattr(self.stream, 'name', 'file')}: more than {WHOLE_BYTES_AT_MOST} bytes; not a trace of one rank"
                )
            if progress is not None:
                progress(len(block))
        return bytes(data)


def find_files(paths: list[Path]) -> list[TraceFile]:
    """Every trace file behind the given files, folders and archives, in a stable order."""
    results: list[TraceFile] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(TRACE_SUFFIXES))
            if not inside:
                raise InputError(f"{path}: no trace files in this folder; expected one of {', '.join(TRACE_SUFFIXES)}")
            for file in inside:
                results += _members(file)
        elif path.is_file():
            results += _members(path)
        elif path.exists():
            raise InputError(f"{path}: neither a file nor a folder; write the trace to a file first")
        else:
            raise InputError(f"{path}: no such file or folder")
    return results


def _members(path: Path) -> list[TraceFile]:
    if not path.name.endswith(_TAR_SUFFIXES):
        return [TraceFile(path)]
    try:
        with tarfile.open(path) as archive:
            names = [m.name for m in _headers(archive) if m.isfile() and m.name.endswith(TRACE_SUFFIXES)]
    except (*_DAMAGE, *_BAD_SIZES) as error:
        raise InputError(f"{path}: not a readable tar archive ({_first_line(error)})") from error
    if not names:
        raise InputError(f"{path}: no trace files inside this archive")
    return [TraceFile(path, name) for name in sorted(names)]


def _headers(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The headers of an archive. One of a negative size would lead back to itself for ever."""
    while (member := archive.next()) is not None:
        if member.size < 0:
            raise tarfile.ReadError(f"a member of {member.size} bytes")
        yield member


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
