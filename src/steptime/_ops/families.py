"""Op families: what kind of computation a piece of device work is, for people who read a breakdown.

Decided by what is known best: the kind of the work (copies, memsets, collectives), the ops around its launch, the kernel's
name. An op that is made of other ops (an optimizer step, an embedding lookup, attention) claims everything inside it; below
those, the innermost op decides. An optimizer's step does not claim the forward and backward passes of a closure that it calls.
"""

from __future__ import annotations

import re
import tomllib
from enum import IntEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import steptime
from steptime._ops.catalogue import op_kind
from steptime._program.program import KindColumn, Phase, Program, WorkKind


class WorkFamily(IntEnum):
    """The families, in the order in which an enclosing op claims what is inside it."""

    OPTIMIZER = 0
    EMBEDDING = 1
    ATTENTION = 2
    SOFTMAX_LOSS = 3
    CONVOLUTION = 4
    NORMALIZATION = 5
    MATMUL = 6
    REDUCTION = 7
    INDEXING = 8
    ELEMENTWISE = 9
    GENERATED = 10
    COPY = 11
    MEMSET = 12
    COMMUNICATION = 13
    OTHER = 14

    @property
    def label(self) -> str:
        """The family's name in reports and JSON."""
        return self.name.lower()


# The last family that claims the ops inside its own.
_LAST_ENCLOSING = WorkFamily.NORMALIZATION

_TABLES = Path(steptime.__file__).parent / "data" / "ops" / "families.toml"
# Names that users choose (annotations, module names) hold spaces or "#" and say nothing certain; the engine's wrapper around
# a backward node also holds the accumulation of gradients, which is not the node's own computation.
_CHOSEN_BY_USERS = re.compile(r"[ #]|^autograd::engine::")
_GRAPH_LAUNCH = "cudaGraphLaunch"
_OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#")

_SHORT_NAME = re.compile(r"(?:_foreach)?_*(\w+?)(?:_backward)?_*")
_OF_KIND = {WorkKind.COPY: WorkFamily.COPY, WorkKind.MEMSET: WorkFamily.MEMSET, WorkKind.COLLECTIVE: WorkFamily.COMMUNICATION}

_Families = npt.NDArray[np.int64]


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(_TABLES.read_text(encoding="utf-8"))


@cache
def _aten_families() -> dict[str, WorkFamily]:
    return {name: WorkFamily[family.upper()] for family, names in _tables()["aten"].items() for name in names.split()}


@cache
def _patterns(what: str) -> list[tuple[WorkFamily, re.Pattern[str]]]:
    rows = _tables()[what]["patterns"]
    return [(WorkFamily[family.upper()], re.compile(pattern, re.IGNORECASE)) for family, pattern in rows]


def work_families(program: Program) -> KindColumn:
    """The family of every row of `Program.works`."""
    works, calls = program.works, program.calls
    kernels = np.array([kernel_family(name) for name in program.names] or [WorkFamily.OTHER], dtype=np.int64)
    result = kernels[works.name]
    ops = op_families(program)
    if len(calls) and len(ops):
        op = np.where(works.call >= 0, calls.op[np.maximum(works.call, 0)], -1)
        text = np.where(op >= 0, ops[np.maximum(op, 0)], WorkFamily.OTHER)
        # One call launches all kernels of a CUDA graph: its op says nothing of each.
        graph = np.array([name == _GRAPH_LAUNCH for name in program.names])[calls.api[np.maximum(works.call, 0)]]
        own = (works.call >= 0) & graph & (result != WorkFamily.OTHER)
        result = np.where((text != WorkFamily.OTHER) & ~own, text, result)
    for kind, family in _OF_KIND.items():
        result = np.where(works.kind == kind, family, result)
    return result.astype(np.int8)


@lru_cache(maxsize=1 << 14)
def op_family(name: str) -> WorkFamily:
    """The family of an op by its own name; OTHER for names that say nothing."""
    if _OPTIMIZER_STEP.match(name):
        return WorkFamily.OPTIMIZER
    if _CHOSEN_BY_USERS.search(name):
        return WorkFamily.OTHER
    kind = op_kind(name)
    short = _SHORT_NAME.fullmatch(kind.plain) if kind.aten else None
    if short and short.group(1) in _aten_families():
        return _aten_families()[short.group(1)]
    return next((family for family, pattern in _patterns("ops") if pattern.search(name)), WorkFamily.OTHER)


@lru_cache(maxsize=1 << 14)
def kernel_family(name: str) -> WorkFamily:
    """The family of a kernel by its name; OTHER for names that say nothing."""
    return next((family for family, pattern in _patterns("kernels") if pattern.search(name)), WorkFamily.OTHER)


def op_families(program: Program) -> _Families:
    """Per op: the strongest enclosing family, else that of the innermost op with one."""
    by_name = np.array([op_family(name) for name in program.names] or [WorkFamily.OTHER], dtype=np.int64)
    own = by_name[program.ops.name]
    parent, phase = program.ops.parent.astype(np.int64), program.ops.phase
    parent[(phase != Phase.OPTIMIZER) & (phase[parent] == Phase.OPTIMIZER)] = -1  # a closure is no part of the step
    rows = np.arange(len(own))
    strongest, up = np.where(own <= _LAST_ENCLOSING, own, WorkFamily.OTHER), np.where(parent >= 0, parent, rows)
    nearest = np.where(own != WorkFamily.OTHER, rows, up)
    # Pointer doubling: every round looks twice as far up, so that depth costs its logarithm.
    for _ in range(64):
        further, nearer = up[up], nearest[nearest]
        strongest = np.minimum(strongest, strongest[up])
        if np.array_equal(further, up) and np.array_equal(nearer, nearest):
            break
        up, nearest = further, nearer
    return np.where(strongest != WorkFamily.OTHER, strongest, own[nearest])
