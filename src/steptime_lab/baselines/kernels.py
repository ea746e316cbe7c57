"""Other forms of kernel models, fitted to the same rows: what the models are compared with."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from steptime._models.engine.archive import Archive, StoredParts
from steptime._models.engine.splits import FIT, VALIDATION
from steptime._models.engine.stored import Arrays, Floats, stored, unpack
from steptime._models.kernels.call import Argument, TensorArg, base_of, flop_of, moved_bytes, precision_of
from steptime._models.kernels.family import family_of
from steptime._models.kernels.forms import KernelForm
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime_lab.fit.engine import seeded_torch
from steptime_lab.fit.engine.terms import non_negative
from steptime_lab.measurements.kernels import Row

# Of a roofline: nanoseconds, bytes per ns and operations per ns, so that weights are near one (an H200's orders of magnitude),
# and rows of an op and dtype below which the dtypes of the op, then all ops, are fitted together.
_SCALES = (1_000.0, 4_300.0, 50_000.0)
_LEAST = 8
# Sizes that are told to a network: of the first tensors, of each the last dimensions; lists are their count and elements.
_TENSORS, _DIMENSIONS, _NUMBERS = 4, 5, 8
_WIDTH, _LAYERS = 128, 3
_CONSTANT = 1e-3
_LARGEST = 1e6
_EPOCHS, _BATCH, _RATE = 150, 512, 2e-3


@dataclass(frozen=True)
class Roofline:
    """A floor, bytes at one bandwidth and operations at one rate, fitted per op and dtype. It stands in every table."""

    keys: tuple[str, ...]  # "op|precision", "op", ""
    weights: Floats  # keys x (floor, bytes, operations)

    @classmethod
    def fit(cls, rows: Sequence[Row], _seed: int, /) -> Roofline:
        """Non-negative weights with the least relative error; nothing is drawn."""
        groups: dict[str, list[tuple[Floats, float]]] = defaultdict(list)
        for row in rows:
            if row.split == FIT:
                for key in _keys(row.question):
                    groups[key].append((_terms(row.question), row.time_ns))
        weights = {}
        for key, members in sorted(groups.items()):
            if len(members) >= _LEAST or not key:
                terms, times_ns = np.asarray([item for item, _ in members]), np.asarray([time_ns for _, time_ns in members])
                solved = non_negative(terms / times_ns[:, None], np.ones(len(members)))
                if solved.any():
                    weights[key] = solved
        return cls(tuple(weights), np.asarray(list(weights.values())))

    @cached_property
    def _by_key(self) -> dict[str, Floats]:
        return dict(zip(self.keys, self.weights, strict=True))

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """One launch per call: this form knows no kernels."""
        known = [next(self._by_key[key] for key in _keys(question) if key in self._by_key) for question in questions]
        times_ns = [float(_terms(question) @ weights) for question, weights in zip(questions, known, strict=True)]
        return [Answer((LaunchTime("roofline", time_ns),)) for time_ns in times_ns]


def _keys(question: Question) -> tuple[str, str, str]:
    base = base_of(question.call.op)
    return f"{base}|{precision_of(question.call, question.tf32)}", base, ""


def _terms(question: Question) -> Floats:
    """Floor, then what bytes and operations take at the usual rates of a whole GPU, times the parts it is divided into."""
    call, (floor, bandwidth, rate) = question.call, _SCALES
    return np.asarray([floor, question.share * moved_bytes(call) / bandwidth, question.share * flop_of(call) / rate])


# One array per layer.
_Layers = tuple[Floats, Floats, Floats, Floats]


@dataclass(frozen=True)
class FamilyNetwork:
    """A multi-layer perceptron on the logarithms of shapes."""

    kinds: tuple[str, ...]  # op and precision, one input each
    shift: Floats
    scale: Floats
    weight: _Layers = field(metadata=stored(dtype=np.float32))
    bias: _Layers = field(metadata=stored(dtype=np.float32))

    def logs(self, features: Floats) -> Floats:
        """ln(ns) of calls."""
        result = (features - self.shift) / self.scale
        for index, (weight, bias) in enumerate(zip(self.weight, self.bias, strict=True)):
            result = result @ weight.T + bias
            if index < _LAYERS:
                result = np.maximum(result, 0.0)
        return result[:, 0]


@dataclass(frozen=True)
class PublishedNetworks:
    """The published form, a network per family (Lin et al.).

    Its search over layers, widths and rates is replaced by one setting within their ranges; precision, cache state and the part
    of a GPU, which the published one does not know, are inputs here, so that it is not beaten by what it was never told.
    """

    networks: dict[str, FamilyNetwork] = field(metadata=stored(prefix="", separator="/"))

    @classmethod
    def fit(cls, rows: Sequence[Row], seed: int, /) -> PublishedNetworks:
        """Each family's network at the epoch that is best on its validation rows."""
        by_family: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            by_family[row.family].append(row)
        networks = {}
        for family, members in sorted(by_family.items()):
            with seeded_torch(seed) as torch:
                networks[family] = _trained(torch, members)
        return cls(networks)

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """One launch per call: this form knows no kernels."""
        times_ns = np.full(len(questions), np.nan)
        members: dict[str, list[int]] = defaultdict(list)
        for index, question in enumerate(questions):
            members[family_of(question.call.op)].append(index)
        for family, places in members.items():
            network = self.networks.get(family)
            if network is not None:
                features = _features([questions[index] for index in places], network.kinds)
                times_ns[places] = np.exp(network.logs(features))
        return [Answer((LaunchTime("published", float(time_ns)),)) for time_ns in times_ns]


def _trained(torch: Any, rows: Sequence[Row]) -> FamilyNetwork:
    kinds = tuple(sorted({_kind(row.question) for row in rows}))
    sides = []
    for split in (FIT, VALIDATION):
        members = [row for row in rows if row.split == split]
        sides.append((_features([row.question for row in members], kinds), np.log([row.time_ns for row in members])))
    (features, logs), (unseen, unseen_logs) = sides
    shift, spread = features.mean(0), features.std(0)
    # An input that never varied in the fit says nothing when it does.
    scale = np.where(spread > _CONSTANT, spread, 1.0 / _CONSTANT)
    x, y = torch.tensor((features - shift) / scale, dtype=torch.float32), torch.tensor(logs, dtype=torch.float32)
    network = torch.nn.Sequential()
    for index, (wide, out) in enumerate(pairwise([x.shape[1], *[_WIDTH] * _LAYERS, 1])):
        network.append(torch.nn.Linear(wide, out))
        if index < _LAYERS:
            network.append(torch.nn.ReLU())
    torch.nn.init.constant_(network[-1].bias, float(logs.mean()))

    def now() -> FamilyNetwork:
        layers = [layer for layer in network if hasattr(layer, "weight")]
        weight, bias = (
            tuple(getattr(layer, name).detach().numpy().astype(np.float64) for layer in layers) for name in ("weight", "bias")
        )
        return FamilyNetwork(kinds, shift, scale, weight, bias)

    best, best_error = now(), math.inf
    optimizer = torch.optim.Adam(network.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _EPOCHS)
    for _ in range(_EPOCHS):
        for places in torch.randperm(len(x)).split(_BATCH):
            loss = (network(x[places])[:, 0] - y[places]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        trained = now()
        error = float(np.abs(trained.logs(unseen) - unseen_logs).mean()) if len(unseen) else 0.0
        if error < best_error:
            best, best_error = trained, error
    return best


def _features(questions: Sequence[Question], kinds: Sequence[str]) -> Floats:
    place_of = {kind: index for index, kind in enumerate(kinds)}
    result = np.zeros((len(questions), len(kinds) + 3 + _TENSORS * (_DIMENSIONS + 2) + _NUMBERS))
    for row, question in zip(result, questions, strict=True):
        index = place_of.get(_kind(question))
        if index is not None:
            row[index] = 1.0
        conditions = (question.warm, math.log(question.share), question.others in ("same", "streaming"))
        row[len(kinds) :] = [*conditions, *_sizes(question), *_numbers(question)]
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
    first = argument[0] if isinstance(argument, tuple) and argument else argument
    return isinstance(first, TensorArg)


def _numbers(question: Question) -> list[float]:
    """Strides, windows, axes and flags, as they come: logarithms with their signs; masks are filled with infinities."""
    results: list[float] = []
    for argument in question.call.args:
        every = argument if isinstance(argument, tuple) else (argument,)
        numbers = (float(item) for item in every if isinstance(item, bool | int | float))
        results += [math.copysign(math.log1p(min(abs(number), _LARGEST)), number) for number in numbers]
    return (results + [0.0] * _NUMBERS)[:_NUMBERS]


class KernelBaseline(KernelForm, Protocol):
    """A fitted baseline, kept as `engine.stored` does."""

    @classmethod
    def fit(cls, rows: Sequence[Row], seed: int, /) -> KernelBaseline:
        """Fits to the rows of the split `fit`, choosing on those of `validation`; none is of `test`."""
        ...


BASELINES: Final[dict[str, type[KernelBaseline]]] = {"roofline": Roofline, "published": PublishedNetworks}


def read_baselines(file: Path) -> dict[str, KernelForm]:
    """The baselines of a file, by name."""
    archive = Archive.open(file)

    def load(name: str, arrays: Arrays) -> KernelForm:
        baseline: Any = BASELINES[name]
        form: KernelForm = unpack(baseline, arrays)
        return form

    return dict(StoredParts(archive, {name: name for name in sorted(archive.parts)}, load))
