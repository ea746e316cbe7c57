"""The forward pass of the table-batched lookup: one kernel, whose programs have several bags of one table each.

Physics, then what it leaves by trees and by a smooth function together, on a whole GPU. Shares of a GPU get powers of their
number in the physics and a correction of their own on top, so that they change nothing for a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.engine.stored import stored
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.batch import Lookups
from steptime._models.lookups.device import LookupConstants, reference_lookups
from steptime._models.lookups.forms import LookupTimes, inside_of, total_only
from steptime._models.lookups.forms.batched_forward.features import features_of
from steptime._models.lookups.forms.batched_forward.physics import Constants, Launch, SharePowers, launched
from steptime._models.lookups.forms.batched_forward.residual import Residual
from steptime._models.lookups.forms.batched_forward.tables import ForwardTables

KERNEL = "table_batched_forward"


@dataclass(frozen=True)
class BatchedForward:
    """A fitted model."""

    constants: Floats  # of `Constants`, in order
    powers: Floats = field(metadata=stored(key="parts"))  # of `SharePowers`, one after the other
    sizes: Floats  # [2, sizes] smallest and largest of fitted launches
    whole: Residual
    shares: Residual = field(metadata=stored(prefix="divided."))
    device: LookupConstants = field(default_factory=reference_lookups)

    def times(self, lookups: Lookups) -> LookupTimes:
        """One kernel each."""
        tables = ForwardTables.of(lookups.pool, self.device)
        launch = self.launched(tables, lookups)
        features = features_of(launch, tables, lookups)
        logs = self.whole.values(features)
        shared = lookups.shares.divided
        if shared.any():
            logs = logs + np.where(shared, self.shares.values(share_features(features, logs, lookups)), 0.0)
        low, high = self.sizes
        return total_only(KERNEL, launch.time * np.exp(logs), 1.0, inside_of(low, high, sizes_of(tables, lookups)))

    def launched(self, tables: ForwardTables, lookups: Lookups) -> Launch:
        """By physics alone."""
        return launched(Constants.of(self.constants), SharePowers.of(self.powers), tables, lookups)


def share_features(features: Floats, logs: Floats, lookups: Lookups) -> Floats:
    """What the correction of shares looks at: what that of a whole GPU does, and what it says."""
    others = lookups.others[:, None] == np.arange(1, len(OTHERS))
    return np.concatenate([features, logs[:, None], lookups.share[:, None], others.astype(np.float64)], axis=1)


def sizes_of(tables: ForwardTables, lookups: Lookups) -> Floats:
    """By which a launch is known to be like fitted ones, [lookups, sizes]."""
    sums = [lookups.sums(values) for values in (tables.lookups, tables.footprint, tables.programs.number)]
    high = [lookups.maxima(values) for values in (tables.batch, tables.dim, tables.programs.longest)]
    return np.stack([*sums, *high, lookups.counts, lookups.share], axis=1)
