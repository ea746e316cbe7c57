"""How long the collectives of a workload take by themselves, by the models of a fabric: from the last arrival to the end.

An uneven exchange is known by what every rank sends: ranks that meet say it together, each for itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from steptime._models.collectives.message import KINDS, Message
from steptime._models.estimate import Estimate, Source
from steptime._notices import Basis
from steptime._platforms.fabric import Fabric
from steptime._program.program import Collective, Program
from steptime._program.workload import Workload
from steptime._sim.laws.departures import EXCHANGE, sent_bytes

# What takes about as long as another kind of as many bytes, where a fabric's tables lack it: a broadcast and a reduce move what
# an all_gather and a reduce_scatter do, a barrier is an all_reduce of next to nothing, nothing moves more than an all_reduce.
_ALIKE: Mapping[str, tuple[str, ...]] = {
    "broadcast": ("broadcast", "all_gather", "all_reduce"),
    "reduce": ("reduce", "reduce_scatter", "all_reduce"),
    "scatter": ("broadcast", "all_gather", "all_reduce"),
    "gather": ("broadcast", "all_gather", "all_reduce"),
    "send": ("send_recv", "all_to_all", "all_reduce"),
    "recv": ("send_recv", "all_to_all", "all_reduce"),
    "send_recv": ("send_recv", "all_to_all", "all_reduce"),
    "barrier": ("barrier", "all_reduce"),
    "unknown": ("all_reduce",),
}
_BARRIER_BYTES = 4
# Groups of some of the ranks, all at once, where a rank has two cores for its host and what moves its data: pairs and fours of
# eight take 1.6 and 1.3 times as long as two and four ranks that have the box to themselves (medians over kinds and 256 KiB to
# 16 MiB, of what all eight took more that day; benchmarks/h200/divided_parts.py, 2026-11-18). With four cores nothing was seen.
# A step has many of each kind, and medians of kinds lie in -.15 to .4 of that, in ln.
_CROWDED_POWER, _ENOUGH_CORES = 0.34, 3.0
_CROWDED_WIDER = (0.15, 0.4)
# A kind that stands for another: known to a factor.
_STAND_IN_FACTOR = 2.0
_NOTHING = Estimate(0.0, 0.0, 0.0, Source.ANALYTIC, inside=True)


@dataclass(frozen=True)
class CollectiveWork:
    """By rank that owns a program, the estimate of each of its collectives."""

    estimates: Mapping[int, tuple[Estimate, ...]]
    warnings: tuple[str, ...] = ()


def collective_work(workload: Workload, fabric: Fabric | None) -> CollectiveWork:
    """The collectives of all programs. Ranks that share a program take as long as its owner does: meshes are regular."""
    asker = _Asker(workload, fabric)
    result = {program.rank: asker.estimates(program) for program in workload.programs}
    return CollectiveWork(result, tuple(asker.warnings))


class _Asker:
    """Asks a fabric about the collectives of a workload's programs, one lot of equal groups at a time."""

    def __init__(self, workload: Workload, fabric: Fabric | None) -> None:
        self._workload, self._fabric = workload, fabric
        self._calls = {
            program.rank: {(each.group, each.sequence): each for each in program.collectives if each.kind == EXCHANGE}
            for program in workload.programs
        }
        self._nodes: dict[str, dict[int, dict[tuple[int, ...], None]]] = {}  # by group and node: sets with ranks there
        self._known: dict[tuple[str, tuple[int, ...], Message], Estimate] = {}
        self._kinds: dict[str, tuple[str, bool]] = {}
        self.warnings: dict[str, None] = {}  # in order, each once

    def estimates(self, program: Program) -> tuple[Estimate, ...]:
        """Of every collective of a program; one of a single rank takes nothing."""
        result = [_NOTHING] * len(program.collectives)
        lots: dict[tuple[str, tuple[int, ...]], list[tuple[int, Message, bool]]] = defaultdict(list)
        for index, collective in enumerate(program.collectives):
            members = self._workload.members(program.rank, collective)
            if len(members) > 1:
                if collective.kind not in self._kinds:
                    self._kinds[collective.kind] = self._kind(collective.kind)
                kind, stand_in = self._kinds[collective.kind]
                lots[collective.group, members].append((index, self._message(collective, members, kind), stand_in))
        for (group, members), lot in lots.items():
            answers = self._answers(group, members, [message for _, message, _ in lot])
            self._say_beyond(members, answers)
            for index, message, stand_in in lot:
                result[index] = _widened(answers[message]) if stand_in else answers[message]
        return tuple(result)

    def _message(self, collective: Collective, members: tuple[int, ...], kind: str) -> Message:
        """A collective asked for as one of this kind. What an exchange sends is known from what each of its ranks calls."""
        ranks = len(members)
        if kind == collective.kind == EXCHANGE:
            owners = self._workload.owners or tuple(range(self._workload.world_size))
            key = (collective.group, collective.sequence)
            sent = sent_bytes([self._calls.get(owners[member], {}).get(key) for member in members])
            if np.ptp(sent * (1.0 - np.eye(ranks)) + np.eye(ranks) * sent.mean()) > 0:
                whole = tuple(tuple(round(size) for size in row) for row in sent.tolist())
                return Message(kind, ranks, max(map(sum, whole)), whole)
        nbytes = _BARRIER_BYTES if collective.kind == "barrier" else max(collective.bytes_in, collective.bytes_out)
        if collective.kind in ("send", "recv") and kind == "send_recv" and self._one_thread:
            # Measured as an exchange: the thread of a rank moved as many bytes out as in.
            nbytes = -(nbytes // -2)
        return Message(kind, ranks, nbytes)

    @property
    def _one_thread(self) -> bool:
        """Whether a thread of a rank moves all that it sends and receives, as on sockets."""
        return self._fabric is not None and self._fabric.limits.buffered_bytes is not None

    def _answers(self, group: str, members: tuple[int, ...], messages: Sequence[Message]) -> dict[Message, Estimate]:
        assert self._fabric is not None, "ranks that meet have a fabric: `Platform` sees to it"
        new = [message for message in dict.fromkeys(messages) if (group, members, message) not in self._known]
        if new:
            beside = [other for other in self._near(group, members) if other != members and len(other) > 1]
            crowded = self._crowding(len(members))
            for message, answer in zip(new, self._fabric.estimates(new, members, beside), strict=True):
                self._known[group, members, message] = answer if crowded == 1.0 else _crowded(answer, crowded)
        return {message: self._known[group, members, message] for message in messages}

    def _crowding(self, ranks: int) -> float:
        """How many times as long groups of so many of the ranks take as if the box were theirs."""
        assert self._fabric is not None
        cores, world = self._fabric.limits.cores, self._workload.world_size
        enough = cores is None or cores.value >= _ENOUGH_CORES * world
        return 1.0 if enough else float((world / ranks) ** _CROWDED_POWER)

    def _near(self, group: str, members: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
        """The sets of a group that could share links with one: on its nodes, or anywhere where a network lacks bandwidth."""
        assert self._fabric is not None
        limits, sets = self._fabric.limits, self._workload.groups.get(group, ())
        if max(limits.oversubscription, *(tier.oversubscription for tier in limits.tiers)) > 1:
            return sets
        if group not in self._nodes:
            self._nodes[group] = defaultdict(dict)
            for each in sets:
                for node in {rank // limits.gpus_per_node for rank in each}:
                    self._nodes[group][node][each] = None
        on_node = self._nodes[group]
        return tuple({each: None for node in {rank // limits.gpus_per_node for rank in members} for each in on_node[node]})

    def _say_beyond(self, members: tuple[int, ...], answers: Mapping[Message, Estimate]) -> None:
        assert self._fabric is not None
        name = self._fabric.limits.name
        beyond = sorted({message.kind for message, answer in answers.items() if not answer.inside})
        if not beyond:
            return
        if any(answer.source is Source.ANALYTIC for answer in answers.values()):
            part = "" if self._fabric.limits.analytic else "the network of "
            text = f"{part}fabric {name} by a data sheet, which can be off by a large factor"
        else:
            text = f"{', '.join(beyond)} of {len(members)} ranks, extrapolated from what was measured on {name}"
        self.warnings[Basis(text)] = None

    def _kind(self, kind: str) -> tuple[str, bool]:
        """The kind to ask for, and whether it stands for another."""
        assert self._fabric is not None
        if kind in ("send", "recv") and self._fabric.knows("send_recv"):
            return "send_recv", False
        for alike in _ALIKE.get(kind, (kind, "all_reduce")):
            if alike in KINDS and self._fabric.knows(alike):
                if alike != kind:
                    self.warnings[Basis(f"{kind} as {alike}, since {self._fabric.limits.name} was not measured on it")] = None
                return alike, alike != kind
        return "all_reduce", True


def _crowded(estimate: Estimate, by: float) -> Estimate:
    """So many times as long, and less sure."""
    low, high = (by * np.exp(wider) for wider in (-_CROWDED_WIDER[0], _CROWDED_WIDER[1]))
    return replace(
        estimate, time_ns=by * estimate.time_ns, low_ns=low * estimate.low_ns, high_ns=high * estimate.high_ns, inside=False
    )


def _widened(estimate: Estimate) -> Estimate:
    """Of a kind that stands for another."""
    low_ns, high_ns = estimate.low_ns / _STAND_IN_FACTOR, estimate.high_ns * _STAND_IN_FACTOR
    return replace(estimate, low_ns=low_ns, high_ns=high_ns, source=Source.FALLBACK, inside=False)
