"""`read` and `capture`: a workload from whatever describes one: recordings, a saved workload, a config, or a function."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime._build.config_values import shortened
from steptime._notices import Caveat
from steptime._program.load import load
from steptime._program.workload import Progress, Workload, fixed
from steptime.errors import InputError

if TYPE_CHECKING:
    from typing import TypeAlias

    Source: TypeAlias = str | Path | Sequence[str | Path] | Mapping[str, Any] | Callable[..., Any] | Workload


# A dotted module or the path of a Python file, a colon, the name of a function in it.
_FUNCTION = re.compile(r"(?:[A-Za-z_][\w.]*|[^:]+\.py):[A-Za-z_]\w*")
# What PyTorch or Python says of a job of several ranks that was started as one: nothing tells it which rank it is.
_NO_GROUP = re.compile(r"\b(?:LOCAL_)?RANK\b|\bWORLD_SIZE\b|process group has not been initialized")
# What a DLRM config or a TorchRec collection in JSON begins with, and in how many bytes.
_TABLES = re.compile(rb'"(?:tables|num_embeddings|dense_features)"\s*:')
_LOOKED_AT = 1 << 14


def read(
    source: Source,
    *,
    batch: int | None = None,
    ranks: int | None = None,
    plan: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    platform_ranks: int | None = None,
    limit_s: float | None = None,
    progress: Progress | None = None,
) -> Workload:
    """The workload behind a source.

    `source` is the path of recordings (a file, folder or archive; a list of paths for several), of a saved workload, of a
    config or of a sharding task (`.toml`, `.csv`, `.json`); the keys and values of a config as a mapping; a training script
    ("train.py") or a function as "module:function", "file.py:function" or the function itself, which is captured without a GPU
    (in a list, what follows a script or function is its arguments); or a workload, which is taken as it is. `batch` (global)
    and `ranks` change a config or a function, `ranks` a script too, which may run for `limit_s`. `plan` is the file of a plan
    of a DLRM's tables, as `steptime shard` or TorchRec writes it. `settings` are keys of a config with other values than its
    file has, dotted: `{"parallel.fsdp": 8}`; None takes a key away. A sharding task that names no ranks, or a script or
    function that joins a process group, is for `platform_ranks`. `progress` is told the name and the
    bytes read so far of long recordings.
    """
    if isinstance(source, Workload):
        return source.varied(batch=batch, ranks=ranks, settings=settings)
    if callable(source):
        _check_unset(str(getattr(source, "__qualname__", "the function")), settings)
        return capture(source, batch=batch, ranks=ranks or 1)
    texts = [] if isinstance(source, Mapping) else named_in(source)
    config = source if isinstance(source, Mapping) else config_file(texts)
    if config is not None:
        from steptime._shard.configs import configured_in

        file = None if plan is None else Path(plan)
        return configured_in(config, batch=batch, ranks=ranks, plan=file, platform_ranks=platform_ranks, settings=settings)
    text, paths = texts[0], [Path(each) for each in texts]
    if runs_code(text):
        _check_unset(text, settings)
        if plan is not None:
            raise InputError(f"{text}: places its tables itself; a plan goes with a DLRM config or a sharding task")
        return _of_code(text, texts[1:], batch, ranks, platform_ranks, limit_s)
    if plan is not None:
        raise InputError(f"{text}: has no tables that the plan {plan} could place; give a DLRM config or a sharding task")
    _check_unset(text, settings)
    if batch is not None or ranks is not None:
        raise InputError(f"{text}: {fixed(batch, ranks)}")
    return load(paths, progress=progress)


def named_in(source: str | Path | Sequence[str | Path]) -> list[str]:
    """List the paths of a source, or a script or function and its arguments."""
    names: object = [source] if isinstance(source, str | Path) else source
    if not isinstance(names, list | tuple) or not names or not all(isinstance(each, str | Path) for each in names):
        raise InputError(
            f"{shortened(source)}: nothing to read; expected a path, a config (a file or a mapping), a training script, "
            "module:function or a function"
        )
    return [str(each) for each in names]


def config_file(names: Sequence[str]) -> Path | None:
    """Return the one config that is named; None where something else is."""
    single = len(names) == 1 and not runs_code(names[0]) and is_config(Path(names[0]))
    return Path(names[0]) if single else None


def _check_unset(source: str, settings: Mapping[str, Any] | None) -> None:
    """Refuses settings of what is no config."""
    if settings:
        raise InputError(f"{source}: {fixed(None, None, settings)}")


def is_config(path: Path) -> bool:
    """A config or a list of tables; JSON may also be a trace, so its first bytes are looked at."""
    if path.suffix != ".json":
        return path.suffix in (".toml", ".csv")
    try:
        with path.open("rb") as file:
            begin = file.read(_LOOKED_AT)
    except OSError:
        return False
    return _TABLES.search(begin) is not None and b'"traceEvents"' not in begin and b'"nodes"' not in begin


def is_script(text: str) -> bool:
    """Whether a source is a training script."""
    return text.endswith(".py") and not Path(text).is_dir()


def runs_code(text: str) -> bool:
    """Whether a source is the user's own code, which runs: a script, or a function that is named."""
    return is_script(text) or (_FUNCTION.fullmatch(text) is not None and not Path(text).exists())


def _of_code(
    text: str,
    arguments: Sequence[str],
    batch: int | None,
    ranks: int | None,
    platform_ranks: int | None = None,
    limit_s: float | None = None,
) -> Workload:
    if find_spec("torch") is None:
        raise InputError(f"{text}: capturing needs PyTorch, which is not installed; pip install 'steptime[measure]'")
    if not is_script(text):
        return _of_function(text, tuple(arguments), batch, ranks, platform_ranks or 1)
    from steptime._capture.launch import LIMIT_S, Script, fixed_batch

    if batch is not None:
        raise InputError(f"{text}: {fixed_batch(batch)}")
    return Script(Path(text), tuple(arguments), LIMIT_S if limit_s is None else limit_s).workload(ranks, platform_ranks)


def _of_function(text: str, arguments: tuple[str, ...], batch: int | None, ranks: int | None, platform_ranks: int) -> Workload:
    """On so many ranks; where none are given, on one, or on those of the platform if the function joins a process group."""
    from steptime._capture.script import captured

    if ranks is not None or platform_ranks == 1:
        return captured(text, arguments=arguments, batch=batch, ranks=ranks or 1)
    try:
        with warnings.catch_warnings():  # of a group that is joined before anything says that there is none
            warnings.filterwarnings("ignore", message="Attempted to get default timeout for nccl")
            alone = captured(text, arguments=arguments, batch=batch)
    except InputError as error:
        if _NO_GROUP.search(str(error)) is None:
            raise
        return captured(text, arguments=arguments, batch=batch, ranks=platform_ranks)
    said = Caveat(
        f"captured as one rank, on one of {platform_ranks} GPUs: --ranks {platform_ranks} captures a job of all of them"
    )
    return replace(alone, warnings=(*alone.warnings, said))


def capture(
    function: str | Callable[..., Any],
    *,
    arguments: Sequence[str] = (),
    ranks: int | None = None,
    batch: int | None = None,
    limit_s: float | None = None,
) -> Workload:
    """What a training step does, op by op: forward, backward and optimiser, on so many ranks.

    `function` makes model, optimiser and inputs and returns the step, a callable without arguments, or is the step itself, or
    a training loop, of which the iteration that repeats is taken; or it is named, as "module:function" or "file.py:function".
    It may take `batch` (samples of all ranks), `device`, `rank` and `ranks`. A training script ("train.py") runs as it is, in
    a process of its own and for `limit_s` at most. `arguments` are what it finds on its command line. PyTorch is needed, a GPU
    is not.
    """
    if isinstance(function, str):
        return _of_code(function, arguments, batch, ranks, limit_s=limit_s)
    from steptime._capture.script import captured

    return captured(function, batch=batch, ranks=ranks or 1)
