"""`chances`: how likely each of several layouts is the fastest, by steps that were drawn under the same errors.

What all layouts have in common (the clock, the card, how fast kernels of a kind are on this machine, the host, links of a kind)
moves them all alike: draws depend on the name of what is drawn alone, so that the same errors are in the same draws of every
layout, and only what differs in their mix of work separates them. Beside it each layout is off by something of its own
(`OWN_ERROR`): how it is scheduled, and what its kernels do beside others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Of the logarithm of a step: what predictions of layouts of one model are off by one by one, beside what their draws have in
# common. On a device known by its data sheet: at 0.1, layouts given 50 % or more were said to be fastest in 64 % and were in
# 67 % of 116 groups of layouts on a node of A100s (VIA-Research/vTrain at f8dda847, MIT; three rows or more of one model and
# batch, defaults), Brier score 0.56; at 0.05 they were said to be in 72 % and were in 61. Chosen on a half of these groups:
# what is said of chances on them is partly in sample.
OWN_ERROR = 0.1
# On a device that was measured: about what whole steps are off by there (docs/accuracy.md); no groups of layouts were measured.
MEASURED_OWN_ERROR = 0.03
_DRAWS = 8192
# Nine of ten draws lie between.
LEVELS = (0.05, 0.95)


def chances(steps_ns: Sequence[float], draws_ns: Sequence[Floats], own_error: float = OWN_ERROR) -> list[float]:
    """P(fastest) of each layout; they add up to 1.

    `steps_ns` are predicted steps, `draws_ns` the same steps once per draw, in the same order of draws for all. The few draws
    say how steps move together; that covariance is drawn from again, often enough for small chances.
    """
    drawn = _drawn_again(steps_ns, draws_ns, own_error)
    counts = np.bincount(np.argmin(drawn, axis=0), minlength=len(drawn))
    return [float(count) / _DRAWS for count in counts]


def p_faster_of_others(
    steps_ns: Sequence[float],
    draws_ns: Sequence[Floats],
    others_ns: Sequence[float],
    spreads: Sequence[float],
    own_error: float,
) -> float:
    """How likely any of other layouts is faster than all of these: of the others it is known what steps are about.

    `spreads` are of the logarithms of `others_ns`. What all layouts have in common moves them as the fastest of these.
    """
    drawn = _drawn_again(steps_ns, draws_ns, own_error).min(axis=0)
    fastest = int(np.argmin(steps_ns))
    common = _moved_together([draws_ns[fastest]])[0]
    rng = np.random.default_rng(1)
    own = np.hypot(own_error, np.asarray(spreads))[:, None] * rng.standard_normal((len(others_ns), _DRAWS))
    best = (np.log(np.asarray(others_ns))[:, None] + own).min(axis=0) + common
    return float((best < drawn).mean())


def ratios(
    steps_ns: Sequence[float], draws_ns: Sequence[Floats], own_errors: Sequence[float]
) -> list[tuple[float, float, float]]:
    """Of each step over the first: from where to where nine of ten draws are, and how likely it is shorter than the first.

    Steps on machines of their own have draws in an order of their own; `own_errors` are of each.
    """
    drawn = _drawn_again(steps_ns, draws_ns, np.asarray(own_errors)[:, None])
    low, high = np.exp(np.quantile(drawn - drawn[0], LEVELS, axis=1))
    shorter = (drawn < drawn[0]).mean(axis=1)
    return list(zip(low.tolist(), high.tolist(), shorter.tolist(), strict=True))


def _drawn_again(steps_ns: Sequence[float], draws_ns: Sequence[Floats], own_error: float | Floats) -> Floats:
    """Logarithms of steps (layout, draw)."""
    common, rng = _moved_together(draws_ns), np.random.default_rng(2)
    return np.asarray(np.log(np.asarray(steps_ns))[:, None] + common + own_error * rng.standard_normal(common.shape))


def _moved_together(draws_ns: Sequence[Floats]) -> Floats:
    """What the same errors do to the logarithms of steps."""
    logs = np.log(np.stack(draws_ns))
    moves = (logs - logs.mean(axis=1, keepdims=True)) / np.sqrt(max(logs.shape[1] - 1, 1))
    return np.asarray(moves @ np.random.default_rng(0).standard_normal((moves.shape[1], _DRAWS)))


def beats(steps_ns: tuple[float, float], draws_ns: tuple[Floats, Floats], own_error: float = OWN_ERROR) -> float:
    """How likely the first of two layouts is faster."""
    return chances(steps_ns, draws_ns, own_error)[0]
