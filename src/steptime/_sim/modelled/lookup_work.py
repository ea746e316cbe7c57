"""What the lookup ops of a program launch, from the statistics of what its rank looks up, or of what its shapes leave open.

Statistics come table by table in the order in which the program looks them up. Where nobody gave any, rows are taken as drawn
evenly, which is what costs most for a table of that size, and that is said.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from steptime._lookups.estimated import expected_statistics
from steptime._lookups.generators import Generator
from steptime._lookups.table import TableStatistics
from steptime._lookups.workload import DENSE, RankLookups, StepLookups
from steptime._models.estimate import Estimate
from steptime._models.kernels.from_ops import IssuedWork
from steptime._models.kernels.question import LaunchTime
from steptime._models.lookups.contention import Contention, MemoryUse, row_bytes
from steptime._models.lookups.fitted import LookupEstimate
from steptime._models.lookups.question import BACKWARD, EMBEDDING_BAG, FORWARD, TABLE_BATCHED, Lookup, rank_questions
from steptime._ops.catalogue import SPARSE_UPDATES
from steptime._ops.table import op_table
from steptime._platforms.device import Device, guess
from steptime._program.program import Phase, Program, Tensor
from steptime._units import dtype_bytes
from steptime.errors import InputError

# What an optimiser's ops on a sparse gradient launch, by the names the lookup models have for it. What else updates the rows
# (`update`) is made of ops on dense tensors, which are asked for as such.
_UPDATES = {SPARSE_UPDATES["sgd"]: ("add",), SPARSE_UPDATES["rowwise_adagrad"]: ("sort", "unique", "coalesce")}
_UPDATE_LAUNCHES = frozenset(("update", *(kernel for kernels in _UPDATES.values() for kernel in kernels)))
# Coalescing a gradient reads back how many rows are distinct (SparseCUDATensor.cu, unique_by_key), and the host waits for it.
_READ_BACK_AFTER = "unique"
_BACKWARD = re.compile("backward", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LookupOp:
    """The launches of one lookup op."""

    op: int
    direction: str
    launches: tuple[LaunchTime, ...]
    estimate: Estimate
    read_back: int = -1  # place of the launch of which the host waits for the end
    memory: MemoryUse | None = None  # where lookups on other shares of the GPU slow it, and it them


@dataclass(frozen=True, slots=True)
class LookupWork:
    """All lookups of a program."""

    ops: tuple[LookupOp, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """What a lookup takes, and where ranks share a memory, alone on it and what it takes of it."""

    lookup: LookupEstimate
    memory: MemoryUse | None = None


def lookup_answers(lookups: Sequence[Lookup], device: Device, *, strict: bool = False) -> list[LookupAnswer]:
    """What lookups take on a device. Where lookups on several shares of it were timed together: beside idle shares."""
    law = Contention.of(device.limits)
    if law is None:
        return [LookupAnswer(results) for results in device.lookup_estimates(lookups, strict=strict)]
    # Of other implementations nobody timed several together: as if all shares did the same.
    known = [lookup.implementation == TABLE_BATCHED for lookup in lookups]
    asked = [replace(lookup, others="idle") if item else lookup for lookup, item in zip(lookups, known, strict=True)]
    beside = [replace(lookup, others="streaming") for lookup in lookups if lookup.implementation == TABLE_BATCHED]
    answers = device.lookup_estimates([*asked, *beside], strict=strict)
    copies = iter(answers[len(asked) :])
    alone = zip(asked, answers, known, strict=False)
    uses = [_memory_use(law, lookup, answer, next(copies)) if item else None for lookup, answer, item in alone]
    return list(map(LookupAnswer, answers, uses))


def _memory_use(law: Contention, lookup: Lookup, alone: LookupEstimate, copies: LookupEstimate) -> MemoryUse:
    alone_ns, beside_ns = (np.array([item.estimate.time_ns]) for item in (alone, copies))
    moved = row_bytes(lookup.tables, lookup.direction, lookup.optimizer).sum(keepdims=True)
    taken = law.taken(lookup.direction, alone_ns, moved)
    return MemoryUse(float(taken[0]), float(law.slowed(alone_ns, beside_ns)[0]))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of the program's ops by what they do; an update belongs to the backward pass."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    update: tuple[int, ...]


@dataclass(frozen=True)
class RankQuestions:
    """What the lookups of one program ask, so that those of all ranks are asked at once."""

    program: Program
    issued: tuple[IssuedWork, ...] = ()
    rows: _Rows = field(default_factory=lambda: _Rows((), (), ()))
    given: RankLookups | None = None
    asked: tuple[Lookup, ...] = ()  # forward, then backward
    warnings: tuple[str, ...] = ()

    @property
    def lookups(self) -> int:
        """How many forward ops look up all tables once."""
        return len(self.asked) // 2

    def work(self, answers: Sequence[LookupAnswer], device: Device) -> LookupWork:
        """The launches, from the answers to `asked`."""
        if not self.issued:
            return LookupWork()
        if self.given is None:
            return _unknown(self.program, self.issued, device)
        result = _answered(self.program, self.rows, _left_to_optimizer(self.given, self.rows), answers)
        beyond = any(not item.estimate.inside for item in result)
        text = f"rank {self.program.rank}: lookups beyond what was measured on {device.limits.name} are extrapolated"
        return LookupWork(tuple(result), (*self.warnings, text) if beyond else self.warnings)


def lookup_questions(program: Program, issued: Sequence[IssuedWork], given: RankLookups | None) -> RankQuestions:
    """What to ask about a program's lookup ops, `issued`; `given` says what its rank looks up."""
    if not issued:
        return RankQuestions(program)
    rows = _rows(program, issued)
    warnings: tuple[str, ...] = ()
    if given is None:
        given = _from_shapes(program, rows)
        if given is None:
            return RankQuestions(program, tuple(issued), rows)
        warnings = (
            f"rank {program.rank}: what its {len(given.steps.tables)} tables are asked for is not known, taken as rows drawn "
            "evenly; skewed lookups are faster: give statistics with --lookups",
        )
    # The first iteration's statistics stand for a step.
    asked = (*rank_questions(given, FORWARD)[0], *rank_questions(given, BACKWARD)[0])
    result = RankQuestions(program, tuple(issued), rows, given, asked, warnings)
    if len(rows.forward) % result.lookups:
        raise InputError(
            f"{program.source or f'rank {program.rank}'}: {len(rows.forward)} lookups in a step, statistics of "
            f"{len(given.steps.tables)} tables looked up {'together' if result.lookups == 1 else 'one by one'}; "
            "give those of the same tables"
        )
    return result


def _rows(program: Program, issued: Sequence[IssuedWork]) -> _Rows:
    update = [work.op for work in issued if program.ops.phase[work.op] == Phase.OPTIMIZER]
    backward = [work.op for work in issued if _BACKWARD.search(work.name) and work.op not in update]
    forward = [work.op for work in issued if not _BACKWARD.search(work.name) and work.op not in update]
    return _Rows(tuple(forward), tuple(backward), tuple(update))


def _answered(program: Program, rows: _Rows, left: Sequence[frozenset[str]], answers: Sequence[LookupAnswer]) -> list[LookupOp]:
    expected = len(left)
    ahead, back = answers[: len(answers) // 2], answers[len(answers) // 2 :]
    results = [
        _part(op, FORWARD, ahead[index % expected], ahead[index % expected].lookup.launches)
        for index, op in enumerate(rows.forward)
    ]
    for op, table in zip(rows.backward, _tables_backward(program, rows, expected), strict=True):
        before = tuple(launch for launch in back[table].lookup.launches if launch.kernel not in left[table])
        results.append(_part(op, BACKWARD, back[table], before))
    # An optimiser goes through its tables in the order in which they were made.
    of_name: Counter[str] = Counter()
    for op in rows.update:
        name = program.names[int(program.ops.name[op])]
        table = of_name[name] % expected
        of_name[name] += 1
        kernels = _UPDATES.get(name, ())
        launches = tuple(launch for launch in back[table].lookup.launches if launch.kernel in kernels)
        results.append(_part(op, BACKWARD, back[table], launches))
    return results


def _left_to_optimizer(given: RankLookups, rows: _Rows) -> list[frozenset[str]]:
    """Per question, the launches that ops of the optimiser make after the backward pass: of gradients that are kept."""
    left = []
    for group in (given, *given.then):
        batched = group.implementation == TABLE_BATCHED
        kernels = _UPDATE_LAUNCHES if rows.update else frozenset()
        if group.optimizer == DENSE:
            kernels = frozenset() if batched else frozenset(("update",))
        left += [kernels] * (1 if batched else len(group.steps.tables))
    return left


def _part(op: int, direction: str, answer: LookupAnswer, launches: tuple[LaunchTime, ...]) -> LookupOp:
    """Some of the launches of a lookup, or all."""
    given = answer.lookup.estimate
    if launches == answer.lookup.launches:
        return LookupOp(op, direction, launches, given, _read_back(launches), answer.memory)
    share = sum(launch.time_ns for launch in launches) / given.time_ns if given.time_ns else 0.0
    estimate = Estimate(given.time_ns * share, given.low_ns * share, given.high_ns * share, given.source, given.inside)
    return LookupOp(op, direction, launches, estimate, _read_back(launches), answer.memory)


def _read_back(launches: tuple[LaunchTime, ...]) -> int:
    counted = [index for index, launch in enumerate(launches) if launch.kernel == _READ_BACK_AFTER]
    return counted[-1] if counted else -1


def _tables_backward(program: Program, rows: _Rows, expected: int) -> list[int]:
    """Which table each backward lookup is of: the one whose indices it was given; by order where that does not tell."""
    places = {storage: index % expected for index, op in enumerate(rows.forward) for storage in _index_storages(program, op)}
    results = []
    for index, op in enumerate(rows.backward):
        known = [places[storage] for storage in _index_storages(program, op) if storage in places]
        # Without identities: autograd goes back in the order in which it came.
        results.append(known[0] if known else (expected - 1 - index) % expected)
    return results


def _index_storages(program: Program, op: int) -> list[int]:
    return [
        tensor.storage for tensor in _tensors(program, op) if tensor.dtype in ("int64", "int32") and tensor.storage is not None
    ]


def _tensors(program: Program, op: int) -> tuple[Tensor, ...]:
    return op_table(program).arguments[op].inputs


def _from_shapes(program: Program, rows: _Rows) -> RankLookups | None:
    """Of `nn.EmbeddingBag`, whose weights and indices are arguments: evenly drawn rows. None where sizes are not recorded."""
    tables: list[TableStatistics] = []
    for op in rows.forward:
        tensors = _tensors(program, op)
        weights = [tensor for tensor in tensors if len(tensor.shape) == 2]
        vectors = [tensor for tensor in tensors if len(tensor.shape) == 1 and tensor.dtype in ("int64", "int32")]
        if not weights or len(vectors) < 2 or not vectors[1].numel:
            return None
        (count, dim), indices, batch = weights[0].shape, vectors[0].numel, vectors[1].numel
        generator = Generator(rows=count, pooling=indices / batch)
        tables.append(expected_statistics(generator, batch, dim, f"table{len(tables)}"))
    return RankLookups(EMBEDDING_BAG, "sgd", StepLookups((tuple(tables),))) if tables else None


def _unknown(program: Program, issued: Sequence[IssuedWork], device: Device) -> LookupWork:
    """Lookups of which the tables are not known: what they were given and what they make, moved once."""
    table, result = op_table(program), []
    for work in issued:
        arguments = table.arguments[work.op]
        every = arguments.inputs + arguments.outputs
        nbytes = sum(
            tensor.numel * dtype_bytes(tensor.dtype) for tensor in every if len(tensor.shape) == 1 or tensor in every[-1:]
        )
        estimate = guess(device.limits, 0.0, float(nbytes), "float32")
        direction = BACKWARD if _BACKWARD.search(work.name) else FORWARD
        result.append(LookupOp(work.op, direction, (LaunchTime(work.name, estimate.time_ns),), estimate))
    names = ", ".join(sorted({work.name for work in issued}))
    text = f"rank {program.rank}: the tables behind {names} are not recorded; give what is looked up with --lookups"
    return LookupWork(tuple(result), (text,))
