"""What a command is asked about: traces, a captured workload, a config, or a function that is captured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from steptime._cli.output import read

if TYPE_CHECKING:
    from steptime._build.configured import UnnamedMemory
    from steptime._build.dlrm.step_lookups import WorkloadLookups
    from steptime._program.workload import Workload

# A dotted module or the path of a Python file, a colon, the name of a function in it.
_FUNCTION = re.compile(r"(?:[A-Za-z_][\w.]*|[^:]+\.py):[A-Za-z_]\w*")


@dataclass(frozen=True)
class Asked:
    """A workload and what its ranks look up; `traces` says whether it was recorded."""

    workload: Workload
    lookups: WorkloadLookups | None = None
    unnamed: Mapping[int, UnnamedMemory] | None = None  # memory that no op names
    traces: bool = True


def asked(given: Sequence[Path], *, batch: int | None = None, ranks: int | None = None) -> Asked:
    """The workload behind the arguments of a command."""
    from steptime.errors import InputError

    text = str(given[0])
    if len(given) == 1 and text.endswith(".toml"):
        from steptime._shard.configs import configured_in

        found = configured_in(given[0], batch=batch, ranks=ranks)
        return Asked(found.workload, found.lookups, found.unnamed, traces=False)
    if len(given) == 1 and _FUNCTION.fullmatch(text) and not given[0].exists():
        from steptime._capture.command import captured

        return Asked(captured(text, batch=batch, ranks=ranks or 1), traces=False)
    for name, value in (("--batch", batch), ("--ranks", ranks)):
        if value is not None:
            raise InputError(f"{name} {value}: a trace has the batch and the ranks it was recorded with; give a config instead")
    return Asked(read(given))
