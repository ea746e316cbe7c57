"""steptime predicts how long a training step takes on a multi-GPU machine, why, and what is fastest.

The public names are here and are loaded when first used, so that `import steptime` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from steptime.errors import DeadlockError, InputError, SteptimeError, TraceError, UnsupportedError

if TYPE_CHECKING:
    from steptime._platforms.platform import Platform
    from steptime._program.load import load
    from steptime._program.program import Program
    from steptime._program.workload import Workload
    from steptime._shard.configs import configured_in
    from steptime._sim.core.simulate import simulate
    from steptime._sim.core.steady import steady
    from steptime._sim.modelled.prediction import predict_on
    from steptime._sim.prediction import predict
    from steptime._sim.recorded.replay import replay

__version__ = "0.1.0"

# Public name -> "module:attribute" that holds it.
_LAZY = {
    "Platform": "steptime._platforms.platform:Platform",
    "Program": "steptime._program.program:Program",
    "Workload": "steptime._program.workload:Workload",
    "configured_in": "steptime._shard.configs:configured_in",
    "load": "steptime._program.load:load",
    "predict": "steptime._sim.prediction:predict",
    "predict_on": "steptime._sim.modelled.prediction:predict_on",
    "replay": "steptime._sim.recorded.replay:replay",
    "simulate": "steptime._sim.core.simulate:simulate",
    "steady": "steptime._sim.core.steady:steady",
}

__all__ = [
    "DeadlockError",
    "InputError",
    "Platform",
    "Program",
    "SteptimeError",
    "TraceError",
    "UnsupportedError",
    "Workload",
    "__version__",
    "configured_in",
    "load",
    "predict",
    "predict_on",
    "replay",
    "simulate",
    "steady",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LAZY[name].partition(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
