"""DLRM in hybrid parallelism: tables divided by a plan and exchanged both ways, data-parallel MLPs.

Columns of the exchanged lookups are in the order of ranks, not of tables: the top MLP is trained on whatever order it sees,
so that putting them back would be work for nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import Plan
from steptime._build.dlrm.step import top_width
from steptime._lookups.generators import Generator
from steptime.errors import InputError
from steptime_lab.workloads.case import Case, GroupLike, Workload
from steptime_lab.workloads.cross_layers import CrossLayers
from steptime_lab.workloads.divided_tables import RankTables
from steptime_lab.workloads.prefetch import AheadTables
from steptime_lab.workloads.shared_buffers import shared_buffers
from steptime_lab.workloads.training import BATCHES, Tf32, data_parallel, precision, random_source

if TYPE_CHECKING:
    from steptime._lookups.statistics import Statistics

LEARNING_RATE = 1e-6
"""Small, so that hot rows stay finite over the thousands of steps for which tables are shared; times do not depend on it."""

LOSS_SCALE = 1024.0
"""Of fp16, by whose range small gradients are lost."""

_NEVER = 1 << 30

KEPT_DENSE = 2
"""Dense parts that wait for a later case of the same shape: making a DDP takes longer than a step."""


@dataclass(frozen=True)
class Dense:
    """The data-parallel part: both MLPs, each wrapped as in the published DLRM, and one optimiser over them.

    Cross layers, where there are some, belong to the top.
    """

    bottom: nn.Module
    top: nn.Module
    optimizer: torch.optim.Optimizer


class DlrmStep:
    """One rank's step. Lookups come first, so that the bottom MLP runs while they are exchanged, forward and backward."""

    def __init__(self, case: Case, group: GroupLike, device: torch.device) -> None:
        model = Dlrm.from_dict(case.config).with_batch(case.batch)
        _check(model, case)
        plan = _plan(model, case)
        buffers = shared_buffers(device)
        scaled = model.precision == "fp16-autocast" and model.optimizer == "sgd"
        self.tables = RankTables(model, plan, group, buffers, LEARNING_RATE / (LOSS_SCALE if scaled else 1.0))
        self.ahead = AheadTables(self.tables, device) if model.prefetch == "lookups" else None
        self.dense = _dense(model, group, device)
        self.batches = BATCHES
        self._local = [table for table in model.tables if plan.placements[table.name].ranks[0] == group.rank]
        self._buffers, self._batch = buffers, case.batch
        self._interact = Interaction(model, device)
        self._loss = functional.mse_loss if model.loss == "mse" else functional.binary_cross_entropy
        self._precision = precision(model.precision, device)
        self._scaler = _scaler(device) if model.precision == "fp16-autocast" else None
        self._products = Tf32() if model.precision == "tf32" else nullcontext()
        source = random_source(group, device)
        shape = (case.local_batch, model.dense_features)
        self.inputs = [torch.randn(shape, device=device, generator=source) for _ in range(BATCHES)]
        self.labels = [torch.rand(case.local_batch, 1, device=device, generator=source).round() for _ in range(BATCHES)]
        self._iteration = 0
        buffers.settle()

    @property
    def spare_bytes(self) -> int:
        """Shared buffers less what this case uses of them."""
        return self._buffers.nbytes() - self.tables.shared_bytes

    def __call__(self) -> None:
        """Queues the next step."""
        number = self._iteration % BATCHES
        self._iteration += 1
        with self._products:
            self.dense.optimizer.zero_grad()
            with self._precision:
                prediction = self._forward(number)
            loss = self._loss(prediction.float(), self.labels[number])
            if self._scaler is None:
                loss.backward()  # type: ignore[no-untyped-call]
                self.dense.optimizer.step()
            else:
                self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                self._scaler.step(self.dense.optimizer)
                self._scaler.update()
            self.tables.update()

    def _forward(self, number: int) -> torch.Tensor:
        if self.ahead is not None:
            blocks = self.ahead(number, (number + 1) % BATCHES)
            dense = self.dense.bottom(self.inputs[number])
        else:
            started = self.tables.start(number)
            dense = self.dense.bottom(self.inputs[number])
            blocks = self.tables.finish(started)
        return torch.sigmoid(self.dense.top(self._interact(dense, blocks)))

    def lookups(self, iteration: int) -> list[Statistics]:
        """What all ranks look up in that iteration, in table order, in tables of which the first shard is here."""
        return [self._buffers.statistics(table.generator, self._batch, iteration % BATCHES) for table in self._local]

    def close(self) -> None:
        """Drops this case's own tensors; dense part and shared buffers wait for the next case."""
        self.dense.optimizer.zero_grad()
        self.inputs.clear()
        self.labels.clear()
        self.tables.close()
        del self.tables, self.ahead, self.dense


class Interaction:
    """How the bottom MLP's output meets the lookups: pairwise dot products, or side by side."""

    def __init__(self, model: Dlrm, device: torch.device) -> None:
        self._dot = model.interaction == "dot"
        self._dim = model.bottom[-1]
        below = torch.tril_indices(len(model.tables) + 1, len(model.tables) + 1, offset=-1, device=device)
        self._rows, self._columns = below[0].contiguous(), below[1].contiguous()

    def __call__(self, dense: torch.Tensor, blocks: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """What the top MLP sees, [local batch, width]."""
        side_by_side = torch.cat([dense, *blocks], dim=1)
        if not self._dot:
            return side_by_side
        vectors = side_by_side.view(len(dense), -1, self._dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat([dense, products[:, self._rows, self._columns]], dim=1)


def build(case: Case, group: GroupLike, device: torch.device) -> DlrmStep:
    """The step of `group.rank`."""
    return DlrmStep(case, group, device)


def small_cases(ranks: int) -> tuple[Case, ...]:
    """Both lookups and both interactions, on tables that fit a cache."""
    plan = {f"t{number}": number % max(1, ranks - 1) for number in range(5)}  # with several ranks the last has no table
    return tuple(
        Case(
            workload="dlrm",
            name=f"dlrm-small-{lookup.replace('_', '-')}-{interaction}-r{ranks}",
            config=_small(lookup, interaction, 8 * ranks).to_dict(),
            precision="fp32",
            batch=8 * ranks,
            ranks=ranks,
            plan=plan,
            task=f"small-{lookup.replace('_', '-')}-{interaction}",
            rule="by_hand",
        )
        for lookup, interaction in (("table_batched", "dot"), ("embedding_bag", "cat"))
    )


def _small(lookup: str, interaction: str, batch: int) -> Dlrm:
    dims = (8, 8, 8, 8, 8) if interaction == "dot" else (4, 8, 16, 8, 4)
    tables = tuple(
        Table(f"t{number}", dim, Generator(rows=100 * (number + 1), pooling=2.0 + number, kind="zipf", seed=number))
        for number, dim in enumerate(dims)
    )
    return Dlrm(f"small-{interaction}", batch, 13, (16, 8), (16, 1), tables, lookup=lookup, interaction=interaction)


def _check(model: Dlrm, case: Case) -> None:
    """Refuses what configs say and no network here trains."""
    unusual = (
        ('lookup = "fbgemm"', model.lookup == "fbgemm"),
        (f'optimizer = "{model.optimizer}"', model.optimizer not in ("sgd", "rowwise_adagrad")),
        ("fused = true", model.fused),
        ("presorted = true", model.presorted),
        ("cuda_graph = true", model.cuda_graph),
        ("tables in other than fp32", any(table.precision != "fp32" for table in model.tables)),
        ("weighted tables", any(table.weighted for table in model.tables)),
        ("tables that are not pooled", not all(table.pooled for table in model.tables)),
    )
    there = next((text for text, is_there in unusual if is_there), None)
    if there is not None:
        raise InputError(f"case {case.name}: no network here trains {there}; it can be predicted, not measured")


def _plan(model: Dlrm, case: Case) -> Plan:
    """How the tables are divided, and on which ranks they are."""
    if case.ranks > 1 and case.plan is None:
        raise InputError(f"case {case.name}: {case.ranks} ranks and no plan; say which rank owns each table")
    placed = case.plan if case.plan is not None else dict.fromkeys((table.name for table in model.tables), 0)
    return Plan.from_dict(placed, model.tables, case.ranks, f"case {case.name}: the plan")


_DENSE: OrderedDict[tuple[object, ...], Dense] = OrderedDict()


def forget_dense() -> None:
    """Keeps no dense part for later cases: after a failed step its all_reduce is half done, or other ranks never had it."""
    _DENSE.clear()


def _dense(model: Dlrm, group: GroupLike, device: torch.device) -> Dense:
    """The dense part of this shape: one that an earlier case left, or a new one. Every rank finds the same."""
    width = top_width(model)
    cross = (model.cross_layers, model.cross_rank) if model.interaction == "dcnv2" else None
    key = (group.ranks, device, model.dense_features, model.bottom, width, model.top, cross, model.dense_optimizer)
    if key not in _DENSE:
        bottom = _mlp(model.dense_features, model.bottom, device, last_is_linear=False)
        top = _mlp(width, model.top, device, last_is_linear=True)
        if cross is not None:
            top = nn.Sequential(CrossLayers(width, *cross, device), *top)
        optimizer = _optimizer(model.dense_optimizer, [*bottom.parameters(), *top.parameters()])
        _DENSE[key] = Dense(data_parallel(bottom, group, device), data_parallel(top, group, device), optimizer)
    _DENSE.move_to_end(key)
    if len(_DENSE) > KEPT_DENSE:
        _DENSE.popitem(last=False)
    return _DENSE[key]


def _mlp(inputs: int, widths: tuple[int, ...], device: torch.device, *, last_is_linear: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise((inputs, *widths)):
        layers += [nn.Linear(before, after, device=device), nn.ReLU()]
    return nn.Sequential(*(layers[:-1] if last_is_linear else layers))


def _scaler(device: torch.device) -> torch.amp.GradScaler:
    """Scales the loss of fp16; it never grows, for tables are updated with the scaled gradient at a rate for this scale."""
    return torch.amp.GradScaler(device.type, init_scale=LOSS_SCALE, growth_interval=_NEVER)


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As PyTorch has it by default, or fused."""
    kind, _, fused = name.partition("_")
    options = {"fused": True} if fused else {}
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adagrad": torch.optim.Adagrad,
    }
    return kinds[kind](parameters, lr=LEARNING_RATE, **options)


WORKLOAD = Workload("dlrm", build, small_cases)
