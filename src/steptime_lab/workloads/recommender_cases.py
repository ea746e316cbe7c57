"""DLRM steps with dense sides as they are run today: TF32 and autocast, DCN v2, Adam and Adagrad, exchanges in 16 bits.

`steptime measure steps --only recommenders` times them; they have no part in any fit. Tables are drawn as those of the step
study, from seeds that nothing else uses. Models of several ranks have small dense sides: on the testbed's wire an all_reduce of
a megabyte takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from steptime._build.dlrm.model import Dlrm, Table
from steptime._lookups.populations import PRODUCTION_2022
from steptime._shard.rules import Machine, place
from steptime_lab.workloads.case import Case
from steptime_lab.workloads.drawn_tasks import Draws

RECOMMENDERS = "recommenders"
"""What `--only` calls all of them."""

_RULE = "size_lookup_greedy"
_SEED = 23_000


@dataclass(frozen=True, slots=True)
class _Recommender:
    """What is chosen of a model; lookups are drawn."""

    tables: int
    bottom: tuple[int, ...]  # the last is the dim of every table
    top: tuple[int, ...]
    rows: tuple[float, float]
    pooling: tuple[float, float]
    cross: tuple[int, int | None] | None = None  # layers and rank of DCN v2; None: dot products
    features: int = 13


_MODELS: Mapping[str, _Recommender] = {
    "small-dot": _Recommender(8, (64, 32), (128, 64, 1), (1e3, 1e5), (1, 20)),
    "middle-dot": _Recommender(12, (256, 64), (512, 256, 1), (1e3, 1e6), (1, 60)),
    "criteo-dot": _Recommender(26, (512, 256, 128), (1024, 1024, 512, 256, 1), (1e3, 1e6), (1, 30)),
    "middle-cross": _Recommender(13, (256, 32), (512, 256, 1), (1e3, 1e6), (1, 60), cross=(3, 64)),
    "wide-cross": _Recommender(10, (512, 32), (1024, 512, 1), (1e3, 1e6), (1, 40), cross=(2, None)),
    "criteo-cross": _Recommender(26, (512, 256, 128), (1024, 1024, 512, 256, 1), (1e3, 1e6), (1, 30), cross=(3, 512)),
}


@dataclass(frozen=True, slots=True)
class _Chosen:
    """One of the cases."""

    model: str
    ranks: int
    samples: int  # of one rank
    precision: str
    dense_optimizer: str
    optimizer: str = "sgd"
    exchange_precision: str = "fp32"
    lookup: str = "table_batched"


_TF32, _BF16 = "tf32", "bf16-autocast"
_STEPS = (
    _Chosen("small-dot", 1, 512, _TF32, "sgd"),
    _Chosen("small-dot", 1, 2048, _BF16, "adam"),
    _Chosen("middle-dot", 1, 32768, _BF16, "adagrad", "rowwise_adagrad"),
    _Chosen("criteo-dot", 1, 8192, _TF32, "adam"),
    _Chosen("criteo-dot", 1, 16384, _BF16, "sgd"),
    _Chosen("middle-cross", 1, 1024, _BF16, "adagrad", "rowwise_adagrad"),
    _Chosen("criteo-cross", 1, 8192, _TF32, "adagrad", "rowwise_adagrad"),
    _Chosen("criteo-cross", 1, 8192, _BF16, "adam"),
    _Chosen("wide-cross", 1, 65536, _TF32, "adam_fused"),
    _Chosen("small-dot", 2, 1024, _BF16, "sgd"),
    _Chosen("middle-dot", 2, 2048, _TF32, "adam", exchange_precision="fp16"),
    _Chosen("middle-dot", 2, 8192, _BF16, "sgd"),
    _Chosen("middle-cross", 2, 1024, _TF32, "sgd", lookup="embedding_bag"),
    _Chosen("middle-cross", 2, 8192, _BF16, "adagrad", "rowwise_adagrad", exchange_precision="bf16"),
    _Chosen("wide-cross", 2, 4096, _BF16, "adam"),
    _Chosen("small-dot", 4, 512, _TF32, "adagrad"),
    _Chosen("middle-dot", 4, 2048, _BF16, "adam"),
    _Chosen("middle-cross", 4, 2048, _TF32, "adam", exchange_precision="fp16"),
    _Chosen("middle-cross", 4, 4096, _BF16, "adagrad", "rowwise_adagrad"),
    _Chosen("wide-cross", 4, 1024, _BF16, "sgd_fused", exchange_precision="bf16"),
)


def recommender_cases(ranks: int) -> tuple[Case, ...]:
    """Those of so many ranks."""
    return tuple(_case(step) for step in _STEPS if step.ranks == ranks)


def _case(step: _Chosen) -> Case:
    model = _drawn(step)
    short = step.precision.removesuffix("-autocast")
    name = f"recommender-{step.model}-{short}-{step.dense_optimizer.replace('_', '-')}-b{model.batch}-r{step.ranks}"
    plan = place(_RULE, model.tables, Machine(step.ranks)).owners()
    return Case("dlrm", name, model.to_dict(), short, model.batch, step.ranks, plan, model.name, _RULE)


def _drawn(step: _Chosen) -> Dlrm:
    chosen, draws = _MODELS[step.model], Draws(_SEED + list(_MODELS).index(step.model))
    streams = [draws.stream(PRODUCTION_2022, chosen.rows, chosen.pooling) for _ in range(chosen.tables)]
    model = Dlrm(
        name=f"recommender-{step.model}",
        batch=step.ranks * step.samples,
        dense_features=chosen.features,
        bottom=chosen.bottom,
        top=chosen.top,
        tables=tuple(Table(f"t{at:02d}", chosen.bottom[-1], stream) for at, stream in enumerate(streams)),
        lookup=step.lookup,
        optimizer=step.optimizer,
        interaction="dot" if chosen.cross is None else "dcnv2",
        precision=step.precision,
        dense_optimizer=step.dense_optimizer,
        exchange_precision=step.exchange_precision,
    )
    if chosen.cross is None:
        return model
    return replace(model, cross_layers=chosen.cross[0], cross_rank=chosen.cross[1])
