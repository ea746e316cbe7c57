"""Shares of a GPU: what a half, a quarter or an eighth has of the SMs, the memory and the cache, beside its company.

The networks of the whole GPU are asked with a share's SMs and bandwidths; how much of each a share has is fitted for
every number of parts and every company, starting from an equal share where the others work and from everything where they idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms.matmul.product import Column
from steptime._models.kernels.question import OTHERS

FACTORS = ("sms", "memory", "cache", "time")  # ln of what a part has relative to its start; `time` is what is left over
COMPANY = OTHERS[1:]  # none is asked like idle

Deviations = npt.NDArray[np.float64]  # shares x company x factors


@dataclass(frozen=True)
class ProductShares:
    """Fitted deviations, by number of parts and company."""

    shares: Column
    deviations: Deviations

    def factors(self, share: Column, others: Column) -> Deviations:
        """Factors on multiprocessors, memory and cache bandwidth and time, one column per product; ones on a whole GPU."""
        company = np.maximum(others - 1, 0)
        logs = np.zeros((len(FACTORS), len(share)))
        if len(self.shares):
            octave, known = np.log2(share), np.log2(self.shares)
            for index in range(len(COMPANY)):
                mine = company == index
                for factor in range(len(FACTORS)):
                    logs[factor, mine] = np.interp(octave[mine], known, self.deviations[:, index, factor])
        logs += _start(share, company)
        logs[:, share == 1] = 0
        return np.exp(logs)


NO_SHARES = ProductShares(np.zeros(0), np.zeros((0, len(COMPANY), len(FACTORS))))


def _start(share: Column, company: Column) -> Deviations:
    """ln of an equal share of everything where others work, of all but the multiprocessors where they are idle."""
    equal = -np.log(share)
    working = np.where(company == 0, 0.0, equal)
    return np.stack([equal, working, working, np.zeros(len(share))])
