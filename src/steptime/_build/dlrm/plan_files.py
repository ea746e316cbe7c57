"""Plans in files: what `steptime shard` writes (`--json`, `--torchrec`), a plan alone, or several by name.

TorchRec's shape is that of torchrec.distributed.types (1.8.0): `ShardingPlan.plan` is module path ->
`EmbeddingModuleShardingPlan`, table -> `ParameterSharding(sharding_type, compute_kernel, ranks, sharding_spec)`, the last an
`EnumerableShardingSpec` of `ShardMetadata(shard_offsets, shard_sizes, placement)`; None for data-parallel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steptime._build.config_values import read_json
from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import BY_NODE, DATA_PARALLEL, EVERYWHERE, GRID, KINDS, ROW_WISE, SLICED, Plan, columns_of
from steptime.errors import InputError

SCHEMA_VERSION = 1

# Of torchrec.distributed.embedding_types.EmbeddingComputeKernel.
_FUSED, _DENSE = "fused", "dense"
_GPUS_PER_NODE = 8
_PARAMETER = ("sharding_type", "ranks")
_SHORT = 80


def read_plans(path: Path) -> dict[str, dict[str, Any]]:
    """Plans by name as plain values, the best of a search first; `Plan.from_dict` takes each. One alone is called `plan`."""
    plans = plans_of(read_json(path, "a plan, see docs/sharding.md"), str(path))
    if not plans:
        raise InputError(f"{path}: no plan in it; expected table and ranks, or plans by name, see docs/sharding.md")
    return plans


def plans_of(values: Any, where: str) -> dict[str, dict[str, Any]]:
    """The plans in plain values."""
    if isinstance(values, list):
        return {f"plan {number}": _plan(plan, f"{where}, plan {number}") for number, plan in enumerate(values)}
    if not isinstance(values, Mapping):
        raise InputError(f"{where}: {type(values).__name__} found; expected table and ranks, or plans by name")
    if isinstance(values.get("best"), Mapping) and "alternatives" in values:  # of `shard --json`
        result = {"best": _plan(values["best"], f"{where}, best")}
        others = values["alternatives"] if isinstance(values["alternatives"], list) else []
        return result | {f"alternative {number}": _plan(plan, where) for number, plan in enumerate(others, 1)}
    if isinstance(values.get("plans"), list):  # of `shard --evaluate --json`
        return _by_name(values["plans"], where)
    if _is_plan(values):
        return {"plan": _plan(values, where)}
    odd = next((name for name, plan in values.items() if not isinstance(plan, Mapping)), None)
    if odd is not None:
        raise InputError(f"{where}: plan {odd!r} is {str(values[odd])[:_SHORT]!r}; expected a table of table and ranks")
    return {name: _plan(plan, f"{where}, plan {name!r}") for name, plan in values.items()}


def _by_name(listed: Sequence[Any], where: str) -> dict[str, dict[str, Any]]:
    """Evaluated plans; those without a name, or with one that is no text, are called by their number."""
    result: dict[str, dict[str, Any]] = {}
    for number, value in enumerate(listed):
        name = value.get("name") if isinstance(value, Mapping) else None
        name = name if isinstance(name, str) else f"plan {number}"
        if name in result:
            raise InputError(f"{where}: two plans are called {name[:_SHORT]!r}; expected every name once")
        result[name] = _plan(value, f"{where}, plan {number}")
    return result


def _is_plan(values: Mapping[str, Any]) -> bool:
    """Whether these are the tables of a plan rather than plans by name."""
    if isinstance(values.get("plan"), Mapping) and ("kinds" in values or "torchrec" in values):
        return True
    return all(
        isinstance(value, int | list) or (isinstance(value, Mapping) and ("kind" in value or _is_parameter(value)))
        for value in values.values()
    )


def _plan(values: Any, where: str) -> dict[str, Any]:
    """One plan in any of its forms, as table -> ranks or kind and ranks."""
    if not isinstance(values, Mapping):
        raise InputError(f"{where}: {str(values)[:_SHORT]!r}; expected a table of table and ranks")
    plain: Mapping[str, Any] = values
    if isinstance(values.get("plan"), Mapping):
        plain = values["plan"]
        kinds = values.get("kinds")
        if isinstance(kinds, Mapping):  # of `shard --json`: ranks and kinds beside each other
            return {name: _of_kind(ranks, kinds.get(name)) for name, ranks in plain.items()}
        if plain and all(isinstance(item, Mapping) and all(map(_is_parameter, item.values())) for item in plain.values()):
            plain = {name: parameter for module in plain.values() for name, parameter in module.items()}  # modules of TorchRec
    return {name: _of_torchrec(item, name, where) if _is_parameter(item) else item for name, item in plain.items()}


def _of_kind(ranks: Any, kind: Any) -> Any:
    return ranks if kind is None else {"kind": kind, "ranks": ranks}


def _is_parameter(value: Any) -> bool:
    return isinstance(value, Mapping) and all(key in value for key in _PARAMETER)


def _of_torchrec(parameter: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    kind, ranks = parameter["sharding_type"], parameter["ranks"]
    if kind not in KINDS:
        raise InputError(f"{where}: table {name!r} has sharding_type {kind!r}; expected {', '.join(KINDS)}")
    if kind in SLICED:
        _check_columns(parameter.get("sharding_spec"), f"{where}, table {name!r}")
    if kind == GRID:
        ranks = _by_slice(ranks, parameter.get("sharding_spec"), f"{where}, table {name!r}")
    return {"kind": kind} if kind in EVERYWHERE and ranks is None else {"kind": kind, "ranks": ranks}


def _by_slice(ranks: Any, spec: Any, where: str) -> list[list[Any]]:
    """The ranks of every slice: TorchRec lists them all, and shards that begin at another column begin another slice."""
    try:
        firsts = [shard["shard_offsets"][1] for shard in spec["shards"]]
        found: dict[Any, list[Any]] = {}
        for rank, first in zip(ranks, firsts, strict=True):
            found.setdefault(first, []).append(rank)
    except (TypeError, KeyError, IndexError, ValueError):
        raise InputError(f"{where}: grid_shard without a sharding_spec of as many shards as ranks; expected one") from None
    return list(found.values())


def _check_columns(spec: Any, where: str) -> None:
    """Slices as wide as here: TorchRec may have a narrower last one, of which nothing is known here."""
    try:
        widths = [shard["shard_sizes"][1] for shard in spec["shards"]]
        unequal = max(widths) - min(widths) > 4 if widths else False
    except (TypeError, KeyError, IndexError):
        return  # nobody said how wide they are
    if unequal:
        raise InputError(f"{where}: slices of {widths} columns; expected slices that differ by at most four columns")


def torchrec_document(plan: Plan, tables: Sequence[Table], *, module: str = "", device: str = "cuda") -> dict[str, Any]:
    """`module`: the path of the EmbeddingBagCollection in the model that is sharded ("" where it is the model)."""
    return {
        "schema_version": SCHEMA_VERSION,
        "torchrec": "torchrec.distributed.types.ShardingPlan",
        "world_size": plan.ranks,
        "plan": {module: {table.name: _parameter(plan, table, device) for table in tables}},
    }


def _parameter(plan: Plan, table: Table, device: str) -> dict[str, Any]:
    placed = plan.placements[table.name]
    spec = None if placed.kind == DATA_PARALLEL else {"shards": [_shard(*shard, device) for shard in _shards(plan, table)]}
    return {
        "sharding_type": placed.kind,
        "compute_kernel": _DENSE if placed.kind == DATA_PARALLEL else _FUSED,
        "ranks": list(placed.ranks),
        "sharding_spec": spec,
    }


def _shards(plan: Plan, table: Table) -> list[tuple[list[int], list[int], int]]:
    """Offsets, sizes and rank of every shard."""
    placed = plan.placements[table.name]
    if placed.kind == ROW_WISE:
        return _rows(table.rows, 0, table.dim, placed.ranks)
    if placed.kind in BY_NODE:
        cut = zip(columns_of(table.dim, placed.slices), range(0, len(placed.ranks), placed.per_node), strict=True)
        parts = (_rows(table.rows, *columns, placed.ranks[first : first + placed.per_node]) for columns, first in cut)
        return [shard for part in parts for shard in part]
    division, owners = Plan(plan.ranks, {table.name: placed}).divided([table])
    shards = division.shards([table])
    return [([0, shard.first_column], [table.rows, shard.columns], rank) for shard, rank in zip(shards, owners, strict=True)]


def _rows(rows: int, first: int, columns: int, ranks: Sequence[int]) -> list[tuple[list[int], list[int], int]]:
    """TorchRec's own division: blocks of rows rounded up, the last one shorter."""
    block = -(-rows // len(ranks))
    begins = [min(place * block, rows) for place in range(len(ranks) + 1)]
    return [([begins[place], first], [begins[place + 1] - begins[place], columns], rank) for place, rank in enumerate(ranks)]


def _shard(offsets: list[int], sizes: list[int], rank: int, device: str) -> dict[str, Any]:
    # As `torch.distributed._remote_device` reads it; GPUs of a node are numbered from 0.
    where = device if device == "cpu" else f"{device}:{rank % _GPUS_PER_NODE}"
    return {"shard_offsets": offsets, "shard_sizes": sizes, "placement": f"rank:{rank}/{where}"}
