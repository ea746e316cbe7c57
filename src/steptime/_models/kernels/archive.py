"""Fitted forms in a file: arrays by part and name, and the recipe as JSON. Reading one executes nothing."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._measurements.whole import whole
from steptime.errors import InputError

SCHEMA_VERSION = 1
_RECIPE, _PARTS = "recipe", "parts"


def write_archive(file: Path, recipe: Mapping[str, Any], parts: Mapping[str, Mapping[str, npt.NDArray[Any]]]) -> None:
    """The same parts give the same bytes."""
    said = {"schema_version": SCHEMA_VERSION, _PARTS: sorted(parts), **recipe}
    arrays: dict[str, npt.NDArray[Any]] = {_RECIPE: np.asarray(json.dumps(said))}
    for part, named in sorted(parts.items()):
        arrays |= {f"{part}/{name}": array for name, array in sorted(named.items())}
    with whole(file) as unfinished, unfinished.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Archive:
    """What is in a file, its parts read when they are asked for."""

    file: Path
    recipe: Mapping[str, Any]
    parts: frozenset[str]

    @classmethod
    def open(cls, file: Path) -> Archive:
        """Reads the recipe and the names."""
        content = _read(file, lambda name: name == _RECIPE)
        try:
            recipe = json.loads(str(content[_RECIPE]))
        except (KeyError, ValueError) as error:
            raise InputError(f"{file}: not a readable file of fitted models ({error}); fit again") from error
        if not isinstance(recipe, dict) or recipe.pop("schema_version", None) != SCHEMA_VERSION:
            raise InputError(f"{file}: fitted models of another version, this steptime reads {SCHEMA_VERSION}; fit again")
        return cls(file, recipe, frozenset(recipe.pop(_PARTS, ())))

    def part(self, part: str) -> dict[str, npt.NDArray[Any]]:
        """The arrays of one part by name."""
        found = _read(self.file, lambda name: name.startswith(f"{part}/"))
        if not found:
            raise InputError(f"{self.file}: has no part {part!r}; fit again")
        return {name.partition("/")[2]: array for name, array in found.items()}


def _read(file: Path, wanted: Callable[[str], bool]) -> dict[str, npt.NDArray[Any]]:
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files if wanted(name)}
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such file; `steptime fit` writes one") from error
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{file}: not a readable file of fitted models ({error}); fit again") from error
