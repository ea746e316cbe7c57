"""The mixture of kernels in NumPy: how long each kernel of a group would take, how likely each is chosen, what is left.

For a tile of a kernel, with `tiles` of them over `sms` multiprocessors, split `s` ways along k:

    waves    = tiles * s / sms, rounded up as far as the kernel's measured times are
    compute  = max(k/s * rate * latency + overhead, waves * (k/s * rate + overhead/2))     one tile alone | all of them
    cached   = what the tiles read and write through L2 / its bandwidth
    memory   = bytes that are not in L2 / the memory's bandwidth
    time     = start + (compute^4 + cached^4 + memory^4)^(1/4), and a reduction where it is split

The choice is a softmax over -sharpness * ln(time) and a small network on sizes, layout and alignment; the answer is the mean
of ln(time) under it, plus a bounded correction by a second network. Sizes outside the fitted range are held at its edge for
both networks, so that there time grows as the formulas above do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from steptime._models.kernels.forms.matmul.features import Floats, ProductInputs
from steptime._models.kernels.forms.matmul.group import TILES

MOST_CORRECTION = 0.7  # of ln(time): a factor of two either way
LEAST_K_PER_SPLIT = 64  # fewer are not worth a block: seen in the rows
_HALF = np.float32(0.5)
_US = np.float32(1e-3)  # per ns

Network = Mapping[str, Floats]


@dataclass(frozen=True)
class Mixed:
    """Of one group's products: ln(ns), how much of the choice is split along k, and scores of what is launched beside."""

    log_ns: Floats
    launched: Floats


def _exp(network: Network, name: str) -> Floats:
    return np.exp(network[name]).astype(np.float32)


def _sigmoid(values: Floats) -> Floats:
    return (1 / (1 + np.exp(-values))).astype(np.float32)


class KernelMixture:
    """One group's fitted networks, ready to be asked. Candidates lie along the first axis, products along the second."""

    def __init__(self, group: int, network: Network) -> None:
        tiles = TILES[group]
        self.network = network
        self._along_n = np.array([[tile.along_n] for tile in tiles], dtype=np.float32)
        self._along_m = np.array([[tile.along_m] for tile in tiles], dtype=np.float32)
        # In us: fourth powers of ns leave float32 at four seconds.
        self._rate = np.exp(network["rate"][:, None] + network["rate_layout"]).astype(np.float32) * _US
        self._latency = _exp(network, "latency")[:, None]
        self._overhead, self._start = (_exp(network, name)[:, None] * _US for name in ("overhead", "start"))
        self._rounding = _sigmoid(network["rounding"])[:, None]
        self._reduce, self._sharpness = _exp(network, "reduce")[0] * _US, _exp(network, "sharpness")[0]
        self._memory, self._cache = (_exp(network, name)[0] / _US for name in ("memory", "cache"))
        self._hot = _sigmoid(network["hot"])[0]

    def _times(self, inputs: ProductInputs) -> Floats:
        """us of every candidate, whole ones first, then split ones."""
        tiles = np.ceil(inputs.n / self._along_n) * np.ceil(inputs.m / self._along_m)
        tiles *= inputs.batch
        rate_k = self._rate[:, inputs.layout] * inputs.k
        per_cache = np.float32(1) / (self._cache * inputs.cache)
        memory = (inputs.cold_bytes + inputs.hot_bytes * self._hot) / (self._memory * inputs.memory)
        memory *= memory
        memory *= memory
        result = inputs.m * inputs.n * inputs.batch
        cached = np.minimum(self._along_n, inputs.n) + np.minimum(self._along_m, inputs.m)
        cached *= tiles
        cached *= inputs.k * inputs.element_bytes
        per_sm = np.float32(1) / inputs.sms
        count = len(self._along_n)
        times = np.empty((2 * count, len(inputs)), dtype=np.float32)
        self._fill(times[:count], tiles * per_sm, rate_k, (cached + result * inputs.element_bytes) * per_cache, memory)
        split = np.floor(inputs.sms / tiles)
        np.minimum(split, np.floor(inputs.k * np.float32(1 / LEAST_K_PER_SPLIT)), out=split)
        np.maximum(split, np.float32(2), out=split)
        cached += split * (result * inputs.element_bytes)
        cached *= per_cache
        tiles *= split
        tiles *= per_sm
        self._fill(times[count:], tiles, rate_k / split, cached, memory)
        split *= result * np.float32(8) * per_cache  # every part is written and read again, in single precision
        split += self._reduce
        times[count:] += split
        return times

    def _fill(self, out: Floats, waves: Floats, rate_k: Floats, cached: Floats, memory: Floats) -> None:
        """One half of the candidates; what it is given is used up."""
        rounded = np.ceil(waves)
        rounded -= waves
        rounded *= self._rounding
        rounded += waves
        rounded *= rate_k + self._overhead * _HALF
        compute = rate_k * self._latency
        compute += self._overhead
        np.maximum(compute, rounded, out=compute)
        compute *= compute
        compute *= compute
        cached *= cached
        cached *= cached
        compute += cached
        compute += memory
        np.sqrt(compute, out=compute)
        np.sqrt(compute, out=compute)
        np.add(compute, self._start, out=out)

    def ask(self, inputs: ProductInputs) -> Mixed:
        """ln(ns) of every product and the scores of what is launched with it."""
        network = self.network
        logs = self._times(inputs)
        np.log(logs, out=logs)
        logs -= np.log(_US)
        choice = np.clip(inputs.choice, network["choice_low"][:, None], network["choice_high"][:, None])
        hidden = np.tanh(network["hidden"] @ choice + network["hidden_bias"][:, None])
        score = network["choice_linear"] @ choice
        score += network["choice_hidden"] @ hidden
        score += network["choice_bias"][:, None]
        score -= self._sharpness * logs
        score -= score.max(axis=0)
        np.exp(score, out=score)
        score /= score.sum(axis=0)
        mean = np.einsum("ij,ij->j", score, logs)
        logs -= mean
        return self._corrected(inputs, choice, mean, np.sqrt(np.einsum("ij,ij,ij->j", score, logs, logs)))

    def _corrected(self, inputs: ProductInputs, choice: Floats, mean: Floats, spread: Floats) -> Mixed:
        network = self.network
        waves = np.clip(inputs.waves, network["waves_low"][:, None], network["waves_high"][:, None])
        scaled = (np.clip(mean, network["mean_low"], network["mean_high"]) - 9) / 3  # ln(8 us) is 9
        read = np.concatenate([choice, waves, scaled[None], spread[None]])
        for layer in ("first", "second"):
            read = network[f"{layer}_weight"] @ read
            read += network[f"{layer}_bias"][:, None]
            np.maximum(read, 0, out=read)
        out = network["last_weight"] @ read + network["last_bias"][:, None]
        flags = network["flags"] @ inputs.flags
        log_ns = mean + flags + np.float32(MOST_CORRECTION) * np.tanh(out[0]) + np.log(inputs.time)
        return Mixed(log_ns.astype(np.float32), out[1:])
