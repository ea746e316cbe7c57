"""Trees grown with LightGBM and read from its own text."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.engine.trees import Trees
from steptime.errors import InputError

# Chosen on validation rows of convolutions and attention; absolute error, because a few calls take a path of their own.
_SETTINGS: dict[str, Any] = {
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


def grow_trees(
    features: npt.ArrayLike,
    target: npt.ArrayLike,
    weight: npt.ArrayLike | None = None,
    seed: int = 0,
    rounds: int = 300,
    **settings: Any,
) -> Trees:
    """Grows trees; `settings` are LightGBM's, over this module's own. The same rows and seed give the same trees."""
    try:
        lightgbm: Any = import_module("lightgbm")
    except ImportError as error:
        raise InputError("fitting needs LightGBM: install steptime[fit]") from error
    fixed = {"num_threads": 1, "deterministic": True, "force_col_wise": True, "verbosity": -1, "seed": seed}
    data = lightgbm.Dataset(np.asarray(features, dtype=np.float64), label=np.asarray(target), weight=weight)
    booster = lightgbm.train({**_SETTINGS, **settings, **fixed}, data, num_boost_round=rounds)
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
