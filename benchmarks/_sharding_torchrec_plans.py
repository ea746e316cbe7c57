"""One plan by TorchRec's planner, written as JSON; and what TorchRec's estimator says of any plan.

    PYTHONPATH=src PYTHONHASHSEED=0 python benchmarks/_sharding_torchrec_plans.py 200x32 plan.json --kinds table_wise

Needs torchrec (1.8.0 --no-deps with fbgemm-gpu-cpu 1.8.0 beside torch 2.13.0). The planner orders options by sets of strings:
its plans are the same twice only with a fixed PYTHONHASHSEED.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sharding_search import PLATFORM, drawn_model
from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import Plan
from steptime._platforms.platform import Platform

Floats = npt.NDArray[np.float64]

GPUS_PER_NODE = 8
_KERNELS = ("fused", "dense")  # in GPU memory; the second is of data-parallel tables


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("case", help="tables x ranks: 200x32")
    given.add_argument("out", type=Path)
    given.add_argument("--kinds", nargs="+", help="allowed kinds, tables in GPU memory; else all it has, anywhere")
    given.add_argument("--columns", type=int, help="of a slice (its min_partition); else the planner's 128")
    given.add_argument("--seconds", type=int, default=600)
    given.add_argument("--told", action="store_true", help="the platform's bandwidths, not the planner's own")
    asked = given.parse_args()
    tables, ranks = map(int, asked.case.split("x"))
    model = drawn_model(tables, ranks)
    found = planned(model, constraints(model, asked.kinds, asked.columns), topology(ranks, told=asked.told), asked.seconds)
    asked.out.write_text(json.dumps(found), encoding="utf-8")


def topology(ranks: int, *, told: bool = False) -> Any:
    """H200s in nodes of eight, with TorchRec's bandwidths or with those of the data sheets."""
    from torchrec.distributed.planner import Topology

    platform = Platform.load(str(PLATFORM), ranks=ranks)
    limits = platform.device.limits
    speeds = {}
    if told:
        assert platform.fabric is not None
        inside, between = (tier.bandwidth_bytes_per_s.value / 1e3 for tier in platform.fabric.limits.tiers)  # bytes a ms
        speeds = {"hbm_mem_bw": limits.bandwidth_bytes_per_s.value / 1e3, "intra_host_bw": inside, "inter_host_bw": between}
    return Topology(
        world_size=ranks,
        compute_device="cuda",
        hbm_cap=int(limits.memory_bytes.value),
        local_world_size=min(GPUS_PER_NODE, ranks),
        **speeds,
    )


def constraints(model: Dlrm, kinds: list[str] | None, columns: int | None) -> dict[str, Any]:
    """Of every table the same, and its pooling factor."""
    from torchrec.distributed.planner import ParameterConstraints

    return {
        table.name: ParameterConstraints(
            sharding_types=kinds,
            compute_kernels=None if kinds is None else list(_KERNELS),
            min_partition=columns,
            pooling_factors=[float(table.pooling_factor)],
        )
        for table in model.tables
    }


def planned(model: Dlrm, limits: Mapping[str, Any], machine: Any, seconds: int) -> dict[str, Any]:
    """The best plan that the planner finds in so many seconds."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.stats import NoopEmbeddingStats

    planner = EmbeddingShardingPlanner(
        topology=machine,
        batch_size=model.batch // machine.world_size,
        constraints=dict(limits),
        stats=NoopEmbeddingStats(),
        timeout_seconds=seconds,
    )
    began = time.monotonic()
    planner.plan(_collection(model), [EmbeddingBagCollectionSharder()])
    took = time.monotonic() - began
    options = {option.name: option for option in planner._best_plan}
    return {
        "seconds": took,
        "proposals": planner._num_proposals,
        "estimate_ms": planner._perf_model.rate(list(options.values())),
        "tables": {
            table.name: {
                "kind": options[table.name].sharding_type,
                "kernel": options[table.name].compute_kernel,
                "ranks": [shard.rank for shard in options[table.name].shards],
            }
            for table in model.tables
        },
    }


def estimated_ms(model: Dlrm, plan: Plan, machine: Any) -> float:
    """The planner's objective, for any plan: the largest sum over ranks of what its estimator says of their shards."""
    from torchrec.distributed.planner.perf_models import NoopPerfModel
    from torchrec.distributed.planner.types import Shard

    limits = constraints(model, None, None)
    for name, one in limits.items():
        one.sharding_types, one.compute_kernels = [plan.placements[name].kind], list(_KERNELS)
    enumerator, options = _enumerated(model, limits, machine)
    slices: dict[str, list[Any]] = {}
    for one in plan.divided(model.tables)[0].shards(model.tables):
        table = model.tables[one.table]
        slices.setdefault(table.name, []).append(Shard(size=[table.rows, one.columns], offset=[0, one.first_column]))
    for option in options:
        option.shards = slices.get(option.name, option.shards)
    enumerator.populate_estimates(options)
    for option in options:
        for shard, rank in zip(option.shards, plan.placements[option.name].ranks, strict=True):
            shard.rank = rank
    return float(NoopPerfModel(machine).rate(options))


def everywhere_ms(model: Dlrm, kind: str, machine: Any) -> Floats:
    """[tables] what the estimator says of every table, on each rank, if all ranks have a part of it."""
    _, options = _enumerated(model, constraints(model, [kind], None), machine)
    found = {option.name: max(shard.perf.total for shard in option.shards) for option in options}
    return np.array([found[table.name] for table in model.tables])


def _enumerated(model: Dlrm, limits: dict[str, Any], machine: Any) -> tuple[Any, list[Any]]:
    """What lists options and estimates them, and the options."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    made = EmbeddingEnumerator(machine, batch_size=model.batch // machine.world_size, constraints=limits)
    return made, list(made.enumerate(_collection(model), [EmbeddingBagCollectionSharder()]))


def _collection(model: Dlrm) -> Any:
    import torch
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[f"f_{t.name}"])
        for t in model.tables
    ]
    module = torch.nn.Module()
    module.tables = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    return module


if __name__ == "__main__":
    main()
