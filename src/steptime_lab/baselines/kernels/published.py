"""A baseline: the published form, a multi-layer perceptron on the logarithms of shapes, one per family (Lin et al.).

Its search over layers, widths and rates is replaced by one setting within their ranges; precision, cache state and the part
of a GPU, which the published one does not know, are inputs here, so that it is not beaten by what it was never told.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.engine.splits import FIT, VALIDATION
from steptime._models.engine.stored import Arrays
from steptime._models.kernels.call import Argument, TensorArg
from steptime._models.kernels.family import family_of
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime._models.kernels.work import base_of, precision_of
from steptime_lab.measurements.kernels import Row

_Array = npt.NDArray[np.float64]

# Sizes that are told to the net: of the first tensors, of each the last dimensions; lists are their count and elements.
_TENSORS, _DIMENSIONS, _NUMBERS = 4, 5, 8
_WIDTH, _LAYERS = 128, 3
_CONSTANT = 1e-3
_LARGEST = 1e6
_EPOCHS, _BATCH, _RATE = 150, 512, 2e-3


@dataclass(frozen=True)
class _Net:
    kinds: tuple[str, ...]  # op and precision, one input each
    shift: _Array
    scale: _Array
    layers: tuple[tuple[_Array, _Array], ...]

    def logs(self, features: _Array) -> _Array:
        result = (features - self.shift) / self.scale
        for index, (weight, bias) in enumerate(self.layers):
            result = result @ weight.T + bias
            if index < len(self.layers) - 1:
                result = np.maximum(result, 0.0)
        return result[:, 0]


@dataclass(frozen=True)
class Published:
    """A net per family."""

    nets: Mapping[str, _Net]

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """One launch per call: this form knows no kernels."""
        times_ns = np.full(len(questions), np.nan)
        places: dict[str, list[int]] = defaultdict(list)
        for index, question in enumerate(questions):
            places[family_of(question.call.op)].append(index)
        for family, item in places.items():
            net = self.nets.get(family)
            if net is not None:
                times_ns[item] = np.exp(net.logs(_features([questions[index] for index in item], net.kinds)))
        return [Answer((LaunchTime("published", float(time_ns)),)) for time_ns in times_ns]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same from."""
        result: dict[str, npt.NDArray[Any]] = {}
        for family, net in sorted(self.nets.items()):
            result |= {
                f"{family}/kinds": np.asarray(net.kinds, dtype=np.str_),
                f"{family}/shift": net.shift,
                f"{family}/scale": net.scale,
            }
            for index, (weight, bias) in enumerate(net.layers):
                result |= {
                    f"{family}/weight{index}": weight.astype(np.float32),
                    f"{family}/bias{index}": bias.astype(np.float32),
                }
        return result


def load(arrays: Arrays) -> Published:
    """The form that `arrays` were taken from."""
    nets = {}
    for family in sorted({name.partition("/")[0] for name in arrays}):
        layers = []
        for index in range(_LAYERS + 1):
            weight, bias = arrays[f"{family}/weight{index}"], arrays[f"{family}/bias{index}"]
            layers.append((weight.astype(np.float64), bias.astype(np.float64)))
        kinds = tuple(arrays[f"{family}/kinds"].tolist())
        nets[family] = _Net(kinds, arrays[f"{family}/shift"], arrays[f"{family}/scale"], tuple(layers))
    return Published(nets)


def fit(rows: Sequence[Row], seed: int) -> Published:
    """Each family's net at the epoch that is best on its validation rows."""
    by_family: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_family[row.family].append(row)
    return Published({family: _fit(item, seed) for family, item in sorted(by_family.items())})


def _fit(rows: Sequence[Row], seed: int) -> _Net:
    import torch

    kinds = tuple(sorted({_kind(row.question) for row in rows}))
    sides = []
    for split in (FIT, VALIDATION):
        some = [row for row in rows if row.split == split]
        features = _features([row.question for row in some], kinds)
        sides.append((features, np.log([row.time_ns for row in some])))
    (features, logs), (unseen, unseen_logs) = sides
    shift, spread = features.mean(0), features.std(0)
    # An input that never varied in the fit says nothing when it does.
    scale = np.where(spread > _CONSTANT, spread, 1.0 / _CONSTANT)
    x, y = torch.tensor((features - shift) / scale, dtype=torch.float32), torch.tensor(logs, dtype=torch.float32)
    torch.manual_seed(seed)
    widths = [x.shape[1], *[_WIDTH] * _LAYERS, 1]
    net = torch.nn.Sequential()
    for index, (wide, out) in enumerate(pairwise(widths)):
        net.append(torch.nn.Linear(wide, out))
        if index < _LAYERS:
            net.append(torch.nn.ReLU())
    torch.nn.init.constant_(net[-1].bias, float(logs.mean()))  # type: ignore[arg-type]
    best, best_error = _taken(net, kinds, shift, scale), math.inf
    optimizer = torch.optim.Adam(net.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _EPOCHS)
    for _ in range(_EPOCHS):
        for some in torch.randperm(len(x)).split(_BATCH):  # type: ignore[no-untyped-call]
            loss = (net(x[some])[:, 0] - y[some]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        taken = _taken(net, kinds, shift, scale)
        error = float(np.abs(taken.logs(unseen) - unseen_logs).mean()) if len(unseen) else 0.0
        if error < best_error:
            best, best_error = taken, error
    return best


def _taken(net: Any, kinds: tuple[str, ...], shift: _Array, scale: _Array) -> _Net:
    layers = []
    for layer in net:
        if hasattr(layer, "weight"):
            layers.append(tuple(part.detach().numpy().astype(np.float64) for part in (layer.weight, layer.bias)))
    return _Net(kinds, shift, scale, tuple(layers))


def _features(questions: Sequence[Question], kinds: Sequence[str]) -> _Array:
    place_of = {kind: index for index, kind in enumerate(kinds)}
    result = np.zeros((len(questions), len(kinds) + 3 + _TENSORS * (_DIMENSIONS + 2) + _NUMBERS))
    for row, question in zip(result, questions, strict=True):
        index = place_of.get(_kind(question))
        if index is not None:
            row[index] = 1.0
        row[len(kinds) : len(kinds) + 3] = (question.warm, math.log(question.share), question.others in ("same", "streaming"))
        told = [*_sizes(question), *_numbers(question)]
        row[len(kinds) + 3 :] = told
    return result


def _kind(question: Question) -> str:
    memory = next((tensor.device for tensor in question.call.tensors() if tensor.device != "device"), "")
    return f"{base_of(question.call.op)}|{precision_of(question.call, question.tf32)}|{memory}"


def _sizes(question: Question) -> list[float]:
    """Per tensor its last dimensions, its elements and whether it is stored densely in order."""
    results: list[float] = []
    for argument in [item for item in question.call.args if _has_tensors(item)][:_TENSORS]:
        tensors = [item for item in argument if isinstance(item, TensorArg)] if isinstance(argument, tuple) else [argument]
        first = tensors[0]
        if not isinstance(first, TensorArg):
            continue
        shape = (len(tensors),) if isinstance(argument, tuple) else first.shape
        sizes = [math.log(1 + size) for size in reversed(shape)][:_DIMENSIONS]
        elements = sum(tensor.numel for tensor in tensors if isinstance(tensor, TensorArg))
        results += [*sizes, *[0.0] * (_DIMENSIONS - len(sizes)), math.log(1 + elements), float(first.strides is not None)]
    return results + [0.0] * (_TENSORS * (_DIMENSIONS + 2) - len(results))


def _has_tensors(argument: Argument) -> bool:
    return isinstance(argument, TensorArg) or (
        isinstance(argument, tuple) and bool(argument) and isinstance(argument[0], TensorArg)
    )


def _numbers(question: Question) -> list[float]:
    """Strides, windows, axes and flags, as they come."""
    results: list[float] = []
    for argument in question.call.args:
        every = argument if isinstance(argument, tuple) else (argument,)
        results += [_told(float(item)) for item in every if isinstance(item, bool | int | float)]
    return (results + [0.0] * _NUMBERS)[:_NUMBERS]


def _told(number: float) -> float:
    """Its logarithm with its sign; masks are filled with infinities."""
    return math.copysign(math.log1p(min(abs(number), _LARGEST)), number)
