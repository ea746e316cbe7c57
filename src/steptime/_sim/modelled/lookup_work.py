"""What the lookup ops of a program launch, from the statistics of what its rank looks up, or of what its shapes leave open.

Statistics come table by table in the order in which the program looks them up. Where nobody gave any, rows are taken as drawn
evenly, which is what costs most for a table of that size, and that is said.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from steptime._lookups.estimated import expected_statistics
from steptime._lookups.generators import Generator
from steptime._lookups.table import TableStatistics
from steptime._lookups.workload import DENSE, ITEM_BYTES, RankLookups
from steptime._models.estimate import Estimate, Source
from steptime._models.kernels.from_ops import IssuedWork
from steptime._models.kernels.question import LaunchTime
from steptime._models.lookups.contention import Contention, MemoryUse, row_bytes
from steptime._models.lookups.fbgemm import FbgemmLookup, lookups_in, optimizer_of
from steptime._models.lookups.fbgemm_kernels import fbgemm_estimate
from steptime._models.lookups.fitted import LookupEstimate
from steptime._models.lookups.question import (
    BACKWARD,
    EMBEDDING_BAG,
    FORWARD,
    TABLE_BATCHED,
    TOGETHER,
    Lookup,
    rank_questions,
)
from steptime._notices import Basis
from steptime._ops.catalogue import SPARSE_UPDATES
from steptime._ops.table import OpTable, is_sparse, op_table
from steptime._platforms.device import Device, guess
from steptime._program.program import Phase, Program, Tensor, Value
from steptime._sim.modelled.issue import DeviceWork, OpWork
from steptime._units import dtype_bytes
from steptime.errors import InputError

# What an optimiser's ops on a sparse gradient launch, by the names the lookup models have for it. What else updates the rows
# (`update`) is made of ops on dense tensors, which are asked for as such.
_UPDATES = {
    SPARSE_UPDATES["sgd"]: frozenset(("add",)),
    SPARSE_UPDATES["rowwise_adagrad"]: frozenset(("sort", "unique", "coalesce")),
}
_UPDATE_LAUNCHES = frozenset(("update", *(kernel for kernels in _UPDATES.values() for kernel in kernels)))
_OF_ALL_ROWS = frozenset(("update",))  # what ops of an optimiser do to all rows where a gradient is dense
_DENSE_BAG, _SPARSE_ROWS = "embedding_bag_dense", "embedding_sparse"
# Coalescing a gradient reads back how many rows are distinct (SparseCUDATensor.cu, unique_by_key), and the host waits for it; a
# dense gradient leaves the number on the device (EmbeddingBackwardKernel.cu; recorded steps in examples/dlrm_overlap4).
_COALESCE, _READ_BACK_AFTER = "coalesce", "unique"
# What a backward pass does with indices alone, where that is an op of its own beside other work: our kernel's, and FBGEMM's.
_OF_INDICES = frozenset(("linearize", "sort_prepare", "sort_passes", "gather", "sort", "runs"))
_INDICES = "Indices"
_INDEX_DTYPES = ("int64", "int32")
# PyTorch's nodes are named so; FBGEMM's are `torch::autograd::CppNode<SplitLookupFunction_*_Op>`.
_BACKWARD = re.compile("backward|CppNode", re.IGNORECASE)
# Places among the arguments of `embedding_bag` and `_embedding_bag`.
_SPARSE, _SAMPLE_WEIGHTS, _LAST_OFFSET = 5, 6, 7


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """What a lookup takes, and where ranks share a memory, alone on it and what it takes of it."""

    lookup: LookupEstimate
    memory: MemoryUse | None = None


def lookup_answers(lookups: Sequence[Lookup], device: Device, *, strict: bool = False) -> list[LookupAnswer]:
    """What lookups take on a device. Where lookups on several shares of it were timed together: beside idle shares."""
    law = Contention.of(device.limits)
    if law is None:
        return [LookupAnswer(estimate) for estimate in device.lookup_estimates(lookups, strict=strict)]
    # Of other implementations nobody timed several together: as if all shares did the same.
    timed = [lookup for lookup in lookups if lookup.implementation == TABLE_BATCHED]
    alone = [replace(lookup, others="idle") if lookup.implementation == TABLE_BATCHED else lookup for lookup in lookups]
    beside = [replace(lookup, others="streaming") for lookup in timed]
    estimates = device.lookup_estimates([*alone, *beside], strict=strict)
    others = iter(estimates[len(alone) :])
    return [
        LookupAnswer(estimate, _memory_use(law, lookup, estimate, next(others)))
        if lookup.implementation == TABLE_BATCHED
        else LookupAnswer(estimate)
        for lookup, estimate in zip(alone, estimates, strict=False)
    ]


def _memory_use(law: Contention, lookup: Lookup, alone: LookupEstimate, beside: LookupEstimate) -> MemoryUse:
    alone_ns, beside_ns = (np.array([answer.estimate.time_ns]) for answer in (alone, beside))
    moved = row_bytes(lookup.tables, lookup.direction, lookup.optimizer, lookup.dtype).sum(keepdims=True)
    taken = law.taken(lookup.direction, alone_ns, moved)
    return MemoryUse(float(taken[0]), float(law.slowed(alone_ns, beside_ns)[0]))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of the program's ops by what they do; an update belongs to the backward pass."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    update: tuple[int, ...]
    indices: tuple[int, ...] = ()  # sorted ahead, in the order of the lookups


@dataclass(frozen=True, slots=True)
class _Asked:
    """A lookup op, the place of the question that answers it, and which of the launches in that answer are its own."""

    op: int
    direction: str
    question: int
    kernels: frozenset[str] = frozenset()
    others: bool = True  # all launches but these, else these
    assumed: bool = False  # whether what is looked up is taken as drawn evenly, since nobody counted

    def work(self, answers: Sequence[LookupAnswer]) -> OpWork:
        """Its launches."""
        answer = answers[self.question]
        launches = tuple(launch for launch in answer.lookup.launches if (launch.kernel in self.kernels) != self.others)
        return _op_work(self.op, _group(self.direction, assumed=self.assumed), answer, launches)


@dataclass(frozen=True, slots=True)
class _OfFbgemm:
    """A lookup op of FBGEMM, or its backward node, by what its shapes tell."""

    op: int
    backward: bool
    lookup: FbgemmLookup

    def work(self, device: Device) -> OpWork:
        """Its kernels, by the device's data sheet."""
        answer = fbgemm_estimate(self.lookup, device.limits, backward=self.backward)
        return OpWork(self.op, answer.launches, answer.estimate, _group(BACKWARD if self.backward else FORWARD, assumed=True))


@dataclass(frozen=True)
class RankQuestions:
    """What the lookups of one program ask, so that those of all ranks are asked at once."""

    program: Program
    issued: tuple[IssuedWork, ...] = ()
    asked: tuple[_Asked, ...] = ()  # none where the sizes of tables are not known
    questions: tuple[Lookup, ...] = ()
    warnings: tuple[str, ...] = ()
    of_fbgemm: tuple[_OfFbgemm, ...] = ()

    def work(self, answers: Sequence[LookupAnswer], device: Device) -> DeviceWork:
        """The launches, from the answers to the questions."""
        batched = [each.work(device) for each in self.of_fbgemm]
        if self.issued and not self.asked:
            unknown = _unknown(self.program, self.issued, device)
            return DeviceWork((*batched, *unknown.works), (*self.warnings, *unknown.warnings))
        works = [*batched, *(each.work(answers) for each in self.asked)]
        beyond = any(not work.estimate.inside for work in works if work.estimate.source is not Source.ANALYTIC)
        text = Basis(f"lookups beyond what was measured on {device.limits.name}, extrapolated")
        warnings = (*self.warnings, text) if beyond else self.warnings
        return DeviceWork(tuple(work for work in works if work.launches), warnings)


def lookup_questions(program: Program, issued: Sequence[IssuedWork], statistics: RankLookups | None) -> RankQuestions:
    """What to ask about a program's lookup ops, `issued`; the statistics are of what its rank looks up."""
    if not issued:
        return RankQuestions(program)
    if statistics is None:
        of_fbgemm, problems = _of_fbgemm(program, issued)
        rest = [work for work in issued if work.op not in {each.op for each in of_fbgemm}]
        rows = _rows(program, rest)
        asked, questions = _from_arguments(program, rows)
        tables = max(len(rows.forward), len(rows.update)) + sum(each.lookup.tables for each in of_fbgemm if not each.backward)
        text = (
            f"rank {program.rank}: what its {tables} tables are asked for is not known, taken as rows drawn evenly; skewed "
            "lookups are faster: give statistics with --lookups"
        )
        warnings = (*problems, *((text,) if asked or of_fbgemm else ()))
        return RankQuestions(program, tuple(rest), asked, questions, warnings, of_fbgemm)
    rows = _rows(program, issued)
    # The first iteration's statistics stand for a step.
    forward, backward = (rank_questions(statistics, direction)[0] for direction in (FORWARD, BACKWARD))
    if len(rows.forward) % len(forward):
        raise InputError(
            f"{program.source or f'rank {program.rank}'}: {len(rows.forward)} lookups in a step, statistics of "
            f"{len(statistics.steps.tables)} tables looked up {'together' if len(forward) == 1 else 'one by one'}; "
            "give those of the same tables"
        )
    asked = tuple(_in_order(program, rows, _left_to_optimizer(statistics, rows)))
    return RankQuestions(program, tuple(issued), asked, (*forward, *backward))


def _of_fbgemm(program: Program, issued: Sequence[IssuedWork]) -> tuple[tuple[_OfFbgemm, ...], tuple[str, ...]]:
    """FBGEMM's lookups among these, by their shapes; and why there are none where they do not tell."""
    theirs = [work.op for work in issued if optimizer_of(work.name) is not None]
    if not theirs:
        return (), ()
    try:
        found = lookups_in(program)
    except InputError as error:
        return (), (f"rank {program.rank}: {error}",)
    names = {work.op: work.name for work in issued}
    return tuple(_OfFbgemm(op, _BACKWARD.search(names[op]) is not None, found[op]) for op in theirs if op in found), ()


def _rows(program: Program, issued: Sequence[IssuedWork]) -> _Rows:
    update = [work.op for work in issued if work.name in _UPDATES or program.ops.phase[work.op] == Phase.OPTIMIZER]
    indices = [work.op for work in issued if work.name.endswith(_INDICES)]
    passes = [work for work in issued if work.op not in {*update, *indices}]
    backward = [work.op for work in passes if _BACKWARD.search(work.name)]
    forward = [work.op for work in passes if not _BACKWARD.search(work.name)]
    return _Rows(tuple(forward), tuple(backward), tuple(update), tuple(indices))


def _in_order(program: Program, rows: _Rows, left: Sequence[frozenset[str]]) -> Iterator[_Asked]:
    """Ops of tables of which statistics are given, in the order in which they are looked up: forward, then backward."""
    expected = len(left)
    for index, op in enumerate(rows.forward):
        yield _Asked(op, FORWARD, index % expected)
    for index, op in enumerate(rows.indices):
        yield _Asked(op, BACKWARD, expected + index % expected, _OF_INDICES, others=False)
    for op, table in zip(rows.backward, _tables_backward(program, rows, expected), strict=True):
        yield _Asked(op, BACKWARD, expected + table, left[table])
    # An optimiser goes through its tables in the order in which they were made.
    of_name: Counter[str] = Counter()
    for op in rows.update:
        name = program.names[int(program.ops.name[op])]
        yield _Asked(op, BACKWARD, expected + of_name[name] % expected, _UPDATES.get(name, frozenset()), others=False)
        of_name[name] += 1


def _left_to_optimizer(statistics: RankLookups, rows: _Rows) -> list[frozenset[str]]:
    """Per question, the launches that ops of the optimiser make after the backward pass: of gradients that are kept."""
    left = []
    for group in (statistics, *statistics.then):
        batched = group.implementation in TOGETHER
        kernels = _UPDATE_LAUNCHES if rows.update else frozenset()
        if group.optimizer == DENSE:
            kernels = frozenset() if batched else _OF_ALL_ROWS
        if batched and rows.indices:
            kernels |= _OF_INDICES
        left += [kernels] * (1 if batched else len(group.steps.tables))
    return left


def _group(direction: str, *, assumed: bool) -> str:
    """Lookups that err together; those of rows that nobody counted are not as sure as what whole steps were measured of."""
    return f"{'assumed ' if assumed else ''}lookup {direction}"


def _op_work(op: int, group: str, answer: LookupAnswer, launches: tuple[LaunchTime, ...]) -> OpWork:
    """Some of the launches of a lookup, or all."""
    estimate = answer.lookup.estimate
    if launches != answer.lookup.launches:
        time_ns = sum(launch.time_ns for launch in launches)
        estimate = scaled(estimate, time_ns / estimate.time_ns if estimate.time_ns else 0.0)
    coalesces = any(launch.kernel == _COALESCE for launch in launches)
    counted = [index for index, launch in enumerate(launches) if coalesces and launch.kernel == _READ_BACK_AFTER]
    return OpWork(op, launches, estimate, group, counted[-1] if counted else -1, answer.memory)


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """So many times the estimate, as sure as it is."""
    low_ns, high_ns = estimate.low_ns * factor, estimate.high_ns * factor
    return Estimate(estimate.time_ns * factor, low_ns, high_ns, estimate.source, estimate.inside)


def _tables_backward(program: Program, rows: _Rows, expected: int) -> list[int]:
    """Which table each backward lookup is of: the one whose indices it was given; by order where that does not tell."""
    tables = {storage: index % expected for index, op in enumerate(rows.forward) for storage in _index_storages(program, op)}
    results = []
    for index, op in enumerate(rows.backward):
        known = [tables[storage] for storage in _index_storages(program, op) if storage in tables]
        # Without identities: autograd goes back in the order in which it came.
        results.append(known[0] if known else (expected - 1 - index) % expected)
    return results


def _index_storages(program: Program, op: int) -> list[int]:
    inputs = op_table(program).arguments[op].inputs
    return [tensor.storage for tensor in inputs if tensor.dtype in _INDEX_DTYPES and tensor.storage is not None]


def _from_arguments(program: Program, rows: _Rows) -> tuple[tuple[_Asked, ...], tuple[Lookup, ...]]:
    """Of `nn.EmbeddingBag` and of sparse gradients, whose sizes are among the arguments: evenly drawn rows.

    Nothing where sizes are not recorded.
    """
    table, asked = op_table(program), []
    questions: list[Lookup] = []
    bags = [_bags(table.signatures[op].inputs) for op in rows.forward]
    summed = any(program.names[int(program.ops.name[op])] == SPARSE_UPDATES["rowwise_adagrad"] for op in rows.update)
    for op, bag in zip(rows.forward, bags, strict=True):
        if bag is None:
            return (), ()
        asked.append(_Asked(op, FORWARD, len(questions), assumed=True))
        questions.append(bag)
    for op, number in zip(rows.backward, _tables_backward(program, rows, max(1, len(bags))), strict=True):
        looked_up = bags[number] if bags else None
        if looked_up is None:
            return (), ()
        dense = looked_up.implementation == _DENSE_BAG
        asked.append(_Asked(op, BACKWARD, len(questions), _OF_ALL_ROWS if dense else _UPDATE_LAUNCHES, assumed=True))
        questions.append(replace(looked_up, direction=BACKWARD, optimizer=_optimizer(summed=summed and not dense)))
    for op in rows.update:
        gradient = _gradient(table, op)
        if gradient is None:
            return (), ()
        name = table.names[op]
        asked.append(_Asked(op, BACKWARD, len(questions), _UPDATES.get(name, frozenset()), others=False, assumed=True))
        optimizer = _optimizer(summed=name == SPARSE_UPDATES["rowwise_adagrad"])
        implementation = EMBEDDING_BAG if bags else _SPARSE_ROWS
        questions.append(Lookup(implementation, BACKWARD, (gradient[0],), optimizer, gradient[1]))
    return tuple(asked), tuple(questions)


def _optimizer(*, summed: bool) -> str:
    """Whose launches a sparse gradient makes: rows are added as they are, or equal ones summed before."""
    return "rowwise_adagrad" if summed else "sgd"


def _bags(values: Sequence[Value]) -> Lookup | None:
    """An `nn.EmbeddingBag` as it is called: rows and columns of its table, bags, lookups. None where they are not recorded."""
    weights = [value for value in values if isinstance(value, Tensor) and len(value.shape) == 2 and value.numel]
    vectors = [value for value in values if isinstance(value, Tensor) and value.dtype in _INDEX_DTYPES]
    if not weights or len(vectors) < 2 or any(len(vector.shape) != 1 for vector in vectors[:2]):
        return None
    sparse, weighted, last_included = (
        values[place] if place < len(values) else None for place in (_SPARSE, _SAMPLE_WEIGHTS, _LAST_OFFSET)
    )
    batch = vectors[1].numel - bool(last_included)
    if batch < 1 or weights[0].dtype not in ITEM_BYTES:
        return None
    (count, dim), indices = weights[0].shape, vectors[0].numel
    statistics = expected_statistics(Generator(rows=count, pooling=indices / batch), batch, dim)
    implementation = _DENSE_BAG if sparse is False else EMBEDDING_BAG
    return Lookup(implementation, FORWARD, (statistics,), dtype=weights[0].dtype, weighted=isinstance(weighted, Tensor))


def _gradient(table: OpTable, op: int) -> tuple[TableStatistics, str] | None:
    """Evenly drawn rows as many as a sparse gradient has, and the type of its rows; None where that is not recorded."""
    sparse = next((tensor for tensor in table.arguments[op].inputs if is_sparse(tensor)), None)
    inside = range(op + 1, table.last[op] + 1)
    parts = (tensor for row in inside if table.kinds[row].sparse_part for tensor in table.arguments[row].outputs)
    values = next((tensor for tensor in parts if tensor.dtype in ITEM_BYTES and len(tensor.shape) == 2), None)
    if sparse is None or values is None or not values.shape[0] or len(sparse.shape) != 2:
        return None
    generator = Generator(rows=sparse.shape[0], pooling=1.0)
    return expected_statistics(generator, values.shape[0], sparse.shape[1]), values.dtype


def _unknown(program: Program, issued: Sequence[IssuedWork], device: Device) -> DeviceWork:
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
        result.append(OpWork(work.op, (LaunchTime(work.name, estimate.time_ns),), estimate, _group(direction, assumed=True)))
    names = ", ".join(sorted({work.name for work in issued}))
    text = f"rank {program.rank}: the tables behind {names} are not recorded; give what is looked up with --lookups"
    return DeviceWork(tuple(result), (text,))
