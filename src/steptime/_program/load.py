"""From what a user points at to one Workload: files told apart, ranks sorted, execution traces linked, the rest said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from steptime._program.agreement import disagreements
from steptime._program.collectives import numbered
from steptime._program.doubts import doubts
from steptime._program.execution import ExecutionTrace
from steptime._program.formats import HEAD_BYTES, format_of
from steptime._program.formats.files import TolerantReader, TraceFile, find_files, open_stream, rank_in_name
from steptime._program.formats.saved import joined
from steptime._program.from_ops import to_program
from steptime._program.link import link
from steptime._program.program import Program
from steptime._program.workload import Workload
from steptime.errors import InputError, TraceError

# Told after every block: file name, decompressed bytes of it read so far.
Progress = Callable[[str, int], None]

# Files that lie beside traces and are none.
COMPANIONS = ("measured.json", "comm_group.json")


@dataclass
class _Found:
    programs: list[Program] = field(default_factory=list)
    traces: list[ExecutionTrace] = field(default_factory=list)
    workloads: list[Workload] = field(default_factory=list)
    files: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failures: list[TraceError] = field(default_factory=list)


def load(paths: Sequence[Path | str], *, progress: Progress | None = None) -> Workload:
    """The workload behind files, folders and archives of traces of any format."""
    given = [Path(p) for p in paths]
    result = _Found()
    for file in dict.fromkeys(find_files(given)):
        _read(file, result, named=file.path in given and file.member is None, progress=progress)
    if result.workloads:
        return _saved(result)
    if not result.programs and not result.traces:
        raise result.failures[0] if result.failures else InputError(_nothing(given, result))
    result.warnings += [f"left out: {failure}" for failure in result.failures]
    programs, world_size = _by_rank(result)
    programs = _linked(programs, result, world_size)
    return _workload(programs, world_size, result, given)


def _read(file: TraceFile, found: _Found, *, named: bool, progress: Progress | None) -> None:
    if file.name in COMPANIONS and not named:
        return
    with open_stream(file) as stream:
        reader = TolerantReader(stream)
        head = reader.read(HEAD_BYTES)
    known = format_of(head, file.name)
    if known is None:
        message = f"{file}: {_why_unknown(head, reader.damage)}"
        if named:
            found.failures.append(TraceError(message))
        else:
            found.warnings.append(f"left out: {message}")
        return
    counter = None if progress is None else _Counter(file.name, progress)
    try:
        read = known.read(file, counter)
    except TraceError as failure:
        found.failures.append(failure)
        return
    found.files.append({"file": str(file), "format": known.name})
    targets: dict[type, list[Any]] = {Program: found.programs, ExecutionTrace: found.traces, Workload: found.workloads}
    targets[type(read)].append(read)


class _Counter:
    """Adds up blocks of one file for the progress bar."""

    def __init__(self, name: str, progress: Progress) -> None:
        self.name, self.progress, self.total = name, progress, 0

    def __call__(self, block: int) -> None:
        self.total += block
        self.progress(self.name, self.total)


def _why_unknown(head: bytes, damage: str | None) -> str:
    if damage is not None:
        return f"the compressed data is damaged ({damage}), and what came before does not tell what it is"
    if not head.strip():
        return "empty; the profiler wrote nothing"
    return "not a Kineto, execution or Chakra trace, nor a saved workload"


def _nothing(given: Sequence[Path], found: _Found) -> str:
    where = ", ".join(str(p) for p in given)
    details = f"; {found.warnings[0]}" if found.warnings else ""
    return f"{where}: no readable trace here{details}"


def _saved(found: _Found) -> Workload:
    if found.programs or found.traces:
        raise InputError("a saved workload is complete in itself; give it alone, without other traces")
    workload = joined(list(zip((each["file"] for each in found.files), found.workloads, strict=True)))
    found.warnings += [f"left out: {failure}" for failure in found.failures]
    return replace(workload, warnings=(*workload.warnings, *found.warnings))


def _by_rank(found: _Found) -> tuple[list[Program], int]:
    """One program per rank, ranks settled, and how large the job is."""
    sizes = {p.world_size: p.source for p in found.programs if p.meta.get("world_size_known", p.world_size > 1)}
    if len(sizes) > 1:
        (a, first), (b, second) = sorted(sizes.items())[:2]
        raise InputError(f"files of different jobs: {first} is of {a} ranks, {second} of {b}; give the files of one job")
    programs: dict[int, Program] = {}
    for program in _with_ranks(found):
        twin = programs.get(program.rank)
        if twin is not None:
            raise InputError(f"rank {program.rank} has two traces, {twin.source} and {program.source}; give one of them")
        programs[program.rank] = program
    largest = max(programs, default=-1) + 1
    world_size = next(iter(sizes), max([largest, *(p.world_size for p in found.programs)]))
    if largest > world_size:
        raise InputError(
            f"rank {largest - 1} in a job of {world_size} ranks ({programs[largest - 1].source}); files of one job?"
        )
    if not sizes and len(programs) > 1:
        found.warnings.append(f"no trace says how many ranks there were; {world_size} are assumed, as many as there are traces")
    return _in_step([_widened(programs[r], world_size) for r in sorted(programs)], found), world_size


def _in_step(programs: list[Program], found: _Found) -> list[Program]:
    """Programs whose windows begin at different steps count their collectives from the first step they share."""
    windows = [set(p.steps) for p in programs if p.recorded and p.steps]
    firsts = {p.steps[0] for p in programs if p.recorded and p.steps}
    if len(firsts) < 2:
        return programs
    common = set.intersection(*windows)
    if not common:
        found.warnings.append(
            "the traces share no step; how ranks met at collectives is not known, and no step can be compared"
        )
        return programs
    found.warnings.append(
        f"the windows of the traces begin at steps {min(firsts)} to {max(firsts)}; ranks meet from {min(common)} on"
    )
    return [numbered(p, min(common)) if p.recorded else p for p in programs]


def _with_ranks(found: _Found) -> list[Program]:
    """Programs in order of file; those that know no rank get the lowest free one."""
    taken = {p.rank for p in found.programs if p.meta.get("rank_known", True)}
    free = (r for r in range(len(found.programs) + len(taken) + 1) if r not in taken)
    settled = []
    for item in found.programs:
        program = item
        if not program.meta.get("rank_known", True):
            rank = next(free)
            if len(found.programs) > 1:
                found.warnings.append(f"{program.source}: says no rank, neither inside nor in its name; taken as rank {rank}")
            program = replace(program, rank=rank)
        elif not program.meta.get("rank_said", True):
            found.warnings.append(
                f"{program.source}: rank {program.rank} is taken from the file name; the trace itself does not say"
            )
        settled.append(program)
    return settled


def _widened(program: Program, world_size: int) -> Program:
    """Collectives whose group nobody named are of everyone."""
    everyone = tuple(range(world_size))
    collectives = tuple(replace(c, ranks=everyone) if c.group == "" else c for c in program.collectives)
    return replace(program, world_size=world_size, collectives=collectives)


def _linked(programs: list[Program], found: _Found, world_size: int) -> list[Program]:
    """Execution traces tied to the programs of their ranks; alone, they are the programs."""
    by_rank: dict[int, ExecutionTrace] = {}
    for index, trace in enumerate(found.traces):
        named = rank_in_name(trace.source)
        rank = next((r for r in (trace.rank, named) if r is not None), index)
        if rank in by_rank:
            found.warnings.append(f"rank {rank} has two execution traces; {trace.source} is left out")
            continue
        by_rank[rank] = trace
    if not programs:
        size = max([max(by_rank) + 1, *(t.world_size or 0 for t in by_rank.values())])
        return [to_program(by_rank[r], rank=r, world_size=size) for r in sorted(by_rank)]
    for rank in sorted(set(by_rank) - {p.rank for p in programs}):
        found.warnings.append(f"{by_rank[rank].source}: rank {rank} has an execution trace but no Kineto trace; left out")
    linked = [link(p, by_rank[p.rank]) if p.rank in by_rank else p for p in programs]
    return [_widened(p, max(world_size, p.world_size)) for p in linked]


def _workload(programs: list[Program], world_size: int, found: _Found, given: Sequence[Path]) -> Workload:
    world_size = max([world_size, *(p.world_size for p in programs)])
    name = given[0].name.split(".")[0] if given else ""
    workload = Workload(tuple(programs), world_size, name=name, meta={"files": tuple(found.files)})
    absent = workload.absent
    if absent:
        listed = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        found.warnings.append(
            f"{len(absent)} of {world_size} ranks have no trace here ({listed}); known only where others met them"
        )
    warnings = [*found.warnings, *disagreements(programs), *doubts(programs), *(w for p in programs for w in p.warnings)]
    return replace(workload, warnings=tuple(dict.fromkeys(warnings)))
