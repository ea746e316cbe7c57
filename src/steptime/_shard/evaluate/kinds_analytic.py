"""What tables cost that every rank has a part of: row-wise and data-parallel, put together from models of their pieces.

No step with such tables was measured, so what this adds to a step is labelled analytic, and such kinds are chosen only where a
task allows them. On every rank alike, one piece after the other and hidden behind nothing (N ranks, B samples of all ranks,
D columns of all tables of a kind):

- row-wise: the lookups of B / N samples (each rank finds its share of the rows of every bag), writing partial sums of all B
  bags, 4 B D bytes; forward a reduce_scatter and backward an all_gather of 4 B D bytes;
- data-parallel: the lookups of the rank's own B / N samples; an all_reduce of the gradients of the whole tables,
  4 * rows * D bytes, and an update that reads and writes all of them (3 passes).

Both: the product of the top MLP's first layer with the tables' columns, three times, which the evaluation of the other tables
lacks. The tables of a kind share one lookup, where lookups are table-batched, and their collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import DATA_PARALLEL
from steptime._build.dlrm.table_lookups import table_lookups
from steptime._models.collectives.message import Message
from steptime._models.lookups.question import BACKWARD, FORWARD, TABLE_BATCHED, Lookup
from steptime._platforms.platform import Platform

_FLOAT = 4
_UPDATE_PASSES = 3


def everywhere_ns(model: Dlrm, tables: Sequence[Table], kind: str, platform: Platform, ranks: int) -> float:
    """What tables of one kind add to the step of every rank."""
    if not tables:
        return 0.0
    device, samples = platform.device.limits, model.batch // ranks
    dims = sum(table.dim for table in tables)
    sums, weights = _FLOAT * model.batch * dims, _FLOAT * sum(table.rows * table.dim for table in tables)
    columns = device.roofline_ns(6.0 * samples * dims * model.top[0], 3.0 * _FLOAT * samples * dims, "float32")
    result = _lookups_ns(model, tables, platform, samples) + columns
    if kind == DATA_PARALLEL:
        update = device.roofline_ns(0.0, float(_UPDATE_PASSES * weights), "float32")
        return result + update + _collective_ns(platform, "all_reduce", ranks, weights)
    result += device.roofline_ns(0.0, 2.0 * sums, "float32")
    return result + sum(_collective_ns(platform, kind, ranks, sums) for kind in ("reduce_scatter", "all_gather"))


def _lookups_ns(model: Dlrm, tables: Sequence[Table], platform: Platform, samples: int) -> float:
    known = [table_lookups(table, max(samples, 1)) for table in tables]
    together = [tuple(known)] if model.lookup == TABLE_BATCHED else [(item,) for item in known]
    asked = [
        Lookup(model.lookup, direction, entry, model.optimizer if direction == BACKWARD else "none")
        for entry in together
        for direction in (FORWARD, BACKWARD)
    ]
    return sum(item.estimate.time_ns for item in platform.device.lookup_estimates(asked))


def _collective_ns(platform: Platform, kind: str, ranks: int, nbytes: int) -> float:
    """By itself; a kind that the fabric was not measured with counts as an exchange of as many bytes."""
    if ranks == 1 or platform.fabric is None:
        return 0.0
    asked = kind if platform.fabric.knows(kind) else "all_to_all"
    return platform.fabric.estimates([Message(asked, ranks, nbytes)])[0].time_ns
