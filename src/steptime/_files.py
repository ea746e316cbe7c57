"""Files that are complete or absent, whatever ends the process that writes them; outputs that never replace an input; inputs
of which no more is read than makes sense.
"""

from __future__ import annotations

import gzip
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from steptime.errors import InputError

MOST_BYTES = 1 << 28
"""Of a file that describes something (a config, a machine, statistics): the largest that ships has 2 MB."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def read_whole(path: Path, *, unpack: bool = False) -> bytes:
    """The content of a file that describes something, unpacked if asked; what has no end is refused before memory is full."""
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise InputError(f"{path}: neither a file nor a folder; expected a file")
    with path.open("rb") as file, gzip.GzipFile(fileobj=file) if unpack else file as content:
        data = content.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise InputError(f"{path}: more than {MOST_BYTES >> 20} MiB; no description has so much, is it another file?")
    return data


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write; it takes the file's name when the block ends well, and is gone when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _whole(path) as unfinished:
        yield unfinished


def write_whole(path: Path, text: str) -> None:
    """A text file, complete or absent."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextmanager
def output(path: Path) -> Iterator[Path]:
    """Where to write a file that a user named: complete or as it was. What is no plain file (a pipe) is written as it is."""
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        with _whole(path.resolve()) as unfinished:
            yield unfinished
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error}); check the folder and permissions") from error


def write_output(path: Path, content: str | bytes) -> None:
    """The content of a file that a user named."""
    with output(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


def refuse_overwriting(outputs: Mapping[str, Path | None], inputs: Iterable[Path | str | None]) -> None:
    """An error where a file that is read would be written; outputs by the option that names them."""
    known = {Path(each).resolve() for each in inputs if each is not None}
    written: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        if path.resolve() in known:
            raise InputError(f"{option} {path}: would overwrite what is read from there; choose another name")
        if path.is_file() or not path.exists():
            before = written.setdefault(path.resolve(), option)
            if before != option:
                raise InputError(f"{option} {path}: is where {before} writes; choose another name")


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path | str | None]) -> None:
    """An error before work begins whose answer could not be written; outputs by the option that names them."""
    refuse_overwriting(outputs, inputs)
    for option, path in outputs.items():
        why = None if path is None else _not_writable(path)
        if why:
            raise InputError(f"{option} {path}: cannot be written ({why}); check the folder and permissions")


def _not_writable(path: Path) -> str:
    """Why no file of this name could be written; empty where one can."""
    folder = path.resolve().parent
    if path.is_dir():
        return "it is a folder"
    if not folder.is_dir():
        return f"there is no folder {path.parent}"
    plain = path.is_file() or not path.exists()  # a device is written as it is
    return "its folder is read-only" if plain and not os.access(folder, os.W_OK | os.X_OK) else ""


def check_file_name(option: str, name: str) -> None:
    """An error where a name could not be a file's, or would lead to another folder."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{option} {name!r}: expected letters, digits, '.', '_', '+' and '-', for files are called so")


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)  # a full disk is told without saying where
        raise
    finally:
        unfinished.unlink(missing_ok=True)
