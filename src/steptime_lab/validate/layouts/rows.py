"""Iteration times of one model under many layouts, as a CSV: vTrain's table, of Megatron-DeepSpeed on a node of A100s.

Every row becomes the config that a user would write. What the table does not say is as its authors' repository has it
(VIA-Research/vTrain, f8dda847, MIT): fp16 with fp32 masters, attention of separate products with Megatron's fused softmax,
dropout of 0.1, learned positions, a tied vocabulary of 50,257 that Megatron pads to a multiple of 128 on every rank, a fused
Adam, and no recomputation: the rows' time per layer is that of forward and backward once. Hosts of Megatron-DeepSpeed wait for
every exchange of a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._platforms.platform import PlatformParts, usual_host
from steptime.errors import InputError
from steptime_lab.measurements.published_rows import TableRow, made_of, rows_of_csv

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
_LONGEST_MS = 1e9
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
    return made_of(rows_of_csv(file, "layouts", (*COLUMNS, MEASURED)), _layout)


def _layout(row: TableRow) -> LayoutRow:
    sizes = {name: row.whole(column) for column, name in COLUMNS.items()}
    measured_ms = row.number(MEASURED, below=_LONGEST_MS)
    if sizes["tensor"] * sizes["data"] * sizes["pipeline"] != sizes["ranks"]:
        raise InputError(f"tensor x data x pipeline is not the {sizes['ranks']} GPUs; expected sizes that multiply to them")
    multiple = sizes["data"] * sizes["micro_batch"]
    parts, left = divmod(sizes["batch"], multiple)
    if left or not parts:
        raise InputError(
            f"a batch of {sizes['batch']} does not divide into micro-batches of {sizes['micro_batch']} on "
            f"{sizes['data']} replicas; expected a multiple of {multiple}"
        )
    config = _config(sizes, parts)
    platform = PlatformParts(f"{config.ranks}x{_DEVICE}", config.ranks, _DEVICE, usual_host(_DEVICE), _FABRIC)
    return LayoutRow(_name(sizes), config, measured_ms, platform)


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
        parallel=Parallelism(
            data=sizes["data"], tensor=sizes["tensor"], pipeline=sizes["pipeline"], batch_p2p_sync=sizes["pipeline"] > 1
        ),
    )
