"""Split matrices of uneven all_to_all: as sharded embedding tables make them, and without any pattern."""

from __future__ import annotations

import numpy as np

from steptime._calibrate.collectives.cases import Matrix
from steptime._units import MIB

# How many cases per rank count: 510 in all, most where sharding is validated.
WANTED = {2: 120, 4: 260, 8: 130}

_SMALLEST_TOTAL, _LARGEST_TOTAL = 64 * 1024, 64 * MIB
_ELEMENT_BYTES = 4  # fp32
_DIMS = (16, 32, 64, 128)

# Forward: every sender's batch shares are equal. Backward: the same matrix with the directions swapped.
_KINDS = ("forward", "backward", "any")
_CHANCES = (0.55, 0.15, 0.30)


def uneven(ranks: int, count: int, seed: int) -> list[Matrix]:
    """So many different matrices, the same for the same seed."""
    draw = np.random.default_rng([seed, ranks, 3])
    result: dict[Matrix, None] = {}
    while len(result) < count:
        total = float(np.exp(draw.uniform(np.log(_SMALLEST_TOTAL), np.log(_LARGEST_TOTAL))))
        kind = str(draw.choice(_KINDS, p=_CHANCES))
        elements = _any(draw, ranks, total) if kind == "any" else _sharded(draw, ranks, total)
        matrix = elements.T if kind == "backward" else elements
        if len(set(matrix.ravel().tolist())) > 1:
            result[tuple(int(value) * _ELEMENT_BYTES for value in matrix.ravel())] = None
    return list(result)


def _sharded(draw: np.random.Generator, ranks: int, total_bytes: float) -> np.ndarray:
    """Rank i owns tables of some dims and sends every rank its batch share of all of them: constant rows."""
    tables = int(draw.integers(ranks, 8 * ranks + 1))
    dims = draw.choice(_DIMS, size=tables)
    # A rank without a table sends nothing; each has at least one here, the rest go anywhere.
    owner = np.concatenate([np.arange(ranks), draw.integers(0, ranks, tables - ranks)])
    owned = np.bincount(owner, weights=dims, minlength=ranks).astype(np.int64)
    per_sample_bytes = int(owned.sum()) * ranks * _ELEMENT_BYTES
    batch_share = max(1, round(total_bytes / per_sample_bytes))
    return np.tile(owned[:, None] * batch_share, (1, ranks))


def _any(draw: np.random.Generator, ranks: int, total_bytes: float) -> np.ndarray:
    """Every entry for itself, over more than a decade; the diagonal (what stays) may be large as well."""
    weights = np.exp(draw.normal(0.0, draw.uniform(0.3, 1.5), (ranks, ranks)))
    elements = weights / weights.sum() * total_bytes / _ELEMENT_BYTES
    whole: np.ndarray = np.maximum(1, np.round(elements)).astype(np.int64)
    return whole


def largest_sent_bytes(splits: Matrix, ranks: int) -> int:
    """The largest send buffer of a rank."""
    return int(np.asarray(splits).reshape(ranks, ranks).sum(axis=1).max())
