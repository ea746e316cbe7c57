"""steptime predicts how long a training step takes on a multi-GPU machine, why, and what is fastest.

What is public is here, and docs/python.md describes it; modules whose names begin with an underscore are not. Names are loaded
when first used, so that `import steptime` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from steptime.errors import DeadlockError, InputError, SteptimeError, TraceError, UnsupportedError

if TYPE_CHECKING:
    from steptime._api.compare import compare
    from steptime._api.diff import diff
    from steptime._api.plan import plan
    from steptime._api.predict import predict, replay
    from steptime._api.read import capture, read
    from steptime._api.shard import shard
    from steptime._api.sweep import sweep
    from steptime._api.whatif import whatif
    from steptime._platforms.calibration import Calibration
    from steptime._platforms.platform import Platform
    from steptime._program.program import Program
    from steptime._program.workload import Workload
    from steptime._report.answers import Prediction, Replayed, Sharding
    from steptime._report.compare import ComparedAnswers
    from steptime._report.diff import Compared
    from steptime._report.plan import Planned
    from steptime._report.sweep import Predictions
    from steptime._report.whatif import Suggestions

__version__ = "0.1.0"

# Public name -> "module:attribute" that holds it.
_LAZY = {
    "Calibration": "steptime._platforms.calibration:Calibration",
    "Compared": "steptime._report.diff:Compared",
    "ComparedAnswers": "steptime._report.compare:ComparedAnswers",
    "Planned": "steptime._report.plan:Planned",
    "Platform": "steptime._platforms.platform:Platform",
    "Prediction": "steptime._report.answers:Prediction",
    "Predictions": "steptime._report.sweep:Predictions",
    "Program": "steptime._program.program:Program",
    "Replayed": "steptime._report.answers:Replayed",
    "Sharding": "steptime._report.answers:Sharding",
    "Suggestions": "steptime._report.whatif:Suggestions",
    "Workload": "steptime._program.workload:Workload",
    "capture": "steptime._api.read:capture",
    "compare": "steptime._api.compare:compare",
    "diff": "steptime._api.diff:diff",
    "plan": "steptime._api.plan:plan",
    "predict": "steptime._api.predict:predict",
    "read": "steptime._api.read:read",
    "replay": "steptime._api.predict:replay",
    "shard": "steptime._api.shard:shard",
    "sweep": "steptime._api.sweep:sweep",
    "whatif": "steptime._api.whatif:whatif",
}

# Names of the last release -> where they are, and what to use instead; they go with the next release.
_DEPRECATED = {
    "configured_in": ("steptime._api.deprecated:configured_in", "steptime.read"),
    "load": ("steptime._api.deprecated:load", "steptime.read"),
    "predict_on": ("steptime._api.deprecated:predict_on", "steptime.predict"),
    "simulate": ("steptime._sim.core.simulate:simulate", "steptime.predict"),
    "steady": ("steptime._sim.core.steady:steady", "steptime.predict"),
}

__all__ = [
    "Calibration",
    "Compared",
    "ComparedAnswers",
    "DeadlockError",
    "InputError",
    "Planned",
    "Platform",
    "Prediction",
    "Predictions",
    "Program",
    "Replayed",
    "Sharding",
    "SteptimeError",
    "Suggestions",
    "TraceError",
    "UnsupportedError",
    "Workload",
    "__version__",
    "capture",
    "compare",
    "diff",
    "plan",
    "predict",
    "read",
    "replay",
    "shard",
    "sweep",
    "whatif",
]


def __getattr__(name: str) -> object:
    if name in _DEPRECATED:
        import warnings  # noqa: PLC0415 (nearly nobody needs it)

        place, instead = _DEPRECATED[name]
        message = f"steptime.{name} is deprecated and goes with the next release; use {instead}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return _loaded(place)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = _loaded(_LAZY[name])
    globals()[name] = value
    return value


def _loaded(place: str) -> object:
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
