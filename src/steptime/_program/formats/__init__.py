"""Trace formats, and opening what users point at: plain files, gzip, members of tar archives; as streams, never all at once.

A module of this folder that has a `FORMAT` is a format; nothing is registered elsewhere.
"""

from __future__ import annotations

import gzip
import importlib
import io
import pkgutil
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import IO, cast

from steptime._program.execution import ExecutionTrace
from steptime._program.program import Program
from steptime._program.workload import Progress, Workload
from steptime.errors import InputError, TraceError

# How much of a file is looked at to tell its format. Kineto writes device properties first, a few kilobytes per GPU.
HEAD_BYTES = 1 << 18

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
    header: tarfile.TarInfo | None = field(default=None, compare=False, repr=False)  # of the member

    @property
    def name(self) -> str:
        """The file's own name, without folders."""
        return Path(self.member).name if self.member else self.path.name

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)


# What messages say of files that end too early.
BREAKS_OFF, DAMAGED = "breaks off", "the compressed data is damaged"


def rank_in_name(source: str) -> int | None:
    """The rank in a file's name, or None; `source` is a `TraceFile` as text."""
    name = source.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    result = next((match for pattern in _RANK_IN_NAME if (match := pattern.search(name))), None)
    return int(result.group(1)) if result else None


@dataclass
class TraceReader:
    """Reads the decompressed bytes of a file until the end or the first damage, which is remembered instead of raised."""

    file: TraceFile
    stream: IO[bytes]
    progress: Progress | None = None
    damage: str | None = None
    _count: int = 0
    _ahead: bytes = b""

    @property
    def source(self) -> str:
        """The file, for messages."""
        return str(self.file)

    def peek(self) -> bytes:
        """The first bytes, which are read again."""
        self._ahead = self._pieces(HEAD_BYTES)
        return self._ahead

    def read(self, size: int) -> bytes:
        """The next block, or b"" at the end or where the compressed data breaks off."""
        block, self._ahead = self._ahead[:size], self._ahead[size:]
        block += self._pieces(size - len(block))
        self._count += len(block)
        if self.progress is not None:
            self.progress(self.file.name, self._count)
        return block

    def _pieces(self, missing: int) -> bytes:
        pieces: list[bytes] = []
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

    def read_all(self) -> bytes:
        """Everything up to the end or the first damage, for formats that cannot be read piece by piece."""
        data = bytearray()
        while block := self.read(_BLOCK_BYTES):
            data += block
            if len(data) > WHOLE_BYTES_AT_MOST:
                raise TraceError(f"{self.source}: more than {WHOLE_BYTES_AT_MOST} bytes; not a trace of one rank")
        return bytes(data)

    def lost(self) -> tuple[str, ...]:
        """What to say of a file whose compressed data is damaged, once it is read."""
        if self.damage is None:
            return ()
        return (f"{self.source}: {DAMAGED} ({self.damage}); what came before was read",)


def opened(files: Iterable[TraceFile], progress: Progress | None = None) -> Iterator[TraceReader]:
    """A reader of each file while it is open, archive by archive and in the order of the archive.

    Going back in compressed data means decompressing it from the start.
    """
    for path, members in groupby(files, key=lambda file: file.path):
        with _unless_damaged(path), tarfile.open(path) if path.name.endswith(_TAR_SUFFIXES) else nullcontext() as archive:
            for file in sorted(members, key=lambda file: file.header.offset if file.header else 0):
                with _unless_damaged(file), _raw(file, archive) as raw, _unzipped(raw) as stream:
                    yield TraceReader(file, stream, progress)


@contextmanager
def _unless_damaged(what: TraceFile | Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise InputError(f"{what}: cannot be opened ({_first_line(error)}); check the path and permissions") from error


def _raw(file: TraceFile, archive: tarfile.TarFile | None) -> IO[bytes]:
    if archive is None:
        return file.path.open("rb")
    extracted = archive.extractfile(file.header or archive.getmember(str(file.member)))
    if extracted is None:
        raise InputError(f"{file}: is not a regular file inside the archive")
    return extracted


@contextmanager
def _unzipped(raw: IO[bytes]) -> Iterator[IO[bytes]]:
    buffered = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)  # type: ignore[type-var]
    if buffered.peek(2)[:2] != _GZIP_MAGIC:
        yield buffered
        return
    with gzip.GzipFile(fileobj=buffered) as unzipped:
        yield cast(IO[bytes], unzipped)


def find_files(paths: Iterable[Path]) -> list[TraceFile]:
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
            # Of several members of one name the last counts, as when an archive is unpacked.
            members = {m.name: m for m in _headers(archive) if m.isfile() and m.name.endswith(TRACE_SUFFIXES)}
    except (*_DAMAGE, *_BAD_SIZES) as error:
        raise InputError(f"{path}: not a readable tar archive ({_first_line(error)})") from error
    if not members:
        raise InputError(f"{path}: no trace files inside this archive")
    return [TraceFile(path, name, members[name]) for name in sorted(members)]


def _headers(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The headers of an archive. One of a negative size would lead back to itself for ever."""
    while (member := archive.next()) is not None:
        if member.size < 0:
            raise tarfile.ReadError(f"a member of {member.size} bytes")
        yield member


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


@dataclass(frozen=True)
class Format:
    """How one kind of file is told from others and read."""

    name: str
    recognises: Callable[[bytes, str], bool]  # the first bytes, decompressed, and the file's name
    read: Callable[[TraceReader], Program | ExecutionTrace | Workload]


@cache
def formats() -> tuple[Format, ...]:
    """Every format in this folder, by file name."""
    result: dict[str, Format] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        candidate = getattr(importlib.import_module(f"{__name__}.{module}"), "FORMAT", None)
        if candidate is None:
            continue
        if candidate.name in result:
            raise ValueError(f"two files in {__name__} claim the format {candidate.name!r}; one of them is {module}.py")
        result[candidate.name] = candidate
    return tuple(result.values())


def format_of(head: bytes, name: str) -> Format | None:
    """The format of a file, or None if no format knows it."""
    return next((f for f in formats() if f.recognises(head, name)), None)
