"""Boosted trees: grown with LightGBM, kept as flat arrays, evaluated with NumPy for all rows and trees at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

# Rows evaluated at once times trees: what a second-level cache holds.
_CHUNK = 1 << 16

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


@dataclass(frozen=True)
class Trees:
    """A sum of decision trees. Nodes of all trees lie in one row; a leaf is its own child on both sides."""

    feature: Ints  # node -> column
    threshold: Floats  # node -> a row goes left where its column is at most this
    children: Ints  # twice the node, plus one where it goes left -> node
    value: Floats  # node -> what a leaf adds
    roots: Ints  # tree -> node
    depth: int
    columns: int = 0  # of the features they were grown on; 0: any

    @classmethod
    def fit(
        cls,
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
            raise InputError("fitting kernel models needs LightGBM: install steptime[fit]") from error
        fixed = {"num_threads": 1, "deterministic": True, "force_col_wise": True, "verbosity": -1, "seed": seed}
        data = lightgbm.Dataset(np.asarray(features, dtype=np.float64), label=np.asarray(target), weight=weight)
        booster = lightgbm.train({**_SETTINGS, **settings, **fixed}, data, num_boost_round=rounds)
        return cls.parse(booster.model_to_string())

    @classmethod
    def parse(cls, text: str) -> Trees:
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
            return cls.constant(0.0)
        joined = {name: np.concatenate(column) for name, column in columns.items()}
        features = int(_field(text, "max_feature_idx")) + 1
        return cls(**joined, roots=np.asarray(roots, dtype=np.int32), depth=depth, columns=features)

    @classmethod
    def constant(cls, value: float) -> Trees:
        """One leaf: the same value for every row."""
        nowhere = np.zeros(1, dtype=np.int32)
        return cls(nowhere, np.zeros(1), np.zeros(2, dtype=np.int32), np.full(1, value), nowhere, 0)

    def values(self, features: npt.ArrayLike) -> Floats:
        """The sum of the trees for each row of `features`, shape (rows, columns)."""
        table = np.ascontiguousarray(features, dtype=np.float64)
        rows = table.shape[0]
        if self.columns and table.shape[1] != self.columns:
            raise InputError(f"trees grown on {self.columns} features were asked with {table.shape[1]}: fit these models again")
        found = np.empty(rows)
        step = max(1, _CHUNK // self.roots.size)
        for first in range(0, rows, step):
            found[first : first + step] = self._sums(table[first : first + step])
        return found

    def _sums(self, table: Floats) -> Floats:
        rows, width = table.shape
        flat = table.ravel()
        node = np.tile(self.roots, rows)
        start = np.repeat(np.arange(rows, dtype=np.int32) * width, self.roots.size)
        for _ in range(self.depth):
            left = flat.take(start + self.feature.take(node)) <= self.threshold.take(node)
            node = self.children.take(2 * node + left)
        sums: Floats = self.value.take(node).reshape(rows, self.roots.size).sum(axis=1)
        return sums

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same trees from."""
        return {
            "feature": self.feature,
            "threshold": self.threshold,
            "children": self.children,
            "value": self.value,
            "roots": self.roots,
            "depth": np.asarray(self.depth),
            "columns": np.asarray(self.columns),
        }

    @classmethod
    def load(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Trees:
        """The trees that `arrays` were taken from."""
        return cls(
            feature=arrays["feature"],
            threshold=arrays["threshold"],
            children=arrays["children"],
            value=arrays["value"],
            roots=arrays["roots"],
            depth=int(arrays["depth"]),
            columns=int(arrays["columns"]) if "columns" in arrays else 0,
        )


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
