"""What a target of a what-if selects in a program, and what there is to select."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from steptime._ops.families import WorkFamily, work_families
from steptime._program.host_code import long_outside_ops
from steptime._program.program import CallKind, Program, WorkKind
from steptime._sim.core.timing import Cohort
from steptime._units import ms
from steptime._whatif.edits import SYNCHRONISING, Floats, Mask
from steptime._whatif.grammar import Target, pattern

HOST, PYTHON, LAUNCH, SYNC, RANK = "host", "python", "launch", "sync", "rank"
DEVICE, COMMUNICATION = "device", "communication"
# Other words for families.
_ALIASES = {
    "lookup": "embedding", "lookups": "embedding", "memcpy": "copy", "softmax": "softmax_loss", "loss": "softmax_loss",
    "conv": "convolution", "norm": "normalization", "optimiser": "optimizer", "gemm": "matmul", "triton": "generated",
}  # fmt: skip
_FAMILIES = {family.label: family for family in WorkFamily}
_SHOWN = 6
_ENGINE = ("autograd::", "torch::autograd::")  # around every op of a backward pass


@dataclass(frozen=True, eq=False)
class Selection:
    """Of one program: works, calls, and how much of the host work before each call."""

    works: Mask
    gaps: Mask | Floats
    calls: Mask

    @property
    def empty(self) -> bool:
        """Whether nothing is selected."""
        return not (self.works.any() or self.gaps.any() or self.calls.any())


def select(program: Program, target: Target) -> Selection:
    """What a target selects in a program; nothing where it does not know the target's kind."""
    works, calls = np.zeros(len(program.works), dtype=bool), np.zeros(len(program.calls), dtype=bool)
    kind = _ALIASES.get(target.kind, target.kind)
    on_host: dict[str, Callable[[], Selection]] = {
        HOST: lambda: Selection(works, ~calls, ~calls),
        PYTHON: lambda: Selection(works, long_outside_ops(program), calls),
        LAUNCH: lambda: Selection(works, calls, np.isin(program.calls.kind, (CallKind.LAUNCH, CallKind.BLOCKING_COPY))),
        SYNC: lambda: Selection(works, calls, synchronising(program) & _named_calls(program, target.name)),
        "op": lambda: _of_ops(program, target.name),
    }
    return on_host[kind]() if kind in on_host else Selection(_works(program, kind, target.name), calls, calls)


def _works(program: Program, kind: str, name: str) -> Mask:
    if kind == DEVICE:
        return np.asarray(program.works.kind != WorkKind.COLLECTIVE)
    if kind == "kernel":
        matching = np.array([bool(pattern(name).search(each)) for each in program.names], dtype=bool)
        return np.asarray(matching[program.works.name])
    if kind in _FAMILIES:
        return np.asarray(work_families(program) == _FAMILIES[kind])
    return collectives(program, kind)


def collectives(program: Program, kind: str) -> Mask:
    """The works that are collectives of a kind, or of any."""
    if kind == COMMUNICATION:
        return np.asarray(program.works.kind == WorkKind.COLLECTIVE)
    of_kind = np.array([each.kind == kind for each in program.collectives] + [False], dtype=bool)
    return np.asarray(of_kind[program.works.collective])


def synchronising(program: Program) -> Mask:
    """The calls in which the host may wait for the device."""
    return np.isin(program.calls.kind, (*SYNCHRONISING, CallKind.BLOCKING_COPY))


def _named_calls(program: Program, name: str) -> Mask:
    """The calls that are called so, or made within an op that is."""
    if not name:
        return np.ones(len(program.calls), dtype=bool)
    matching = np.array([bool(pattern(name).search(each)) for each in program.names], dtype=bool)
    within = np.append(_within(program, matching[program.ops.name]), False)
    return np.asarray(matching[program.calls.api] | within[program.calls.op])


def _within(program: Program, ops: Mask) -> Mask:
    """Ops, and all inside them."""
    result, parents = ops.copy(), program.ops.parent
    inside = parents >= 0
    while True:
        wider = result | (inside & result[np.maximum(parents, 0)])
        if np.array_equal(wider, result):
            return result
        result = wider


def _of_ops(program: Program, name: str) -> Selection:
    matching = np.array([bool(pattern(name).search(each)) for each in program.names], dtype=bool)
    ops = np.append(_within(program, matching[program.ops.name]) if len(program.ops) else np.zeros(0, dtype=bool), False)
    calls = np.asarray(ops[program.calls.op])
    of_call = np.append(calls, False)
    return Selection(np.asarray(of_call[program.works.call]), calls, calls)


# --- what there is ---------------------------------------------------------------------------------------------------------


def menu(cohorts: Sequence[Cohort], target: Target) -> str:
    """What there is to match, in words: of the target's kind where that has names, else the targets of this step."""
    programs = [cohort.program for cohort in cohorts]
    if target.kind == "kernel":
        return f"kernels: {_longest(_kernel_times(cohorts))}"
    if target.kind == "op":
        return f"ops: {_most_common(_op_names(programs))}"
    if target.kind == SYNC and target.name:
        return f"synchronisations: {_most_common(_sync_names(programs))}"
    if target.kind == RANK:
        return f"ranks: {', '.join(str(rank) for cohort in cohorts for rank in cohort.ranks[:_SHOWN])}"
    return f"{', '.join(available(cohorts))}, kernel:NAME, op:NAME, rank:N"


def available(cohorts: Sequence[Cohort]) -> list[str]:
    """The targets that select something, without those that take a name."""
    programs = [cohort.program for cohort in cohorts]
    present = Counter(family for program in programs for family in work_families(program).tolist())
    families = [family.label for family in WorkFamily if present[family] and family != WorkFamily.COMMUNICATION]
    kinds = dict.fromkeys(each.kind for program in programs for each in program.collectives)
    python = [PYTHON] if any(long_outside_ops(program).any() for program in programs) else []
    sync = [SYNC] if any(synchronising(program).any() for program in programs) else []
    return [*families, *([COMMUNICATION] if kinds else []), *kinds, DEVICE, HOST, *python, LAUNCH, *sync]


def _kernel_times(cohorts: Sequence[Cohort]) -> Counter[str]:
    times: Counter[str] = Counter()
    for cohort in cohorts:
        works, names = cohort.program.works, cohort.program.names
        total = np.bincount(works.name, weights=cohort.timing.duration_ns.mean(axis=(1, 2)), minlength=len(names))
        times.update({name: ns for name, ns in zip(names, total.tolist(), strict=True) if ns})
    return times


def _op_names(programs: Sequence[Program]) -> Counter[str]:
    return Counter(program.names[row] for program in programs for row in program.ops.name.tolist())


def _sync_names(programs: Sequence[Program]) -> Counter[str]:
    names: Counter[str] = Counter()
    for program in programs:
        names.update(sync_name(program, call) for call in np.flatnonzero(synchronising(program)).tolist())
    return names


def sync_name(program: Program, call: int) -> str:
    """What a synchronisation is called: by the outermost op around it that is of a library, or else by its own name."""
    op, name = int(program.calls.op[call]), program.names[int(program.calls.api[call])]
    while op >= 0:
        called = program.names[int(program.ops.name[op])]
        if "::" in called and not called.startswith(_ENGINE):
            name = called
        op = int(program.ops.parent[op])
    return name


def _longest(times: Counter[str]) -> str:
    shown = [f"{_short(name)} ({ms(ns):.3f} ms)" for name, ns in times.most_common(_SHOWN)]
    return ", ".join(shown) + (f" and {len(times) - _SHOWN} more" if len(times) > _SHOWN else "")


def _most_common(names: Counter[str]) -> str:
    shown = [f"{_short(name)} ({count})" for name, count in names.most_common(_SHOWN)]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(shown) or "none") + more


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."
