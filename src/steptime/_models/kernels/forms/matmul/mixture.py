"""How long a product takes by the mixture of kernels that the library may choose from, in NumPy.

For a tile of a kernel, with `tiles` of them over `sms` multiprocessors, split `s` ways along k:

    waves    = tiles * s / sms, rounded up as far as the kernel's measured times are
    compute  = max(k/s * rate * latency + overhead, waves * (k/s * rate + overhead/2))     one tile alone | all of them
    cached   = what the tiles read and write through L2 / its bandwidth
    memory   = bytes that are not in L2 / the memory's bandwidth
    time     = start + (compute^4 + cached^4 + memory^4)^(1/4), and a reduction where it is split

The choice is a softmax over -sharpness * ln(time) and a small network on sizes, layout and alignment; the answer is the mean
of ln(time) under it, plus a bounded correction by a second network. Sizes outside the fitted range are held at its edge for
both networks, so that there time grows as the formulas above do.

On a half, a quarter or an eighth of a GPU the networks are asked with a share's SMs and bandwidths. How much of each a share
has is fitted for every number of parts and every company.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.engine.regression import Choice, Trees
from steptime._models.engine.stored import stored
from steptime._models.kernels.forms.matmul.products import OPERATIONS, TILES, VECTOR, Column, Products, upright
from steptime._models.kernels.question import OTHERS

Floats = npt.NDArray[Any]  # float32
Deviations = npt.NDArray[np.float64]  # shares x company x factors

FACTORS = ("sms", "memory", "cache", "time")  # ln of what a part has relative to its start; `time` is what is left over
COMPANY = OTHERS[1:]  # none is asked like idle


@dataclass(frozen=True)
class ProductShares:
    """Fitted deviations, by number of parts and company."""

    shares: Column
    deviations: Deviations

    def factors(self, share: Column, others: Column) -> Deviations:
        """Factors on multiprocessors, memory and cache bandwidth and time, one column per product; ones on a whole GPU."""
        company = np.maximum(others - 1, 0)
        logs = np.zeros((len(FACTORS), len(share)))
        if len(self.shares):
            octave, known = np.log2(share), np.log2(self.shares)
            for index in range(len(COMPANY)):
                mine = company == index
                for factor in range(len(FACTORS)):
                    logs[factor, mine] = np.interp(octave[mine], known, self.deviations[:, index, factor])
        # From an equal share of everything where others work, of all but the multiprocessors where they are idle.
        equal = -np.log(share)
        working = np.where(company == 0, 0.0, equal)
        logs += np.stack([equal, working, working, np.zeros(len(share))])
        logs[:, share == 1] = 0
        return np.exp(logs)


NO_SHARES = ProductShares(np.zeros(0), np.zeros((0, len(COMPANY), len(FACTORS))))


# Tiles whose number of waves the residual reads: small, square and wide ones.
_WAVE_TILES = ((64, 64), (128, 128), (128, 256), (256, 128), (32, 32))
_BATCHED = OPERATIONS.index("bmm")  # and what follows


@dataclass(frozen=True)
class MatmulConstants:
    """Of the device that products run on."""

    sms: float
    l2_bytes: float
    filled_bytes_per_ns: float  # of a result without terms


@dataclass(frozen=True)
class ProductInputs:
    """Float32 columns of one group's products; `choice`, `flags` and `waves` have one row per feature."""

    n: Floats
    m: Floats
    k: Floats
    batch: Floats
    element_bytes: Floats
    cold_bytes: Floats  # read from memory or written
    hot_bytes: Floats  # read and written just before
    layout: Column
    sms: Floats
    memory: Floats  # bandwidth relative to a whole GPU's, of memory and of L2; a number where all are whole
    cache: Floats
    time: Floats  # what a part's time is multiplied with
    choice: Floats
    flags: Floats
    waves: Floats

    def __len__(self) -> int:
        return len(self.m)

    def take(self, places: Column) -> ProductInputs:
        """Those at some places."""
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        return ProductInputs(**{name: column if column.size == 1 else column[..., places] for name, column in columns.items()})


def _log2_alignment(values: Column, most: int) -> Floats:
    return np.log2(np.minimum(values & -values, most).astype(np.float32))


def _stack(columns: list[Column]) -> Floats:
    stacked = np.empty((len(columns), len(columns[0])), dtype=np.float32)
    for row, column in enumerate(columns):
        stacked[row] = column
    return stacked


def _choice(products: Products, logs: tuple[Floats, Floats, Floats, Floats, Floats], epilogue: Column) -> Floats:
    n, m, k, batch, per_sm = logs
    size, layout, operation = products.element_bytes, products.layout, products.operation
    return _stack(
        [
            *(n, m, k, batch, per_sm, n * m, n * k, m * k, n * n, m * m, k * k, per_sm * k),
            *(layout == 0, layout == 2, layout == 1, operation >= _BATCHED, epilogue),
            *(products.precision == place for place in (3, 1, 0)),
            *((_log2_alignment(lead * size, 128) - 4) / 3 for lead in (products.leading_b, products.leading_a, products.n)),
            *(_log2_alignment(products.m, 64) / 6, _log2_alignment(products.k, 64) / 6),
            *(
                (operation == OPERATIONS.index("baddbmm")) & (products.bias == 0),
                products.bias >= 2,
                products.m == 1,
                products.n == 1,
            ),
        ]
    )


def _waves(n: Floats, m: Floats, batch: Floats, sms: Floats) -> list[Floats]:
    results = []
    area = m * n * batch / sms
    for along_n, along_m in _WAVE_TILES:
        waves = np.ceil(n / np.float32(along_n)) * np.ceil(m / np.float32(along_m)) * batch / sms
        filled = np.where(waves < 16, waves / np.ceil(waves), np.float32(1))
        results += [np.clip(np.log2(waves), -8, 6) / 4, filled, area / (waves * (along_n * along_m))]
    return results


def inputs_of(products: Products, group: int, shares: ProductShares, device: MatmulConstants) -> ProductInputs:
    """What the group's mixture reads."""
    if group == VECTOR:
        products = upright(products)
    m, n, k, batch, size = (
        np.asarray(column, dtype=np.float32)
        for column in (products.m, products.n, products.k, products.batch, products.element_bytes)
    )
    whole = bool((products.share == 1).all())
    factors = np.ones((4, 1)) if whole else shares.factors(products.share, products.others)
    share_sms, memory, cache, time = factors.astype(np.float32)
    sms = np.float32(device.sms) * share_sms
    bytes_a, bytes_b, bytes_c = size * batch * m * k, size * batch * n * k, size * batch * m * n
    total = bytes_a + bytes_b + bytes_c
    hot = products.hot_a * bytes_a + products.hot_b * bytes_b
    # It falls out of the cache from 0.3 to 1.3 times its size: seen in the rows.
    hot = (hot * np.clip(1.3 - hot / np.float32(device.l2_bytes), 0, 1)).astype(np.float32)
    epilogue = (products.operation == OPERATIONS.index("addmm")) & ~products.bias_copied
    # Centred and scaled to about -2..2 over the measured sizes.
    sizes = tuple((np.log2(column) - 8) / 4 for column in (n, m, k))
    per_sm = (np.log2(np.maximum(m * n * batch / sms, 1)) - 8) / 4
    warm = (products.hot_a + products.hot_b) > 0
    return ProductInputs(
        *(n, m, k, batch, size, total - hot, hot, products.layout, sms, memory, cache, time),
        choice=_choice(products, (sizes[0], sizes[1], sizes[2], np.log2(batch) / 4, per_sm), epilogue),
        flags=_stack([epilogue, products.operation >= _BATCHED, *(products.precision == place for place in (3, 1, 0)), warm]),
        waves=_stack([*_waves(n, m, batch, sms), np.log2(total) / 8 - 2, hot / total, warm]),
    )


def sizes_of(inputs: ProductInputs) -> Column:
    """log2 of m, n, k, batch, elements of the result and products: what `inside` goes by."""
    elements = inputs.m * inputs.n * inputs.batch
    sizes: Column = np.log2(np.stack([inputs.m, inputs.n, inputs.k, inputs.batch, elements, elements * inputs.k]))
    return sizes


MOST_CORRECTION = 0.7  # of ln(time): a factor of two either way
LEAST_K_PER_SPLIT = 64  # fewer are not worth a block: seen in the rows
_HALF = np.float32(0.5)
_US = np.float32(1e-3)  # per ns

Network = Mapping[str, Floats]


@dataclass(frozen=True)
class Mixed:
    """Of one group's products: ln(ns), and scores of what is launched beside."""

    log_ns: Floats
    launched: Floats


def _exp(network: Network, name: str) -> Floats:
    return np.exp(network[name]).astype(np.float32)


def _sigmoid(values: Floats) -> Floats:
    return (1 / (1 + np.exp(-values))).astype(np.float32)


class KernelMixture:
    """One group's fitted networks, ready to be asked. Candidates lie along the first axis, products along the second."""

    def __init__(self, group: int, network: Network) -> None:
        self.network = network
        self._along_n = np.array([[tile.along_n] for tile in TILES[group]], dtype=np.float32)
        self._along_m = np.array([[tile.along_m] for tile in TILES[group]], dtype=np.float32)
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
        # Fourth powers of more than an hour leave single precision; who asks sees that the time is no number.
        with np.errstate(over="ignore", invalid="ignore"):
            return self._mixed(inputs, self._times(inputs))

    def _mixed(self, inputs: ProductInputs, logs: Floats) -> Mixed:
        network = self.network
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


FOLDS = 5
# The networks of a group: each has not seen one fifth of the rows but the last, which has seen all.
NETWORKS = (*(f"fold{place}" for place in range(FOLDS)), "whole")
_SLACK = 0.01  # octaves by which a size may leave the fitted range and still count as inside


def tree_features(inputs: ProductInputs, mixed: Mixed) -> Column:
    """What the trees read: all that the mixture's networks do, what they predict, and how they score what is launched."""
    return np.concatenate([inputs.choice, inputs.waves, mixed.log_ns[None], mixed.launched]).T


def launch_features(inputs: ProductInputs, group: int) -> Column:
    """What says which kernels go along with a product's own: sizes, layout, and the waves of every tile it may run in.

    cuBLAS clears a counter of tiles where there are more than two for each multiprocessor, and splits the inner length only
    where there are less than two thirds of one: all of 7,900 rows of `nvjet` kernels, by the tile in their names.
    """
    tiles = [np.ceil(inputs.n / tile.along_n) * np.ceil(inputs.m / tile.along_m) for tile in TILES[group]]
    waves = np.log2(np.stack(tiles) * inputs.batch / inputs.sms)
    return np.concatenate([inputs.choice, inputs.waves, waves]).T


@dataclass(frozen=True)
class FittedGroup:
    """What is fitted of one group."""

    sizes_low: Column
    sizes_high: Column
    trees: Trees
    patterns: Choice  # what is launched beside copies
    networks: dict[str, dict[str, Floats]] = field(metadata=stored(prefix="", names=NETWORKS))


class Ensemble:
    """Several mixtures of one group: their mean, and trees that have learned what mixtures get wrong about rows unseen."""

    def __init__(self, group: int, fitted: FittedGroup, sms: float) -> None:
        self._members = [KernelMixture(group, fitted.networks[name]) for name in NETWORKS]
        self._group, self._fitted, self._sms = group, fitted, sms
        self.whole = self._members[-1]

    def ask(self, inputs: ProductInputs) -> Mixed:
        """The best answer: all networks, and on a whole GPU the trees, which have seen no shares of one."""
        answers = [member.ask(inputs) for member in self._members]
        log_ns, launched = (np.mean([getattr(answer, name) for answer in answers], axis=0) for name in ("log_ns", "launched"))
        whole = inputs.sms == self._sms
        if inputs.sms.size > 1 and not whole.any():
            return Mixed(log_ns, launched)
        learned = self._fitted.trees.values(tree_features(inputs, Mixed(log_ns, launched)))
        return Mixed(log_ns + np.where(whole, np.clip(learned, -MOST_CORRECTION, MOST_CORRECTION), 0.0), launched)

    def patterns(self, inputs: ProductInputs) -> Column:
        """The place of the pattern of launches that each product is likeliest to have."""
        return self._fitted.patterns.likeliest(launch_features(inputs, self._group))

    def inside(self, inputs: ProductInputs) -> Column:
        """Whether products are of sizes that were fitted to."""
        low, high, sizes = self._fitted.sizes_low[:, None], self._fitted.sizes_high[:, None], sizes_of(inputs)
        inside: Column = np.all((sizes >= low - _SLACK) & (sizes <= high + _SLACK), axis=0)
        return inside
