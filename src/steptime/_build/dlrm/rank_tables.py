"""All tables of one rank: in groups that one kernel looks up together, whole, in parts, or copies of what every rank has."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate

from steptime._build.dlrm.batched_tables import FbgemmOps, TableBatchedOps, table_batched_sizes
from steptime._build.dlrm.fused import FusedOptimizer
from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.tables import BagOps, LocalTable, NoTableOps, TableOps, sizes_of
from steptime._build.emit.gradients import ROWWISE_ADAGRAD, Optimizer, Reducer, divided_rows, mean_squares, step_of, zero_grad
from steptime._build.emit.layers import cat
from steptime._build.emit.tape import Tape
from steptime._build.emit.views import view
from steptime._lookups.workload import FBGEMM, TABLE_BATCHED, TOGETHER
from steptime._program.program import Tensor

_BATCHED: Mapping[str, type[TableBatchedOps] | type[FbgemmOps]] = {TABLE_BATCHED: TableBatchedOps, FBGEMM: FbgemmOps}


def groups_of(tables: Sequence[LocalTable]) -> list[tuple[LocalTable, ...]]:
    """Tables that one kernel looks up: of one type, weighted or not, with sequences of one length. In order of their first."""
    groups: dict[Hashable, list[LocalTable]] = {}
    for table in tables:
        groups.setdefault((table.dtype, table.weighted, table.sequence), []).append(table)
    return [tuple(group) for group in groups.values()]


def what_is_written(model: Dlrm, local: Sequence[LocalTable]) -> Hashable:
    """What the program of a rank depends on, of its tables: ranks for which it is equal do the same."""
    if model.lookup == TABLE_BATCHED:
        return tuple(table_batched_sizes(group) for group in groups_of(local))
    if model.lookup == FBGEMM or model.optimizer == "rowwise_adagrad":
        return tuple(local)
    return tuple((table.rows, table.dim, table.indices) for table in local)


def table_ops(tape: Tape, model: Dlrm, local: Sequence[LocalTable], ranks: int, rate: float) -> TableOps:
    """Of tables that this rank looks up for the samples of all ranks."""
    if not local:
        return NoTableOps(tape, model.batch, model.vector_dtype)
    if model.lookup in TOGETHER:
        batched = _BATCHED[model.lookup]
        groups = [
            _of_sequences(
                tape, batched(tape, group, model.batch, model.optimizer, vectors=model.vector_dtype), group, model.batch
            )
            for group in groups_of(local)
        ]
        return groups[0] if len(groups) == 1 else GroupedOps(tape, groups)
    adagrad = model.optimizer == "rowwise_adagrad"
    # Every rank's loss is a mean over its own samples, so that gradients of tables add up to so many times the mean's.
    # Adagrad divides by what the gradient was so far, and the factor with it.
    return BagOps(tape, local, model.batch, rate if adagrad else rate / ranks, adagrad=adagrad)


def _of_sequences(tape: Tape, ops: TableOps, group: Sequence[LocalTable], samples: int) -> TableOps:
    return SequenceOps(tape, ops, samples, sum(table.columns for table in group)) if group[0].sequence else ops


def copy_ops(tape: Tape, model: Dlrm, copied: Sequence[LocalTable], local_batch: int, rate: float) -> list[TableOps]:
    """Of tables that every rank has a copy of, group by group."""
    if model.fused and model.optimizer != "rowwise_adagrad":
        return [FusedCopyOps(tape, model, group, local_batch) for group in groups_of(copied)]
    return [CopyOps(tape, model, group, local_batch, rate) for group in groups_of(copied)]


class SequenceOps(TableOps):
    """Tables whose rows are not summed: all rows of a sample side by side."""

    def __init__(self, tape: Tape, rows: TableOps, samples: int, columns: int) -> None:
        self._tape, self._rows, self._shape = tape, rows, (samples, columns)

    def look_up(self) -> Tensor:
        """[samples, rows of a sample * summed dims]."""
        return view(self._tape, self._rows.look_up(), self._shape)

    def sort_ahead(self) -> None:
        """As the lookups have it."""
        self._rows.sort_ahead()


class GroupedOps(TableOps):
    """Tables that no one kernel looks up: group after group, their columns side by side, as TorchRec has them."""

    def __init__(self, tape: Tape, groups: Sequence[TableOps]) -> None:
        self._tape, self._groups = tape, groups

    def look_up(self) -> Tensor:
        """[global batch, summed columns]."""
        return cat(self._tape, [group.look_up() for group in self._groups])

    def sort_ahead(self) -> None:
        """Group after group."""
        for group in self._groups:
            group.sort_ahead()


class FusedCopyOps(TableOps):
    """The same beside fused layers: a gradient of all rows that is reduced where it lies, and one kernel that applies it."""

    def __init__(self, tape: Tape, model: Dlrm, tables: Sequence[LocalTable], local_batch: int) -> None:
        self._tape, self._number = tape, 0
        batched = _BATCHED[model.lookup]
        lookups = batched(tape, tables, local_batch, model.optimizer, dense=True, vectors=model.vector_dtype)
        (self._weights,) = lookups.parameters
        self._looked_up = _of_sequences(tape, lookups, tables, local_batch)
        self._optimizer = FusedOptimizer(tape.emit, model.optimizer)
        tape.hook(self._weights, self._ready)

    def look_up(self) -> Tensor:
        """Sums of looked-up rows of the rank's own samples, [local batch, summed dims]."""
        return self._looked_up.look_up()

    def sort_ahead(self) -> None:
        """As the lookups have it."""
        self._looked_up.sort_ahead()

    def _ready(self, gradient: Tensor) -> None:
        if self._tape.emit.world_size > 1:
            self._number = self._tape.emit.all_reduce((gradient,))

    def update(self) -> None:
        """The optimiser's step over the dense gradient."""
        if self._tape.emit.world_size > 1:
            self._tape.emit.wait(self._number)
        self._optimizer.step(self._weights, self._tape.gradients[self._weights.id or 0])


class CopyOps(TableOps):
    """Data-parallel tables: a copy on every rank, with dense gradients that DistributedDataParallel reduces.

    So does TorchRec (compute kernel `dense`). Lookups are those of the rank's own samples; the optimiser goes over all rows.
    """

    def __init__(self, tape: Tape, model: Dlrm, tables: Sequence[LocalTable], local_batch: int, rate: float) -> None:
        self._tape, self._tables, self._rate = tape, tables, rate
        self._together = model.lookup in TOGETHER
        self._lookups: TableBatchedOps | FbgemmOps | BagOps = (
            _BATCHED[model.lookup](tape, tables, local_batch, model.optimizer, dense=True, vectors=model.vector_dtype)
            if self._together
            else BagOps(tape, tables, local_batch, rate, adagrad=False, dense=True)
        )
        self._looked_up = _of_sequences(tape, self._lookups, tables, local_batch)
        adagrad = model.optimizer == "rowwise_adagrad"
        self._states = [tape.emit.tensor((table.rows,)) for table in tables] if adagrad else []
        self._optimizer = None if adagrad else Optimizer(tape.emit, model.optimizer, self._lookups.parameters, rate)
        self._reducer = Reducer(tape, self._lookups.parameters)

    def clear(self) -> None:
        """The optimiser drops the gradients of the step before."""
        if self._optimizer is None:
            zero_grad(self._tape.emit, ROWWISE_ADAGRAD)
        else:
            self._optimizer.zero_grad()

    def look_up(self) -> Tensor:
        """Sums of looked-up rows of the rank's own samples, [local batch, summed dims]."""
        with self._reducer.forward():
            return self._looked_up.look_up()

    def sort_ahead(self) -> None:
        """As the lookups have it."""
        self._looked_up.sort_ahead()

    def update(self) -> None:
        """The optimiser's step over dense gradients."""
        emit, parameters = self._tape.emit, self._lookups.parameters
        gradients = [self._tape.gradients[parameter.id or 0] for parameter in parameters]
        if self._optimizer is not None:
            self._optimizer.step(gradients)
            return
        with step_of(emit, ROWWISE_ADAGRAD):
            if self._together:
                parameters, gradients = self._rows(parameters[0]), self._rows(gradients[0])
            for weight, gradient, state in zip(parameters, gradients, self._states, strict=True):
                emit.op("add_", (state, mean_squares(emit, gradient), 1), (state,))
                divided = divided_rows(emit, gradient, emit.new("sqrt", (state,)))
                emit.op("add_", (weight, divided, -self._rate), (weight,))

    def _rows(self, flat: Tensor) -> list[Tensor]:
        """Every table as rows of its own; those of table-batched lookups lie behind each other."""
        starts = accumulate(sizes_of(self._tables), initial=0)
        pairs = zip(self._tables, starts, strict=False)
        return [self._tape.emit.view(flat, (table.rows, table.dim), offset=start) for table, start in pairs]
