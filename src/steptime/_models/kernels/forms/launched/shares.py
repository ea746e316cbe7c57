"""A share of a GPU: its SMs, and how much slower memory, cache and arithmetic are for what the others do meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms.launched.columns import Numbers
from steptime._models.kernels.question import OTHERS, Question

# What is scaled on a part: what does not grow with the work, bytes read, written and from L2, elements, blocks, and the bytes
# that stay in L2. The scale is exp(step) * share ** power, with both numbers of its own for every kind of company.
SCALED = ("latency", "memory", "written", "cache", "work", "blocks", "cache_bytes")


@dataclass(frozen=True)
class LaunchShares:
    """Per launch: SMs, and what the terms of each kind are multiplied by."""

    sms: Numbers
    latency: Numbers
    memory: Numbers
    written: Numbers
    cache: Numbers
    work: Numbers
    blocks: Numbers
    cache_bytes: Numbers


def shares_of(sms: float, share: Numbers, others: npt.NDArray[np.int64], scales: Numbers) -> LaunchShares:
    """The shares of a GPU that launches run on; `others` are places in OTHERS."""
    step, power = scales[others, :, 0], scales[others, :, 1]
    scale = np.where(share[:, None] > 1, np.exp(step + power * np.log(share)[:, None]), 1.0)
    return LaunchShares(sms / share, *scale.T)


def others_code(question: Question) -> int:
    """The company of a part as a place in OTHERS; a part whose company is not told is taken to do the same."""
    return OTHERS.index("same" if question.share > 1 and question.others == "none" else question.others)
