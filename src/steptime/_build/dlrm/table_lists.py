"""Models from lists of tables alone: a CSV, or the tables of a TorchRec `EmbeddingBagCollection`. What they leave open is said.

The dense layers, the batch and often the lookups are not in such lists. The layers are those of the DLRM that Meta published
for Criteo's data (facebookresearch/dlrm, bench/dlrm_s_criteo_kaggle.sh: 13-512-256-64-16 and 512-256-1), whose vectors stand
side by side here, for dims may differ. A pooling factor is 1, as TorchRec's planner takes it (POOLING_FACTOR in
torchrec/distributed/planner/constants.py), and rows are looked up evenly, which is what costs most. What that could cost is
found by asking again with lookups spread as those of production tables are (docs/lookups.md).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from random import Random
from typing import Any

from steptime._build.config_values import MOST_WIDTH, Overrides, Values
from steptime._build.dlrm.config import DlrmConfig, Doubt, check_names, generator_of
from steptime._build.dlrm.constraints import OF_TABLES, constraints_of_tables
from steptime._build.dlrm.model import TABLE_DTYPES, Dlrm, Table
from steptime._lookups.generators import MOST_ROWS
from steptime._lookups.populations import PRODUCTION_2021
from steptime.errors import InputError

SAMPLES_PER_RANK = 2048
_DENSE_FEATURES, _BOTTOM, _TOP = 13, (512, 256, 64, 16), (512, 256, 1)
_POOLING = 1.0

_REQUIRED = ("name", "rows", "dim")
_SKEW = {"kind": str, "alpha": float, "shift": float, "lengths": str, "locality": float}
_MODEL = (*_REQUIRED, "pooling_factor", *_SKEW, "precision")
_COLUMNS = (*_MODEL, *OF_TABLES)
# What TorchRec calls the types of rows.
_DATA_TYPES = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16", "INT8": "int8"}
# Of torchrec.modules.embedding_configs.EmbeddingBagConfig (1.8.0), and the pooling factor, which is ours.
_BAG_KEYS = (
    "name", "num_embeddings", "embedding_dim", "feature_names", "data_type", "pooling", "pooling_factor", "weight_init_max",
    "weight_init_min", "num_embeddings_post_pruning", "init_fn", "need_pos", "input_dim", "total_num_buckets",
    "use_virtual_table", "virtual_table_eviction_policy", "enable_embedding_update",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Listed:
    """A table and what its list left open."""

    table: Table
    no_pooling: bool
    no_skew: bool


def listed_tables(text: str, where: str, overrides: Overrides) -> DlrmConfig:
    """The model of a CSV with a head: name, rows, dim, and perhaps more of `_COLUMNS`."""
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)]
    except csv.Error as error:  # a cell of more than 128 kB
        raise InputError(f"{where}: not readable as CSV ({error}); expected a line for every table") from None
    if len(rows) < 2:
        raise InputError(f"{where}: {len(rows)} lines; expected a head ({', '.join(_COLUMNS)}) and a line for every table")
    head = [name.strip() for name in rows[0]]
    for name in head:
        if name not in _COLUMNS or head.count(name) > 1:
            near = get_close_matches(name, _COLUMNS, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(_COLUMNS)}, each once"
            raise InputError(f"{where}: column {name!r}; {meant}")
    missing = next((name for name in _REQUIRED if name not in head), None)
    if missing is not None:
        raise InputError(f"{where}: no column {missing!r}; expected {', '.join(_REQUIRED)} and perhaps more")
    listed: list[_Listed] = []
    constrained: dict[str, Mapping[str, str]] = {}
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(head):
            raise InputError(f"{where}, line {number}: {len(row)} values; expected {len(head)}, as in its head")
        cells = {name: cell.strip() for name, cell in zip(head, row, strict=True) if cell.strip()}
        own = {name: cell for name, cell in cells.items() if name not in OF_TABLES}
        listed.append(_of_cells(own, len(listed), f"{where}, line {number}"))
        constrained[listed[-1].table.name] = cells
    config = _config(listed, where, overrides, ())
    constraints = constraints_of_tables(constrained, where)
    if constraints is not None:
        constraints.check(config.model.tables, where)
    return replace(config, constraints=constraints)


def _of_cells(cells: Mapping[str, str], index: int, where: str) -> _Listed:
    values: dict[str, Any] = dict(cells)
    kinds = {"rows": int, "dim": int, "pooling_factor": float, **_SKEW}
    for name, kind in kinds.items():
        if name in cells:
            try:
                values[name] = _whole(cells[name]) if kind is int else kind(cells[name].replace("_", ""))
            except ValueError:
                expected = "a whole number, as 1000000" if kind is int else "a number"
                raise InputError(f"{where}: {name} is {cells[name]!r}; expected {expected}") from None
    return _listed(Values(values, where), {key: values[key] for key in _SKEW if key in values}, index)


def _whole(text: str) -> int:
    """A whole number, also as 1e6; a `ValueError` where it is none."""
    plain = text.replace("_", "")
    if plain.lstrip("+-").isdecimal():
        return int(plain)
    value = float(plain)
    if not value.is_integer():  # of infinity and NaN too
        raise ValueError(text)
    return int(value)


def torchrec_tables(tables: Sequence[Mapping[str, Any]], where: str, overrides: Overrides) -> DlrmConfig:
    """The model of an EmbeddingBagCollection's tables: name, num_embeddings, embedding_dim, feature_names."""
    listed, notes = [], []
    for index, table in enumerate(tables):
        at = f"{where}, tables[{index}]"
        section = Values(table, at)
        section.expect(_BAG_KEYS, ("name", "num_embeddings", "embedding_dim"))
        values = {"name": table["name"], "rows": table["num_embeddings"], "dim": table["embedding_dim"]}
        features = table.get("feature_names") or [table["name"]]
        if not isinstance(features, list):
            raise section.wrong("feature_names", "a list of names")
        if "pooling_factor" in table:
            values["pooling_factor"] = table["pooling_factor"]
        item = _listed(Values(values, at), {}, index)
        if len(features) > 1:
            more = replace(item.table.generator, pooling=item.table.pooling_factor * len(features))
            item = replace(item, table=replace(item.table, generator=more))
            notes.append(
                f"table {item.table.name!r} serves {len(features)} features: their lookups are counted, their vectors as one, "
                f"so that what it sends is {len(features)} times what is predicted"
            )
        data_type = str(table.get("data_type", "FP32")).removeprefix("DataType.")
        if data_type in _DATA_TYPES:
            item = replace(item, table=replace(item.table, precision=_DATA_TYPES[data_type]))
        else:
            notes.append(f"table {item.table.name!r} has data_type {data_type}: taken as fp32, with more bytes than it has")
        listed.append(item)
    return _config(listed, where, overrides, tuple(notes))


def _listed(section: Values, skew: dict[str, Any], index: int) -> _Listed:
    section.expect(_MODEL, _REQUIRED)
    name, rows, dim = section.text("name"), section.whole("rows", 1, MOST_ROWS), section.whole("dim", 1, MOST_WIDTH)
    if dim % 4:
        raise section.wrong("dim", "a multiple of 4, as table-batched lookups have it")
    pooling = section.number("pooling_factor", 0.0) if "pooling_factor" in section.values else _POOLING
    generator = generator_of(section.where, rows=rows, pooling=pooling, seed=index, **skew)
    table = Table(name, dim, generator, precision=section.choice("precision", tuple(TABLE_DTYPES), "fp32"))
    return _Listed(table, "pooling_factor" not in section.values, "kind" not in skew)


def _config(listed: Sequence[_Listed], where: str, overrides: Overrides, notes: tuple[str, ...]) -> DlrmConfig:
    tables = tuple(item.table for item in listed)
    check_names(tables, where)
    ranks, batch = overrides.ranks or overrides.platform_ranks, overrides.batch
    samples = SAMPLES_PER_RANK * ranks if batch is None else batch
    model = Dlrm(Path(where).stem, samples, _DENSE_FEATURES, _BOTTOM, _TOP, tables, interaction="cat")
    layers = f"dense layers {_DENSE_FEATURES}-{'-'.join(map(str, _BOTTOM))} and {'-'.join(map(str, _TOP))}"
    text = [
        f"{layers}, optimizer sgd: not in the list, assumed as in Meta's DLRM for Criteo; use a config (.toml) for your own"
    ]
    if batch is None:
        text.append(f"a batch of {samples} ({SAMPLES_PER_RANK} samples a rank): not in the list; give yours with --batch")
    return DlrmConfig(model, ranks, notes=(*text, *notes), doubts=tuple(_doubts(listed, model)))


def _doubts(listed: Sequence[_Listed], model: Dlrm) -> list[Doubt]:
    open_ones = [item for item in listed if item.no_pooling or item.no_skew]
    if not open_ones:
        return []
    no_pooling = sum(item.no_pooling for item in listed)
    no_skew = sum(item.no_skew for item in listed)
    parts = (
        [f"{no_pooling} tables without a pooling factor are taken to have {_POOLING:g} lookup a sample"] if no_pooling else []
    )
    parts += [f"{no_skew} tables without a skew are taken to be looked up evenly"] if no_skew else []
    text = f"{' and '.join(parts)} (first: {open_ones[0].table.name!r})"
    tables = tuple(_otherwise(item, index) for index, item in enumerate(listed))
    return [Doubt(text, "spread as those of production tables are", replace(model, tables=tables))]


def _otherwise(listed: _Listed, index: int) -> Table:
    """The table with what was left open drawn from a population."""
    if not (listed.no_pooling or listed.no_skew):
        return listed.table
    draws = Random(index)
    drawn = PRODUCTION_2021.table([draws.random() for _ in range(4)])
    result = listed.table.generator
    if listed.no_pooling:
        result = replace(result, pooling=drawn.pooling)
    if listed.no_skew:
        result = replace(result, kind=drawn.kind, alpha=drawn.alpha, shift=drawn.shift)
    return replace(listed.table, generator=result)
