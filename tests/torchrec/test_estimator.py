"""Our form of TorchRec's estimate says the same as its real `EmbeddingPerfEstimator`, of whole tables and slices of columns."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import Division
from steptime._lookups.generators import Generator
from steptime._platforms.platform import Platform
from steptime_lab.validate.sharding.estimates import planner_costs

planner = pytest.importorskip("torchrec.distributed.planner", reason="torchrec is not installed (with fbgemm-gpu-cpu)")

WORLDS = (1, 2, 8, 16, 64)
"""Up to eight are one node; the others are several, where a slower network joins ranks."""

DIMS, POOLINGS = (4, 16, 32, 64, 96, 128, 256), (0.13, 0.5, 1.0, 3.7, 120.0)


def model_of(samples: int, ranks: int) -> Dlrm:
    """A table of every dim and pooling factor."""
    tables = tuple(
        Table(f"t_{dim}_{place}", dim, Generator(rows=1000 * (place + 1), pooling=pooling))
        for dim in DIMS
        for place, pooling in enumerate(POOLINGS)
    )
    return Dlrm("drawn", samples * ranks, 16, (32, 16), (32, 1), tables, interaction="cat")


def options_of(model: Dlrm, topology: Any, kind: str, columns: int | None = None) -> list[Any]:
    """What TorchRec enumerates for the tables, with its estimates."""
    torch, modules = import_module("torch"), import_module("torchrec.modules.embedding_modules")
    configs = import_module("torchrec.modules.embedding_configs")
    holder = torch.nn.Module()
    holder.tables = modules.EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            configs.EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[f"f_{t.name}"])
            for t in model.tables
        ],
    )
    limits = {
        table.name: planner.ParameterConstraints(
            sharding_types=[kind],
            compute_kernels=["fused"],
            min_partition=columns,
            pooling_factors=[float(table.pooling_factor)],
        )
        for table in model.tables
    }
    enumerators = import_module("torchrec.distributed.planner.enumerators")
    made = enumerators.EmbeddingEnumerator(topology, batch_size=model.batch // topology.world_size, constraints=limits)
    sharders = [import_module("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder()]
    found = {option.name: option for option in made.enumerate(holder, sharders)}
    return [found[table.name] for table in model.tables]


def topology_of(ranks: int, **speeds: float) -> Any:
    return planner.Topology(world_size=ranks, compute_device="cuda", local_world_size=min(8, ranks), **speeds)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("samples", [1, 100, 4096])
def test_whole_tables_cost_what_torchrec_says(ranks: int, samples: int) -> None:
    model = model_of(samples, ranks)
    real = [1e-3 * option.shards[0].perf.total for option in options_of(model, topology_of(ranks), "table_wise")]
    np.testing.assert_allclose(planner_costs(model, ranks), real, rtol=1e-9)


@pytest.mark.parametrize("ranks", [4, 32])
def test_slices_of_columns_cost_what_narrower_tables_do(ranks: int) -> None:
    model = model_of(512, ranks)
    options = options_of(model, topology_of(ranks), "column_wise", 32)
    real = [1e-3 * shard.perf.total for option in options for shard in option.shards]
    division = Division.whole(len(model.tables))
    for place, option in enumerate(options):
        division = division.with_table(place, "column_wise", len(option.shards))
    sliced = Dlrm("sliced", model.batch, 16, (32, 16), (32, 1), division.shard_tables(model.tables), interaction="cat")
    assert len(real) > len(options)
    np.testing.assert_allclose(planner_costs(sliced, ranks), real, rtol=1e-9)


@pytest.mark.parametrize("ranks", [8, 16])
def test_a_platforms_bandwidths_take_the_place_of_torchrecs(ranks: int) -> None:
    platform, model = Platform.load("16xh100-2-nodes"), model_of(512, ranks)
    assert platform.fabric is not None
    inside, between = (tier.bandwidth_bytes_per_s.value / 1e3 for tier in platform.fabric.limits.tiers)
    memory = platform.device.limits.bandwidth_bytes_per_s.value / 1e3
    topology = topology_of(ranks, hbm_mem_bw=memory, intra_host_bw=inside, inter_host_bw=between)
    real = [1e-3 * option.shards[0].perf.total for option in options_of(model, topology, "table_wise")]
    np.testing.assert_allclose(planner_costs(model, ranks, platform), real, rtol=1e-9)


def test_a_plan_is_rated_by_the_largest_sum_of_a_rank() -> None:
    model = model_of(512, 4)
    topology = topology_of(4)
    options, rank_of = options_of(model, topology, "table_wise"), np.arange(len(model.tables)) % 4
    for option, rank in zip(options, rank_of.tolist(), strict=True):
        option.shards[0].rank = rank
    rating = import_module("torchrec.distributed.planner.perf_models").NoopPerfModel(topology).rate(options)
    sums = np.bincount(rank_of, weights=planner_costs(model, 4))
    assert 1e-3 * rating == pytest.approx(sums.max(), rel=1e-9)
