"""What steps cost at the price of a GPU for an hour: one place for predictions, plans, shardings and sweeps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from steptime._sim.prediction import PredictedStep
from steptime.errors import InputError

_HOUR_S, _MILLION, _TRILLION = 3600.0, 1e6, 1e12
_UNKNOWN = ("price", "cost_per_step", "cost_per_million_samples", "cost_per_trillion_tokens")


def checked_price(price: float | None) -> float | None:
    """A price that makes sense, or none."""
    if price is not None and not 0 <= price < float("inf"):
        raise InputError(f"--price {price:g}: expected 0 or more per GPU and hour")
    return price


@dataclass(frozen=True, slots=True)
class Cost:
    """Of steps on so many GPUs at this price of each for an hour."""

    price: float
    gpus: float
    step_s: float
    batch: int | None = None
    sequence: int | None = None

    @property
    def per_step(self) -> float:
        """Of all GPUs for one step."""
        return self.price * self.gpus * self.step_s / _HOUR_S

    @property
    def per_million_samples(self) -> float | None:
        """None where the batch is not known."""
        return None if not self.batch else self.per_step * _MILLION / self.batch

    @property
    def per_trillion_tokens(self) -> float | None:
        """None where batch or sequence is not known."""
        return None if not self.batch or not self.sequence else self.per_step * _TRILLION / (self.batch * self.sequence)

    def words(self) -> Iterator[str]:
        """What people compare, and at which price."""
        yield f"{money(self.per_step)} per step"
        tokens, samples = self.per_trillion_tokens, self.per_million_samples
        if tokens is not None:
            yield f"{money(tokens)} per trillion tokens"
        elif samples is not None:
            yield f"{money(samples)} per million samples"
        yield f"at {money(self.price)} per GPU-hour"

    @property
    def text(self) -> str:
        """All of it in a line."""
        *costs, price = self.words()
        return f"{', '.join(costs)} {price}"

    def to_dict(self) -> dict[str, Any]:
        """Its keys in JSON."""
        return {
            "price": self.price,
            "cost_per_step": self.per_step,
            "cost_per_million_samples": self.per_million_samples,
            "cost_per_trillion_tokens": self.per_trillion_tokens,
        }


def cost_of(prediction: PredictedStep) -> Cost | None:
    """Of a predicted step; None where no price was given."""
    if prediction.price is None:
        return None
    known = prediction.workload.description
    gpus = prediction.workload.world_size if prediction.gpus is None else prediction.gpus
    return Cost(prediction.price, gpus, prediction.step_time_ms / 1e3, known.batch, known.sequence)


def cost_document(cost: Cost | None) -> dict[str, Any]:
    """The keys of a cost, null where no price was given."""
    return dict.fromkeys(_UNKNOWN) if cost is None else cost.to_dict()


def money(amount: float) -> str:
    """Dollars with as many digits as matter."""
    if amount >= 1 or not amount:
        return f"${amount:,.0f}" if amount >= 1000 else f"${amount:.2f}"
    return f"${amount:.{2 - math.floor(math.log10(amount))}f}"
