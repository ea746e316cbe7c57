"""Peak memory of every rank of a step, and whether it fits on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steptime._lookups.workload import ITEM_BYTES, TABLE_BATCHED, RankLookups
from steptime._models.memory.peak import peak_memory
from steptime._platforms.platform import Platform
from steptime._program.one_step import one_step
from steptime._program.workload import UnnamedMemory, Workload
from steptime._units import GIB

# Values of optimiser state per row of a table: row-wise Adagrad keeps one number for each, Adagrad one for each weight.
_STATE_PER_ROW, _STATE_PER_WEIGHT = ("rowwise_adagrad",), ("adagrad",)
_STATE_BYTES = 4


def memory_of(workload: Workload, platform: Platform) -> dict[str, Any]:
    """As `predict --json` has it: the largest of all ranks, the device's memory, and each distinct rank's share of it.

    Nothing is said of recordings without identities of tensors. Tables that one kernel looks up are no argument of any op: the
    workload has their sizes as `unnamed`, or statistics of them.
    """
    limits = platform.device.limits
    # Parts of one GPU share its memory as well.
    capacity = int(limits.memory_bytes.value / limits.share)
    ranks: list[dict[str, Any]] = []
    for program in workload.programs:
        rank = program.rank
        given = workload.unnamed.get(rank) or _tables(None if workload.lookups is None else workload.lookups.ranks.get(rank))
        result = peak_memory(
            one_step(program).program,
            outside_bytes=program.meta.get("outside_bytes", ()),  # of a captured step, what no op names
            parameters=given.parameters,
            optimizer_state=given.optimizer_state,
            device=limits,
        )
        ranks.append({
            "rank": rank,
            "peak_bytes": result.device_bytes(workload.world_size, limits.share),
            "allocated_bytes": result.allocated,
            "reserved_bytes": result.reserved,
            "parts": {kind.value: nbytes for kind, nbytes in result.parts.items() if nbytes},
        })  # fmt: skip
    if not all(one["allocated_bytes"] for one in ranks):
        return {"peak_bytes": None}
    most = max(ranks, key=lambda one: int(one["peak_bytes"]))
    return {
        **{key: most[key] for key in ("peak_bytes", "allocated_bytes", "reserved_bytes")},
        "capacity_bytes": capacity,
        "fits": most["peak_bytes"] <= capacity,
        "ranks": ranks,
    }


def does_not_fit(memory: Mapping[str, Any]) -> list[str]:
    """What to say where a rank needs more memory than its device has."""
    if memory.get("fits", True):
        return []
    needed, there = memory["peak_bytes"] / GIB, memory["capacity_bytes"] / GIB
    rank = max(memory["ranks"], key=lambda one: int(one["peak_bytes"]))
    largest = max(rank["parts"], key=rank["parts"].__getitem__)
    return [
        f"does not fit: rank {rank['rank']} needs {needed:.1f} GiB, its device has {there:.1f}; most of it is {largest} "
        f"({rank['parts'][largest] / GIB:.1f} GiB)"
    ]


def _tables(given: RankLookups | None) -> UnnamedMemory:
    """Tables that one kernel looks up together are no argument of any op."""
    if given is None or given.implementation != TABLE_BATCHED:
        return UnnamedMemory()
    tables = given.steps.steps[0]
    weights = tuple(table.counted.rows * table.dim * ITEM_BYTES[given.dtype] for table in tables)
    state: tuple[int, ...] = ()
    if given.optimizer in _STATE_PER_ROW:
        state = tuple(table.counted.rows * _STATE_BYTES for table in tables)
    elif given.optimizer in _STATE_PER_WEIGHT:
        state = tuple(table.counted.rows * table.dim * _STATE_BYTES for table in tables)
    return UnnamedMemory(weights, state)
