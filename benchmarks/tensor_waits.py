"""What tensors say about waits, against recorded runs and over the shipped steps.

First, folders that hold Kineto and execution traces of the same run: from the execution trace alone, the first work that a
collective holds back and the last that it waits for; beside it what the recorded stream waits say, and whether the recording
contradicts it (the work began before the collective ended). Then the shipped step cases, by workload: who needs each kind of
collective and why, and what should hold in every training step. All is done again with waits hidden, so that data has to tell.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steptime._ops.waits import TensorWaits, tensor_waits
from steptime._program.load import load
from steptime._program.program import CallKind, Phase, Program, WorkKind
from steptime._program.queues import IssueOrder
from steptime_lab.measurements.shipped import FILE_NAME, FOLDER, program_of, read_programs, shipped

EXAMPLE = Path(__file__).parents[1] / "examples" / "h200_mps4_dlrm"
LOT = 16  # cases, as many as lie side by side in the file
# The op that joins looked-up rows with dense features, in the shipped DLRM.
INTERACTION, OPTIMISER = "aten::bmm", "Optimizer.step"


@dataclass(frozen=True)
class Recorded:
    """One step of a recorded rank, its works by the rows of the execution trace."""

    program: Program
    issued: IssueOrder
    rows: list[int]  # per work: the row of its op in the execution trace, or -1
    number: int
    works: list[int]  # of the step, by launch; no collectives

    def first_from(self, row: int, after: int) -> int:
        """The first work that an op from a row on launched after another work was, or -1."""
        launch_ns = self.issued.launch_ns
        return next((w for w in self.works if self.rows[w] >= row and launch_ns[w] > launch_ns[after]), -1)

    def last_within(self, row: int, end: int) -> int:
        """The last work launched by an op or one inside it, or -1."""
        return next((w for w in reversed(self.works) if row <= self.rows[w] < end), -1)

    def held(self, work: int) -> int:
        """The first compute that recorded waits, or the stream itself, hold back until a collective is over, or -1."""
        calls, works, launch_ns = self.program.calls, self.program.works, self.issued.launch_ns
        beside = [w for w in self.works if works.stream[w] == works.stream[work] and launch_ns[w] > launch_ns[work]]
        waits = (calls.kind == CallKind.STREAM_WAIT) & (calls.awaits == work)
        heads = [
            self.issued.head(int(calls.stream[call]), int(calls.start_ns[call])) for call in np.flatnonzero(waits).tolist()
        ]
        return min((w for w in (*beside[:1], *heads) if w in self.works), key=lambda w: launch_ns[w], default=-1)

    def awaited(self, work: int) -> int:
        """The last compute that a collective waits for as recorded, or -1."""
        calls, works, launch_ns = self.program.calls, self.program.works, self.issued.launch_ns
        stream = works.stream[work]
        waits = (calls.kind == CallKind.STREAM_WAIT) & (calls.stream == stream) & (calls.awaits >= 0)
        before = calls.awaits[waits & (calls.start_ns <= launch_ns[work])].tolist()
        beside = [w for w in self.works if works.stream[w] == stream and launch_ns[w] < launch_ns[work]]
        return max((w for w in (*beside[-1:], *before) if w in self.works), key=lambda w: launch_ns[w], default=-1)


def recorded_steps(linked: Program, alone: Program) -> Iterator[Recorded]:
    row_of = {int(node): row for row, node in enumerate(alone.ops.node.tolist())}
    works, issued = linked.works, IssueOrder.of(linked)
    ops = np.where(works.call >= 0, linked.calls.op[np.maximum(works.call, 0)], -1)
    rows = [row_of.get(int(linked.ops.node[op]), -1) if op >= 0 else -1 for op in ops.tolist()]
    launched = np.flatnonzero((works.call >= 0) & (works.kind != WorkKind.COLLECTIVE))
    order = launched[np.argsort(issued.launch_ns[launched], kind="stable")]
    for step in linked.steps:
        yield Recorded(linked, issued, rows, step, order[works.step[order] == step].tolist())


def end_of(program: Program, row: int) -> int:
    """The first row after an op and everything inside it."""
    inside = {row}
    at = row + 1
    while at < len(program.ops) and int(program.ops.parent[at]) in inside:
        inside.add(at)
        at += 1
    return at


def compare(step: Recorded, alone: Program, waits: dict[int, TensorWaits], found: Counter[str]) -> None:
    works = step.program.works
    for work in np.flatnonzero((works.kind == WorkKind.COLLECTIVE) & (works.step == step.number)).tolist():
        said = waits.get(step.rows[work])
        if said is None:
            found["collectives that the execution trace lacks"] += 1
            continue
        found["collectives"] += 1
        held = step.held(work)
        first = step.first_from(said.needed_by, work) if said.needed_by >= 0 else -1
        found["needed by: " + relation(step, first, held)] += 1
        # A microsecond: clocks of the host's and the device's records are apart by that much at the most.
        early = first >= 0 and works.start_ns[first] < works.end_ns[work] - 1000
        found["needed by: contradicted, it began before the collective ended"] += int(early)
        last = step.last_within(said.sent_by, end_of(alone, said.sent_by)) if said.sent_by >= 0 else -1
        found["sent by: " + relation(step, last, step.awaited(work))] += 1
        late = last >= 0 and works.end_ns[last] > works.start_ns[work] + 1000
        found["sent by: contradicted, it ended after the collective began"] += int(late)


def relation(step: Recorded, said: int, recorded: int) -> str:
    if said < 0 or recorded < 0:
        return "none in both" if said == recorded else ("only recorded" if said < 0 else "only said")
    apart = int(step.issued.launch_ns[said] - step.issued.launch_ns[recorded])
    return "as recorded" if said == recorded else "earlier than recorded" if apart < 0 else "later than recorded"


def traces_of(folder: Path) -> tuple[list[Program], list[Program]]:
    """The linked programs of a folder, and those of its execution traces alone."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "measured" not in path.name]
    alone = [path for path in files if "et" in path.name.split(".") or "_et_" in path.name or "_eg_" in path.name]
    return list(load(files).programs), list(load(alone).programs)


def print_recorded(folder: Path, *, hidden: bool) -> None:
    found: Counter[str] = Counter()
    linked, alone = traces_of(folder)
    programs = {program.rank: program for program in alone}
    for program in linked:
        one = programs[program.rank]
        waits = {each.launched_by: each for each in tensor_waits(one, recorded=not hidden)}
        # Launches are in ops inside the record.
        for each in list(waits.values()):
            waits.update(dict.fromkeys(range(each.launched_by, end_of(one, each.launched_by)), each))
        for step in recorded_steps(program, one):
            compare(step, one, waits, found)
    print(f"{folder.name}, {len(linked)} ranks{', waits hidden' if hidden else ''}")
    for name, count in sorted(found.items()):
        print(f"  {count:6d} {name}")


def shipped_programs() -> Iterator[tuple[str, Program]]:
    """Every distinct program of the shipped step cases, with its workload."""
    table = shipped("step_kernels").select(("workload", "name"))
    workloads = dict(zip(table["name"].to_pylist(), table["workload"].to_pylist(), strict=True))
    names = sorted(workloads)
    for first in range(0, len(names), LOT):
        for case in read_programs(FOLDER / FILE_NAME, names[first : first + LOT]):
            for owner in sorted(set(case.owners)):
                yield workloads[case.name], program_of(case, owner)


def first_op(program: Program, name: str, after: int) -> int:
    """The first op from a row on whose name begins so, or one past the last."""
    named = [number for number, each in enumerate(program.names) if each.startswith(name)]
    rows = np.flatnonzero(np.isin(program.ops.name[after:], named))
    return after + int(rows[0]) if len(rows) else len(program.ops)


def broken(program: Program, each: TensorWaits) -> str:
    """What should hold of a collective in a training step and does not, or nothing."""
    kind = program.collectives[each.collective].kind
    if each.sent_by < 0 or each.sent_by >= each.launched_by:
        return "sent by nobody before it"
    if each.needed_by < 0:
        return ""
    if each.needed_by <= each.launched_by:
        return "needed before it was launched"
    backward = program.ops.phase[each.launched_by] == Phase.BACKWARD
    if kind == "all_reduce" and each.needed_by > first_op(program, OPTIMISER, each.launched_by):
        return "gradients needed after the optimiser began"
    if kind == "all_to_all" and not backward and each.needed_by > first_op(program, INTERACTION, each.launched_by):
        return "looked-up rows needed after the interaction began"
    return ""


def same_hold(program: Program, one: TensorWaits, other: TensorWaits) -> str:
    """How far apart two answers are: the same, or how many ops with tensors lie between them."""
    if other.needed_by < 0:
        return "data finds nobody"
    between = program.ops.signature[min(one.needed_by, other.needed_by) : max(one.needed_by, other.needed_by)]
    return "data is later" if other.needed_by >= one.needed_by else f"data is EARLIER by {int((between >= 0).sum())} ops"


def print_shipped() -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for workload, program in shipped_programs():
        found = counts[workload]
        waits, hidden = tensor_waits(program), tensor_waits(program, recorded=False)
        found["programs"] += 1
        found["programs with collectives"] += bool(waits)
        found["collectives nobody needs"] += sum(each.needed_by < 0 for each in waits)
        for each, other in zip(waits, hidden, strict=True):
            kind, phase = program.collectives[each.collective].kind, Phase(program.ops.phase[each.launched_by]).name.lower()
            sender = program.names[program.ops.name[each.sent_by]] if each.sent_by >= 0 else "nobody"
            needer = program.names[program.ops.name[each.needed_by]] if each.needed_by >= 0 else "nobody"
            found[f"{kind}, {phase}: sent by {sender}, needed by {needer} ({each.reason})"] += 1
            if each.reason == "wait":
                found[f"{kind}, {phase}, waits hidden: {same_hold(program, each, other)}"] += 1
            for said, how in ((each, ""), (other, ", waits hidden")):
                if why := broken(program, said):
                    found[f"BROKEN {kind}, {phase}{how}: {why}"] += 1
    for workload, found in counts.items():
        print(workload)
        for name, count in sorted(found.items()):
            print(f"  {count:6d} {name}")


def main() -> None:
    for folder in [EXAMPLE, *map(Path, sys.argv[1:])]:
        print_recorded(folder, hidden=False)
        print_recorded(folder, hidden=True)
    print_shipped()


if __name__ == "__main__":
    main()
