"""Iteration times of one model under many layouts, as a CSV: vTrain's table of Megatron-DeepSpeed on a node of A100s.

Every row becomes the config that a user would write. What the table does not say is as its authors' repository has it
(VIA-Research/vTrain, f8dda847, MIT): fp16 with fp32 masters, attention of separate products with Megatron's fused softmax,
dropout of 0.1, learned positions, a tied vocabulary of 50,257 that Megatron pads to a multiple of 128 on every rank, a fused
Adam, and no recomputation: the rows' time per layer is that of forward and backward once.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._platforms.platform import PlatformParts, usual_host
from steptime.errors import InputError, SteptimeError

# Column of the table -> what it is called here.
COLUMNS = {
    "# GPUs": "ranks",
    "global batch": "batch",
    "micro batch": "micro_batch",
    "hidden size": "width",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "sequence",
    "tensor parallelism": "tensor",
    "data parallelism": "data",
    "pipeline parallelism": "pipeline",
}
MEASURED = "iteration time (ms)"
_DEVICE, _FABRIC = "a100", "a100-nvlink"
_MOST, _MOST_ROWS, _LONGEST_MS = 1 << 24, 100_000, 1e9
_VOCABULARY, _DROPOUT = 50_257, 0.1


@dataclass(frozen=True)
class LayoutRow:
    """One layout of one job, as a config, and how long its step took."""

    name: str
    config: Transformer
    measured_ms: float
    platform: PlatformParts

    @property
    def job(self) -> tuple[int, ...]:
        """What rows have in common among which a layout is chosen."""
        config = self.config
        return (config.ranks, config.batch, config.width, config.heads, config.layers, config.sequence)

    @property
    def micro_batches(self) -> int:
        """Parts of a rank's batch that run one after the other."""
        return self.config.gradient_accumulation


def read_layouts(file: Path) -> tuple[list[LayoutRow], list[str]]:
    """The rows that can be built, and a line for each other."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file}: not readable as a table of layouts ({error})") from error
    needed = (*COLUMNS, MEASURED)
    missing = [name for name in needed if not rows or name not in rows[0]]
    if missing:
        raise InputError(f"{file}: no column {missing[0]!r}; a table of layouts has {', '.join(needed)}")
    if len(rows) > _MOST_ROWS:
        raise InputError(f"{file}: {len(rows):,} rows; expected at most {_MOST_ROWS:,}")
    known, refused = [], []
    for number, row in enumerate(rows, 2):
        found = _row(row, f"line {number}")
        if isinstance(found, str):
            refused.append(f"{file.name}, {found}")
        else:
            known.append(found)
    return known, refused


def _row(row: Mapping[str, str | None], where: str) -> LayoutRow | str:
    try:
        sizes = {name: int(row[column] or "") for column, name in COLUMNS.items()}
        measured_ms = float(row[MEASURED] or "")
    except ValueError:
        return f"{where}: expected whole numbers and milliseconds"
    if not all(0 < size <= _MOST for size in sizes.values()) or not 0 < measured_ms < _LONGEST_MS:
        return f"{where}: expected numbers of 1 to {_MOST:,} and milliseconds above 0"
    if sizes["tensor"] * sizes["data"] * sizes["pipeline"] != sizes["ranks"]:
        return f"{where}: tensor x data x pipeline is not the {sizes['ranks']} GPUs"
    parts, left = divmod(sizes["batch"], sizes["data"] * sizes["micro_batch"])
    if left or not parts:
        return f"{where}: a batch of {sizes['batch']} does not divide into micro-batches of {sizes['micro_batch']}"
    try:
        config = _config(sizes, parts)
        platform = PlatformParts(f"{config.ranks}x{_DEVICE}", config.ranks, _DEVICE, usual_host(_DEVICE), _FABRIC)
        return LayoutRow(_name(sizes), config, measured_ms, platform)
    except SteptimeError as error:
        return f"{where}: {error}"


def _name(sizes: Mapping[str, int]) -> str:
    return (
        f"{sizes['layers']} layers of {sizes['width']}, batch {sizes['batch']} by {sizes['micro_batch']}, "
        f"tensor {sizes['tensor']}, data {sizes['data']}, pipeline {sizes['pipeline']}"
    )


def _config(sizes: Mapping[str, int], parts: int) -> Transformer:
    return Transformer(
        layers=sizes["layers"],
        width=sizes["width"],
        heads=sizes["heads"],
        sequence=sizes["sequence"],
        vocabulary=_VOCABULARY,
        batch=sizes["batch"],
        attention="unfused",
        dropout=_DROPOUT,
        precision="fp16",
        optimizer="adamw_fused",
        gradient_accumulation=parts,
        parallel=Parallelism(data=sizes["data"], tensor=sizes["tensor"], pipeline=sizes["pipeline"]),
    )
