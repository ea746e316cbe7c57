"""`read` and `capture`: a workload from whatever describes one: recordings, a saved workload, a config, or a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime._program.load import load
from steptime._program.workload import Progress, Workload, fixed
from steptime.errors import InputError

if TYPE_CHECKING:
    from typing import TypeAlias

    Source: TypeAlias = str | Path | Sequence[str | Path] | Callable[..., Any] | Workload


# A dotted module or the path of a Python file, a colon, the name of a function in it.
_FUNCTION = re.compile(r"(?:[A-Za-z_][\w.]*|[^:]+\.py):[A-Za-z_]\w*")
# What a DLRM config or a TorchRec collection in JSON begins with, and in how many bytes.
_TABLES = re.compile(rb'"(?:tables|num_embeddings|dense_features)"\s*:')
_LOOKED_AT = 1 << 14


def read(
    source: Source,
    *,
    batch: int | None = None,
    ranks: int | None = None,
    plan: str | Path | None = None,
    platform_ranks: int | None = None,
    progress: Progress | None = None,
) -> Workload:
    """The workload behind a source.

    `source` is the path of recordings (a file, folder or archive; a list of paths for several), of a saved workload, of a
    config or of a sharding task (`.toml`, `.csv`, `.json`); a function as "module:function", "file.py:function" or the
    function itself, which is captured without a GPU; or a workload, which is taken as it is. `batch` (global) and `ranks`
    change a config or a function. `plan` is the file of a plan of a DLRM's tables, as `steptime shard` or TorchRec writes it.
    A sharding task that names no ranks is for `platform_ranks`. `progress` is told the name and the bytes read so far of long
    recordings.
    """
    if isinstance(source, Workload):
        return source.varied(batch=batch, ranks=ranks)
    if callable(source):
        return capture(source, batch=batch, ranks=ranks or 1)
    paths = [Path(source)] if isinstance(source, str | Path) else [Path(each) for each in source]
    if not paths:
        raise InputError("nothing to read: give a path, a config, module:function or a function")
    text = str(paths[0])
    if len(paths) == 1 and _is_config(paths[0]):
        from steptime._shard.configs import configured_in

        file = None if plan is None else Path(plan)
        return configured_in(paths[0], batch=batch, ranks=ranks, plan=file, platform_ranks=platform_ranks)
    if plan is not None:
        raise InputError(f"{text}: has no tables that the plan {plan} could place; give a DLRM config or a sharding task")
    if len(paths) == 1 and _FUNCTION.fullmatch(text) and not paths[0].exists():
        return capture(text, batch=batch, ranks=ranks or 1)
    if batch is not None or ranks is not None:
        raise InputError(f"{text}: {fixed(batch, ranks)}")
    return load(paths, progress=progress)


def _is_config(path: Path) -> bool:
    """A config or a list of tables; JSON may also be a trace, so its first bytes are looked at."""
    if path.suffix != ".json":
        return path.suffix in (".toml", ".csv")
    try:
        with path.open("rb") as file:
            begin = file.read(_LOOKED_AT)
    except OSError:
        return False
    return _TABLES.search(begin) is not None and b'"traceEvents"' not in begin and b'"nodes"' not in begin


def capture(function: str | Callable[..., Any], *, ranks: int = 1, batch: int | None = None) -> Workload:
    """What a training step does, op by op: forward, backward and optimiser, on so many ranks.

    `function` makes model, optimiser and inputs and returns the step, a callable without arguments, or is the step itself; or
    it is named, as "module:function" or "file.py:function". It may take `batch` (samples of all ranks), `device`, `rank` and
    `ranks`. PyTorch is needed, a GPU is not.
    """
    from steptime._capture.script import captured

    return captured(function, batch=batch, ranks=ranks)
