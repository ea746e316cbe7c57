"""`plan`: the fastest layout of a Transformer on so many GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from steptime._api.predict import calibration_for, platform_for, platform_ranks
from steptime._build.config import Config, read_config
from steptime._build.config_values import Overrides
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._fuse.compiled import checked_mode
from steptime._models.memory.fit import usable_bytes
from steptime._plan.evaluate import LayoutEvaluator
from steptime._plan.explain import compared
from steptime._plan.search import search
from steptime._plan.space import Choices
from steptime._plan.torchtitan import runnable
from steptime._platforms.calibration import Calibration
from steptime._platforms.names import joining
from steptime._platforms.platform import Platform
from steptime._report.cost import checked_price
from steptime._report.plan import Planned
from steptime._sim.modelled.prediction import within
from steptime.errors import InputError

TORCHTITAN = "torchtitan"
# Keys of a config that a search chooses, besides [parallel].
_SEARCHED = ("ranks", "gradient_accumulation", "recompute", "checkpointing")


def plan(
    model: str | Path | Mapping[str, Any] | Transformer,
    platform: str | Path | Platform,
    *,
    gpus: int | None = None,
    batch: int | None = None,
    settings: Mapping[str, Any] | None = None,
    data: Sequence[int] | None = None,
    fsdp: Sequence[int] | None = None,
    tensor: Sequence[int] | None = None,
    pipeline: Sequence[int] | None = None,
    context: Sequence[int] | None = None,
    expert: Sequence[int] | None = None,
    chunks: Sequence[int] | None = None,
    zero: Sequence[int] | None = None,
    sequence: bool | None = None,
    micro_batch: Sequence[int] | None = None,
    recompute: Sequence[str] | None = None,
    memory_bytes: int | None = None,
    headroom: float = 0.0,
    price: float | None = None,
    fabric: str | Path | None = None,
    calibration: str | Path | Calibration | None = None,
    compile: str | None = None,
    framework: str | None = None,
    executor: Executor | None = None,
    progress: Callable[[str], None] | None = None,
) -> Planned:
    """Search for the layout with the shortest step that fits, and say why it is.

    `model` is a Transformer config; its own [parallel], micro-batches and recomputation are what is searched. `gpus` are all
    of the platform's unless fewer are given, `batch` is the global batch if not the config's, `settings` are
    keys of the config with other values, dotted. What follows bounds the search:
    each is the values that may be chosen, whatever divides where nothing is given. `memory_bytes` is what a rank may use,
    `headroom` a share of it that is left free. `price` is of one GPU for an hour. `compile` is a mode of `torch.compile` as
    which layouts are predicted, if not the config's. `framework="torchtitan"` searches only layouts that torchtitan runs
    (`torchtitan()` of the answer writes the best one), and refuses a model that it cannot run. `executor` runs the questions:
    processes, or a cluster's `concurrent.futures.Executor`; without one, processes of this machine. `progress` is told how far
    the search is.
    """
    ranks = platform_ranks(platform) if gpus is None else gpus
    assert ranks is not None
    if ranks < 1:
        raise InputError(f"--gpus {ranks}: expected 1 or more")
    machine = platform_for(platform, ranks, fabric=fabric)
    if ranks > machine.ranks:
        raise InputError(
            f"--gpus {ranks}: platform {machine.name} joins {machine.ranks}; choose one that joins as many, as "
            f"{joining(ranks, machine.parts.device) or '`steptime platforms` lists them'}, or --gpus {machine.ranks}"
        )
    checked_price(price)
    speed = calibration_for(calibration, machine)
    choices = Choices(
        data, fsdp, tensor, pipeline, context, expert, chunks, zero,
        None if sequence is None else (sequence,), micro_batch, recompute,
    )  # fmt: skip
    alone = _model(model, batch, settings or {})
    if compile is not None:
        alone = replace(alone, compile=checked_mode(compile))
    machine.device.limits.check_format(alone.precision, alone.title)
    if framework not in (None, TORCHTITAN):
        raise InputError(f"framework is {framework!r}; expected {TORCHTITAN!r} or none")
    if framework is not None:
        choices = runnable(alone, choices)
    evaluator = LayoutEvaluator(alone, machine.parts, speed)
    limit = usable_bytes(machine.device.limits, memory_bytes, headroom)
    found = search(evaluator, ranks, choices, limit_bytes=limit, executor=executor, progress=progress)
    best = replace(within(evaluator.predicted(found.best.layout), limit), price=price)
    return Planned(found, best, compared(found), limit)


def _model(model: str | Path | Mapping[str, Any] | Transformer, batch: int | None, settings: Mapping[str, Any]) -> Transformer:
    """The model without a layout of its own."""
    layout = next((key for key in settings if key in _SEARCHED or key.partition(".")[0] == "parallel"), None)
    if layout is not None:
        raise InputError(f"{layout} is set, and `plan` searches layouts; bound the search by --fsdp, --tensor and the like")
    where = "the config" if isinstance(model, Mapping) else str(model)
    if isinstance(model, Transformer):
        if settings:
            raise InputError(f"{model.title}: settings are of a config's file; change the Transformer itself")
        config: Config = model
    else:
        # A batch need not suit the layout that the file has.
        source = model if isinstance(model, Mapping) else _config_path(model)
        overrides = Overrides.of(where, batch, settings=settings)
        config, batch = read_config(source, replace(overrides, batch=None)), overrides.batch
    if not isinstance(config, Transformer):
        raise InputError(f"{where}: `plan` shares Transformers among GPUs; tables of a DLRM are placed by `steptime shard`")
    alone = replace(config, parallel=Parallelism(), gradient_accumulation=1)
    return alone if batch is None else alone.with_batch(batch)


def _config_path(model: str | Path) -> Path:
    """Refuse files of other kinds in words of `plan`."""
    path = Path(model)
    if path.suffix in (".toml", ".csv", ".json"):
        return path
    raise InputError(
        f"{path}: `plan` takes a Transformer config (.toml, docs/configs.md), whose layouts it compares; `steptime predict` "
        "takes scripts and recordings"
    )
