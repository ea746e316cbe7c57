"""Trees grown with LightGBM and read from its own text, small networks trained with PyTorch, and blends of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.engine.regression import REACH, Blend, Choice, Guess, Networks, Trees
from steptime._models.engine.stored import Floats
from steptime._models.lookups.forms import Correction
from steptime_lab.fit.engine import fitting_library, seeded_torch

# Chosen on validation rows of convolutions and attention; absolute error, because a few calls take a path of their own.
_USUAL: dict[str, Any] = {
    "objective": "regression_l1",
    "learning_rate": 0.05,
    "num_leaves": 15,
    "max_depth": 8,
    "min_data_in_leaf": 8,
    "feature_fraction": 0.7,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 1.0,
}
# Chosen on validation rows of convolutions: absolute error beyond a tenth, leaves of four rows.
_BLENDED: dict[str, Any] = {
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
# Chosen on validation rows of products: as many are right with twice as many and twice as large trees.
_CHOICE: dict[str, Any] = {"rounds": 30, "learning_rate": 0.25, "num_leaves": 15, "lambda_l2": 1.0}
_STEPS, _DECAY = 500, 0.01  # of a network that is trained without saying so otherwise
# Chosen on validation rows of lookups: few trees, so that a plan of many tables is estimated in microseconds.
_CORRECTION: dict[str, Any] = {
    "rounds": 140,
    "objective": "regression",
    "learning_rate": 0.1,
    "num_leaves": 16,
    "max_depth": 7,
    "min_data_in_leaf": 10,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 1.0,
}


def grow_trees(
    features: npt.ArrayLike,
    target: npt.ArrayLike,
    weight: npt.ArrayLike | None = None,
    seed: int = 0,
    rounds: int = 300,
    **settings: Any,
) -> Trees:
    """Grows trees; `settings` are LightGBM's, over this module's own. The same rows and seed give the same trees."""
    lightgbm = fitting_library("lightgbm")
    fixed = {"num_threads": 1, "deterministic": True, "force_col_wise": True, "verbosity": -1, "seed": seed}
    data = lightgbm.Dataset(np.asarray(features, dtype=np.float64), label=np.asarray(target), weight=weight)
    booster = lightgbm.train({**_USUAL, **settings, **fixed}, data, num_boost_round=rounds)
    return parse_trees(booster.model_to_string())


def parse_trees(text: str) -> Trees:
    """The trees of a model in LightGBM's own text."""
    columns: dict[str, list[npt.NDArray[Any]]] = {"feature": [], "threshold": [], "children": [], "value": []}
    roots, depth, offset = [], 0, 0
    for block in text.split("\nTree=")[1:]:
        nodes = _nodes(block)
        depth = max(depth, _depth(nodes["children"]))
        nodes["children"] = nodes["children"] + offset
        for name, column in columns.items():
            column.append(nodes[name])
        roots.append(offset)
        offset += nodes["value"].size
    if not roots:
        return Trees.constant(0.0)
    joined = {name: np.concatenate(column) for name, column in columns.items()}
    features = int(_field(text, "max_feature_idx")) + 1
    return Trees(**joined, roots=np.asarray(roots, dtype=np.int32), depth=depth, columns=features)


def _field(text: str, name: str) -> str:
    """A field of the head of a model in LightGBM's own text."""
    return text.split(f"\n{name}=", 1)[1].split("\n", 1)[0]


def _nodes(block: str) -> dict[str, npt.NDArray[Any]]:
    """One tree's columns: inner nodes first, leaves behind them, as LightGBM numbers them (leaf i is child -1 - i)."""
    fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
    leaves = np.array(fields["leaf_value"].split(), dtype=np.float64)
    inner = leaves.size - 1
    if inner == 0:
        return {"feature": np.zeros(1, np.int32), "threshold": np.zeros(1), "children": np.zeros(2, np.int32), "value": leaves}
    own = np.arange(inner, inner + leaves.size, dtype=np.int32)
    children = np.empty(2 * (inner + leaves.size), dtype=np.int32)
    for side, name in enumerate(("right_child", "left_child")):
        child = np.array(fields[name].split(), dtype=np.int32)
        children[side::2] = np.concatenate([np.where(child < 0, inner - 1 - child, child), own])
    blank = np.zeros(leaves.size)
    return {
        "feature": np.concatenate([np.array(fields["split_feature"].split(), np.int32), blank.astype(np.int32)]),
        "threshold": np.concatenate([np.array(fields["threshold"].split(), np.float64), blank]),
        "children": children,
        "value": np.concatenate([np.zeros(inner), leaves]),
    }


def _depth(children: npt.NDArray[Any]) -> int:
    """Steps from the root (node 0) to the deepest leaf."""
    level, depth = np.zeros(1, dtype=np.int32), 0
    while True:
        below = np.unique(np.concatenate([children[2 * level], children[2 * level + 1]]))
        below = below[~np.isin(below, level)]
        if below.size == 0:
            return depth
        level, depth = below, depth + 1


@dataclass(frozen=True)
class Training:
    """How a network is trained."""

    width: int = 64
    steps: int | None = None  # as many as this module says where there is none
    rate: float = 0.01
    dropout: float = 0.05
    knee: float = 0.05  # of the loss: quadratic below, absolute above
    batch: int | None = None  # rows that a step sees; all of them where there is none
    epochs: int | None = None  # that few rows are seen at most, so that fitting them takes less; as many as it takes: none
    least: int = 700  # steps that even the fewest rows get

    def steps_for(self, rows: int) -> int:
        """How many there are for so many rows."""
        steps = _STEPS if self.steps is None else self.steps
        if self.epochs is None or self.batch is None:
            return steps
        return min(steps, max(self.least, self.epochs * rows // self.batch))


def train_networks(features: Floats, target: Floats, seed: int, count: int, training: Training | None = None) -> Networks:
    """Fits `count` networks from different seeds."""
    centre, scale = features.mean(axis=0), features.std(axis=0) + 1e-6
    scaled = np.clip((features - centre) / scale, -REACH, REACH)
    results = [_network(scaled, target, seed + index, training or Training()) for index in range(count)]
    layers = [np.stack([network[index] for network in results]) for index in range(6)]
    return Networks(centre, scale, (layers[0], layers[2], layers[4]), (layers[1], layers[3], layers[5]))


def _network(scaled: Floats, target: Floats, seed: int, training: Training) -> list[Floats]:
    """Weights and offsets of one network, layer by layer."""
    width, knee, steps = training.width, training.knee, training.steps_for(len(target))
    with seeded_torch(seed) as torch:
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
    arrays: list[Floats] = []
    for layer in layers:
        weight, offset = (part.detach().numpy() for part in (layer.weight, layer.bias))
        arrays += [np.ascontiguousarray(weight.T, dtype=np.float64), offset.astype(np.float64)]
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


def fit_guess(features: Floats, ways: npt.NDArray[np.int_], seed: int, **settings: Any) -> Guess:
    """Learns which rows go which way; ways are any whole numbers, `settings` are LightGBM's, over this module's own."""
    grown = [_rounded(grow_trees(features, taken, seed=seed, **{**_GUESS, **settings})) for taken in flags_of(ways).T]
    names = ("feature", "threshold", "children", "value", "roots", "depth", "columns")
    joined = {name: np.concatenate([np.atleast_1d(getattr(trees, name)) for trees in grown]) for name in names}
    sizes = {"nodes": [trees.value.size for trees in grown], "rounds": [trees.roots.size for trees in grown]}
    return Guess(**joined, **{name: np.asarray(values) for name, values in sizes.items()})


def fit_choice(features: Floats, numbers: npt.NDArray[np.int_], seed: int, **settings: Any) -> Choice:
    """Learns which number rows have; `settings` are LightGBM's, over this module's own.

    Only which sum of leaves is the largest counts, so that few bits of them and of the corners are kept.
    """
    seen = np.unique(numbers).astype(np.int64)
    if len(seen) < 2:
        return Choice(seen, None)
    guess = fit_guess(features, numbers, seed, **{**_CHOICE, **settings})
    corners, leaves = guess.threshold.astype(np.float32), guess.value.astype(np.float16)
    return Choice(seen, replace(guess, threshold=corners.astype(np.float64), value=leaves.astype(np.float64)))


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
    grown = grow_trees(seen, target, seed=seed, **{**_BLENDED, **settings})
    trained = train_networks(features, target, seed, networks, training) if networks else None
    return Blend((_rounded(grown) if single else grown,), trained, weight, guess)


def _rounded(trees: Trees) -> Trees:
    """With leaves that half the bytes hold."""
    return replace(trees, value=trees.value.astype(np.float32).astype(np.float64))


def fit_correction(features: Floats, physics: Floats, times: Floats, seed: int, **settings: Any) -> Correction:
    """From fitted rows. `settings` are LightGBM's, with `rounds`."""
    target = np.log(times / physics)
    trees = grow_trees(features, target, seed=seed, **{**_CORRECTION, **settings})
    return Correction(trees, np.array([target.min(), target.max()]))
