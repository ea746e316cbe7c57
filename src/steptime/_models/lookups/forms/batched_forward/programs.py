"""How long the programs of a table-batched forward launch run, in steps, from quantiles of the bags' lengths.

A program has as many bags of one table as fit its lanes. It takes a step for four lookups of each bag, until its longest bag
ends. Bags are taken as drawn independently, so what a program's bags need are order statistics of the lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from steptime._lookups.statistics import QUANTILES
from steptime._lookups.table import Floats, TableColumns

# Of the kernel: quads (four elements) of a program, and lookups of a bag that a step takes.
_QUADS, _AT_ONCE = 128, 4

# Lengths are read at points that lie this close: between quantiles, and per octave of rarity beyond the last but one.
_PER_QUANTILE, _PER_OCTAVE, _OCTAVES = 4, 2, 12


@dataclass(frozen=True)
class Programs:
    """Of each table: its programs, the mean one and the longest one. `bag_steps` adds up over the bags of a program."""

    bags: Floats  # of a program
    number: Floats
    steps: Floats  # mean over programs: while any bag runs
    log_steps: Floats  # mean over programs: sum over steps of log2 of the bags that still run
    bag_steps: Floats  # mean over programs
    spread: Floats  # standard deviation of `steps` over programs
    longest: Floats  # steps of the program with the longest bag
    longest_log: Floats
    longest_bags: Floats

    @classmethod
    def of(cls, tables: TableColumns) -> Programs:
        """From the tables' dims, batches and quantiles of lengths."""
        wide = np.maximum(np.ceil(tables.dim / 4), 1.0)
        bags = np.minimum(np.maximum(_QUADS // wide, 1.0), np.maximum(tables.batch, 1.0))
        steps = np.ceil(np.rint(_lengths(tables)) / _AT_ONCE)
        first, others, behind, square = (np.zeros(len(tables)) for _ in range(4))
        for number in np.unique(bags):
            here = bags == number
            longest, rest, after = _weights(int(number))
            first[here], others[here], behind[here] = steps[here] @ longest, steps[here] @ rest, steps[here] @ after
            square[here] = steps[here] ** 2 @ longest
        mean = steps @ _widths()
        most = np.ceil(tables.longest / _AT_ONCE)
        return cls(
            bags=bags,
            number=np.ceil(tables.batch / bags) * np.ceil(wide / _QUADS),
            steps=first,
            log_steps=others,
            bag_steps=bags * mean,
            spread=np.sqrt(np.maximum(square - first**2, 0.0)),
            longest=most,
            longest_log=np.minimum(behind, most * np.log2(bags)),
            longest_bags=most + (bags - 1) * mean,
        )


@cache
def _edges() -> Floats:
    """Shares of bags between which lengths are read once, from 0 to 1."""
    knots = np.array((0.0, *QUANTILES[:-1]))
    inner = [np.linspace(low, high, _PER_QUANTILE, endpoint=False) for low, high in pairwise(knots)]
    rare = (1 - knots[-1]) * 2.0 ** -(np.arange(_PER_OCTAVE * _OCTAVES + 1) / _PER_OCTAVE)
    return np.concatenate([*inner, 1 - rare, [1.0]])


def _widths() -> Floats:
    return np.diff(_edges())


@cache
def _points() -> Floats:
    """Where between the edges lengths are read: the middle; the geometric middle of rarities beyond the last quantile."""
    low, high = _edges()[:-1], _edges()[1:]
    rarest = (1 - low[-1]) / 3
    tail = 1 - np.sqrt((1 - low) * np.maximum(1 - high, rarest**2 / (1 - low)))
    return np.where(low < QUANTILES[-2], (low + high) / 2, tail)


def _lengths(tables: TableColumns) -> Floats:
    """Lengths of bags at the points, [tables, points]: linear between quantiles, an exponential tail up to the longest bag."""
    points, knots = _points(), np.array((0.0, *QUANTILES[:-1]))
    lowest = np.maximum(2 * tables.lengths[:, :1] - tables.lengths[:, 1:2], 0.0)
    known = np.concatenate([lowest, tables.lengths[:, :-1]], axis=1)
    inner = points[points < knots[-1]]
    low = np.searchsorted(knots, inner, side="right") - 1
    part = (inner - knots[low]) / (knots[low + 1] - knots[low])
    between = known[:, low] * (1 - part) + known[:, low + 1] * part
    # The median of the longest of so many bags: 1 - ln(2) / batch, about.
    begin, tail = -math.log(1 - knots[-1]), -np.log(1 - points[len(inner) :])
    end = np.maximum(np.log(np.maximum(tables.batch, 1.0) / math.log(2)), begin + 0.3)[:, None]
    part = np.clip((tail - begin) / (end - begin), 0.0, 1.0)
    beyond = known[:, -1:] * (1 - part) + tables.longest[:, None] * part
    return np.concatenate([between, beyond], axis=1)


@cache
def _weights(bags: int) -> tuple[Floats, Floats, Floats]:
    """Weights of the points in the longest of so many bags, in the others by log2, and in those others if the first is given.

    While n bags run a step counts log2(n): the n-th longest bag adds log2(n / (n - 1)) for each of its steps.
    """
    logs = np.diff(np.log2(np.arange(1, bags + 1)))
    longest = np.diff(_edges() ** bags)
    if bags == 1:
        return longest, np.zeros_like(longest), np.zeros_like(longest)
    return longest, logs @ np.diff(_below(bags)[1:], axis=1), logs @ np.diff(_below(bags - 1), axis=1)


def _below(bags: int) -> Floats:
    """Chance that the n-th longest of so many bags is within each edge, [bags, edges]: at most n - 1 bags lie beyond it."""
    beyond, number = 1 - _edges(), np.arange(bags)[:, None]
    ways = np.array([float(math.comb(bags, int(n))) for n in range(bags)])[:, None]
    return np.cumsum(ways * beyond**number * (1 - beyond) ** (bags - number), axis=0)
