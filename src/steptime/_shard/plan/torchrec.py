"""A plan in the form of TorchRec's `ShardingPlan`, as plain values for JSON, and what makes the real one of them.

The shape is that of torchrec.distributed.types (1.8.0): `ShardingPlan.plan` is module path -> `EmbeddingModuleShardingPlan`,
table -> `ParameterSharding(sharding_type, compute_kernel, ranks, sharding_spec)`, the last an `EnumerableShardingSpec` of
`ShardMetadata(shard_offsets, shard_sizes, placement)`; None for data-parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steptime._build.dlrm.model import Table
from steptime._shard.plan.kind_names import COLUMN_WISE, DATA_PARALLEL, ROW_WISE
from steptime._shard.plan.kinds import MixedPlan

SCHEMA_VERSION = 1

# Of torchrec.distributed.embedding_types.EmbeddingComputeKernel.
_FUSED, _DENSE = "fused", "dense"


def torchrec_document(plan: MixedPlan, tables: Sequence[Table], *, module: str = "", device: str = "cuda") -> dict[str, Any]:
    """`module`: the path of the EmbeddingBagCollection in the model that is sharded ("" where it is the model)."""
    return {
        "schema_version": SCHEMA_VERSION,
        "torchrec": "torchrec.distributed.types.ShardingPlan",
        "world_size": plan.ranks,
        "plan": {module: {table.name: _parameter(plan, table, device) for table in tables}},
    }


def _parameter(plan: MixedPlan, table: Table, device: str) -> dict[str, Any]:
    placed = plan.placed[table.name]
    if placed.kind == DATA_PARALLEL:
        return {
            "sharding_type": DATA_PARALLEL, "compute_kernel": _DENSE, "ranks": list(placed.ranks), "sharding_spec": None,
        }  # fmt: skip
    return {
        "sharding_type": placed.kind,
        "compute_kernel": _FUSED,
        "ranks": list(placed.ranks),
        "sharding_spec": {"shards": [_shard(*one, device) for one in _shards(plan, table)]},
    }


def _shards(plan: MixedPlan, table: Table) -> list[tuple[list[int], list[int], int]]:
    """Offsets, sizes and rank of every shard."""
    placed = plan.placed[table.name]
    if placed.kind == ROW_WISE:
        # TorchRec's own division: blocks of rows rounded up, the last one shorter.
        block = -(-table.rows // plan.ranks)
        begins = [min(rank * block, table.rows) for rank in range(plan.ranks + 1)]
        return [([begins[rank], 0], [begins[rank + 1] - begins[rank], table.dim], rank) for rank in range(plan.ranks)]
    division, _ = plan.__class__(plan.ranks, {table.name: placed}).divided([table])
    shards = division.shards([table])
    owners = placed.ranks if placed.kind == COLUMN_WISE else placed.ranks[:1]
    return [([0, shard.first_column], [table.rows, shard.columns], rank) for shard, rank in zip(shards, owners, strict=True)]


def _shard(offsets: list[int], sizes: list[int], rank: int, device: str) -> dict[str, Any]:
    return {"shard_offsets": offsets, "shard_sizes": sizes, "placement": f"rank:{rank}/{_device(device, rank)}"}


def _device(device: str, rank: int) -> str:
    """As `torch.distributed._remote_device` reads it; GPUs of a node are numbered from 0, of which this takes eight."""
    return device if device == "cpu" else f"{device}:{rank % _GPUS_PER_NODE}"


_GPUS_PER_NODE = 8
