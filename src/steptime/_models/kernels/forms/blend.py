"""Trees and small neural networks on the same features, averaged: trees know corners, networks what lies between.

On validation rows of convolutions both err about equally and their mean errs least; of attention, networks err less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms.trees import Trees
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]

# Chosen on validation rows of convolutions: absolute error beyond a tenth, leaves of four rows.
_TREES: dict[str, Any] = {
    "objective": "huber",
    "alpha": 0.1,
    "num_leaves": 31,
    "max_depth": 8,
    "min_data_in_leaf": 4,
    "learning_rate": 0.08,
    "rounds": 300,
}
# Chosen on validation rows of convolutions: which of a few ways a pass goes.
_GUESS: dict[str, Any] = {
    "objective": "binary",
    "num_leaves": 31,
    "max_depth": 10,
    "min_data_in_leaf": 4,
    "learning_rate": 0.2,
    "feature_fraction": 0.5,
    "rounds": 50,
}
_WIDTH, _STEPS, _RATE, _DECAY, _DROPOUT = 64, 500, 0.01, 0.01, 0.05
_KNEE = 0.05  # of the loss: quadratic below, absolute above
_REACH = 4.0  # standard deviations beyond which a network sees no further: it answers as at the edge
_ROWS = 1 << 11  # evaluated at once: what the hidden layers of a few networks take in a third-level cache


@dataclass(frozen=True)
class Training:
    """How a network is trained; what is not given is this module's own."""

    width: int = _WIDTH
    steps: int | None = None
    rate: float = _RATE
    dropout: float = _DROPOUT
    knee: float = _KNEE
    batch: int | None = None  # rows that a step sees; all of them where there is none


@dataclass(frozen=True)
class Networks:
    """Networks of two hidden layers, evaluated together. First axis: network."""

    centre: Floats
    scale: Floats
    weights: tuple[Floats, Floats, Floats]
    offsets: tuple[Floats, Floats, Floats]

    @classmethod
    def fit(cls, features: Floats, target: Floats, seed: int, count: int, training: Training | None = None) -> Networks:
        """Fits `count` networks from different seeds."""
        try:
            torch: Any = import_module("torch")
        except ImportError as error:
            raise InputError("fitting kernel models needs PyTorch: install steptime[fit]") from error
        centre, scale = features.mean(axis=0), features.std(axis=0) + 1e-6
        scaled = np.clip((features - centre) / scale, -_REACH, _REACH)
        found = [_network(torch, scaled, target, seed + place, training or Training()) for place in range(count)]
        layers = [np.stack([network[place] for network in found]) for place in range(6)]
        return cls(centre, scale, (layers[0], layers[2], layers[4]), (layers[1], layers[3], layers[5]))

    def values(self, features: Floats) -> Floats:
        """The mean over the networks, for each row."""
        found = np.empty(len(features))
        for first in range(0, len(features), _ROWS):
            found[first : first + _ROWS] = self._means(features[first : first + _ROWS])
        return found

    def _means(self, features: Floats) -> Floats:
        hidden = np.clip((features - self.centre) / self.scale, -_REACH, _REACH)[None]
        for place in (0, 1):
            linear = hidden @ self.weights[place] + self.offsets[place][:, None, :]
            hidden = linear / (1.0 + np.exp(-linear))
        result: Floats = (hidden @ self.weights[2] + self.offsets[2][:, None, :])[..., 0].mean(axis=0)
        return result


def _network(torch: Any, scaled: Floats, target: Floats, seed: int, training: Training) -> list[Floats]:
    """Weights and offsets of one network, layer by layer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that sums, and with them the network, are the same everywhere
    width, knee, steps = training.width, training.knee, _STEPS if training.steps is None else training.steps
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        nn = torch.nn
        layers = (nn.Linear(scaled.shape[1], width), nn.Linear(width, width), nn.Linear(width, 1))
        # None at all where it is 0: it would draw numbers all the same.
        gap = (nn.Dropout(training.dropout),) if training.dropout else ()
        network = nn.Sequential(layers[0], nn.SiLU(), *gap, layers[1], nn.SiLU(), *gap, layers[2])
        inputs, wanted = (torch.as_tensor(values, dtype=torch.float32) for values in (scaled, target))
        optimizer = torch.optim.AdamW(network.parameters(), lr=training.rate, weight_decay=_DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, training.rate, total_steps=steps)
        for rows in _batches(len(target), training.batch, steps, seed):
            optimizer.zero_grad()
            error = (network(inputs[rows])[:, 0] - wanted[rows]).abs()
            torch.where(error < knee, error * error / (2 * knee), error - knee / 2).mean().backward()
            optimizer.step()
            schedule.step()
    torch.set_num_threads(threads)
    arrays = []
    for layer in layers:
        arrays += [
            np.ascontiguousarray(layer.weight.detach().numpy().T, dtype=np.float64),
            layer.bias.detach().numpy().astype(np.float64),
        ]
    return arrays


def _batches(rows: int, batch: int | None, steps: int, seed: int) -> Iterator[slice | npt.NDArray[np.int_]]:
    """The rows that each step sees: every row once before any comes again."""
    if batch is None or batch >= rows:
        yield from (slice(None) for _ in range(steps))
        return
    dice = np.random.default_rng(seed)
    each = rows // batch
    for first in range(0, steps, each):
        order = dice.permutation(rows)
        yield from (order[place * batch : (place + 1) * batch] for place in range(min(each, steps - first)))


@dataclass(frozen=True)
class Guess:
    """Trees that tell ways of doing a thing apart, one sum for each way: the largest says which one is likeliest."""

    ways: tuple[Trees, ...]

    @classmethod
    def fit(cls, features: Floats, ways: npt.NDArray[np.int_], seed: int) -> Guess:
        """Learns which rows go which way; ways are any whole numbers."""
        return cls(tuple(_rounded(Trees.fit(features, taken, seed=seed, **_GUESS)) for taken in flags_of(ways).T))

    def flags(self, features: Floats) -> Floats:
        """A column for each way, in the order of `flags_of`: 1 where it is the likeliest, else 0."""
        likeliest = np.argmax([trees.values(features) for trees in self.ways], axis=0)
        flags: Floats = np.eye(len(self.ways))[likeliest]
        return flags

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same guess from: the trees of all ways behind each other, because few arrays read faster."""
        kept = [trees.arrays() for trees in self.ways]
        return {name: np.concatenate([np.atleast_1d(one[name]) for one in kept]) for name in kept[0]} | {
            "nodes": np.array([trees.value.size for trees in self.ways]),
            "rounds": np.array([trees.roots.size for trees in self.ways]),
        }

    @classmethod
    def load(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Guess:
        """The guess that `arrays` were taken from."""
        nodes, rounds = (np.cumsum(arrays[name])[:-1] for name in ("nodes", "rounds"))
        borders = {"feature": nodes, "threshold": nodes, "children": 2 * nodes, "value": nodes, "roots": rounds}
        split = {name: np.split(arrays[name], places) for name, places in borders.items()}
        plain = {name: values for name, values in arrays.items() if name not in (*borders, "nodes", "rounds")}
        ways = ({name: values[way] for name, values in (split | plain).items()} for way in range(len(arrays["nodes"])))
        return cls(tuple(Trees.load(way) for way in ways))


def flags_of(ways: npt.NDArray[np.int_]) -> Floats:
    """A column for each way that occurs, 1 where it was taken and else 0."""
    flags: Floats = (ways[:, None] == np.unique(ways)).astype(np.float64)
    return flags


@dataclass(frozen=True)
class Blend:
    """Trees and, where it has any, networks with their weight beside the trees'; trees may go by a guess besides."""

    trees: tuple[Trees, ...]
    networks: Networks | None
    weight: float = 0.5
    guess: Guess | None = None

    @classmethod
    def fit(
        cls,
        features: Floats,
        target: Floats,
        seed: int,
        *,
        networks: int = 3,
        weight: float = 0.5,
        training: Training | None = None,
        single: bool = False,
        ways: npt.NDArray[np.int_] | None = None,
        **settings: Any,
    ) -> Blend:
        """Fits both to the same rows; `settings` are LightGBM's, over this module's own.

        `single` rounds leaves so that a file holds them in half the bytes. Where rows go different ways, trees learn from the
        way of each and are asked with the way that is guessed: a time between those of two ways is right for neither.
        """
        guess, seen = None, features
        if ways is not None and len(np.unique(ways)) > 1:
            guess, seen = Guess.fit(features, ways, seed), np.column_stack([features, flags_of(ways)])
        grown = Trees.fit(seen, target, seed=seed, **{**_TREES, **settings})
        trained = Networks.fit(features, target, seed, networks, training) if networks else None
        return cls((_rounded(grown) if single else grown,), trained, weight, guess)

    def values(self, features: Floats) -> Floats:
        """What the blend says for each row of `features`."""
        voices = self.voices(features)
        return voices[0] if len(voices) == 1 else (1 - self.weight) * voices[0] + self.weight * voices[1]

    def voices(self, features: Floats) -> list[Floats]:
        """What the trees say for each row and, where there are any, what the networks say."""
        if not len(features):
            return [np.zeros(0)]
        seen = features if self.guess is None else np.column_stack([features, self.guess.flags(features)])
        grown: Floats = sum((trees.values(seen) for trees in self.trees), np.zeros(len(seen))) / len(self.trees)
        return [grown] if self.networks is None else [grown, self.networks.values(features)]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same blend from."""
        kept: dict[str, npt.NDArray[Any]] = {"trees": np.asarray(len(self.trees)), "weight": np.asarray(self.weight)}
        for place, trees in enumerate(self.trees):
            kept |= prefixed(trees.arrays(), f"trees{place}")
        if self.guess is not None:
            kept |= prefixed(self.guess.arrays(), "guess")
        if self.networks is not None:
            kept |= {"networks.centre": self.networks.centre, "networks.scale": self.networks.scale}
            kept |= {f"networks.weights{place}": values for place, values in enumerate(self.networks.weights)}
            kept |= {f"networks.offsets{place}": values for place, values in enumerate(self.networks.offsets)}
        return {name: _narrow(values) for name, values in kept.items()}

    @classmethod
    def load(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Blend:
        """The blend that `arrays` were taken from."""
        arrays = {name: _wide(values) for name, values in arrays.items()}
        trees = tuple(Trees.load(part(arrays, f"trees{place}")) for place in range(int(arrays["trees"])))
        guessed, kept = part(arrays, "guess"), part(arrays, "networks")
        guess = Guess.load(guessed) if guessed else None
        if not kept:
            return cls(trees, None, guess=guess)
        weights, offsets = ((kept[f"{name}0"], kept[f"{name}1"], kept[f"{name}2"]) for name in ("weights", "offsets"))
        networks = Networks(kept["centre"], kept["scale"], weights, offsets)
        return cls(trees, networks, float(arrays["weight"]), guess)


def _rounded(trees: Trees) -> Trees:
    """With leaves that half the bytes hold."""
    return replace(trees, value=trees.value.astype(np.float32).astype(np.float64))


def _narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """In half the bytes where nothing is lost: a network's weights always, leaves where they were rounded."""
    if values.dtype != np.float64:
        return values
    with np.errstate(over="ignore"):
        half = values.astype(np.float32)
    return half if np.array_equal(half, values) else values


def _wide(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.astype(np.float64) if values.dtype == np.float32 else values


def part(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> dict[str, npt.NDArray[Any]]:
    """Those of some arrays whose names begin with a prefix and a dot, without it."""
    start = prefix + "."
    return {name.removeprefix(start): values for name, values in arrays.items() if name.startswith(start)}


def prefixed(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays under names that begin with a prefix and a dot."""
    return {f"{prefix}.{name}": values for name, values in arrays.items()}
