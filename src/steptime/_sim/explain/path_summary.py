"""The critical path in a few lines: what kinds of time it consists of, and the names it spends most on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from steptime._program.program import Program, WorkKind
from steptime._sim.core.timeline import Timeline
from steptime._sim.explain.critical_path import PathSegment
from steptime._units import ms

# As many names as a person reads.
TOP = 10

_TEMPLATE_OR_ARGUMENTS = re.compile(r"[<(].*$", re.DOTALL)
_Key = TypeVar("_Key", str, int)
_ANONYMOUS = "(anonymous namespace)::"


@dataclass(frozen=True)
class PathShare:
    """Time of one kind on the critical path."""

    kind: str  # a reason of `critical_path`: host, device, collective, launch latency, ...
    ms: float  # per step
    share: float  # of the path


@dataclass(frozen=True)
class PathEntry:
    """Time on the critical path under one name: an op, a kernel, a collective."""

    name: str
    kind: str
    ms: float  # per step
    share: float  # of the path
    count: int  # segments per step, rounded up


@dataclass(frozen=True)
class PathRank:
    """Time of one rank on the critical path."""

    rank: int
    ms: float  # per step
    share: float  # of the path


@dataclass(frozen=True)
class PathSummary:
    """The critical path, summed up."""

    length_ms: float  # per step
    kinds: tuple[PathShare, ...]
    ranks: tuple[PathRank, ...]
    top: tuple[PathEntry, ...]

    def share(self, *kinds: str) -> float:
        """The share of the path that is of these kinds."""
        return sum(k.share for k in self.kinds if k.kind in kinds)


def summarise_path(path: Sequence[PathSegment], timeline: Timeline, steps: int, since_ns: int) -> PathSummary:
    """Sum up a critical path over the steps of its window; what lies before `since_ns` belongs to the window before."""
    programs = {rank: t.cohort.program for t in timeline.cohorts for rank in t.cohort.ranks}
    kinds: dict[str, int] = {}
    ranks: dict[int, int] = {}
    names: dict[tuple[str, str], list[int]] = {}
    for segment in path:
        length = segment.end_ns - max(segment.start_ns, since_ns)
        if length <= 0:
            continue
        kinds[segment.reason] = kinds.get(segment.reason, 0) + length
        ranks[segment.rank] = ranks.get(segment.rank, 0) + length
        entry = names.setdefault((name_of(segment, programs[segment.rank]), segment.reason), [0, 0])
        entry[0] += length
        entry[1] += 1
    total = sum(kinds.values()) or 1
    top = sorted(names.items(), key=lambda n: (-n[1][0], n[0]))[:TOP]
    return PathSummary(
        ms(sum(kinds.values())) / steps,
        tuple(PathShare(kind, ms(length) / steps, length / total) for kind, length in _largest_first(kinds)),
        tuple(PathRank(rank, ms(length) / steps, length / total) for rank, length in _largest_first(ranks)),
        tuple(
            PathEntry(name, kind, ms(length) / steps, length / total, -(-count // steps))
            for (name, kind), (length, count) in top
        ),
    )


def _largest_first(lengths: dict[_Key, int]) -> list[tuple[_Key, int]]:
    return sorted(lengths.items(), key=lambda item: (-item[1], str(item[0])))


def name_of(segment: PathSegment, program: Program) -> str:
    """What a person would call a segment: the op around it, the collective it is, or the kernel."""
    if segment.row < 0:
        return "before the window"
    if segment.lane == "host":
        return _op_name(program, int(program.calls.op[segment.row])) or program.names[int(program.calls.api[segment.row])]
    works = program.works
    if works.kind[segment.row] == WorkKind.COLLECTIVE and works.collective[segment.row] >= 0:
        return program.collectives[int(works.collective[segment.row])].kind
    call = int(works.call[segment.row])
    op = _op_name(program, int(program.calls.op[call])) if call >= 0 else ""
    return op or short_kernel_name(program.names[int(works.name[segment.row])])


def short_kernel_name(name: str) -> str:
    """A kernel's name without return type, namespaces, template and arguments."""
    plain = name.removeprefix("void ").replace(_ANONYMOUS, "")
    plain = _TEMPLATE_OR_ARGUMENTS.sub("", plain).strip()
    return plain.rsplit("::", 1)[-1] or name


def _op_name(program: Program, op: int) -> str:
    return program.names[int(program.ops.name[op])] if op >= 0 else ""
