"""`Verdict`: what every answer begins with: whether it fits, what binds it, and how sure that is.

Text, JSON, pages and Python all show this one object: a `Fit`, a `StepBound` and a `Certainty`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from steptime._models.memory.fit import Fit, Remedy
from steptime._platforms.situation import CARRIED, CARRIED_CALIBRATED, KNOWN, KNOWN_CALIBRATED
from steptime._report.words import OUT_OF_RANGE, percent
from steptime._sim.explain.bound import HOST, StepBound
from steptime._sim.prediction import PredictedStep

MEMORY = "memory"
MEMORY_UNKNOWN = "memory unknown"
_KNOWN = {
    KNOWN: "GPU measured, host not calibrated",
    KNOWN_CALIBRATED: "GPU measured, host calibrated or recorded",
    CARRIED: "GPU not measured: carried over from data sheets",
    CARRIED_CALIBRATED: "GPU not measured: carried over from data sheets, machine calibrated",
}
_CUT_OFF = "the recording is cut off, so the step is of what is left of it; record again, or give the whole file"
NOT_CLAIMED = "cut off, no interval"
_AS_RECORDED, _AS_RUN = "its own times, profiler included", "its own times, what the profiler cost taken out"
# Shares of device time from which a guess or an extrapolation is part of how sure an answer is.
_WORTH_SAYING = 0.01
_MUCH_OUT_OF_RANGE = 0.05


@dataclass(frozen=True, slots=True)
class Certainty:
    """How far measured steps may be from the predicted one: nine of ten lie within, and why that is so wide."""

    below: float  # shares of the step
    above: float
    situation: str | None  # what is known of the machine; None: the step is a recorded one
    why: str
    claimed: bool = True  # whether an interval is claimed at all: not of a recording of which a part is missing

    @property
    def span(self) -> str:
        """The interval around the step, in percent."""
        if not self.claimed:
            return NOT_CLAIMED
        below, above = round(100 * self.below), round(100 * self.above)
        return f"±{above} %" if below == above else f"-{below} to +{above} %"

    @property
    def text(self) -> str:
        """The interval and where it comes from."""
        return f"{self.span}: {self.why}"

    @property
    def measured(self) -> bool | None:
        """Whether the device was measured; None for a recorded step."""
        return None if self.situation is None else self.situation in (KNOWN, KNOWN_CALIBRATED)

    @property
    def calibrated(self) -> bool | None:
        """Whether the machine was calibrated; None for a recorded step."""
        return None if self.situation is None else self.situation in (KNOWN_CALIBRATED, CARRIED_CALIBRATED)

    @classmethod
    def around(
        cls,
        step: float,
        interval: tuple[float, float],
        situation: str | None,
        *,
        recorded: str = _AS_RUN,
        coverage: Mapping[str, float] | None = None,
        cut_off: bool = False,
    ) -> Certainty:
        """Of a step and its interval, in the same unit."""
        below, above = (max(1 - interval[0] / step, 0.0), max(interval[1] / step - 1, 0.0)) if step > 0 else (0.0, 0.0)
        if cut_off:
            return cls(below, above, situation, _CUT_OFF, claimed=False)
        why = recorded if situation is None else _KNOWN.get(situation, situation)
        return cls(below, above, situation, "; ".join([why, *_doubts(coverage or {})]))

    def to_dict(self) -> dict[str, Any]:
        """Its keys in JSON."""
        return {
            "below": self.below if self.claimed else None,
            "above": self.above if self.claimed else None,
            "measured": self.measured,
            "calibrated": self.calibrated,
            "situation": self.situation,
            "text": self.text,
        }


def _doubts(coverage: Mapping[str, float]) -> Iterator[str]:
    if coverage.get("fallback", 0.0) >= _WORTH_SAYING:
        yield f"{percent(coverage['fallback'])} of the device time is a guess"
    if coverage.get(OUT_OF_RANGE, 0.0) >= _MUCH_OUT_OF_RANGE:
        yield f"{percent(coverage[OUT_OF_RANGE])} of the device time is beyond the fitted range"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Fits or not, what binds, how sure."""

    fit: Fit | None  # None: nothing is known of memory; `unknown` says why where that is worth saying
    binds: StepBound
    certainty: Certainty
    helps: tuple[Remedy, ...] = ()  # what would make it fit
    unknown: str = ""  # why nobody knows whether it fits
    caveats: tuple[str, ...] = ()  # what changes its meaning

    @property
    def fits(self) -> bool | None:
        """None where nobody knows."""
        return None if self.fit is None else self.fit.fits

    @property
    def short_bytes(self) -> int | None:
        """What the fullest rank lacks; 0 where it fits."""
        return None if self.fit is None else self.fit.short_bytes

    @property
    def bound_by(self) -> str:
        """What bounds the step, and why, in a sentence."""
        return self.binds.text

    @property
    def regime(self) -> str:
        """What bounds the step, in few words."""
        guessed = self.binds.kind == HOST and self.certainty.calibrated is False
        return self.binds.regime + " (host not calibrated)" * guessed

    @property
    def bound(self) -> str:
        """One word: memory, host, GPU, wire, power, peers (waiting for them) or mixed."""
        return MEMORY if self.fits is False else self.binds.kind

    @property
    def headline(self) -> str:
        """Fits or by how much not, what binds and how sure, in few words."""
        if self.fit is not None and not self.fit.fits:
            return self.fit.words
        return ", ".join([*([self.room] if self.room else []), self.regime, self.certainty.span])

    @property
    def room(self) -> str:
        """Whether it fits, in few words; empty where nobody asked, as of a step as recorded."""
        return self.fit.words if self.fit is not None else MEMORY_UNKNOWN if self.unknown else ""

    @property
    def text(self) -> str:
        """The headline with its reasons, in a line."""
        if self.fit is not None and not self.fit.fits:
            return self.fit.text
        why = [MEMORY_UNKNOWN + f": {self.unknown}"] if self.unknown else []
        return f"{self.headline}: {'; '.join([*self.caveats, self.certainty.why, *why])}"

    def to_dict(self) -> dict[str, Any]:
        """The key `verdict` of every answer's JSON."""
        return {
            "fits": self.fits,
            "tight": None if self.fit is None else self.fit.tight,
            "short_bytes": self.short_bytes,
            "rank": None if self.fit is None else self.fit.rank,
            "bound": self.bound,
            "headline": self.headline,
            "text": self.text,
            "certainty": self.certainty.to_dict(),
            "helps": [each.text for each in self.helps],
            "remedies": [each.to_dict() for each in self.helps],
            "caveats": list(self.caveats),
        }


def verdict_of(prediction: PredictedStep) -> Verdict:
    """Of a predicted or replayed step."""
    certainty = Certainty.around(
        prediction.step_time_ms,
        prediction.interval_ms,
        prediction.situation,
        recorded=_AS_RECORDED if prediction.profiled else _AS_RUN,
        coverage=prediction.coverage,
        cut_off=prediction.workload.cut_off,
    )
    unknown = "" if prediction.platform is None else str(prediction.memory.get("unknown", ""))
    return Verdict(prediction.fit, prediction.bound, certainty, prediction.helps, unknown, prediction.notices.caveats)
