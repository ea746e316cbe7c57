"""A step that is a sum of maxima over ranks of loads that add up: searches have a known best there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import Division
from steptime._lookups.generators import Generator
from steptime._sim.composed import Evaluation

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Additive:
    """Forward a nanosecond an element looked up, backward twice that, exchanges a thousand a column; 1 ms for the rest."""

    model: Dlrm
    ranks: int

    def evaluate(self, rank_of: npt.NDArray[np.intp], division: Division, *, exact: bool = False) -> Evaluation:  # noqa: ARG002
        """Tables that every rank has a part of cost nothing."""
        plans, shards = np.atleast_2d(rank_of), division.shard_tables(self.model.tables)
        loads = np.array([table.pooling_factor * table.dim * (1.0 + table.generator.alpha / 3) for table in shards])
        forward = self._summed(plans, self.model.batch * loads)
        wire = self._summed(plans, np.array([1000.0 * table.dim for table in shards])).max(axis=1)
        step = 1e6 + 3 * forward.max(axis=1) + wire
        return evaluation(step, step, forward, 2 * forward, np.repeat(wire[:, None], self.ranks, axis=1))

    def simulate(self, rank_of: npt.NDArray[np.intp], division: Division) -> Evaluation:
        """The same."""
        return self.evaluate(rank_of, division)

    def _summed(self, plans: npt.NDArray[np.intp], loads: Floats) -> Floats:
        result = np.zeros((len(plans), self.ranks))
        np.add.at(result, (np.arange(len(plans))[:, None], plans), loads)
        return result


def evaluation(step: Floats, device: Floats, forward: Floats, backward: Floats, exchange: Floats) -> Evaluation:
    """Where nobody waits and hosts are never slower than devices."""
    return Evaluation(step, device, forward, backward, exchange, np.zeros_like(forward), np.zeros(len(step), dtype=np.bool_))


def model_of(tables: int, *, seed: int = 0, batch: int = 1024, widest: int = 3, interaction: str = "cat") -> Dlrm:
    """Tables of unequal rows, dims, lookups and skews."""
    draws = np.random.default_rng(seed)
    made = tuple(
        Table(
            f"t{place:03d}",
            int(16 * 2 ** draws.integers(0, widest)),
            Generator(
                rows=int(10 ** draws.uniform(3, 6)),
                pooling=float(round(10 ** draws.uniform(0, 2), 1)),
                kind="zipf",
                alpha=float(round(draws.uniform(0.4, 1.4), 2)),
            ),
        )
        for place in range(tables)
    )
    return Dlrm("unequal", batch, 16, (32, 16), (32, 1), made, interaction=interaction)
