"""Whether a program that was built or captured has the ops of one that was recorded, op by op.

Ops are put side by side by name, depth and phase; what one side has more is a difference of its own. Two ops are the same where
name, place, phase, thread and all arguments agree. Numbers by which tensors and storages go differ from one source to the
other, and a recording gives the number of freed memory to the next tensor: compared is whether the same memory is meant, since
it was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from steptime._models.kernels.from_ops import IssuedWork, questions_of
from steptime._models.kernels.question import Question
from steptime._program.program import Program, Signature, Tensor, Value

# Numbers that PyTorch writes with six decimals.
_FLOAT_AGREES = 1e-6


@dataclass(frozen=True, slots=True)
class Difference:
    """One op that is not the same, or is there on one side alone (row -1 on the other)."""

    captured: int  # row of the op in the program that was built or captured
    recorded: int
    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name} (op {self.captured} / recorded {self.recorded}): {self.what}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many ops of both programs are the same, of how many that either has."""

    equal: int
    total: int
    differences: tuple[Difference, ...] = ()

    @property
    def fraction(self) -> float:
        """Equal ones of all; 1 where there is nothing to compare."""
        return self.equal / self.total if self.total else 1.0


def same_ops(captured: Program, recorded: Program) -> Agreement:
    """All ops with names, nesting, phases, threads, arguments and the identity of memory."""
    ours, theirs = _Side(captured), _Side(recorded)
    identity = _Identity()
    differences: list[Difference] = []
    equal = total = 0
    partner: dict[int, int] = {-1: -1}
    for row, other in _side_by_side(ours.keys(), theirs.keys()):
        total += 1
        if row < 0 or other < 0:
            side, at = (ours, row) if other < 0 else (theirs, other)
            differences.append(Difference(row, other, side.names[at], _missing(captured=other < 0)))
            continue
        partner[row] = other
        found = [] if partner.get(ours.parents[row]) == theirs.parents[other] else ["inside another op"]
        found += _compare(ours, row, theirs, other, identity)
        equal += not found
        if found:
            differences.append(Difference(row, other, ours.names[row], "; ".join(found)))
    return Agreement(equal, total, tuple(differences))


def same_device_ops(captured: Program, recorded: Program, *, caches: bool = True) -> Agreement:
    """The ops that launch device work, in order: compute as kernel models are asked about it, the rest by its arguments.

    Without `caches`, what a question says of arguments that are in cache is left out: a recording gives the memory of freed
    tensors to the next ones, so that these count as just written.
    """
    ours, theirs = questions_of(captured), questions_of(recorded)
    sides = _Side(captured), _Side(recorded)
    differences: list[Difference] = []
    equal = total = 0
    for at, other in _side_by_side([_work_key(work) for work in ours], [_work_key(work) for work in theirs]):
        total += 1
        row = ours[at].op if at >= 0 else -1
        partner = theirs[other].op if other >= 0 else -1
        if at < 0 or other < 0:
            name = ours[at].name if other < 0 else theirs[other].name
            differences.append(Difference(row, partner, name, _missing(captured=other < 0)))
        elif found := _work_differs(ours[at], sides[0], theirs[other], sides[1], caches=caches):
            differences.append(Difference(row, partner, ours[at].name, found))
        else:
            equal += 1
    return Agreement(equal, total, tuple(differences))


def _missing(*, captured: bool) -> str:
    return "not in the recorded program" if captured else "only in the recorded program"


def _work_key(work: IssuedWork) -> tuple[str, str]:
    return work.kind, work.name


def _work_differs(one: IssuedWork, ours: _Side, other: IssuedWork, theirs: _Side, *, caches: bool) -> str:
    """What differs between two pieces of device work of one kind and name; empty where nothing does."""
    if one.question is not None and other.question is not None:
        same = one.question == other.question if caches else _cold(one.question) == _cold(other.question)
        return "" if same else f"asks {_asked(one)}, recorded {_asked(other)}"
    mine, recorded = ours.signatures[one.op], theirs.signatures[other.op]
    pairs = (("input", mine.inputs, recorded.inputs), ("output", mine.outputs, recorded.outputs))
    return "; ".join(text for pair in pairs for text in _values_differ(*pair))


def _cold(question: Question) -> Question:
    return replace(question, warm=False, call=replace(question.call, written=()))


def _asked(work: IssuedWork) -> str:
    return "nothing" if work.question is None else f"{work.question.call}{' warm' if work.question.warm else ''}"


class _Side:
    """The ops of one program, as they are compared."""

    def __init__(self, program: Program) -> None:
        ops = program.ops
        self.names = [program.names[name] for name in ops.name.tolist()]
        self.parents: list[int] = ops.parent.tolist()
        self.phases: list[int] = ops.phase.tolist()
        self.roles = [program.threads[thread].role for thread in ops.thread.tolist()]
        rows = ops.signature.tolist()
        self.signatures = [program.signatures[row] if row >= 0 else Signature() for row in rows]

    def keys(self) -> list[tuple[str, int, int]]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return list(zip(self.names, depths, self.phases, strict=True))


def _side_by_side(ours: Sequence[object], theirs: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Places of equal keys, in order; -1 where one side has nothing. A long common begin and end cost nothing."""
    shorter = min(len(ours), len(theirs))
    begin = next((at for at in range(shorter) if ours[at] != theirs[at]), shorter)
    end = next((at for at in range(shorter - begin) if ours[-1 - at] != theirs[-1 - at]), shorter - begin)
    yield from ((at, at) for at in range(begin))
    matcher = SequenceMatcher(None, ours[begin : len(ours) - end], theirs[begin : len(theirs) - end], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            yield from ((begin + i, begin + j) for i, j in zip(range(i1, i2), range(j1, j2), strict=True))
        else:
            yield from ((begin + i, -1) for i in range(i1, i2))
            yield from ((-1, begin + j) for j in range(j1, j2))
    yield from ((len(ours) - end + at, len(theirs) - end + at) for at in range(end))


def _compare(ours: _Side, row: int, theirs: _Side, other: int, identity: _Identity) -> list[str]:
    """What differs between two ops of one name."""
    found = []
    if ours.roles[row] != theirs.roles[other]:
        found.append(f"on thread {ours.roles[row]}, recorded on {theirs.roles[other]}")
    if ours.names[row].startswith("##"):  # a remark, whose text tells about the job and not the step
        return found
    mine, recorded = ours.signatures[row], theirs.signatures[other]
    found += _values_differ("input", mine.inputs, recorded.inputs)
    found += _values_differ("output", mine.outputs, recorded.outputs)
    if not found:
        found += identity.check(mine, recorded)
    return found


def _values_differ(side: str, ours: Sequence[Value], theirs: Sequence[Value]) -> list[str]:
    if len(ours) != len(theirs):
        return [f"{len(ours)} {side}s, recorded with {len(theirs)}"]
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [
        f"{side} {place} is {_said(one)}, recorded {_said(other)}" for place, (one, other) in pairs if not _same(one, other)
    ]


def _same(one: Value, other: Value) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _seen(one) == _seen(other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        # A collective's number counts from the begin of the process.
        if len(one) == len(other) == 2 and one[1] is other[1] is False and isinstance(one[0], int):
            return True
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= _FLOAT_AGREES * max(1.0, abs(one))
    return type(one) is type(other) and one == other


def _seen(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.strides, tensor.offset, tensor.device


def _said(value: Value) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)} strides {value.strides} offset {value.offset} on {value.device}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_said, value))})"
    return repr(value)


class _Identity:
    """Which storage of one program is which of the other, since it was made."""

    def __init__(self) -> None:
        self._theirs: dict[int, int] = {}
        self._ours: dict[int, int] = {}

    def check(self, ours: Signature, theirs: Signature) -> list[str]:
        """Whether two ops with alike arguments mean the same memory; what they make is the same from here on."""
        pairs = [*zip(_storages(ours.inputs), _storages(theirs.inputs), strict=True)]
        taken = {one for one, _ in pairs}, {other for _, other in pairs}
        wrong = [pair for pair in pairs if not self._means(*pair)]
        for one, other in zip(_storages(ours.outputs), _storages(theirs.outputs), strict=True):
            if one in taken[0] or other in taken[1]:
                wrong += [] if self._means(one, other) else [(one, other)]
            else:
                self._tie(one, other)
        return [f"memory {one} is not what was recorded as {other}" for one, other in dict.fromkeys(wrong)]

    def _means(self, one: int, other: int) -> bool:
        if one not in self._theirs and other not in self._ours:
            self._tie(one, other)
        return self._theirs.get(one) == other and self._ours.get(other) == one

    def _tie(self, one: int, other: int) -> None:
        self._theirs[one], self._ours[other] = other, one


def _storages(values: Sequence[Value]) -> Iterator[int]:
    """Storages of tensors with data on a device."""
    for value in values:
        if isinstance(value, Tensor):
            if value.numel and value.storage is not None and value.device != "cpu":
                yield value.storage
        elif isinstance(value, tuple):
            yield from _storages(value)
