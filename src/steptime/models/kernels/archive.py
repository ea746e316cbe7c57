"""Fitted forms in a file: arrays by part and name, and the recipe as JSON. Reading one executes nothing."""

from __future__ import annotations

import json
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError
from steptime.measurements.whole import whole

SCHEMA_VERSION = 1
_RECIPE = "recipe"

Parts = dict[str, dict[str, npt.NDArray[Any]]]


def write_archive(file: Path, recipe: Mapping[str, Any], parts: Mapping[str, Mapping[str, npt.NDArray[Any]]]) -> None:
    """The same parts give the same bytes."""
    arrays: dict[str, npt.NDArray[Any]] = {_RECIPE: np.asarray(json.dumps({"schema_version": SCHEMA_VERSION, **recipe}))}
    for part, named in sorted(parts.items()):
        arrays |= {f"{part}/{name}": array for name, array in sorted(named.items())}
    with whole(file) as unfinished, unfinished.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]


def read_archive(file: Path) -> tuple[dict[str, Any], Parts]:
    """The recipe and the parts that `write_archive` wrote."""
    parts: Parts = defaultdict(dict)
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            for name in archive.files:
                part, _, rest = name.partition("/")
                parts[part][rest] = archive[name]
        recipe = json.loads(str(parts.pop(_RECIPE)[""]))
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such file; `steptime fit` writes one") from error
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{file}: not a readable file of fitted models ({error}); fit again") from error
    if not isinstance(recipe, dict) or recipe.pop("schema_version", None) != SCHEMA_VERSION:
        raise InputError(f"{file}: fitted models of another version, this steptime reads {SCHEMA_VERSION}; fit again")
    return recipe, dict(parts)
