"""Small networks trained with PyTorch, guesses of ways, and blends of trees and networks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.engine.blend import REACH, Blend, Guess, Networks
from steptime._models.engine.stored import Floats
from steptime._models.engine.trees import Trees
from steptime.errors import InputError
from steptime_lab.fit.engine.trees import grow_trees

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


@dataclass(frozen=True)
class Training:
    """How a network is trained; what is not given is this module's own."""

    width: int = _WIDTH
    steps: int | None = None
    rate: float = _RATE
    dropout: float = _DROPOUT
    knee: float = _KNEE
    batch: int | None = None  # rows that a step sees; all of them where there is none


def train_networks(features: Floats, target: Floats, seed: int, count: int, training: Training | None = None) -> Networks:
    """Fits `count` networks from different seeds."""
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        raise InputError("fitting kernel models needs PyTorch: install steptime[fit]") from error
    centre, scale = features.mean(axis=0), features.std(axis=0) + 1e-6
    scaled = np.clip((features - centre) / scale, -REACH, REACH)
    results = [_network(torch, scaled, target, seed + index, training or Training()) for index in range(count)]
    layers = [np.stack([network[index] for network in results]) for index in range(6)]
    return Networks(centre, scale, (layers[0], layers[2], layers[4]), (layers[1], layers[3], layers[5]))


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
        yield from (order[index * batch : (index + 1) * batch] for index in range(min(each, steps - first)))


def fit_guess(features: Floats, ways: npt.NDArray[np.int_], seed: int) -> Guess:
    """Learns which rows go which way; ways are any whole numbers."""
    grown = [_rounded(grow_trees(features, taken, seed=seed, **_GUESS)) for taken in flags_of(ways).T]
    names = ("feature", "threshold", "children", "value", "roots", "depth", "columns")
    joined = {name: np.concatenate([np.atleast_1d(getattr(trees, name)) for trees in grown]) for name in names}
    sizes = {"nodes": [trees.value.size for trees in grown], "rounds": [trees.roots.size for trees in grown]}
    return Guess(**joined, **{name: np.asarray(values) for name, values in sizes.items()})


def flags_of(ways: npt.NDArray[np.int_]) -> Floats:
    """A column for each way that occurs, 1 where it was taken and else 0."""
    flags: Floats = (ways[:, None] == np.unique(ways)).astype(np.float64)
    return flags


def fit_blend(
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
    """Fits trees and networks to the same rows; `settings` are LightGBM's, over this module's own.

    `single` rounds leaves so that a file holds them in half the bytes. Where rows go different ways, trees learn from the
    way of each and are asked with the way that is guessed: a time between those of two ways is right for neither.
    """
    guess, seen = None, features
    if ways is not None and len(np.unique(ways)) > 1:
        guess, seen = fit_guess(features, ways, seed), np.column_stack([features, flags_of(ways)])
    grown = grow_trees(seen, target, seed=seed, **{**_TREES, **settings})
    trained = train_networks(features, target, seed, networks, training) if networks else None
    return Blend((_rounded(grown) if single else grown,), trained, weight, guess)


def _rounded(trees: Trees) -> Trees:
    """With leaves that half the bytes hold."""
    return replace(trees, value=trees.value.astype(np.float32).astype(np.float64))
