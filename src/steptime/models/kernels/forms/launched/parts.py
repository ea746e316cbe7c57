"""A part of a GPU: its SMs, and how much slower memory, cache and arithmetic are for what the other parts do meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime.models.kernels.forms.launched.columns import Numbers
from steptime.models.kernels.question import OTHERS, Question

_SMS = 132.0
# What is scaled by a power of the share, with a power of its own for every kind of company.
SCALED = ("memory", "written", "cache", "work", "cache_share")
# Where the fit starts: an even share of everything beside parts that do the same, most of the bandwidth beside idle ones.
START = np.array(
    [
        [0.0, 0.0, 0.0, 0.0, 0.0],  # none
        [0.4, 0.4, 0.6, 1.0, 0.0],  # idle
        [1.0, 1.0, 1.0, 1.0, -1.0],  # same
        [1.0, 1.0, 1.0, 1.0, -1.0],  # streaming
    ]
)


@dataclass(frozen=True)
class Parts:
    """Per launch: SMs, and what the terms of each kind are multiplied by."""

    sms: Numbers
    memory: Numbers
    written: Numbers
    cache: Numbers
    work: Numbers
    cache_share: Numbers


def parts_of(share: Numbers, others: npt.NDArray[np.int64], powers: Numbers) -> Parts:
    """The parts that launches run on; `others` are places in OTHERS."""
    scale = share[:, None] ** powers[others]
    return Parts(_SMS / share, *scale.T)


def others_code(question: Question) -> int:
    """The company of a part as a place in OTHERS."""
    return OTHERS.index(question.others)
