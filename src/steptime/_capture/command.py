"""`captured`: the workload of a training step, a function or the name of one, for any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from steptime._capture.script import bound, function_of
from steptime._program.workload import Description, Workload


def captured(function: str | Callable[..., Any], *, batch: int | None = None, ranks: int = 1) -> Workload:
    """The workload of a function, or of `package.module:function`; see `steptime._capture.script` for what it may take."""
    result = _captured(function, batch, ranks)
    return replace(result, description=Description(batch=batch), rebuild=CaptureAgain(function, batch, ranks))


@dataclass(frozen=True)
class CaptureAgain:
    """Captures a function once more, with another batch or for other ranks."""

    function: str | Callable[..., Any]
    batch: int | None
    ranks: int

    def __call__(self, *, batch: int | None = None, ranks: int | None = None) -> Workload:
        return captured(
            self.function, batch=self.batch if batch is None else batch, ranks=self.ranks if ranks is None else ranks
        )


def _captured(given: str | Callable[..., Any], batch: int | None, ranks: int) -> Workload:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch's observer says on stderr when it begins and ends
    target = given if isinstance(given, str) else getattr(given, "__qualname__", type(given).__name__)
    function = function_of(given) if isinstance(given, str) else given
    bound(function, target, batch=batch, rank=0, ranks=ranks)
    name = target.rpartition(":")[2]
    if ranks == 1:
        from steptime._capture.capture import capture  # noqa: PLC0415 (it imports torch, whose level is set above)

        program = capture(bound(function, target, batch=batch, rank=0, ranks=1), name=target).program
        return Workload((program,), 1, name)
    from steptime._capture.collectives.ranks import capture_ranks  # noqa: PLC0415 (torch.distributed, which one rank does not need)
    from steptime._capture.refusals import failure  # noqa: PLC0415 (the same)

    try:
        return capture_ranks(lambda: _of_this_rank(function, target, batch), ranks=ranks, name=name)
    except (Exception, SystemExit) as error:
        raise failure(error, target) from error


def _of_this_rank(function: Callable[..., Any], target: str, batch: int | None) -> Any:
    """What the function gives the rank that is being captured."""
    # As every launcher of ranks says it, `steptime._capture.collectives.world` too.
    rank, ranks = (int(os.environ[variable]) for variable in ("RANK", "WORLD_SIZE"))
    return bound(function, target, batch=batch, rank=rank, ranks=ranks)()
