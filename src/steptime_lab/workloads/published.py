"""The DLRM configurations of the published benchmark, as data: table-batched lookups and SGD, as there."""

from __future__ import annotations

from dataclasses import replace

from steptime._build.dlrm.model import Dlrm, Table
from steptime._lookups.generators import Generator

BATCH = 2048
"""What they are described with; `Dlrm.with_batch` gives the others."""

MLPERF_MOST_ROWS = 4_000_000
"""Cap on a table's rows. MLPerf's is 40 million, which makes 96 GB of tables; a share of one GPU holds a tenth of that."""

CRITEO_ROWS = (
    39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546, 403_346, 10, 2_208, 11_938, 155, 4,
    976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935, 12_972, 108, 36,
)  # fmt: skip
"""Rows of the 26 tables of Criteo Terabyte under MLPerf's cap of 40 million."""

# Rows, mean lookups per sample and skew that stand in for tables 4, 24, 26, 156, 340 and 404 of dlrm_datasets, whose index
# files are not at hand: from a small table with few lookups to a large one with many. An assumption, not data.
_OPEN_SOURCE = (
    (250_000, 4.0, 1.05),
    (1_000_000, 12.0, 1.10),
    (3_000_000, 28.0, 1.05),
    (500_000, 60.0, 1.20),
    (4_000_000, 8.0, 1.00),
    (2_000_000, 20.0, 1.15),
)


def published_models() -> dict[str, Dlrm]:
    """Every configuration, by name."""
    models = (_default(), _ddp(), _mlperf(), _open_source(), _test())
    return {model.name: model for model in models}


def _default() -> Dlrm:
    tables = tuple(Table(f"t{i}", 64, Generator(rows=1_000_000, pooling=100.0, seed=i)) for i in range(8))
    return Dlrm("default", BATCH, 512, (512, 64), (1024, 1024, 1024, 1), tables, loss="mse")


def _ddp() -> Dlrm:
    # 10 lookups per sample: what the DLRM repository does when not told.
    tables = tuple(Table(f"t{i}", 128, Generator(rows=80_000, pooling=10.0, seed=i)) for i in range(8))
    return Dlrm("ddp", BATCH, 128, (128, 128, 128), (512, 512, 512, 256, 1), tables)


def _mlperf() -> Dlrm:
    # One lookup per sample in every table; categories of clicks are as skewed as words (alpha near 1): an assumption.
    tables = tuple(
        Table(f"t{i}", 128, Generator(rows=min(rows, MLPERF_MOST_ROWS), pooling=1.0, kind="zipf", alpha=1.05, seed=i))
        for i, rows in enumerate(CRITEO_ROWS)
    )
    return Dlrm("mlperf", BATCH, 13, (512, 256, 128), (1024, 1024, 512, 256, 1), tables)


def _open_source() -> Dlrm:
    tables = tuple(
        Table(
            f"t{i}",
            128,
            Generator(rows=rows, pooling=pooling, lengths="geometric", kind="zipf", alpha=alpha, locality=0.2, seed=i),
        )
        for i, (rows, pooling, alpha) in enumerate(_OPEN_SOURCE)
    )
    return Dlrm("open_source", BATCH, 512, (1024, 256, 128), (1024, 512, 256, 1), tables)


def _test() -> Dlrm:
    table = Table("t0", 64, Generator(rows=1_000_000, pooling=10.0))
    return Dlrm("test", BATCH, 512, (64,), (1024, 1), (table,))


def with_bags(model: Dlrm) -> Dlrm:
    """The same model with one `nn.EmbeddingBag` per table."""
    return replace(model, lookup="embedding_bag")
