"""`rank_program`: one training step of one rank of a DLRM, as PyTorch records it on a GPU, from the model alone.

The step is that of `steptime_lab.workloads.networks.dlrm`: tables sharded by a plan, all_to_all both ways, both MLPs wrapped by
DistributedDataParallel where there are several ranks, fp32. Tables that every rank has a share or a copy of are looked up after
these, in the order in which TorchRec's `ShardedEmbeddingBagCollection.compute_and_output_dist` goes through its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from steptime._build.dlrm.batched_tables import SORTING
from steptime._build.dlrm.exchanges import ColumnExchangeOps, NodeExchangeOps, Nodes, RowExchangeOps
from steptime._build.dlrm.fused import FusedDense
from steptime._build.dlrm.model import AUTOCAST, Dlrm
from steptime._build.dlrm.rank_tables import copy_ops, table_ops
from steptime._build.dlrm.tables import LocalTable, NoTableOps, TableOps
from steptime._build.emit.emitter import CONTIGUOUS, Emitter
from steptime._build.emit.gradients import Optimizer, Reducer
from steptime._build.emit.layers import activation, add, bmm, cat, linear, mul
from steptime._build.emit.losses import binary_cross_entropy, mse_loss
from steptime._build.emit.scaling import LossScaler
from steptime._build.emit.tape import Tape
from steptime._build.emit.views import to_dtype, transpose, view
from steptime._build.emit.writer import GROUP, is_contiguous, strides_of
from steptime._program.program import CUDA_GRAPH, Program, Tensor

LEARNING_RATE = 1e-6
"""Of `steptime_lab.workloads.networks.dlrm`; times do not depend on it."""


@dataclass(frozen=True, slots=True)
class LocalTables:
    """What one rank looks up, by how the tables are divided."""

    sharded: tuple[LocalTable, ...]  # whole tables and slices of columns of this rank
    row_wise: tuple[LocalTable, ...] = ()  # its shares of tables that are divided by rows
    copied: tuple[LocalTable, ...] = ()  # its copies of tables, for its own samples
    by_node: tuple[LocalTable, ...] = ()  # its shares of tables whose rows the ranks of its node share


_AHEAD = 1  # the stream of lookups for the next batch

# Steps that are kept, each with what was derived from it: one model is predicted on many platforms, or under many calibrations.
_KEPT = 16


@lru_cache(maxsize=_KEPT)
def rank_program(model: Dlrm, local: LocalTables, widths: tuple[int, ...], rank: int, nodes: Nodes | None = None) -> Program:
    """The step of a rank with these tables; `widths` are the columns (summed dims) of every rank's sharded tables.

    `nodes`: where the ranks of nodes share rows.
    """
    groups = None if nodes is None else {GROUP: tuple(range(len(widths))), **nodes.groups(rank)}
    emit = Emitter(rank=rank, world_size=len(widths), source=model.name, groups=groups, tf32=model.precision == "tf32")
    _Step(Tape(emit, AUTOCAST.get(model.precision, "")), model, local, widths, nodes).write()
    written = emit.program()
    return replace(written, meta={**written.meta, CUDA_GRAPH: True}) if model.cuda_graph else written


class _Step:
    def __init__(self, tape: Tape, model: Dlrm, local: LocalTables, widths: Sequence[int], nodes: Nodes | None) -> None:
        emit, ranks = tape.emit, len(widths)
        self._tape, self._model = tape, model
        self._late_waits: list[tuple[int, str]] = []  # collectives and their groups
        samples, sent = model.batch // ranks, model.sent_dtype
        self._sharded: list[tuple[TableOps, ColumnExchangeOps | RowExchangeOps | NodeExchangeOps | None]] = []
        if any(widths):
            exchange = ColumnExchangeOps(tape, widths, samples, sent) if ranks > 1 else None
            self._sharded.append((table_ops(tape, model, local.sharded, ranks, LEARNING_RATE), exchange))
        if nodes is not None:
            held, own = local.by_node, model.batch // nodes.per_node  # a node without such a table has nothing to add
            shares = table_ops(tape, model, held, ranks, LEARNING_RATE) if held else NoTableOps(tape, own, model.vector_dtype)
            self._sharded.append((shares, NodeExchangeOps(tape, nodes, samples, sent)))
        if local.row_wise:
            row_exchange = RowExchangeOps(tape, samples, sent) if ranks > 1 else None
            self._sharded.append((table_ops(tape, model, local.row_wise, ranks, LEARNING_RATE), row_exchange))
        self._copies = copy_ops(tape, model, local.copied, samples, LEARNING_RATE)
        self._interact = InteractionOps(tape, dot=model.interaction == "dot", tables=_vectors(model), dim=model.bottom[-1])
        self._dense = FusedDense(tape, model, top_width(model)) if model.fused else _Dense(tape, model)
        self._inputs = emit.tensor((samples, model.dense_features), model.vector_dtype)
        self._labels = emit.tensor((samples, 1))

    def write(self) -> None:
        emit, tape = self._tape.emit, self._tape
        self._dense.clear()
        prediction = activation(tape, "sigmoid", self._dense.top(self._interact(*self._bottom_and_lookups())))
        if tape.autocast or self._model.fused:
            prediction = to_dtype(tape, prediction, "float32")
        else:
            emit.same_dtype(prediction, node=True)
        loss = (mse_loss if self._model.loss == "mse" else binary_cross_entropy)(tape, prediction, self._labels)
        scaler = LossScaler(tape) if tape.autocast == "float16" else None
        tape.backward(loss if scaler is None else scaler.scaled(loss))
        self._dense.update(scaler)
        for tables in (*self._copies, *(sharded for sharded, _ in self._sharded)):
            tables.update()
        for number, group in self._late_waits:
            emit.wait(number, group)

    def _bottom_and_lookups(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The bottom MLP while rows are exchanged; what it meets then: columns of ranks, sums of rows, and of copies."""
        if self._model.prefetch == "lookups":
            blocks, copied = self._looked_up_ahead(), self._look_up_copies()
            return self._dense.bottom(self._inputs), (*blocks, *copied)
        started, copied = self._start(), self._look_up_copies()
        if self._model.presorted:
            self._sort_ahead()
        dense = self._dense.bottom(self._inputs)
        return dense, (*self._finish(started), *copied)

    def _start(self) -> list[Tensor]:
        """Lookups in tables that ranks share, and what they send on its way."""
        started = []
        for tables, exchange in self._sharded:
            tables.clear()
            pooled = tables.look_up()
            started.append(pooled if exchange is None else exchange.start(pooled))
        return started

    def _finish(self, started: Sequence[Tensor]) -> tuple[Tensor, ...]:
        blocks: list[Tensor] = []
        for (_, exchange), tensor in zip(self._sharded, started, strict=True):
            blocks += [tensor] if exchange is None else exchange.finish(tensor)
        return tuple(blocks)

    def _look_up_copies(self) -> list[Tensor]:
        copied = []
        for copies in self._copies:
            copies.clear()
            copied.append(copies.look_up())
        return copied

    def _sort_ahead(self) -> None:
        """In the order of the lookups, on a stream of its own, while the dense layers run."""
        with self._tape.emit.on_stream(SORTING):
            for tables in (*(sharded for sharded, _ in self._sharded), *self._copies):
                tables.sort_ahead()

    def _looked_up_ahead(self) -> tuple[Tensor, ...]:
        """What the step before looked up and sent for this batch; the same for the next one begins on a stream of its own.

        To wait for a collective of the step before where a step begins is to wait for this step's where it ends, so that these
        waits stand there.
        """
        emit = self._tape.emit
        emit.follow(0, _AHEAD)
        first, emit.muted = emit.collectives, True
        started = self._start()
        emit.muted = False
        with emit.waits_put_off() as waits:
            blocks = self._finish(started)
        since = emit.collectives - first
        with emit.on_stream(_AHEAD):
            self._start()
        self._late_waits = [(number + since, group) for number, group in waits]
        return blocks


class _Dense:
    """Both MLPs with the cross layers, as PyTorch runs them op by op, and their optimiser."""

    def __init__(self, tape: Tape, model: Dlrm) -> None:
        self.bottom = _Mlp(tape, (model.dense_features, *model.bottom), last_is_linear=False)
        cross = _Cross(tape, top_width(model), model.cross_layers, model.cross_rank) if model.interaction == "dcnv2" else None
        self.top = _Mlp(tape, (top_width(model), *model.top), last_is_linear=True, cross=cross)
        self._tape, self._parameters = tape, (*self.bottom.parameters, *self.top.parameters)
        self._optimizer = Optimizer(tape.emit, model.dense_optimizer, self._parameters, LEARNING_RATE)

    def clear(self) -> None:
        """The optimiser lets go of the gradients."""
        self._optimizer.zero_grad()

    def update(self, scaler: LossScaler | None) -> None:
        """The optimiser's step."""
        gradients = [self._tape.gradients[parameter.id or 0] for parameter in self._parameters]
        if scaler is None:
            self._optimizer.step(gradients)
        else:
            scaler.step(self._optimizer, gradients)


class _Cross:
    """DCN v2's interaction, x -> x0 * (W (V x) + b) + x layer by layer, as TorchRec's `LowRankCrossNet`; full rank has no V."""

    def __init__(self, tape: Tape, width: int, layers: int, rank: int | None) -> None:
        def weights(*shape: int) -> list[Tensor]:
            return [tape.parameter(tape.emit.tensor(shape)) for _ in range(layers)]

        self._tape = tape
        self._narrow = [] if rank is None else weights(rank, width)
        self._wide, self._biases = weights(width, rank or width), weights(width)
        self.parameters = [*self._narrow, *self._wide, *self._biases]

    def __call__(self, x: Tensor) -> Tensor:
        tape, first = self._tape, x
        for layer, (wide, bias) in enumerate(zip(self._wide, self._biases, strict=True)):
            inner = linear(tape, x, self._narrow[layer]) if self._narrow else x
            x = add(tape, mul(tape, first, add(tape, linear(tape, inner, wide), bias)), x)
        return x


class _Mlp:
    """Linear layers with a ReLU between, and after the last unless told; cross layers before them where there are some."""

    def __init__(self, tape: Tape, widths: Sequence[int], *, last_is_linear: bool, cross: _Cross | None = None) -> None:
        self._tape, self._last_is_linear, self._cross = tape, last_is_linear, cross
        self._layers = [
            (tape.parameter(tape.emit.tensor((after, before))), tape.parameter(tape.emit.tensor((after,))))
            for before, after in pairwise(widths)
        ]
        self.parameters = [parameter for layer in self._layers for parameter in layer]
        if cross is not None:
            self.parameters = [*cross.parameters, *self.parameters]
        self._reducer = Reducer(tape, self.parameters)

    def __call__(self, x: Tensor) -> Tensor:
        with self._reducer.forward():
            if self._cross is not None:
                x = self._cross(x)
            for number, (weight, bias) in enumerate(self._layers):
                x = linear(self._tape, x, weight, bias)
                if not self._last_is_linear or number + 1 < len(self._layers):
                    x = activation(self._tape, "relu", x)
        return x


def _vectors(model: Dlrm) -> int:
    """That tables give the interaction: every row of a sequence is one."""
    return sum(table.sequence or 1 for table in model.tables)


def top_width(model: Dlrm) -> int:
    """Columns that the top MLP sees."""
    if model.interaction == "dot":
        vectors = _vectors(model) + 1
        return model.bottom[-1] + vectors * (vectors - 1) // 2
    return model.bottom[-1] + sum(table.columns for table in model.tables)


def parameter_count(model: Dlrm) -> int:
    """Weights and biases of both MLPs and of cross layers, and all rows of all tables."""
    widths = (model.dense_features, *model.bottom), (top_width(model), *model.top)
    dense = sum((before + 1) * after for mlp in widths for before, after in pairwise(mlp))
    if model.interaction == "dcnv2":
        width = top_width(model)
        dense += model.cross_layers * width * (1 + (width if model.cross_rank is None else 2 * model.cross_rank))
    return dense + sum(table.rows * table.dim for table in model.tables)


class InteractionOps:
    """How the bottom MLP meets the lookups: side by side, or all pairwise dot products.

    `dot` interactions index the lower triangle of the products by two rows of one tensor, made before the step.
    """

    def __init__(self, tape: Tape, *, dot: bool, tables: int, dim: int) -> None:
        self._tape, self._dot, self._dim, self._vectors = tape, dot, dim, tables + 1
        pairs = self._vectors * (self._vectors - 1) // 2
        below = tape.emit.tensor((2, pairs), "int64")
        self._rows, self._columns = (tape.emit.view(below, (pairs,), offset=row * pairs) for row in (0, 1))

    def __call__(self, dense: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """What the top MLP sees, [local batch, width]."""
        tape = self._tape
        side_by_side = cat(tape, (dense, *blocks))
        if not self._dot:
            return side_by_side
        samples = side_by_side.shape[0]
        vectors = view(tape, side_by_side, (samples, self._vectors, self._dim), (samples, -1, self._dim))
        products = bmm(tape, vectors, transpose(tape, vectors, 1, 2))
        return cat(tape, (dense, self._lower_triangle(products)))

    def _lower_triangle(self, products: Tensor) -> Tensor:
        emit, (pairs,) = self._tape.emit, self._rows.shape
        indices = (None, self._rows, self._columns)
        picked = emit.tensor((products.shape[0], pairs), products.dtype)
        with emit.op("index", (products, indices), (picked,), node=True):
            emit.strided(products, picked.shape, (self._vectors**2, 0))
            for index in (self._rows, self._columns):
                emit.reshaped(index, (1, pairs))

        def backward(gradient: Tensor) -> Tensor:
            result = emit.new_zeros(gradient, products.shape)
            with emit.op("_index_put_impl_", (result, indices, gradient, True, True), (result,)):
                self._put(gradient)
            return result

        return self._tape.node("IndexBackward0", (products,), picked, backward)

    def _put(self, gradient: Tensor) -> None:
        """Adds gradients at indices: PyTorch counts places, sorts them and sums (index_put_with_sort_kernel)."""
        emit, (pairs,) = self._tape.emit, self._rows.shape
        places = self._counted(self._rows, self._vectors)
        columns = self._counted(self._columns, 1)
        emit.op("add_", (places, columns, 1), (places,))
        spread = emit.expanded(gradient, gradient.shape, strides_of(gradient))
        if not is_contiguous(spread):
            emit.contiguous(spread)
        flat = emit.reshaped(places, (pairs,), (-1,))
        for _ in ("sorted places", "their order"):
            emit.empty_like(flat, emit.tensor((pairs,), "int64"), memory_format=CONTIGUOUS)
        with emit.op("divide_", (flat, 1, "trunc"), (flat,)), emit.op("div_", (flat, 1, "trunc"), (flat,)):
            emit.op("div_", (flat, emit.number("int64"), "trunc"), (flat,))
        emit.arange(pairs)

    def _counted(self, index: Tensor, step: int) -> Tensor:
        """Indices along one dimension as places in memory, negative ones brought in."""
        emit, counted = self._tape.emit, index
        for name, by in (("remainder", self._vectors), ("mul", step)):
            result = emit.tensor(index.shape, "int64")
            with emit.op(name, (counted, by), (result,)):
                emit.op(name, (counted, emit.number("int64")), (result,))
            counted = result
        emit.op("to", (counted, None, None, emit.device, None, False, False, None), (counted,))
        return counted
