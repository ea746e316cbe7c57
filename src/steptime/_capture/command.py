"""`captured`: the workload of a training step that a text names, for any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from steptime._capture.script import bound, function_of
from steptime._program.workload import Workload


def captured(target: str, *, batch: int | None = None, ranks: int = 1) -> Workload:
    """The workload of `package.module:function` or `file.py:function`; see `steptime._capture.script` for what it may take."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch's observer says on stderr when it begins and ends
    function = function_of(target)
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
