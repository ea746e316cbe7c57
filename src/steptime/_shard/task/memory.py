"""What a shard takes of its rank's memory, and what every rank needs beside: weights, state, activations, buffers.

The step is that of `build.dlrm_program`. Per shard, with B samples of all ranks, D columns and L lookups of a step:

- weights, 4 * rows * D; state of row-wise Adagrad, 4 * rows (again for every slice of columns, as TorchRec has it);
- its inputs, 8 * (L + B); its sums and their gradients, 4 * B * D each, and what they are packed into for the exchange;
- backward: keys and positions of all lookups, sorted, and what else was found per lookup; or for `nn.EmbeddingBag` a gradient
  row each.

Per rank: workspaces of libraries; received sums of its samples and their gradients; dense weights, gradients and the buckets of
DistributedDataParallel; activations of the dense layers; and what the process holds outside PyTorch's allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import DATA_PARALLEL, Division
from steptime._build.dlrm.program import top_width
from steptime._hardware.device import DeviceLimits
from steptime._models.memory.process import process_bytes

Bytes = npt.NDArray[np.int64]
Ranks = npt.NDArray[np.intp] | Sequence[int]

_FLOAT, _INDEX = 4, 8
# What the shipped steps (set `steps`, table-batched, 1 to 8 ranks) had allocated beyond the terms here, by least squares: 35
# bytes per lookup beside the 24 of keys and positions twice, and 166 MB per rank; the rest is within 75 MiB of nothing.
_BACKWARD_PER_LOOKUP = 60
_WORKSPACES = 166_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes per shard of a division, and of every rank whatever it holds; `limit` is what a rank has."""

    names: tuple[str, ...]
    shard_bytes: Bytes  # [shards]
    rank_bytes: int
    limit: int

    @property
    def room(self) -> int:
        """For shards, on every rank."""
        return self.limit - self.rank_bytes

    def used(self, rank_of: Ranks, ranks: int) -> Bytes:
        """Bytes on every rank, [..., ranks], of one plan or many."""
        owners = np.asarray(rank_of)
        flat = owners.reshape(-1, owners.shape[-1]) if owners.ndim else owners
        places = flat + ranks * np.arange(len(flat))[:, None]
        weights = np.broadcast_to(self.shard_bytes, flat.shape).ravel()
        summed = np.bincount(places.ravel(), weights=weights, minlength=ranks * len(flat))
        found: Bytes = summed.astype(np.int64).reshape(*owners.shape[:-1], ranks) + self.rank_bytes
        return found

    def fits(self, rank_of: Ranks, ranks: int) -> npt.NDArray[np.bool_]:
        """Whether no rank has too much, of one plan or many."""
        return np.asarray((self.used(rank_of, ranks) <= self.limit).all(axis=-1))


def memory_of(model: Dlrm, division: Division, ranks: int, limit: int, outside_bytes: int = 0) -> Memory:
    """Of a model divided so; `limit` of a rank, `outside_bytes` held by its process beside the allocator."""
    shards = division.shard_tables(model.tables)
    everywhere = sum(everywhere_bytes(model, model.tables[place], kind, ranks) for place, kind in division.everywhere().items())
    return Memory(
        names=tuple(table.name for table in shards),
        shard_bytes=np.array([shard_bytes(model, table, ranks) for table in shards], dtype=np.int64),
        rank_bytes=dense_bytes(model, ranks) + everywhere + outside_bytes,
        limit=limit,
    )


def rank_limit(limits: DeviceLimits, ranks: int, given: int | None = None) -> tuple[int, int]:
    """What a rank has of its device, and what its process holds outside the allocator (0 where a limit is given)."""
    has = int(limits.memory_bytes.value) // limits.share
    return (has, process_bytes(ranks, limits.share)) if given is None else (min(has, given), 0)


def weight_bytes(table: Table) -> int:
    """Of its rows."""
    return _FLOAT * table.rows * table.dim


def state_bytes(model: Dlrm, table: Table) -> int:
    """Of the optimiser."""
    return _FLOAT * table.rows if model.optimizer == "rowwise_adagrad" else 0


def shard_bytes(model: Dlrm, table: Table, ranks: int) -> int:
    """All that one more shard takes on its rank."""
    return weight_bytes(table) + state_bytes(model, table) + passing_bytes(model, table, ranks)


def passing_bytes(model: Dlrm, table: Table, ranks: int) -> int:
    """What its lookups hold during a step: inputs, sums, their gradients, buffers of the exchange and of the sort."""
    batch, lookups = model.batch, round(model.batch * table.pooling_factor)
    sums = _FLOAT * batch * table.dim
    per_lookup = _BACKWARD_PER_LOOKUP if model.lookup == "table_batched" else _FLOAT * table.dim + 3 * _INDEX
    backward = per_lookup * lookups
    return _INDEX * (lookups + batch) + (3 if ranks > 1 else 2) * sums + backward


def everywhere_bytes(model: Dlrm, table: Table, kind: str, ranks: int) -> int:
    """Of a table that every rank has a part of: a share of its rows with sums of all samples, or a copy with a gradient."""
    weights, state = weight_bytes(table), state_bytes(model, table)
    if kind == DATA_PARALLEL:
        return 2 * weights + state + -(-passing_bytes(model, table, ranks) // ranks)
    sums = 3 * _FLOAT * model.batch * table.dim
    others = passing_bytes(model, table, ranks) - sums
    return -(-(weights + state + others) // ranks) + sums


def dense_bytes(model: Dlrm, ranks: int) -> int:
    """Of the dense layers and the received sums, the same on every rank."""
    samples = model.batch // ranks
    widths = ((model.dense_features, *model.bottom), (top_width(model), *model.top))
    weights = sum(_FLOAT * (before + 1) * after for mlp in widths for before, after in pairwise(mlp))
    copies = 3 if ranks > 1 else 2  # weights, gradients, and buckets where there is somebody to reduce with
    activations = _FLOAT * samples * (2 * sum(sum(mlp) for mlp in widths) + model.dense_features)
    received = (2 if ranks > 1 else 0) * _FLOAT * samples * sum(table.dim for table in model.tables)
    return _WORKSPACES + copies * weights + activations + received
