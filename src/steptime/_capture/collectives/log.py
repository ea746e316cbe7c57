"""`CommLog`: which collectives a captured step launches, on which stream, and where it waits for them; `Partition`: of ranks.

A trace says which op was called on which tensors; this log says the rest, in the same order: the process group, and for every
wait the collective that is waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from steptime._capture.collectives.ranges import Range
from steptime._program.execution import ProcessGroup

COMM = "steptime_comm"
"""What `record_param_comms` is called while it is recorded: PyTorch's observer looks for more in a range of that name."""

STREAM = "steptime_stream:"
"""Begins the name of a mark in a trace: what follows it is launched on the stream of that number."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One collective: its group, its index within that group, and whether a peer is named."""

    number: int
    group: str
    sequence: int
    rank: int  # as PyTorch records it: the caller's in the group; the root's; the peer's
    point_to_point: bool = False


@dataclass
class CommLog:
    """In order of call. Numbers count from the first collective of the run, kept are those of the step that is recorded."""

    recording: bool = False
    calls: list[Launch] = field(default_factory=list)  # one per recorded node of a collective or a wait
    waits: list[bool] = field(default_factory=list)  # whether that node is a wait
    last: Launch | None = None
    _count: int = 0
    _sequences: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def launched(self, group: str, rank: int, *, point_to_point: bool = False) -> Launch:
        """One more collective."""
        sequence = self._sequences[group, point_to_point] + 1
        self._sequences[group, point_to_point] = sequence
        self._count += 1
        self.last = Launch(self._count, group, sequence, rank, point_to_point)
        self._note(self.last, wait=False)
        return self.last

    def waited(self, launch: Launch) -> None:
        """Compute waits for it from here on."""
        if self.recording:
            self._note(launch, wait=True)
            with Range(COMM):
                pass

    def on_stream(self, number: int) -> None:
        """What comes next goes to that stream; 0 is where compute is."""
        if self.recording:
            with Range(f"{STREAM}{number}"):
                pass

    def _note(self, launch: Launch, *, wait: bool) -> None:
        if self.recording:
            self.calls.append(launch)
            self.waits.append(wait)


@dataclass
class Partitions:
    """Process groups that were made side by side: the ranks of the job divided into groups that do the same.

    A rank knows its own group of each kind; `torch.distributed.new_group` is called for the others too, in one order.
    """

    world: tuple[int, ...]
    _blocks: list[tuple[str, list[tuple[int, ...]]]] = field(default_factory=list)
    _named: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # group -> block, members

    def made(self, ranks: Sequence[int] | None, description: str, own: str | None) -> None:
        """`new_group` was called; `own` is the group's name where this rank is in it."""
        members = tuple(sorted(ranks)) if ranks else self.world
        last = next((at for at in reversed(range(len(self._blocks))) if self._blocks[at][0] == description), -1)
        fits = last >= 0 and all(len(each) == len(members) and not set(each) & set(members) for each in self._blocks[last][1])
        if not fits:
            last = len(self._blocks)
            self._blocks.append((description, []))
        self._blocks[last][1].append(members)
        if own is not None:
            self._named[own] = (last, members)

    def common_name(self, group: str) -> str:
        """What all groups of a partition are called, the same on every rank."""
        if group not in self._named:
            return group
        block = self._named[group][0]
        description = self._blocks[block][0]
        alike = [at for at, (other, _) in enumerate(self._blocks) if other == description]
        plain = description if description not in ("", "undefined") else "group"
        return plain if len(alike) == 1 else f"{plain}_{alike.index(block)}"

    def described(self, group: str, description: str) -> ProcessGroup:
        """The group as a trace has it, under its common name."""
        members = self._named[group][1] if group in self._named else self.world
        return ProcessGroup(self.common_name(group), description, members, len(members))

    def sides(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """By common name, the sets of ranks that meet under it; those of everybody left out."""
        result = {self.common_name(group): tuple(sorted(self._blocks[block][1])) for group, (block, _) in self._named.items()}
        return {name: sides for name, sides in result.items() if sides != (self.world,)}
