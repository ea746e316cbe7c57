"""`rank_program`: one training step of one rank of a DLRM, as PyTorch records it on a GPU, from the model alone.

The step is that of `steptime_lab.workloads.networks.dlrm`: tables sharded by a plan, all_to_all both ways, both MLPs wrapped by
DistributedDataParallel where there are several ranks, fp32. Tables that every rank has a share or a copy of are looked up after
these, in the order in which TorchRec's `ShardedEmbeddingBagCollection.compute_and_output_dist` goes through its groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from steptime._build.dlrm.bags import BagOps, LocalTable
from steptime._build.dlrm.exchange import ColumnExchangeOps, InteractionOps, RowExchangeOps
from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.tables import CopyOps, NoTableOps, TableBatchedOps, TableOps, table_batched_sizes
from steptime._build.emit.ddp import Reducer
from steptime._build.emit.emitter import Emitter
from steptime._build.emit.layers import activation, linear
from steptime._build.emit.losses import binary_cross_entropy, mse_loss
from steptime._build.emit.optimizers import sgd, step_of, zero_grad
from steptime._build.emit.tape import Tape
from steptime._build.emit.tensors import same_dtype
from steptime._program.program import Program, Tensor

LEARNING_RATE = 1e-6
"""Of `steptime_lab.workloads.networks.dlrm`; times do not depend on it."""


@dataclass(frozen=True, slots=True)
class LocalTables:
    """What one rank looks up, by how the tables are divided."""

    sharded: tuple[LocalTable, ...]  # whole tables and slices of columns of this rank
    row_wise: tuple[LocalTable, ...] = ()  # its shares of tables that are divided by rows
    copied: tuple[LocalTable, ...] = ()  # its copies of tables, for its own samples


# Steps that are kept, each with what was derived from it: one model is predicted on many platforms, or under many calibrations.
_KEPT = 16


@lru_cache(maxsize=_KEPT)
def rank_program(model: Dlrm, local: LocalTables, widths: tuple[int, ...], rank: int) -> Program:
    """The step of a rank with these tables; `widths` are the columns (summed dims) of every rank's sharded tables."""
    emit = Emitter(rank=rank, world_size=len(widths), source=model.name)
    _Step(Tape(emit), model, local, widths).write()
    return emit.program()


def what_is_written(model: Dlrm, local: Sequence[LocalTable]) -> Hashable:
    """What the program of a rank depends on, of its tables: ranks for which it is equal do the same."""
    if model.lookup == "table_batched":
        return table_batched_sizes(local)
    if model.optimizer == "rowwise_adagrad":
        return tuple(local)
    return tuple((table.rows, table.dim, table.indices) for table in local)


class _Step:
    def __init__(self, tape: Tape, model: Dlrm, local: LocalTables, widths: Sequence[int]) -> None:
        emit, ranks = tape.emit, len(widths)
        self._tape, self._model = tape, model
        self._samples = model.batch // ranks
        self._tables = _tables(tape, model, local.sharded, ranks) if any(widths) else None
        self._row_wise = _tables(tape, model, local.row_wise, ranks) if local.row_wise else None
        self._copies = CopyOps(tape, model, local.copied, self._samples, LEARNING_RATE) if local.copied else None
        several = ranks > 1
        self._exchange = ColumnExchangeOps(tape, widths, self._samples) if self._tables and several else None
        self._row_exchange = RowExchangeOps(tape, self._samples) if self._row_wise and several else None
        self._interact = InteractionOps(tape, dot=model.interaction == "dot", tables=len(model.tables), dim=model.bottom[-1])
        self._bottom = _Mlp(tape, (model.dense_features, *model.bottom), last_is_linear=False)
        self._top = _Mlp(tape, (top_width(model), *model.top), last_is_linear=True)
        self._inputs = emit.tensor((self._samples, model.dense_features))
        self._labels = emit.tensor((self._samples, 1))

    def write(self) -> None:
        emit = self._tape.emit
        zero_grad(emit)
        sharded = [tables for tables in (self._tables, self._row_wise) if tables is not None]
        for tables in sharded:
            tables.clear()
        prediction = activation(self._tape, "sigmoid", self._top(self._interact(*self._lookups_and_bottom())))
        # Under autocast the prediction would be cast here; in fp32 it is not.
        same_dtype(emit, prediction, node=True)
        loss = (mse_loss if self._model.loss == "mse" else binary_cross_entropy)(self._tape, prediction, self._labels)
        self._tape.backward(loss)
        parameters = [*self._bottom.parameters, *self._top.parameters]
        with step_of(emit):
            sgd(emit, parameters, [self._tape.gradients[parameter.id or 0] for parameter in parameters], LEARNING_RATE)
        if self._copies is not None:
            self._copies.update()
        for tables in sharded:
            tables.update()

    def _lookups_and_bottom(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The bottom MLP while rows are exchanged; what it meets then: columns of ranks, sums of rows, and of copies."""
        pooled = None if self._tables is None else self._tables.look_up()
        received = pooled if pooled is None or self._exchange is None else self._exchange.start(pooled)
        partial_sums = None if self._row_wise is None else self._row_wise.look_up()
        summed = partial_sums if partial_sums is None or self._row_exchange is None else self._row_exchange.start(partial_sums)
        copied = None if self._copies is None else self._copies.look_up()
        dense = self._bottom(self._inputs)
        blocks: tuple[Tensor, ...] = ()
        if received is not None:
            blocks = (received,) if self._exchange is None else self._exchange.finish(received)
        if summed is not None:
            blocks = (*blocks, summed if self._row_exchange is None else self._row_exchange.finish(summed))
        return dense, blocks if copied is None else (*blocks, copied)


class _Mlp:
    """Linear layers with a ReLU between, and after the last unless told."""

    def __init__(self, tape: Tape, widths: Sequence[int], *, last_is_linear: bool) -> None:
        self._tape, self._last_is_linear = tape, last_is_linear
        self._layers = [
            (tape.parameter(tape.emit.tensor((after, before))), tape.parameter(tape.emit.tensor((after,))))
            for before, after in pairwise(widths)
        ]
        self.parameters = [parameter for layer in self._layers for parameter in layer]
        self._reducer = Reducer(tape, self.parameters)

    def __call__(self, x: Tensor) -> Tensor:
        with self._reducer.forward():
            for number, (weight, bias) in enumerate(self._layers):
                x = linear(self._tape, x, weight, bias)
                if not self._last_is_linear or number + 1 < len(self._layers):
                    x = activation(self._tape, "relu", x)
        return x


def top_width(model: Dlrm) -> int:
    """Columns that the top MLP sees."""
    if model.interaction == "dot":
        vectors = len(model.tables) + 1
        return model.bottom[-1] + vectors * (vectors - 1) // 2
    return model.bottom[-1] + sum(table.dim for table in model.tables)


def parameter_count(model: Dlrm) -> int:
    """Weights and biases of both MLPs, and all rows of all tables."""
    widths = (model.dense_features, *model.bottom), (top_width(model), *model.top)
    dense = sum((before + 1) * after for mlp in widths for before, after in pairwise(mlp))
    return dense + sum(table.rows * table.dim for table in model.tables)


def _tables(tape: Tape, model: Dlrm, local: Sequence[LocalTable], ranks: int) -> TableOps:
    if not local:
        return NoTableOps(tape, model.batch)
    adagrad = model.optimizer == "rowwise_adagrad"
    if model.lookup == "table_batched":
        return TableBatchedOps(tape, local, model.batch, adagrad=adagrad)
    # Every rank's loss is a mean over its own samples, so that gradients of tables add up to so many times the mean's.
    # Adagrad divides by what the gradient was so far, and the factor with it.
    return BagOps(tape, local, model.batch, LEARNING_RATE if adagrad else LEARNING_RATE / ranks, adagrad=adagrad)
