"""steptime predicts how long a training step takes on a multi-GPU machine, why, and what is fastest.

The public names are here and are loaded when first used, so that `import steptime` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from steptime.errors import DeadlockError, InputError, SteptimeError, TraceError, UnsupportedError

if TYPE_CHECKING:
    from steptime.graph.load import load
    from steptime.graph.program import Program
    from steptime.graph.workload import Workload
    from steptime.platforms.platform import Platform
    from steptime.sharding.configs import configured_in
    from steptime.sim.modelled.prediction import predict_on
    from steptime.sim.prediction import predict
    from steptime.sim.simulate import simulate
    from steptime.sim.steady import steady
    from steptime.validate.replay import replay

__version__ = "0.1.0"

# Public name -> "module:attribute" that holds it.
_LAZY = {
    "Platform": "steptime.platforms.platform:Platform",
    "Program": "steptime.graph.program:Program",
    "Workload": "steptime.graph.workload:Workload",
    "configured_in": "steptime.sharding.configs:configured_in",
    "load": "steptime.graph.load:load",
    "predict": "steptime.sim.prediction:predict",
    "predict_on": "steptime.sim.modelled.prediction:predict_on",
    "replay": "steptime.validate.replay:replay",
    "simulate": "steptime.sim.simulate:simulate",
    "steady": "steptime.sim.steady:steady",
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
