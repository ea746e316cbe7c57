"""A step that is a sum of maxima over ranks of loads that add up: searches have a known best there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm, Table
from steptime._lookups.generators import Generator
from steptime._shard.search.state import Answer, Evaluate

Floats = npt.NDArray[np.float64]


def additive(model: Dlrm, ranks: int) -> Evaluate:
    """Forward a nanosecond an element looked up, backward twice that, exchanges a thousand a column; 1 ms for the rest."""
    forward = np.array([table.pooling_factor * table.dim * (1.0 + table.generator.alpha / 3) for table in model.tables])
    columns = np.array([1000.0 * table.dim for table in model.tables])

    def evaluate(plans: npt.NDArray[np.intp]) -> Answer:
        def summed(loads: Floats) -> Floats:
            found = np.zeros((len(plans), ranks))
            np.add.at(found, (np.arange(len(plans))[:, None], plans), model.batch * loads)
            return found

        ahead, wire = summed(forward), summed(columns / model.batch)
        step = 1e6 + 3 * ahead.max(axis=1) + wire.max(axis=1)
        return Answer(step, step, ahead, 2 * ahead, np.repeat(wire.max(axis=1)[:, None], ranks, axis=1))

    return evaluate


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


Make = Callable[[Dlrm, int], Evaluate]
