"""The keys of a config as controls: which there are, and which values each may have, by the config's own classes and checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from steptime._build.config import Config
from steptime._build.dlrm import model as dlrm
from steptime._build.dlrm.config import DlrmConfig
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.config_checks import CHOICES
from steptime._build.transformer.fp8 import FEW_BITS, RECIPES
from steptime._build.transformer.parallelism import CHOICES as PARALLEL_CHOICES
from steptime._build.transformer.parallelism import DEGREES
from steptime._build.transformer.recompute import FULL, NONE, OPS, SELECTIVE
from steptime._explore.controls import CHOICE, NUMBER, SET, SWITCH, WHOLE, Control, doubling
from steptime._shard.configs import USUAL_RULE
from steptime._shard.rules import DIVIDING_RULES, RULES

PRECISION, PARALLEL, TABLES, MODEL = "Precision and kernels", "Parallelism", "Sharding", "Model"
_MOST = 1 << 31
# What a person changes often; other keys of a model are shown on demand.
_OFTEN = ("precision", "states", "optimizer", "fused", "recompute", "attention", "gradient_accumulation", "sequence", "layers")
_OFTEN_PARALLEL = (*DEGREES, "zero", "sequence", "schedule", "chunks")
_IN_PRECISION = ("precision", "states", "fp8_recipe", "optimizer", "fused", "attention", "recompute", "gradient_accumulation")
_ZERO = 2  # the highest level of `zero`; level 3 is `fsdp`
_DOUBLINGS = 7  # of a slider that begins at 1
_TRANSFORMER_CHOICES = {
    **CHOICES,
    "fp8_recipe": ("", *(each for each in RECIPES if each not in FEW_BITS)),
    "recompute": (NONE, SELECTIVE, FULL, OPS),
}
_DLRM_CHOICES: Mapping[str, tuple[str, ...]] = {
    "precision": (*dlrm.PRECISIONS, *dlrm.FUSED),
    "table_precision": tuple(dlrm.TABLE_DTYPES),
    "exchange_precision": tuple(dlrm.EXCHANGE_DTYPES),
    "optimizer": dlrm.OPTIMIZERS,
    "dense_optimizer": dlrm.DENSE_OPTIMIZERS,
    "lookup": dlrm.LOOKUPS,
    "prefetch": dlrm.PREFETCHES,
    "interaction": dlrm.INTERACTIONS,
    "loss": dlrm.LOSSES,
}
_DLRM_LABELS = {
    "optimizer": "Optimizer of tables",
    "dense_optimizer": "Optimizer of layers",
    "precision": "Precision of layers",
}
_HELP = {
    "parallel.data": "Replicas (DDP), or replicas of what FSDP shards",
    "parallel.fsdp": "Ranks that shard parameters, gradients and optimizer state (FSDP2, ZeRO 3)",
    "parallel.tensor": "Ranks that split every layer's matrices",
    "parallel.pipeline": "Stages of layers",
    "parallel.context": "Ranks that share every sequence",
    "parallel.expert": "Ranks that hold different experts",
    "parallel.zero": "What replicas share: 0 nothing, 1 the optimizer's state, 2 gradients too",
    "recompute": "Activation checkpointing: what is recomputed in backward",
}


def key_controls(config: Config) -> list[Control]:
    """A control for every key of a config that is one value."""
    return list(_of_dlrm(config) if isinstance(config, DlrmConfig) else _of_transformer(config))


def _named(key: str) -> str:
    """What a person reads: `parallel.context_exchange` is "Context exchange"."""
    text = key.rsplit(".", 1)[-1].replace("_", " ")
    return {"fsdp": "FSDP", "zero": "ZeRO"}.get(text, text[:1].upper() + text[1:])


def _choice(key: str, group: str, value: str, choices: tuple[str, ...], label: str = "", *, more: bool = False) -> Control:
    known = choices if value in choices else (value, *choices)
    pairs = tuple((each, each or "automatic") for each in known)
    return Control(SET + key, group, label or _named(key), CHOICE, value, choices=pairs, help=_HELP.get(key, ""), more=more)


def _of_dlrm(config: DlrmConfig) -> Iterator[Control]:
    model = config.model
    rules = (*RULES, *DIVIDING_RULES)
    yield Control(
        SET + "rule", TABLES, "Rule", CHOICE, config.rule, choices=tuple((each, each) for each in rules), optional=True,
        empty="the plan of the file" if config.plan is not None else USUAL_RULE,
        help="How tables are placed on ranks; `steptime shard` searches for a faster plan",
    )  # fmt: skip
    precisions = {table.precision for table in model.tables}
    common = precisions.pop() if len(precisions) == 1 else "fp32"
    for key, choices in _DLRM_CHOICES.items():
        group = TABLES if key in ("lookup", "prefetch") else MODEL if key in ("interaction", "loss") else PRECISION
        value = common if key == "table_precision" else str(getattr(model, key))
        yield _choice(key, group, value, choices, _DLRM_LABELS.get(key, ""), more=group == MODEL)
    for key in ("cuda_graph", "fused", "presorted"):
        yield Control(SET + key, PRECISION, _named(key), SWITCH, bool(getattr(model, key)), more=key == "presorted")
    yield Control(
        SET + "dense_features", MODEL, "Dense features", WHOLE, model.dense_features, least=1, most=1 << 20,
        steps=doubling(model.dense_features, most=1 << 16), more=True,
    )  # fmt: skip


def _of_transformer(config: Transformer) -> Iterator[Control]:
    for each in fields(config.parallel):
        key = f"parallel.{each.name}"
        yield from _key(key, getattr(config.parallel, each.name), often=each.name in _OFTEN_PARALLEL)
    names = [*_IN_PRECISION, *(each.name for each in fields(config) if each.name not in _IN_PRECISION)]
    for key in names:
        if key not in ("batch", "name", "checkpointing"):
            yield from _key(key, getattr(config, key), often=key in _OFTEN)
    if config.experts.count:
        for part in fields(config.experts):
            key = f"experts.{part.name}"
            yield from _key(key, getattr(config.experts, part.name), often=part.name in ("imbalance", "capacity"))


def _key(key: str, value: object, *, often: bool) -> Iterator[Control]:
    """The control of a key, unless its value is a table or a list."""
    table, _, name = key.rpartition(".")
    group = PARALLEL if table == "parallel" else PRECISION if key in _IN_PRECISION else MODEL
    choices = PARALLEL_CHOICES.get(name) if table == "parallel" else _TRANSFORMER_CHOICES.get(key)
    if choices is not None and isinstance(value, str):
        yield _choice(key, group, value, choices, more=not often)
    elif isinstance(value, bool):
        yield Control(SET + key, group, _named(key), SWITCH, value, help=_HELP.get(key, ""), more=not often)
    elif isinstance(value, int | float):
        yield _number(key, group, value, more=not often)


def _number(key: str, group: str, value: float, *, more: bool) -> Control:
    kind = WHOLE if isinstance(value, int) else NUMBER
    least, most = (1.0, float(_MOST)) if kind == WHOLE and value >= 1 else (0.0, float(_MOST))
    steps: tuple[float, ...] = doubling(int(value), most=1 << 20, times=4) if kind == WHOLE and value else ()
    if key == "parallel.zero":
        least, most, steps = 0.0, float(_ZERO), tuple(range(_ZERO + 1))
    elif key.removeprefix("parallel.") in (*DEGREES, "chunks") or key == "gradient_accumulation":
        steps = tuple(1 << power for power in range(max(_DOUBLINGS, int(value).bit_length() + 1) + 1))
    return Control(
        SET + key, group, _named(key), kind, value, least=least, most=most, steps=steps, help=_HELP.get(key, ""), more=more
    )
