"""`Dlrm`: a recommender as data. One schema serves prediction, sharding and measuring."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from steptime._lookups import saved
from steptime._lookups.generators import Generator
from steptime._lookups.table import TableStatistics
from steptime._lookups.workload import TOGETHER, row_bytes, state_bytes

KIND = "dlrm"
LOOKUPS = ("embedding_bag", "table_batched", "fbgemm")
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")
TABLE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
"""What tables may be kept in, by their names in configs."""

DENSE_OPTIMIZERS = ("sgd", "adam", "adagrad", "sgd_fused", "adam_fused")
FUSED_OPTIMIZERS = ("sgd", "adam", "adagrad")
INTERACTIONS = ("dot", "cat", "dcnv2")
LOSSES = ("bce", "mse")
AUTOCAST = {"bf16-autocast": "bfloat16", "fp16-autocast": "float16"}
FUSED = {"bf16": "bfloat16", "fp16": "float16"}
"""Types of fused layers, throughout."""

PRECISIONS = ("fp32", "tf32", *AUTOCAST)
EXCHANGE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
PREFETCHES = ("none", "lookups")
MOST_BATCH = 1 << 24
"""Of all ranks: bags are counted one by one, and no training step has more samples."""


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table and what is looked up in it."""

    name: str
    dim: int
    generator: Generator  # rows, pooling factor, skew, locality, seed
    statistics: TableStatistics | None = None  # counted of real lookups; the generator then draws what is like them
    precision: str = "fp32"  # of the rows; sums of rows are fp32
    weighted: bool = False  # a weight for every lookup
    pooled: bool = True  # else every row that a sample looks up goes on by itself

    @property
    def rows(self) -> int:
        """How many rows the table has."""
        return self.generator.rows

    @property
    def pooling_factor(self) -> float:
        """Mean lookups per sample."""
        return self.generator.pooling

    @property
    def dtype(self) -> str:
        """Of its rows."""
        return TABLE_DTYPES[self.precision]

    @property
    def sequence(self) -> int:
        """Rows that go on for every sample where they are not summed; 0 where they are."""
        return 0 if self.pooled else round(self.pooling_factor)

    @property
    def columns(self) -> int:
        """Elements that go on for every sample."""
        return self.dim * (self.sequence or 1)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.rows * row_bytes(self.dim, self.dtype)


@dataclass(frozen=True, slots=True)
class Dlrm:
    """Tables sharded over the ranks (model parallel), dense layers on every rank (data parallel).

    `bottom` are the widths of the bottom MLP after `dense_features`; where the interaction is `dot`, all tables have one dim,
    and the last of these equals it. `top` are the widths of the top MLP after the interaction; the last is 1. Tables of
    unequal dims interact by `cat`.
    """

    name: str
    batch: int  # global
    dense_features: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    tables: tuple[Table, ...]
    lookup: str = "table_batched"
    optimizer: str = "sgd"  # of the tables, fused into the backward lookup
    interaction: str = "dot"  # dot (lower triangle of pairwise products) | cat | dcnv2 (cross layers over cat)
    loss: str = "bce"  # bce | mse
    precision: str = "fp32"  # fp32 | tf32 (of matrix products) | bf16-autocast | fp16-autocast
    dense_optimizer: str = "sgd"  # of the layers, which every rank has whole
    cross_layers: int = 3  # of dcnv2
    cross_rank: int | None = None  # of their matrices; None: full
    exchange_precision: str = "fp32"  # what lookups and their gradients are sent in
    fused: bool = False  # dense layers in 16 bits, with all that is not a product fused into products
    presorted: bool = False  # lookups are sorted for the backward pass beside the dense layers
    cuda_graph: bool = False  # the step is captured once and replayed
    prefetch: str = "none"  # what of the next batch runs beside this one: none | lookups

    def state_bytes(self, table: Table) -> int:
        """Of the optimiser, for one of the tables or a slice of one."""
        return state_bytes(table.rows, table.dim, self.optimizer)

    @property
    def vector_dtype(self) -> str:
        """Of what lookups give the interaction."""
        return FUSED[self.precision] if self.fused else "float32"

    @property
    def sent_dtype(self) -> str:
        """Of what is exchanged."""
        return self.vector_dtype if self.fused else EXCHANGE_DTYPES[self.exchange_precision]

    @property
    def one_kernel(self) -> bool:
        """Whether one kernel looks up all tables of a rank, whichever they are."""
        kinds = {(table.precision, table.weighted, table.sequence) for table in self.tables}
        return self.lookup in TOGETHER and len(kinds) == 1

    @property
    def host_waits(self) -> bool:
        """Whether the host reads the loss scaler's check of gradients before it calls the optimiser."""
        return self.precision == "fp16-autocast" and not self.dense_optimizer.endswith("_fused")

    @property
    def composable(self) -> bool:
        """Whether a plan changes no more of the step than how long lookups and exchanges take, on one stream, hosts ahead."""
        return self.one_kernel and not self.host_waits and self.prefetch == "none"

    def with_batch(self, batch: int) -> Dlrm:
        """The same model on another global batch."""
        return replace(self, batch=batch)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; stored measurements know their models by the text that they make, so no default is added."""
        plain = {
            "name": self.name, "batch": self.batch, "dense_features": self.dense_features, "bottom": list(self.bottom),
            "top": list(self.top), "lookup": self.lookup, "optimizer": self.optimizer, "interaction": self.interaction,
            "loss": self.loss,
            "tables": [_table_to_dict(table) for table in self.tables],
        }  # fmt: skip
        later = {key: getattr(self, key) for key in _LATER_KEYS}
        return {**plain, **{key: value for key, value in later.items() if value != _DEFAULTS[key]}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Dlrm:
        """The model that `to_dict` gave."""
        tables = tuple(_table_from_dict(table) for table in values["tables"])
        plain = {name: value for name, value in values.items() if name not in ("bottom", "top", "tables")}
        return cls(**plain, bottom=tuple(values["bottom"]), top=tuple(values["top"]), tables=tables)

    def to_json(self) -> str:
        """Compact text; the same model always gives the same text."""
        return json.dumps(self.to_dict(), separators=(",", ":"), sort_keys=True)


_DEFAULTS = {each.name: each.default for each in fields(Dlrm)}
_LATER_KEYS = (
    "precision",
    "dense_optimizer",
    "cross_layers",
    "cross_rank",
    "exchange_precision",
    "fused",
    "presorted",
    "cuda_graph",
    "prefetch",
)


_TABLE_USUAL: dict[str, Any] = {"precision": "fp32", "weighted": False, "pooled": True}


def _table_to_dict(table: Table) -> dict[str, Any]:
    """Statistics and other than usual values only where there are some: stored measurements know their models by this text."""
    plain: dict[str, Any] = {"name": table.name, "dim": table.dim, "generator": table.generator.to_dict()}
    if table.statistics is not None:
        plain["statistics"] = saved.to_dict(table.statistics)
    return {**plain, **{key: getattr(table, key) for key, usual in _TABLE_USUAL.items() if getattr(table, key) != usual}}


def _table_from_dict(values: dict[str, Any]) -> Table:
    where = f"Table {values['name']}"
    counted = saved.from_dict(values["statistics"], where) if "statistics" in values else None
    other = {key: values[key] for key in _TABLE_USUAL if key in values}
    return Table(values["name"], int(values["dim"]), Generator.from_dict(values["generator"]), counted, **other)
