"""The fastest layout of a model, as Python and JSON have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from steptime._files import write_output
from steptime._models.memory.fit import Fit, first_with_margin
from steptime._notices import Notices
from steptime._plan.evaluate import Played
from steptime._plan.explain import Comparison
from steptime._plan.files import config_text
from steptime._plan.search import FoundLayouts
from steptime._plan.torchtitan import torchtitan_text
from steptime._report.answers import plain, table_of
from steptime._report.cost import Cost, cost_document
from steptime._report.json import SCHEMA_VERSION, Document
from steptime._report.verdict import Verdict, verdict_of
from steptime._report.words import interval_words, time_ms
from steptime._sim.prediction import PredictedStep
from steptime._units import NS_PER_S, ms

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN = 10


@dataclass(frozen=True, repr=False)
class Planned:
    """The fastest layout that fits, its runners-up, and why."""

    found: FoundLayouts
    best: PredictedStep  # the best layout as `predict` answers it
    comparison: Comparison | None  # with the second
    limit_bytes: int

    @property
    def platform(self) -> str:
        """By its name."""
        return str(self.best.platform)

    @property
    def price(self) -> float | None:
        """Of a GPU for an hour."""
        return self.best.price

    @property
    def step_time_ms(self) -> float:
        """Of the best layout."""
        return self.best.step_time_ms

    @property
    def interval_ms(self) -> tuple[float, float]:
        """That nine of ten measured steps of the best layout are expected in."""
        return self.best.interval_ms

    @property
    def layout(self) -> Document:
        """The best layout: degrees of parallelism, micro-batch and recomputation."""
        return dict(self.found.best.layout.to_dict())

    def __repr__(self) -> str:
        what = f"{self.found.model.title} on {self.found.gpus} GPUs of {self.platform}: {self.found.best.layout}"
        return f"<Planned {what}, {time_ms(self.step_time_ms)} ms per step, {interval_words(*self.interval_ms)}>"

    def tokens_per_s(self, played: Played) -> float:
        """Of all GPUs together."""
        return self.found.model.batch * self.found.model.sequence / (played.step_ns / 1e9)

    def cost(self, played: Played) -> Cost | None:
        """Of steps of a layout; None without a price."""
        model = self.found.model
        if self.price is None:
            return None
        return Cost(self.price, self.found.gpus, played.step_ns / NS_PER_S, model.batch, model.sequence)

    @property
    def verdict(self) -> Verdict:
        """That the best layout fits, what binds it, and how sure that is."""
        return verdict_of(self.best)

    @property
    def with_room(self) -> Played | None:
        """The fastest layout that fits clearly, where the best barely does; None where there is none, or no need of one."""
        return first_with_margin(self.found.played, lambda each: self.fit(each).tight)

    def fit(self, played: Played) -> Fit:
        """What the fullest rank of a layout needs of its memory."""
        return Fit(None, played.peak_bytes, self.limit_bytes)

    @property
    def notices(self) -> Notices:
        """What a reader should know before trusting the winner, and what its step says."""
        return self.best.notices.after(*self._warnings())

    def _warnings(self) -> Iterator[str]:
        found = self.found
        if found.left:
            low, _, high = found.ratios
            yield (
                f"{found.plays} layouts were simulated; {found.left} more could be among the ten shown: simulations took "
                f"{low:.2f} to {high:.2f} times their closed-form estimates, which are not lower bounds; one of them is faster "
                f"than all that were simulated with a chance of {100 * found.p_left:.0f} %: fix a part of the layout to look "
                "closer"
            )

    def config(self) -> str:
        """The best layout as a config that `predict` reads."""
        return config_text(self.found.model, self.found.best.layout, self._comment)

    def torchtitan(self) -> str:
        """Write the best layout as a configuration of torchtitan, a Python module; search with `framework="torchtitan"`."""
        return torchtitan_text(self.found.model, self.found.best.layout, self._comment)

    @property
    def _comment(self) -> str:
        return f"{self.found.best.layout}: {time_ms(self.step_time_ms)} ms per step on {self.platform}, by steptime plan"

    def to_dict(self) -> Document:
        """What `steptime plan --json` writes."""
        return plain(plan_document(self))

    def to_table(self) -> pa.Table:
        """A row for every played layout that fits, fastest first."""
        rows = zip(self.found.played, self.found.p_fastest, strict=True)
        return table_of([{**each.layout.to_dict(), **_figures(self, each), "p_fastest": chance} for each, chance in rows])

    def html(self, path: str | Path) -> None:
        """Writes the page of `steptime plan --html`."""
        from steptime._report.plan_page import plan_page

        write_output(Path(path), plan_page(self))


def plan_document(planned: Planned) -> Document:
    """Stable keys."""
    found, model = planned.found, planned.found.model
    layouts = [
        {**_layout(planned, each), "p_fastest": chance} for each, chance in zip(found.played, found.p_fastest, strict=True)
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": planned.verdict.to_dict(),
        "model": model.title,
        "platform": planned.platform,
        "gpus": found.gpus,
        "batch": model.batch,
        "sequence": model.sequence,
        "precision": model.precision,
        "numerics": model.numerics,
        "memory_limit_bytes": planned.limit_bytes,
        "best": layouts[0],
        "layouts": layouts[:SHOWN],
        "front": [_layout(planned, each) for each in found.front],
        "second": _comparison(planned.comparison),
        "searched": {
            "layouts": len(found.space.layouts),
            "may_fit": found.fitting,
            "played": found.plays,
            "complete": not found.left,
            "could_be_among_the_shown": found.left,
            "p_faster_not_played": found.p_left,
            "played_over_closed_form": dict(zip(("least", "median", "most"), found.ratios, strict=True)),
            "refused": dict(found.space.refused),
        },
        "config": found.best.layout.of(model).to_dict(),
        "seconds": found.seconds,
        **planned.notices.to_dict(),
    }


def _layout(planned: Planned, played: Played) -> Document:
    low, high = played.interval_ns
    return {
        "layout": played.layout.to_dict(),
        "name": str(played.layout),
        "interval_ms": [ms(low), ms(high)],
        **_figures(planned, played),
        "parts_ms": {name: ms(value) for name, value in played.parts_ns.items()},
    }


def _figures(planned: Planned, played: Played) -> Document:
    return {
        "step_time_ms": ms(played.step_ns),
        "tokens_per_s": planned.tokens_per_s(played),
        "peak_bytes": played.peak_bytes,
        "mfu": played.mfu,
        "energy_j": played.energy_j,
        **cost_document(planned.cost(played)),
    }


def _comparison(comparison: Comparison | None) -> Document | None:
    if comparison is None:
        return None
    return {
        "name": str(comparison.second.layout),
        "longer_ms": ms(comparison.longer_ns),
        "parts_ms": {name: ms(value) for name, value in comparison.parts_ns.items()},
        "p_best_is_faster": comparison.p_faster,
    }
