"""From what a user points at to one Workload: files told apart, ranks sorted, execution traces linked, the rest said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from steptime._notices import Basis
from steptime._program.checks import disagreements, implausible
from steptime._program.collectives import everyone, numbered_from, sized_by_ops
from steptime._program.execution import ExecutionTrace, to_program
from steptime._program.formats import BREAKS_OFF, DAMAGED, TraceReader, find_files, format_of, opened, rank_in_name
from steptime._program.formats.saved import joined
from steptime._program.kernel_names import described_by_kernels
from steptime._program.link import link
from steptime._program.program import Program
from steptime._program.workload import CUT_OFF, Progress, Workload
from steptime.errors import InputError, TraceError

# Files that lie beside traces and are none.
COMPANIONS = ("measured.json", "comm_group.json")


@dataclass
class _Contents:
    """What all files hold, in their order."""

    programs: list[Program] = field(default_factory=list)
    traces: list[ExecutionTrace] = field(default_factory=list)
    workloads: list[tuple[str, Workload]] = field(default_factory=list)  # with their files
    files: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failures: list[TraceError] = field(default_factory=list)


def load(paths: Sequence[Path | str], *, progress: Progress | None = None) -> Workload:
    """The workload behind files, folders and archives of traces of any format."""
    named = [Path(p) for p in paths]
    contents = _read(named, progress)
    if contents.workloads:
        if contents.programs or contents.traces:
            raise InputError("a saved workload is complete in itself; give it alone, without other traces")
        workload = joined(contents.workloads)
        lost = [f"left out: {failure}" for failure in contents.failures]
        return replace(workload, warnings=(*workload.warnings, *contents.warnings, *lost))
    if not contents.programs and not contents.traces:
        if contents.failures:
            raise contents.failures[0]
        details = f"; {contents.warnings[0]}" if contents.warnings else ""
        raise InputError(f"{', '.join(map(str, named))}: no readable trace here{details}")
    contents.warnings += [f"left out: {failure}" for failure in contents.failures]
    programs, world_size = _by_rank(contents)
    programs = _linked(programs, contents, world_size)
    return _workload(programs, world_size, contents, named)


def _read(paths: Sequence[Path], progress: Progress | None) -> _Contents:
    there = dict.fromkeys(find_files(paths))
    named = {file for file in there if file.member is None and file.path in paths}
    files = [file for file in there if file.name not in COMPANIONS or file in named]
    results = {reader.file: _content(reader) for reader in opened(files, progress)}
    contents = _Contents()
    for file in files:
        kind, content = results[file]
        if isinstance(content, str):
            if file in named:
                contents.failures.append(TraceError(content))
            else:
                contents.warnings.append(f"left out: {content}")
        elif isinstance(content, TraceError):
            contents.failures.append(content)
        else:
            contents.files.append({"file": str(file), "format": kind})
        if isinstance(content, Program):
            contents.programs.append(content)
        elif isinstance(content, ExecutionTrace):
            contents.traces.append(content)
        elif isinstance(content, Workload):
            contents.workloads.append((str(file), content))
    return contents


def _content(reader: TraceReader) -> tuple[str, Program | ExecutionTrace | Workload | TraceError | str]:
    """Format and content of a file; where it cannot be read, why, and as a text where no format knows it."""
    head = reader.peek()
    known = format_of(head, reader.file.name)
    if known is not None:
        try:
            return known.name, known.read(reader)
        except TraceError as failure:
            return known.name, failure
    if reader.damage is not None:
        why = f"the compressed data is damaged ({reader.damage}), and what came before does not tell what it is"
    elif not head.strip():
        why = "empty; the profiler wrote nothing"
    else:
        why = "not a Kineto, execution or Chakra trace, nor a saved workload"
    return "", f"{reader.source}: {why}"


def _by_rank(contents: _Contents) -> tuple[list[Program], int]:
    """One program per rank, ranks settled, and how large the job is."""
    sizes = {p.world_size: p.source for p in contents.programs if p.meta.get("world_size_known", p.world_size > 1)}
    if len(sizes) > 1:
        (a, first), (b, second) = sorted(sizes.items())[:2]
        raise InputError(f"files of different jobs: {first} is of {a} ranks, {second} of {b}; give the files of one job")
    programs: dict[int, Program] = {}
    for program in _with_ranks(contents):
        twin = programs.get(program.rank)
        if twin is not None:
            raise InputError(f"rank {program.rank} has two traces, {twin.source} and {program.source}; give one of them")
        programs[program.rank] = program
    largest = max(programs, default=-1) + 1
    world_size = next(iter(sizes), max([largest, *(p.world_size for p in contents.programs)]))
    if largest > world_size:
        raise InputError(
            f"rank {largest - 1} in a job of {world_size} ranks ({programs[largest - 1].source}); files of one job?"
        )
    if not sizes and len(programs) > 1:
        contents.warnings.append(
            f"no trace says how many ranks there were; {world_size} are assumed, as many as there are traces"
        )
    return _in_step([_widened(programs[r], world_size) for r in sorted(programs)], contents), world_size


def _in_step(programs: list[Program], contents: _Contents) -> list[Program]:
    """Programs whose windows begin at different steps count their collectives from the first step they share."""
    windows = [set(p.steps) for p in programs if p.recorded and p.steps]
    firsts = {p.steps[0] for p in programs if p.recorded and p.steps}
    if len(firsts) < 2:
        return programs
    common = set.intersection(*windows)
    if not common:
        contents.warnings.append(
            "the traces share no step; how ranks met at collectives is not known, and no step can be compared"
        )
        return programs
    contents.warnings.append(
        f"the windows of the traces begin at steps {min(firsts)} to {max(firsts)}; ranks meet from {min(common)} on"
    )
    return [numbered_from(p, min(common)) if p.recorded else p for p in programs]


def _with_ranks(contents: _Contents) -> list[Program]:
    """Programs in order of file; those that know no rank get the lowest free one."""
    used = {p.rank for p in contents.programs if p.meta.get("rank_known", True)}
    free = (r for r in range(len(contents.programs) + len(used) + 1) if r not in used)
    settled = []
    for item in contents.programs:
        program = item
        if not program.meta.get("rank_known", True):
            rank = next(free)
            if len(contents.programs) > 1:
                contents.warnings.append(
                    f"{program.source}: says no rank, neither inside nor in its name; taken as rank {rank}"
                )
            program = replace(program, rank=rank)
        elif not program.meta.get("rank_said", True):
            contents.warnings.append(Basis(f"rank {program.rank} by the name of its file: the trace does not say"))
        settled.append(program)
    return settled


def _widened(program: Program, world_size: int) -> Program:
    """Collectives whose group nobody named are of everyone."""
    collectives = tuple(replace(c, ranks=everyone(world_size)) if c.group == "" else c for c in program.collectives)
    return replace(program, world_size=world_size, collectives=collectives)


def _linked(programs: list[Program], contents: _Contents, world_size: int) -> list[Program]:
    """Execution traces tied to the programs of their ranks; alone, they are the programs."""
    by_rank: dict[int, ExecutionTrace] = {}
    for index, trace in enumerate(contents.traces):
        named = rank_in_name(trace.source)
        rank = next((r for r in (trace.rank, named) if r is not None), index)
        if rank in by_rank:
            contents.warnings.append(f"rank {rank} has two execution traces; {trace.source} is left out")
            continue
        by_rank[rank] = trace
    if not programs:
        size = max([max(by_rank) + 1, *(t.world_size or 0 for t in by_rank.values())])
        return [to_program(by_rank[r], rank=r, world_size=size) for r in sorted(by_rank)]
    for rank in sorted(set(by_rank) - {p.rank for p in programs}):
        contents.warnings.append(f"{by_rank[rank].source}: rank {rank} has an execution trace but no Kineto trace; left out")
    linked = [link(p, by_rank[p.rank]) if p.rank in by_rank else p for p in programs]
    return [sized_by_ops(described_by_kernels(_widened(p, max(world_size, p.world_size)))) for p in linked]


def _workload(programs: list[Program], world_size: int, contents: _Contents, paths: Sequence[Path]) -> Workload:
    world_size = max([world_size, *(p.world_size for p in programs)])
    name = paths[0].name.split(".")[0] if paths else ""
    workload = Workload(tuple(programs), world_size, name=name, meta={"files": tuple(contents.files)})
    absent = workload.absent
    if absent:
        listed = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        contents.warnings.append(
            f"{len(absent)} of {world_size} ranks have no trace here ({listed}); known only where others met them"
        )
    warnings = [
        *contents.warnings,
        *disagreements(programs),
        *implausible(programs),
        *(w for p in programs for w in p.warnings),
    ]
    # What is missing from the files comes first: it is in doubt of everything else.
    cut = [text for text in warnings if BREAKS_OFF in text or DAMAGED in text]
    meta = {**workload.meta, CUT_OFF: True} if cut else workload.meta
    return replace(workload, meta=meta, warnings=tuple(dict.fromkeys([*cut, *warnings])))
