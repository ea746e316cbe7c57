"""Forms that are learned: the published network per table on its sizes and reuse bins, and trees on sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from steptime._lookups.table import Floats, Places
from steptime._models.engine.stored import stored
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.forms import Correction, LookupTimes
from steptime._models.lookups.question import OPTIMIZERS, Flags, Lookups
from steptime_lab.baselines.lookups.rules import Seen
from steptime_lab.fit.engine import seeded_torch
from steptime_lab.fit.engine.regression import fit_correction
from steptime_lab.measurements.lookups import MeasuredLookups

# Published search: 64 to 512 wide, 2 to 6 layers per table and one behind the sum, 64 rows a step, 1,200 epochs.
# On validation rows of table-batched forward, whole GPU, widths 64 and 128, rates 2e-3 and 4e-3, one or two layers behind the
# sum and 60 to 200 epochs all give a GMAE of 13 to 15 %; two layers per table 18 %, and five times the epochs 12.4 %.
_WIDTH, _TABLE_LAYERS, _WHOLE_LAYERS = 128, 3, 2
_RATE, _DECAY = 4e-3, 1e-4
_QUESTIONS = 64  # in a step, with about two rows each: the same tables cold and warm
_STEPS = 16  # of an epoch at least, where there are few questions
_EPOCHS = 110
_HELD_OUT = 10  # one of so many questions says which epoch is the best
_NO_LOOKUPS = 1e-3  # pooling of a table without lookups, as published
# An input that varies less than this in the fit says nothing where it does.
_CONSTANT = 1e-3
_MEASURED = ("adagrad", "rowwise_adagrad")  # optimisers of measured lookups, beside none and SGD


def told(lookups: Lookups) -> Floats:
    """The conditions of lookups as inputs, [lookups, inputs]."""
    flags: list[Flags] = [lookups.warm, lookups.weighted]
    flags += [lookups.optimizer == OPTIMIZERS.index(name) for name in _MEASURED]
    flags += [lookups.others == OTHERS.index(name) for name in ("same", "streaming")]
    return np.column_stack([*flags, np.log(lookups.share)]).astype(np.float64)


def typed(lookups: Lookups) -> Floats:
    """The rows' type as inputs, [tables of the pool, inputs]."""
    return np.column_stack([lookups.pool.dtype == place for place in (1, 2)]).astype(np.float64)


@dataclass(frozen=True)
class SizeTrees:
    """Trees of ln(time) on rows, dim, pooling, batch and tables, without anything that says which rows are looked up."""

    trees: Correction
    seen: Seen

    @classmethod
    def fit(cls, measured: MeasuredLookups, seed: int, /) -> SizeTrees:
        """As many trees as the models' corrections have."""
        rows = measured.of("fit")
        return cls(fit_correction(_sizes(rows.lookups), np.ones(len(rows)), rows.time_ns, seed), Seen.of(rows))

    def times(self, lookups: Lookups) -> LookupTimes:
        """The whole lookup as one part."""
        return self.seen.times(lookups, self.trees.factors(_sizes(lookups)))


def _sizes(lookups: Lookups) -> Floats:
    """Sums, means and extremes over tables."""
    pool = lookups.pool
    tables = pool.tables
    moved = tables.lookups * pool.row_bytes
    sums = lookups.sums(np.column_stack([tables.lookups, moved, tables.rows * pool.row_bytes, tables.dim, tables.rows]))
    most = lookups.maxima(np.column_stack([tables.batch, tables.pooling, tables.dim, tables.rows, moved]))
    least = -lookups.maxima(-np.column_stack([tables.pooling, tables.dim, tables.rows]))
    means = lookups.sums(np.column_stack([tables.pooling, np.log(tables.rows), tables.pooling * moved])) / np.column_stack(
        [lookups.counts, lookups.counts, np.maximum(sums[:, 1], 1e-9)]
    )
    return np.column_stack([sums, most, least, means, lookups.counts, lookups.dtype, told(lookups)])


@dataclass(frozen=True)
class Scale:
    """Makes inputs of one size, as seen in the fit."""

    shift: Floats
    scale: Floats

    @classmethod
    def of(cls, inputs: Floats) -> Scale:
        """From fitted rows."""
        spread = inputs.std(axis=0)
        return cls(inputs.mean(axis=0), np.where(spread > _CONSTANT, spread, 1.0 / _CONSTANT))

    def scaled(self, inputs: Floats) -> Floats:
        """What a network is given."""
        return (inputs - self.shift) / self.scale


@dataclass(frozen=True)
class ThreeLayers:
    """Weights and offsets of a network."""

    weight: tuple[Floats, Floats, Floats] = field(metadata=stored(dtype=np.float32))
    bias: tuple[Floats, Floats, Floats] = field(metadata=stored(dtype=np.float32))

    def values(self, inputs: Floats, linear: int = 0) -> Floats:
        """What comes out, with so many linear layers at the end."""
        for index, (weight, bias) in enumerate(zip(self.weight, self.bias, strict=True)):
            inputs = inputs @ weight.T + bias
            if index < len(self.weight) - linear:
                inputs = np.maximum(inputs, 0.0)
        return inputs


@dataclass(frozen=True)
class PublishedLookupNetwork:
    """The published learned form: a network per table on its sizes and 17 reuse bins, and a network on their sum (Lin et al.).

    As published: inputs, sum over tables, logarithm of the time, loss, weight decay. Not as published: inputs are scaled; one
    setting instead of a search over 140; conditions that the published one does not know are inputs behind the sum, so that
    what a table adds is computed once, however many lookups it is part of. Times lie within the range of fitted rows, as sums
    of other tables may give anything.
    """

    table: ThreeLayers
    whole: ThreeLayers
    table_scale: Scale
    told_scale: Scale
    span: Floats  # [2] of logarithms of times
    seen: Seen

    @classmethod
    def fit(cls, measured: MeasuredLookups, seed: int, /) -> PublishedLookupNetwork:
        """The epoch that is best on the questions of fitted rows that were held out."""
        rows = measured.of("fit")
        lookups = rows.lookups
        conditions, features = told(lookups), _features(lookups)[lookups.member]
        scales = Scale.of(features), Scale.of(conditions)
        logs = np.log(rows.time_ns)
        data = _Training.of(lookups, scales[0].scaled(features), scales[1].scaled(conditions), logs)
        with seeded_torch(seed) as torch:
            networks = _trained(torch, data, np.random.default_rng(seed))
        return cls(*networks, *scales, np.array([logs.min(), logs.max()]), Seen.of(rows))

    def times(self, lookups: Lookups) -> LookupTimes:
        """The whole lookup as one part."""
        each = self.table.values(self.table_scale.scaled(_features(lookups)))
        both = np.concatenate([lookups.sums(each), self.told_scale.scaled(told(lookups))], axis=1)
        logs = self.whole.values(both, linear=1)[:, 0]
        return self.seen.times(lookups, np.exp(np.clip(logs, *self.span)))


def _features(lookups: Lookups) -> Floats:
    """Inputs of the pool's tables, as published, and the type of rows: [tables, inputs]."""
    tables = lookups.pool.tables
    pooling = np.where(tables.lookups > 0, tables.pooling, _NO_LOOKUPS)
    reuse = tables.bin_rows / np.maximum(tables.unique, 1.0)[:, None]
    return np.column_stack([np.log(np.column_stack([tables.batch, tables.rows, pooling, tables.dim])), reuse, typed(lookups)])


@dataclass(frozen=True)
class _Training:
    """Rows by question, those of the same tables, whose tables are passed through the network once."""

    tables: Floats  # [members of all questions, inputs] scaled
    table_starts: Places  # [questions + 1]
    conditions: Floats  # [rows, inputs] scaled, question by question
    logs: Floats  # [rows]
    row_starts: Places  # [questions + 1]

    @classmethod
    def of(cls, lookups: Lookups, members: Floats, conditions: Floats, logs: Floats) -> _Training:
        places: dict[bytes, int] = {}
        question = np.array(
            [
                places.setdefault(lookups.member[first:last].tobytes(), len(places))
                for first, last in pairwise(lookups.starts.tolist())
            ]
        )
        _, item = np.unique(question, return_index=True)
        order = np.argsort(question, kind="stable")
        table_starts = np.concatenate([[0], np.cumsum(lookups.counts[item])])
        row_starts = np.concatenate([[0], np.cumsum(np.bincount(question))])
        return cls(members[_ranges(lookups.starts, item)[0]], table_starts, conditions[order], logs[order], row_starts)


def _ranges(starts: Places, chosen: Places) -> tuple[Places, Places]:
    """The places of chosen ranges one behind the other, and which of the chosen each belongs to."""
    counts = np.diff(starts)[chosen]
    owner = np.repeat(np.arange(len(chosen)), counts)
    return np.arange(counts.sum()) + (starts[chosen] - np.cumsum(counts) + counts)[owner], owner


def _trained(torch: Any, data: _Training, random: np.random.Generator) -> tuple[ThreeLayers, ThreeLayers]:
    tables, conditions, logs = (
        torch.tensor(values, dtype=torch.float32) for values in (data.tables, data.conditions, data.logs - data.logs.mean())
    )
    nets = _network(torch, tables.shape[1], _TABLE_LAYERS, 0), _network(torch, _WIDTH + conditions.shape[1], _WHOLE_LAYERS, 1)
    weights = [weight for net in nets for weight in net.parameters()]
    shuffled = random.permutation(len(data.row_starts) - 1)
    unseen, seen = np.split(shuffled, [len(shuffled) // _HELD_OUT])
    steps = min(max(math.ceil(len(seen) / _QUESTIONS), _STEPS), len(seen))
    optimizer = torch.optim.Adam(weights, lr=_RATE, weight_decay=_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=_EPOCHS * steps)

    def off(chosen: Places) -> Any:
        members, owners = _ranges(data.table_starts, chosen)
        rows, questions = _ranges(data.row_starts, chosen)
        each = nets[0](tables[torch.from_numpy(members)])
        sums = torch.zeros(len(chosen), _WIDTH).index_add(0, torch.from_numpy(owners), each)
        rows = torch.from_numpy(rows)
        return nets[1](torch.cat([sums[torch.from_numpy(questions)], conditions[rows]], 1))[:, 0] - logs[rows]

    best: Any = []
    best_error = math.inf
    for _ in range(_EPOCHS):
        for chosen in np.array_split(random.permutation(seen), steps):
            loss = off(chosen).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            error = float(off(unseen if len(unseen) else seen).abs().mean())
        if error < best_error:
            best, best_error = [weight.detach().numpy().astype(np.float64) for weight in weights], error
    # As it is kept, so that what is read back is the same.
    best[-1] = (best[-1] + data.logs.mean()).astype(np.float32).astype(np.float64)
    kept: Any = tuple(best)
    return ThreeLayers(kept[:6:2], kept[1:6:2]), ThreeLayers(kept[6::2], kept[7::2])


def _network(torch: Any, inputs: int, layers: int, outputs: int) -> Any:
    """So many hidden layers, and a linear one where there is an output; started as published."""
    net = torch.nn.Sequential()
    for wide in [inputs, *[_WIDTH] * (layers - 1)]:
        net.append(torch.nn.Linear(wide, _WIDTH))
        net.append(torch.nn.ReLU())
    if outputs:
        net.append(torch.nn.Linear(_WIDTH, outputs))
    for weight in net.parameters():
        if weight.ndim > 1:
            torch.nn.init.xavier_uniform_(weight)
        else:
            torch.nn.init.constant_(weight, 0.01)
    return net
