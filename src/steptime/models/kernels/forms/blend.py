"""Trees and small neural networks on the same features, averaged: trees know corners, networks what lies between.

On validation rows of convolutions both err about equally and their mean errs least; of attention, networks err less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError
from steptime.models.kernels.forms.trees import Trees

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
_WIDTH, _STEPS, _RATE, _DECAY, _DROPOUT = 64, 500, 0.01, 0.01, 0.05
_KNEE = 0.05  # of the loss: quadratic below, absolute above
_REACH = 4.0  # standard deviations beyond which a network sees no further: it answers as at the edge


@dataclass(frozen=True)
class Networks:
    """Networks of two hidden layers, evaluated together. First axis: network."""

    centre: Floats
    scale: Floats
    weights: tuple[Floats, Floats, Floats]
    offsets: tuple[Floats, Floats, Floats]

    @classmethod
    def fit(cls, features: Floats, target: Floats, seed: int, count: int) -> Networks:
        """Fits `count` networks from different seeds."""
        try:
            torch: Any = import_module("torch")
        except ImportError as error:
            raise InputError("fitting kernel models needs PyTorch: install steptime[fit]") from error
        centre, scale = features.mean(axis=0), features.std(axis=0) + 1e-6
        scaled = np.clip((features - centre) / scale, -_REACH, _REACH)
        found = [_network(torch, scaled, target, seed + place) for place in range(count)]
        layers = [np.stack([network[place] for network in found]) for place in range(6)]
        return cls(centre, scale, (layers[0], layers[2], layers[4]), (layers[1], layers[3], layers[5]))

    def values(self, features: Floats) -> Floats:
        """The mean over the networks, for each row."""
        hidden = np.clip((features - self.centre) / self.scale, -_REACH, _REACH)[None]
        for place in (0, 1):
            linear = hidden @ self.weights[place] + self.offsets[place][:, None, :]
            hidden = linear / (1.0 + np.exp(-linear))
        result: Floats = (hidden @ self.weights[2] + self.offsets[2][:, None, :])[..., 0].mean(axis=0)
        return result


def _network(torch: Any, scaled: Floats, target: Floats, seed: int) -> list[Floats]:
    """Weights and offsets of one network, layer by layer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that sums, and with them the network, are the same everywhere
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        nn = torch.nn
        layers = (nn.Linear(scaled.shape[1], _WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 1))
        network = nn.Sequential(
            layers[0], nn.SiLU(), nn.Dropout(_DROPOUT), layers[1], nn.SiLU(), nn.Dropout(_DROPOUT), layers[2]
        )
        inputs, wanted = (torch.as_tensor(values, dtype=torch.float32) for values in (scaled, target))
        optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=_DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=_STEPS)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            error = (network(inputs)[:, 0] - wanted).abs()
            torch.where(error < _KNEE, error * error / (2 * _KNEE), error - _KNEE / 2).mean().backward()
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


@dataclass(frozen=True)
class Blend:
    """Trees and, where it has any, networks with their weight beside the trees'."""

    trees: tuple[Trees, ...]
    networks: Networks | None
    weight: float = 0.5

    @classmethod
    def fit(
        cls,
        features: Floats,
        target: Floats,
        seed: int,
        *,
        trees: int = 1,
        networks: int = 3,
        weight: float = 0.5,
        **settings: Any,
    ) -> Blend:
        """Fits both to the same rows; `settings` are LightGBM's, over this module's own."""
        grown = tuple(Trees.fit(features, target, seed=seed + place, **{**_TREES, **settings}) for place in range(trees))
        return cls(grown, Networks.fit(features, target, seed, networks) if networks else None, weight)

    def values(self, features: Floats) -> Floats:
        """What the blend says for each row of `features`."""
        voices = self.voices(features)
        return voices[0] if len(voices) == 1 else (1 - self.weight) * voices[0] + self.weight * voices[1]

    def voices(self, features: Floats) -> list[Floats]:
        """What the trees say for each row and, where there are any, what the networks say."""
        if not len(features):
            return [np.zeros(0)]
        grown: Floats = sum((trees.values(features) for trees in self.trees), np.zeros(len(features))) / len(self.trees)
        return [grown] if self.networks is None else [grown, self.networks.values(features)]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same blend from."""
        kept: dict[str, npt.NDArray[Any]] = {"trees": np.asarray(len(self.trees)), "weight": np.asarray(self.weight)}
        for place, trees in enumerate(self.trees):
            kept |= {f"trees{place}.{name}": values for name, values in trees.arrays().items()}
        if self.networks is not None:
            kept |= {"networks.centre": self.networks.centre, "networks.scale": self.networks.scale}
            kept |= {f"networks.weights{place}": values for place, values in enumerate(self.networks.weights)}
            kept |= {f"networks.offsets{place}": values for place, values in enumerate(self.networks.offsets)}
        return kept

    @classmethod
    def load(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Blend:
        """The blend that `arrays` were taken from."""
        trees = tuple(Trees.load(part(arrays, f"trees{place}")) for place in range(int(arrays["trees"])))
        kept = part(arrays, "networks")
        if not kept:
            return cls(trees, None)
        weights, offsets = ((kept[f"{name}0"], kept[f"{name}1"], kept[f"{name}2"]) for name in ("weights", "offsets"))
        return cls(trees, Networks(kept["centre"], kept["scale"], weights, offsets), float(arrays["weight"]))


def part(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> dict[str, npt.NDArray[Any]]:
    """Those of some arrays whose names begin with a prefix and a dot, without it."""
    start = prefix + "."
    return {name.removeprefix(start): values for name, values in arrays.items() if name.startswith(start)}


def prefixed(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays under names that begin with a prefix and a dot."""
    return {f"{prefix}.{name}": values for name, values in arrays.items()}
