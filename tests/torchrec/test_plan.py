"""A searched plan is a TorchRec `ShardingPlan`: loaded, and checked by TorchRec's own sharding of a collection on one CPU rank.

`make test-torchrec` runs it; constraints.txt has the versions that work together.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest
from tests.shard.additive import model_of

from steptime._build.dlrm.plan import COLUMN_WISE, DATA_PARALLEL, ROW_WISE, Division
from steptime._build.dlrm.plan_files import torchrec_document

types = pytest.importorskip("torchrec.distributed.types", reason="torchrec is not installed (with fbgemm-gpu-cpu)")

MODEL = model_of(4)


def document(ranks: int = 4) -> dict[str, Any]:
    division = Division.whole(4).with_table(1, COLUMN_WISE, 2).with_table(2, ROW_WISE).with_table(3, DATA_PARALLEL)
    found = torchrec_document(division.plan(MODEL.tables, [1, 0, ranks - 1], ranks), MODEL.tables, device="cpu")
    return dict(json.loads(json.dumps(found)))


def loaded(values: dict[str, Any]) -> Any:
    """The plan as docs/sharding.md shows it."""
    spec_types = import_module("torch.distributed._shard.sharding_spec")
    metadata, enumerable = spec_types.ShardMetadata, spec_types.EnumerableShardingSpec

    def parameter(one: dict[str, Any]) -> Any:
        spec = one["sharding_spec"]
        shards = None if spec is None else enumerable([metadata(**shard) for shard in spec["shards"]])
        return types.ParameterSharding(one["sharding_type"], one["compute_kernel"], ranks=one["ranks"], sharding_spec=shards)

    modules = {
        path: types.EmbeddingModuleShardingPlan({name: parameter(one) for name, one in tables.items()})
        for path, tables in values["plan"].items()
    }
    return types.ShardingPlan(modules)


def test_a_document_loads_as_the_real_plan() -> None:
    plan = loaded(document())
    kinds = {name: one.sharding_type for name, one in plan.get_plan_for_module("").items()}
    assert list(kinds.values()) == [
        types.ShardingType.TABLE_WISE.value,
        types.ShardingType.COLUMN_WISE.value,
        types.ShardingType.ROW_WISE.value,
        types.ShardingType.DATA_PARALLEL.value,
    ]


def test_shards_cover_every_table_once() -> None:
    for table, one in zip(MODEL.tables, loaded(document()).get_plan_for_module("").values(), strict=True):
        if one.sharding_spec is None:
            continue
        sizes = [shard.shard_sizes for shard in one.sharding_spec.shards]
        assert sum(rows * columns for rows, columns in sizes) == table.rows * table.dim
        assert [shard.placement.rank() for shard in one.sharding_spec.shards] == one.ranks


def test_torchrec_shards_a_collection_by_the_plan() -> None:
    torch, dist = import_module("torch"), import_module("torch.distributed")
    parallel = import_module("torchrec.distributed.model_parallel")
    sharders = import_module("torchrec.distributed.embeddingbag")
    modules = import_module("torchrec.modules.embedding_modules")
    embedding_configs = import_module("torchrec.modules.embedding_configs")
    jagged = import_module("torchrec.sparse.jagged_tensor")

    configs = [
        embedding_configs.EmbeddingBagConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[f"f_{t.name}"]
        )
        for t in MODEL.tables
    ]
    division = Division.whole(4)
    values = torchrec_document(division.plan(MODEL.tables, [0, 0, 0, 0], 1), MODEL.tables, module="bags", device="cpu")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        holder = torch.nn.Module()
        holder.bags = modules.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        sharded = parallel.DistributedModelParallel(
            holder,
            env=types.ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=loaded(values),
            sharders=[sharders.EmbeddingBagCollectionSharder()],
        )
        lookups = jagged.KeyedJaggedTensor.from_lengths_sync(
            keys=[f"f_{table.name}" for table in MODEL.tables],
            values=torch.zeros(8, dtype=torch.int64),
            lengths=torch.ones(8, dtype=torch.int64),
        )
        found = sharded.module.bags(lookups).wait().to_dict()
        assert {key: tuple(value.shape) for key, value in found.items()} == {
            f"f_{table.name}": (2, table.dim) for table in MODEL.tables
        }
    finally:
        dist.destroy_process_group()
