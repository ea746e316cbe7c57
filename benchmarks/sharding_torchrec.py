"""TorchRec's planner and our search on the same tables, both plans by our evaluation of the step.

    PYTHONPATH=src python benchmarks/sharding_torchrec.py [--cases 60x4 200x32 1000x128]

Needs torchrec (1.8.0 --no-deps with fbgemm-gpu-cpu 1.8.0 beside torch 2.13.0). The planner is held to whole tables, which are
what both can place; its topology has eight GPUs to a node.
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec

import numpy as np

from sharding_search import PLATFORM, drawn_model
from steptime.build.dlrm import Dlrm
from steptime.platforms.platform import Platform
from steptime.sharding.evaluation import Evaluator
from steptime.sharding.search import search, usual_evaluations
from steptime.sharding.search_state import Budget
from steptime.sharding.task import Task

CASES = ("60x4", "200x32", "1000x128")
HBM_BYTES = 141 * 10**9  # of an H200


def planned(model: Dlrm, ranks: int) -> list[int]:
    """The rank of every table by TorchRec's planner."""
    import torch
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[f"f_{t.name}"])
        for t in model.tables
    ]
    module = torch.nn.Module()
    module.tables = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    kernels = [EmbeddingComputeKernel.FUSED.value]
    constraints = {
        t.name: ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=kernels, pooling_factors=[float(t.pooling_factor)]
        )
        for t in model.tables
    }
    topology = Topology(world_size=ranks, compute_device="cuda", hbm_cap=HBM_BYTES, local_world_size=min(8, ranks))
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=model.batch // ranks, constraints=constraints)
    (found,) = planner.plan(module, [EmbeddingBagCollectionSharder()]).plan.values()
    return [found[table.name].ranks[0] for table in model.tables]


def main() -> None:
    if find_spec("torchrec") is None:
        print("torchrec is not installed; nothing to compare with")
        return
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--cases", nargs="+", default=CASES)
    print("| tables x ranks | our step, ms | TorchRec's plan, ms | slower by | our search, s | its planner, s |")
    print("|---|---|---|---|---|---|")
    for case in given.parse_args().cases:
        tables, ranks = map(int, case.split("x"))
        model, platform = drawn_model(tables, ranks), Platform.load(str(PLATFORM), ranks=ranks)
        began = time.monotonic()
        found = search(Task(model, ranks), platform, Budget(usual_evaluations(model)))
        searched = time.monotonic()
        theirs = np.array([planned(model, ranks)])
        done = time.monotonic()
        other = float(Evaluator.of(model, platform, ranks).evaluate(theirs).step_ns[0])
        print(
            f"| {case} | {found.best.step_ns / 1e6:.2f} | {other / 1e6:.2f} | {other / found.best.step_ns - 1:+.1%} | "
            f"{searched - began:.1f} | {done - searched:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
