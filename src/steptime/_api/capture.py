"""`capture`: the workload of a PyTorch training step, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steptime._capture.command import captured
from steptime._program.workload import Workload


def capture(function: str | Callable[..., Any], *, ranks: int = 1, batch: int | None = None) -> Workload:
    """What a training step does, op by op: forward, backward and optimiser, on so many ranks.

    `function` makes model, optimiser and inputs and returns the step, a callable without arguments, or is the step itself; or
    it is named, as "module:function" or "file.py:function". It may take `batch` (samples of all ranks), `device`, `rank` and
    `ranks`. PyTorch is needed, a GPU is not.
    """
    return captured(function, batch=batch, ranks=ranks)
