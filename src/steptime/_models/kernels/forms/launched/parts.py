"""A part of a GPU: its SMs, and how much slower memory, cache and arithmetic are for what the other parts do meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms.launched.columns import Numbers
from steptime._models.kernels.question import OTHERS, Question

# What is scaled on a part: what does not grow with the work, bytes read, written and from L2, elements, blocks, and the bytes
# that stay in L2. The scale is exp(step) * share ** power, with both numbers of its own for every kind of company.
SCALED = ("latency", "memory", "written", "cache", "work", "blocks", "cache_bytes")
# Powers where the fit starts: bandwidth is nearly what the SMs can draw; L2 is free beside idle parts, else shared evenly.
_IDLE = (0.1, 0.9, 0.9, 0.9, 1.0, 0.0, 0.0)
_BUSY = (0.3, 0.9, 0.9, 0.9, 1.0, 0.0, -1.0)


@dataclass(frozen=True)
class Parts:
    """Per launch: SMs, and what the terms of each kind are multiplied by."""

    sms: Numbers
    latency: Numbers
    memory: Numbers
    written: Numbers
    cache: Numbers
    work: Numbers
    blocks: Numbers
    cache_bytes: Numbers


def start() -> Numbers:
    """Step and power of every company and kind where a fit begins (companies x kinds x 2)."""
    found = np.zeros((len(OTHERS), len(SCALED), 2))
    found[1:, :, 1] = (_IDLE, _BUSY, _BUSY)
    return found


def parts_of(sms: float, share: Numbers, others: npt.NDArray[np.int64], scales: Numbers) -> Parts:
    """The parts that launches run on; `others` are places in OTHERS."""
    step, power = scales[others, :, 0], scales[others, :, 1]
    scale = np.where(share[:, None] > 1, np.exp(step + power * np.log(share)[:, None]), 1.0)
    return Parts(sms / share, *scale.T)


def others_code(question: Question) -> int:
    """The company of a part as a place in OTHERS; a part whose company is not told is taken to do the same."""
    return OTHERS.index("same" if question.share > 1 and question.others == "none" else question.others)
