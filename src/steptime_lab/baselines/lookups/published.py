"""The published learned form: a network per table on its sizes and 17 reuse bins, and a network on their sum (Lin et al.).

As published: inputs, sum over tables, logarithm of the time, loss, weight decay. Not as published: inputs are scaled; one
setting instead of a search over 140; conditions that the published one does not know are inputs behind the sum, so that what a
table adds is computed once, however many lookups it is part of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.table import Floats, Places
from steptime._models.engine.stored import Arrays, pack, unpack
from steptime._models.lookups.batch import Lookups
from steptime._models.lookups.forms import LookupTimes
from steptime.errors import InputError
from steptime_lab.baselines.lookups.conditions import Seen, told, typed
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

Layers = tuple[tuple[Floats, Floats], ...]


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
class Published:
    """Both networks. Times lie within the range of fitted rows, as sums of other tables may give anything."""

    table: Layers
    whole: Layers
    table_scale: Scale
    told_scale: Scale
    span: Floats  # [2] of logarithms of times
    seen: Seen

    def times(self, lookups: Lookups) -> LookupTimes:
        """The whole lookup as one part."""
        each = self.table_scale.scaled(_features(lookups))
        for weight, bias in self.table:
            each = np.maximum(each @ weight.T + bias, 0.0)
        result = np.concatenate([lookups.sums(each), self.told_scale.scaled(told(lookups))], axis=1)
        for weight, bias in self.whole[:-1]:
            result = np.maximum(result @ weight.T + bias, 0.0)
        weight, bias = self.whole[-1]
        logs = (result @ weight.T + bias)[:, 0]
        return self.seen.times(lookups, np.exp(np.clip(logs, *self.span)))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same from."""
        result: dict[str, npt.NDArray[Any]] = {
            "span": self.span,
            **{f"seen.{name}": array for name, array in pack(self.seen).items()},
        }
        for name, layers in (("table", self.table), ("whole", self.whole)):
            for index, (weight, bias) in enumerate(layers):
                result |= {f"{name}.weight{index}": weight.astype(np.float32), f"{name}.bias{index}": bias.astype(np.float32)}
        for name, scale in (("table_scale", self.table_scale), ("told_scale", self.told_scale)):
            result |= {f"{name}.shift": scale.shift, f"{name}.scale": scale.scale}
        return result


def load(arrays: Arrays) -> Published:
    """The form that `arrays` were taken from."""

    def layers(name: str, count: int) -> Layers:
        kept = [(arrays[f"{name}.weight{index}"], arrays[f"{name}.bias{index}"]) for index in range(count)]
        return tuple((weight.astype(np.float64), bias.astype(np.float64)) for weight, bias in kept)

    return Published(
        layers("table", _TABLE_LAYERS),
        layers("whole", _WHOLE_LAYERS + 1),
        Scale(arrays["table_scale.shift"], arrays["table_scale.scale"]),
        Scale(arrays["told_scale.shift"], arrays["told_scale.scale"]),
        arrays["span"],
        unpack(Seen, {name.removeprefix("seen."): array for name, array in arrays.items() if name.startswith("seen.")}),
    )


def fit(measured: MeasuredLookups, seed: int) -> Published:
    """The epoch that is best on the questions of fitted rows that were held out."""
    rows = measured.of("fit")
    lookups = rows.lookups
    conditions = told(lookups)
    features = _features(lookups)[lookups.member]
    scales = Scale.of(features), Scale.of(conditions)
    logs = np.log(rows.time_ns)
    table, whole = _trained(_Training.of(lookups, scales[0].scaled(features), scales[1].scaled(conditions), logs), seed)
    return Published(table, whole, *scales, np.array([logs.min(), logs.max()]), Seen.of(rows))


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


def _trained(data: _Training, seed: int) -> tuple[Layers, Layers]:
    """On one core, so that the same rows and seed give the same networks."""
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        raise InputError("fitting lookup models needs PyTorch: install steptime[fit]") from error
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _epochs(torch, data, np.random.default_rng(seed))
    finally:
        torch.set_num_threads(threads)


def _epochs(torch: Any, data: _Training, random: np.random.Generator) -> tuple[Layers, Layers]:
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

    best, best_error = [], math.inf
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
    layers = list(zip(best[::2], best[1::2], strict=True))
    weight, bias = layers[-1]
    # As it is kept, so that what is read back is the same.
    layers[-1] = weight, (bias + data.logs.mean()).astype(np.float32).astype(np.float64)
    return tuple(layers[:_TABLE_LAYERS]), tuple(layers[_TABLE_LAYERS:])


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
