"""`ExecutionTrace`: what a PyTorch execution trace says, in one form for every schema version.

An execution trace lists the ops of one process with their arguments and the identity of every tensor, but no times, no kernels.
Ids are drawn when an op starts, so order of id is order of start; ids of tensors come from the same counter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from steptime._program.program import Signature, Tensor

COMM_NODE = "record_param_comms"

# Calls whose recorded rank is the root or the peer instead of the caller (ProcessGroupNCCL, RECORD_PARAM_COMMS_DATA).
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: its name, what it is for, its global ranks (empty: not recorded) and its size (0: not recorded)."""

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()
    size: int = 0


@dataclass(frozen=True, slots=True)
class Comm:
    """What a `record_param_comms` node says about one collective or one wait. Splits count rows, as recorded."""

    name: str  # as recorded: allreduce, all_to_allv, wait, ...
    kind: str  # canonical, or `wait`
    group: str
    rank: int = -1  # in the group: the caller, or for rooted and point-to-point calls the root or the peer
    sequence: int = -1  # as recorded: counts within the group since the process began
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    bytes_in: int = 0
    bytes_out: int = 0
    dtype: str = ""

    @property
    def caller(self) -> int | None:
        """The caller's rank in its group, or None where the recorded rank is somebody else's."""
        foreign = self.kind in _ROOTED or self.kind in _POINT_TO_POINT or self.kind == "unknown"
        return None if foreign or self.rank < 0 else self.rank

    @property
    def root(self) -> int | None:
        """The root of a broadcast, reduce, gather or scatter, in the group; None for everything else."""
        return self.rank if self.kind in _ROOTED and self.rank >= 0 else None

    @property
    def peer(self) -> int | None:
        """The other side of a send or a receive, in the group; None for everything else."""
        return self.rank if self.kind in _POINT_TO_POINT and self.rank >= 0 else None


@dataclass(frozen=True, slots=True)
class Node:
    """One op of an execution trace."""

    id: int
    name: str
    parent: int  # id; 1 is the process
    rf_id: int = -1  # record function id, which newer Kineto traces carry too
    seq_id: int = -1  # autograd sequence number
    tid: int = 0
    fw_tid: int = 0
    signature: Signature = field(default_factory=Signature)
    comm: Comm | None = None

    @property
    def marker(self) -> bool:
        """Whether it stands for the process or a thread instead of an op."""
        return self.name.startswith("[pytorch|profiler|execution_")


@dataclass(frozen=True, slots=True)
class ExecutionTrace:
    """The ops of one process in order of start (parents before children), and what is known about its process groups."""

    schema: str
    nodes: tuple[Node, ...]
    parents: tuple[int, ...]  # per node: row of the enclosing op, markers left out, or -1
    groups: Mapping[str, Group] = field(default_factory=dict)
    rank: int | None = None
    world_size: int | None = None
    source: str = ""
    warnings: tuple[str, ...] = ()


def enclosing(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], tuple[int, ...], tuple[str, ...]]:
    """Order nodes by id with parents first; give each the row of its parent; say which parents are missing or circular."""
    ordered = sorted(nodes, key=lambda node: node.id)
    first: dict[int, int] = {}
    for row, node in enumerate(ordered):
        first.setdefault(node.id, row)
    parents = [first.get(node.parent, -1) if node.parent != node.id else -1 for node in ordered]
    messages = [*_duplicates(ordered, first), *_dangling(ordered, first), *_cut_cycles(ordered, parents)]
    order = _parents_first(parents)
    place = {row: at for at, row in enumerate(order)}
    rows = tuple(place[parents[row]] if parents[row] >= 0 else -1 for row in order)
    return tuple(ordered[row] for row in order), rows, tuple(messages)


def _duplicates(nodes: Sequence[Node], first: Mapping[int, int]) -> list[str]:
    again = [node for row, node in enumerate(nodes) if first[node.id] != row]
    if not again:
        return []
    return [f"{len(again)} nodes repeat an id (first: {again[0].id}, {again[0].name}); children are given to the first of each"]


def _dangling(nodes: Sequence[Node], first: Mapping[int, int]) -> list[str]:
    # A thread names the process (id 1) as its parent; a recording that was cut short lacks the process, which is no loss.
    lost = [node for node in nodes if node.parent not in first and not node.marker and node.parent not in (0, 1)]
    if not lost:
        return []
    return [
        f"{len(lost)} nodes name a parent that is not there (first: {lost[0].id}, {lost[0].name}); they become top-level ops"
    ]


def _cut_cycles(nodes: Sequence[Node], parents: list[int]) -> list[str]:
    cut = []
    done = [False] * len(parents)
    for row in range(len(parents)):
        path: dict[int, None] = {}
        at = row
        while at >= 0 and not done[at]:
            if at in path:
                cut.append(at)
                parents[at] = -1
                break
            path[at] = None
            at = parents[at]
        for seen in path:
            done[seen] = True
    if not cut:
        return []
    names = ", ".join(f"{nodes[row].id} ({nodes[row].name})" for row in cut[:3])
    return [f"{len(cut)} circles of parents were cut at node {names}; these become top-level ops"]


def _parents_first(parents: Sequence[int]) -> list[int]:
    order: list[int] = []
    placed = [False] * len(parents)
    for row in range(len(parents)):
        waiting = []
        at = row
        while at >= 0 and not placed[at]:
            waiting.append(at)
            placed[at] = True
            at = parents[at]
        order.extend(reversed(waiting))
    return order
