"""Fitted forms in a file: arrays by part and name, and the recipe as JSON. Reading one executes nothing.

A digest of all arrays is written last. Arrays that belong together have sizes that no reader could check one by one: a file of
which some were lost or replaced is refused as a whole.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import numpy as np

from steptime._files import whole
from steptime._models.engine.stored import Array, Arrays
from steptime.errors import InputError

K = TypeVar("K")
T = TypeVar("T")

SCHEMA_VERSION = 1
_RECIPE, _PARTS, _DIGEST = "recipe", "parts", "digest"
# Of a member of a zip file the bytes before its name, and of an array in NumPy's format 1.0 those before its description.
_LOCAL_HEADER, _HEADER, _MAGIC = 30, 10, b"\x93NUMPY\x01\x00"


def write_archive(file: Path, recipe: Mapping[str, Any], parts: Mapping[str, Arrays]) -> None:
    """The same parts give the same bytes."""
    text = {"schema_version": SCHEMA_VERSION, _PARTS: sorted(parts), **recipe}
    arrays: dict[str, Array] = {_RECIPE: np.asarray(json.dumps(text))}
    for part, named in sorted(parts.items()):
        arrays |= {f"{part}/{name}": array for name, array in sorted(named.items())}
    with whole(file) as unfinished, unfinished.open("w+b") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
        add_digest(stream)


def add_digest(stream: BinaryIO) -> None:
    """Write the digest of the arrays that a file has."""
    with zipfile.ZipFile(stream, "a") as archive:
        text = io.BytesIO()
        np.save(text, np.asarray(_digest({each.filename.removesuffix(".npy"): each for each in archive.infolist()})))
        archive.writestr(zipfile.ZipInfo(f"{_DIGEST}.npy"), text.getvalue())


def _digest(members: Mapping[str, zipfile.ZipInfo]) -> str:
    """Names, sizes and checksums of all arrays in one text."""
    listed = sorted((name, each.file_size, each.CRC) for name, each in members.items() if name != _DIGEST)
    return hashlib.sha256(repr(listed).encode()).hexdigest()


@dataclass(frozen=True)
class Archive:
    """What is in a file, its parts read when they are asked for."""

    file: Path
    recipe: Mapping[str, Any]
    parts: frozenset[str]

    @classmethod
    def open(cls, file: Path) -> Archive:
        """Reads the recipe and the names."""
        content = _read(file, lambda name: name in (_RECIPE, _DIGEST))
        members = _members(file, file.stat().st_mtime_ns)
        if _DIGEST in content and str(content[_DIGEST]) != _digest(members):
            raise InputError(f"{file}: some of its arrays are not those that were fitted together; fit again")
        try:
            recipe = json.loads(str(content[_RECIPE]))
        except (KeyError, ValueError) as error:
            raise InputError(f"{file}: not a readable file of fitted models ({error}); fit again") from error
        if not isinstance(recipe, dict) or recipe.pop("schema_version", None) != SCHEMA_VERSION:
            raise InputError(f"{file}: fitted models of another version, this steptime reads {SCHEMA_VERSION}; fit again")
        return cls(file, recipe, frozenset(recipe.pop(_PARTS, ())))

    def part(self, part: str) -> dict[str, Array]:
        """The arrays of one part by name."""
        result = _read(self.file, lambda name: name.startswith(f"{part}/"))
        if not result:
            raise InputError(f"{self.file}: has no part {part!r}; fit again")
        return {name.partition("/")[2]: array for name, array in result.items()}


class StoredParts(Mapping[K, T]):
    """Models in a file, each made from the arrays of its part when it is first asked for."""

    def __init__(self, archive: Archive, names: Mapping[K, str], load: Callable[[K, Arrays], T]) -> None:
        self._archive, self._names, self._load = archive, dict(names), load
        self._loaded: dict[K, T] = {}

    def __getitem__(self, key: K) -> T:
        """The model of that key."""
        name = self._names[key]
        if key not in self._loaded:
            try:
                self._loaded[key] = self._load(key, self._archive.part(name))
            except (KeyError, ValueError, IndexError, ModuleNotFoundError) as error:
                message = f"{self._archive.file}: not the {name} model that this steptime reads ({error}); fit again"
                raise InputError(message) from error
        return self._loaded[key]

    def __iter__(self) -> Iterator[K]:
        """The keys, in the order they were given."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._names)


def _read(file: Path, wanted: Callable[[str], bool]) -> dict[str, Array]:
    try:
        with file.open("rb") as stream:
            members = _members(file, file.stat().st_mtime_ns)
            return {name: _array(stream, member) for name, member in members.items() if wanted(name)}
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such file; `steptime fit` writes one") from error
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        TypeError,
        struct.error,
        SyntaxError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise InputError(f"{file}: not a readable file of fitted models ({error}); fit again") from error


@lru_cache(maxsize=16)
def _members(file: Path, changed_ns: int) -> Mapping[str, zipfile.ZipInfo]:  # noqa: ARG001 - a file that changed is read again
    """Where the arrays of a file lie. There are thousands, in parts that are asked for one by one."""
    with zipfile.ZipFile(file) as archive:
        return {member.filename.removesuffix(".npy"): member for member in archive.infolist()}


def _array(stream: BinaryIO, member: zipfile.ZipInfo) -> Array:
    """One array, as `np.savez_compressed` writes it; `np.load` takes several times as long over as many small ones."""
    stream.seek(member.header_offset)
    name, extra = struct.unpack("<26x2H", stream.read(_LOCAL_HEADER))
    stream.seek(name + extra, 1)
    content = stream.read(member.compress_size)
    if member.compress_type == zipfile.ZIP_DEFLATED:
        content = zlib.decompress(content, -zlib.MAX_WBITS)
    if zlib.crc32(content) != member.CRC or not content.startswith(_MAGIC):
        raise ValueError(f"{member.filename} is damaged")
    begin = _HEADER + int.from_bytes(content[_HEADER - 2 : _HEADER], "little")
    dtype, shape, order = _header(content[_HEADER:begin])
    return np.ndarray(shape, dtype, content, begin, order=order)


@lru_cache(maxsize=1 << 12)
def _header(text: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]]:
    header = ast.literal_eval(text.decode("latin1"))
    dtype = np.dtype(header["descr"])
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    return dtype, header["shape"], "F" if header["fortran_order"] else "C"
