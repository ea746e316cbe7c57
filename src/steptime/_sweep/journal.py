"""A journal of finished variants, by which a sweep that was ended goes on: a line of JSON each, written whole.

A variant is found again by a digest of all that its answer depends on: the version, the contents of files, every setting. So a
journal that other inputs made holds nothing that a sweep would take for its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from steptime import __version__
from steptime.errors import InputError

_KIND = "steptime sweep"
_SCHEMA = 1
_HEAD = {"journal": _KIND, "schema_version": _SCHEMA}
_BLOCK = 1 << 20


class Journal:
    """The finished variants in a file, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Any] = {}
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error}); give another file for --resume") from None
        # A last line without an end was being written when the sweep ended.
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].split(b"\n")[:-1]
        if lines or (content and not json.dumps(_HEAD).encode().startswith(content)):
            self._read(lines)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            if whole < len(content):
                os.truncate(self._file, whole)
            if not whole:
                self._write(_HEAD)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror or error}); give another file for --resume") from None

    def _read(self, lines: list[bytes]) -> None:
        if not lines or _decoded(lines[0]) != _HEAD:
            raise InputError(f"{self.path}: is no journal of a sweep; --resume continues one, or begins one in a new file")
        for number, line in enumerate(lines[1:], 2):
            entry = _decoded(line)
            if not isinstance(entry, dict) or not isinstance(entry.get("key"), str) or "result" not in entry:
                raise InputError(f"{self.path}, line {number}: is damaged; delete that line and it is predicted again")
            if entry.get("check") != _check(entry["key"], entry["result"]):
                raise InputError(
                    f"{self.path}, line {number}: was changed or is damaged; delete that line and it is predicted again"
                )
            self.entries[entry["key"]] = entry["result"]

    def add(self, key: str, result: Any) -> None:
        """One more variant."""
        self.entries[key] = result
        self._write({"key": key, "check": _check(key, result), "result": result})

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            content = json.dumps(line, allow_nan=False).encode() + b"\n"
            while content:
                content = content[os.write(self._file, content) :]
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror or error})") from None

    def close(self) -> None:
        """No more variants."""
        os.close(self._file)


def digest(*parts: Any) -> str:
    """Of plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def of_files(paths: Iterable[Path]) -> str:
    """Of the contents of files and of all files in folders, with their names."""
    result = hashlib.sha256()
    for path in paths:
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        for file in files:
            result.update(f"{file}\n".encode())
            try:
                with file.open("rb") as content:
                    while block := content.read(_BLOCK):
                        result.update(block)
            except OSError as error:
                raise InputError(f"{file}: cannot be read ({error.strerror or error})") from None
    return result.hexdigest()


@cache
def version() -> str:
    """What predicts: the version, and which files of which sizes it is made of, for those who change them."""
    root = Path(__file__).parents[1]
    files = sorted(each for each in root.rglob("*") if each.is_file() and each.suffix != ".pyc")
    return digest(__version__, [(str(each.relative_to(root)), each.stat().st_size) for each in files])


def _check(key: str, result: Any) -> str:
    return digest(key, result)[:16]


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
