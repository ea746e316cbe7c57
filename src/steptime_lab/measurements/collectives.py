"""What NCCL chooses per collective and size: asked apart from the times, and joined onto their rows.

DIR/nccl_choices/<place>.json: `nccl` (its version), `ranks`, `fabric`, and `choices`, a list of
[collective, bytes, algorithm, protocol, channels or null].
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from steptime._files import write_whole
from steptime.errors import InputError

FOLDER_NAME = "nccl_choices"


class Asked(NamedTuple):
    """What NCCL was asked, and which NCCL."""

    nccl: str
    ranks: int
    fabric: str
    collective: str
    size_bytes: int


class Choice(NamedTuple):
    """What NCCL said it would do; empty where it did not say."""

    algorithm: str = ""
    protocol: str = ""
    channels: int | None = None


def write_choices(file: Path, choices: Mapping[Asked, Choice], *, nccl: str, ranks: int, fabric: str) -> None:
    """The choices at one place, whole or not at all."""
    content = {
        "nccl": nccl, "ranks": ranks, "fabric": fabric,
        "choices": [[item.collective, item.size_bytes, *choice] for item, choice in choices.items()],
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(content))


def choices_in(file: Path) -> dict[Asked, Choice]:
    """The choices at one place; none where nobody asked."""
    if not file.exists():
        return {}
    try:
        text = json.loads(file.read_text(encoding="utf-8"))
        where = str(text["nccl"]), int(text["ranks"]), str(text["fabric"])
        return {
            Asked(*where, str(collective), int(size)): Choice(str(algorithm), str(protocol), channels)
            for collective, size, algorithm, protocol, channels in text["choices"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: not a list of NCCL's choices ({error}); remove it and ask again") from error


def choices_of(folders: Iterable[Path]) -> dict[Asked, Choice]:
    """All choices that were asked into some folders."""
    files = [file for folder in folders for file in sorted((folder / FOLDER_NAME).glob("*.json"))]
    return {item: choice for file in files for item, choice in choices_in(file).items()}


def with_choices(table: pa.Table, choices: Mapping[Asked, Choice]) -> pa.Table:
    """Rows of `collectives` with what NCCL chose, by collective, bytes, ranks, fabric and NCCL; rows that know it keep it.

    Uneven splits are not joined: NCCL makes them of sends and receives, of which it says nothing.
    """
    rows = zip(
        *(table[name].to_pylist() for name in ("nccl", "ranks", "fabric", "collective", "bytes", "splits", "algorithm")),
        *(table[name].to_pylist() for name in ("protocol", "channels")),
        strict=True,
    )
    results = [
        Choice(algorithm, protocol, channels)
        if algorithm or splits
        else choices.get(Asked(nccl, ranks, fabric, collective, size), Choice("", protocol, channels))
        for nccl, ranks, fabric, collective, size, splits, algorithm, protocol, channels in rows
    ]
    for index, name in enumerate(Choice._fields):
        field = table.schema.field(name)
        plain = pa.array([choice[index] for choice in results], pa.int16() if name == "channels" else pa.string())
        table = table.set_column(table.schema.get_field_index(name), field, plain.cast(field.type))
    return table
