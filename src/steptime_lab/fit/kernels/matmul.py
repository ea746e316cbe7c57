"""The form of matrix products: a mixture for every group, the small kernels beside it, and shares of a GPU."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from steptime._hardware.device import DeviceLimits
from steptime._models.engine.constants import constants_of
from steptime._models.engine.splits import FIT
from steptime._models.kernels.call import Call
from steptime._models.kernels.forms import matmul
from steptime._models.kernels.forms.matmul import COPY, MAIN, PATTERNS, REDUCE, ROLES, MatmulForm, SmallKernels, mixture
from steptime._models.kernels.forms.matmul.mixture import Floats, KernelMixture, MatmulConstants, ProductShares, inputs_of
from steptime._models.kernels.forms.matmul.products import (
    BIASES,
    DTYPES,
    GROUPS,
    OPERATIONS,
    TILES,
    Column,
    Products,
    Tile,
    groups_of,
    of_questions,
)
from steptime._models.kernels.launches import base_name
from steptime.errors import InputError
from steptime_lab.fit.engine.regression import fit_choice, grow_trees
from steptime_lab.fit.kernels.matmul_training import Schedule, Targets, UsualRates, train
from steptime_lab.measurements.kernels import Row

# A group of fewer products is not fitted: whoever asks for one has to look elsewhere.
_LEAST_OF_GROUP = 40
# Chosen on validation rows.
_TREES: dict[str, Any] = {"learning_rate": 0.05, "num_leaves": 15, "min_data_in_leaf": 10, "feature_fraction": 0.4}


def fit(rows: Sequence[Row], seed: int, limits: DeviceLimits, schedule: Schedule | None = None) -> MatmulForm:
    """Fits to rows on whole GPUs and on shares of one."""
    device, usual = constants_of(limits, "matmul", MatmulConstants), constants_of(limits, "matmul", UsualRates)
    # Those of `validation` say how far off it is; products that are taken for others do not teach what those take.
    rows = [row for row in rows if row.split == FIT and modelled(row.question.call)]
    whole = [row for row in rows if row.question.share == 1]
    products = of_questions([row.question for row in whole])
    groups = groups_of(products)
    beside = SmallKernels(_fit_lines(whole, products), _fit_curves(whole, products, usual.copied_bytes_per_ns))
    fitted = {}
    for group, name in enumerate(GROUPS):
        places = np.flatnonzero(groups == group)
        members = [whole[index] for index in places]
        if len(set(_folds(members))) < mixture.FOLDS or len(members) < _LEAST_OF_GROUP:
            continue
        inputs = inputs_of(products.take(places), group, mixture.NO_SHARES, device)
        fitted[name] = _fit_group(group, members, inputs, seed, schedule or Schedule(), usual)
    if not fitted:
        raise InputError(f"{len(whole)} measured products are too few to be fitted on")
    form = MatmulForm(beside, mixture.NO_SHARES, fitted, device)
    return _with_shares(form, [row for row in rows if row.question.share > 1])


def modelled(call: Call) -> bool:
    """Whether the form answers a measured call itself: not one of complex numbers, nor one that is taken for another."""
    return base_name(call.op) in OPERATIONS and all(tensor.dtype in DTYPES for tensor in call.tensors())


def _times_of(row: Row, what: str) -> list[float]:
    """Times of a row's kernels that are for one thing."""
    return [time for name, time in zip(row.kernel_names, row.kernel_ns, strict=True) if role(name) == what]


def _main_log_ns(rows: Sequence[Row]) -> Floats:
    """ln of what is left of rows' times without copies."""
    left = np.array([row.time_ns for row in rows]) - np.array([sum(_times_of(row, COPY)) for row in rows])
    log_ns: Floats = np.log(np.maximum(left, 1.0)).astype(np.float32)
    return log_ns


def _folds(rows: Sequence[Row]) -> Column:
    """Which fifth each row is in, by its call: cache states and settings of one call stay together."""
    texts = (row.question.call.to_json().encode() for row in rows)
    return np.array([int(hashlib.sha256(text).hexdigest()[8:14], 16) % mixture.FOLDS for text in texts])


def _fit_group(
    group: int, rows: Sequence[Row], inputs: mixture.ProductInputs, seed: int, schedule: Schedule, usual: UsualRates
) -> mixture.FittedGroup:
    """One group's networks and the trees that correct what networks predict of rows they have not seen."""
    folds = _folds(rows)
    names = [row.kernel_names for row in rows]
    candidates, patterns = ([candidate(item, group) for item in names], [pattern_of(item) for item in names])
    targets = Targets(_main_log_ns(rows), np.array(candidates), np.array(patterns))
    unseen, networks = np.empty((1 + len(PATTERNS), len(rows)), dtype=np.float32), []
    for fold in range(mixture.FOLDS):
        inner, outer = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        networks.append(train(group, inputs.take(inner), targets.take(inner), mixture.FOLDS * seed + fold, schedule, usual))
        asked = KernelMixture(group, networks[-1]).ask(inputs.take(outer))
        unseen[0, outer], unseen[1:, outer] = asked.log_ns, asked.launched
    # One network learns from the measured times and from the others' mean, which is smoother: better than from rows alone.
    mean = np.mean([KernelMixture(group, network).ask(inputs).log_ns for network in networks], axis=0)
    both = replace(targets, log_ns=((targets.log_ns + mean) / 2).astype(np.float32))
    networks.append(train(group, inputs, both, seed, schedule, usual, networks[0]))
    features = mixture.tree_features(inputs, mixture.Mixed(unseen[0], unseen[1:]))
    trees = grow_trees(features, targets.log_ns - unseen[0], seed=seed, rounds=schedule.trees, **_TREES)
    sizes = mixture.sizes_of(inputs)
    listed = np.flatnonzero(targets.pattern >= 0)
    beside = fit_choice(mixture.launch_features(inputs.take(listed), group), targets.pattern[listed], seed)
    return mixture.FittedGroup(
        sizes.min(axis=1), sizes.max(axis=1), trees, beside, dict(zip(mixture.NETWORKS, networks, strict=True))
    )


def _with_shares(form: MatmulForm, rows: Sequence[Row]) -> MatmulForm:
    """The form with what shares of a GPU have, as rows on them tell."""
    groups = groups_of(of_questions([row.question for row in rows])) if rows else np.zeros(0, dtype=np.int8)
    rows = [row for row, group in zip(rows, groups.tolist(), strict=True) if group in form.ensembles]
    if not rows:
        return form
    products = of_questions([row.question for row in rows])
    groups = groups_of(products)

    def predict(shares: ProductShares, places: Column) -> Column:
        log_ns = np.empty(len(places))
        for group in np.unique(groups[places]):
            mine = groups[places] == group
            inputs = inputs_of(products.take(places[mine]), int(group), shares, form.device)
            log_ns[mine] = form.ensembles[group].whole.ask(inputs).log_ns
        return log_ns

    return replace(form, shares=_fit_shares(products.share, products.others, predict, _main_log_ns(rows)))


# What a kernel is for, and the words in its name that say so, in this order.
_ROLES = {
    matmul.MEMSET: ("Memset",),
    REDUCE: ("splitKreduce", "execute_split_k", "reduce_1Block", "reduce_kernel"),
    COPY: ("Memcpy", "elementwise_kernel"),
    matmul.SCALE: ("scal_kernel",),
    matmul.EPILOGUE: ("epilogue::impl",),
}
# Kinds of kernels, and the words for them, in this order.
_KINDS = {
    "nvjet": ("nvjet",),
    "wmma": ("wmma_tensorop",),
    "tensor75": ("cutlass_75_tensorop",),
    "tensor80": ("cutlass_80_tensorop",),
    "simt": ("simt_sgemm",),
    "sm90": ("sm90_xmma",),
    "xmma_tf32": ("tf32f32_tf32f32", "sm80_xmma_gemm_f32f32_tf32"),
    "ffma": ("sm80_xmma",),
    "large_k": ("sgemm_largek",),
    "small_n": ("gemmSN",),
    "gemv": ("gemv",),
    "other": ("gemm",),
}
_SIZE = re.compile(r"(?:tilesize|_)(\d+)x(\d+)(?:x\d+)?_")
_FARTHEST = 0.9  # octaves, both sides together, within which a tile counts as its nearest candidate


def _first_named(kernel: str, words: Mapping[str, Sequence[str]]) -> str:
    """The first of the things whose words a kernel's name has."""
    return next((item for item, each in words.items() if any(word in kernel for word in each)), "")


@lru_cache(maxsize=4096)
def role(kernel: str) -> str:
    """What a kernel is for, by its name."""
    return _first_named(kernel, _ROLES) or MAIN


@lru_cache(maxsize=4096)
def _tile_of(kernel: str) -> Tile | None:
    """The kind and tile of a product's main kernel; sizes are 0 where the name has none."""
    kind, size = _first_named(kernel, _KINDS), _SIZE.search(kernel)
    return Tile(kind, int(size[1]) if size else 0, int(size[2]) if size else 0) if kind else None


def pattern_of(names: Sequence[str]) -> int:
    """Which of `PATTERNS` a row's kernels are; -1 for others."""
    roles = tuple(item for item in map(role, names) if item != COPY)
    return PATTERNS.index(roles) if roles in PATTERNS else -1


def candidate(names: Sequence[str], group: int) -> int:
    """The place of a row's kernel among its group's candidates (the second half: split along k); -1 where none is near."""
    main = next((name for name in names if role(name) == MAIN), "")
    ran = _tile_of(main)
    if ran is None:
        return -1
    best, place = _FARTHEST, -1
    for index, tile in enumerate(TILES[group]):
        if tile.kind != ran.kind:
            continue
        far = abs(np.log2(tile.along_n / ran.along_n)) + abs(np.log2(tile.along_m / ran.along_m)) if ran.along_n else 0.0
        if far < best:
            best, place = far, index
    split = "splitK" in main or "segment_k_on" in main or any(role(name) == REDUCE for name in names)
    return place + len(TILES[group]) * split if place >= 0 else -1


_ROUNDS = 20  # of reweighting; the fit has settled after about ten
# What is assumed of copies where no rows are: a small kernel's 1 us; and how many rows make a knot.
_COPY_START_NS = 1000.0
_LEAST_ROWS = 3
# Of shares of a GPU.
_SCALES = (0.15, 0.5, 0.5, 0.15)  # how far from the start each may go before it has to be worth it
_PULL = 0.01
_STEP, _LEAST_STEP = 0.2, 0.02


def _curve(bytes_: Column, times_ns: Column, bytes_per_ns: float) -> Column:
    """ln(ns) at every knot: medians of the nearest rows, never falling; knots without rows follow a memory-bound copy."""
    place = np.log2(np.maximum(bytes_, 1)) if len(bytes_) else np.zeros(0)
    result = np.log(_COPY_START_NS + np.exp2(matmul.KNOTS) / bytes_per_ns)
    result += np.median(np.log(times_ns) - np.interp(place, matmul.KNOTS, result)) if len(bytes_) else 0.0
    for index, knot in enumerate(matmul.KNOTS):
        near = np.abs(place - knot) <= 1
        if near.sum() >= _LEAST_ROWS:
            result[index] = np.median(np.log(times_ns[near]))
    return np.maximum.accumulate(result)


def _fit_curves(rows: Sequence[Row], products: Products, bytes_per_ns: float) -> matmul.Curves:
    """How long copies take by the bytes they move: of odd operands, then of each kind of bias."""
    pairs: list[list[tuple[float, float]]] = [[] for _ in BIASES]
    columns = products.bias, matmul.copy_bytes(products), products.copied_bytes
    for row, bias, copied, operands in zip(rows, *columns, strict=True):
        if len(times := _times_of(row, COPY)) == 1:
            pairs[bias if copied else 0].append((float(copied or operands), times[0]))
    by_kind = (np.array(item).reshape(-1, 2).T for item in pairs)
    return np.stack([_curve(sizes, times, bytes_per_ns) for sizes, times in by_kind])


def _line(sizes: Column, times_ns: Column) -> tuple[float, float]:
    """The line through (size, ns) with the least sum of relative errors, neither end negative."""
    if len(sizes) == 0:
        return 1000.0, 0.0  # about what any small kernel takes
    read = np.stack([1 / times_ns, sizes / times_ns], axis=1)
    scale = np.maximum(np.abs(read).max(axis=0), 1e-30)
    weight = np.ones(len(sizes))
    start, slope = float(np.median(times_ns)), 0.0
    for _ in range(_ROUNDS):
        result = np.linalg.lstsq(read / scale * weight[:, None], weight, rcond=None)[0] / scale
        start, slope = float(result[0]), float(result[1])
        if slope < 0 or start < 0:
            return float(np.median(times_ns)), 0.0
        weight = 1 / np.sqrt(np.maximum(np.abs(read @ result - 1), 1e-3))
    return start, slope


def _fit_lines(rows: Sequence[Row], products: Products) -> matmul.Lines:
    """How long each small kernel takes, by elements of the result."""
    sized = list(zip(rows, (products.batch * products.m * products.n).tolist(), strict=True))
    pairs = ([(float(elements), time) for row, elements in sized for time in _times_of(row, what)] for what in ROLES)
    return np.array([_line(*np.array(item).reshape(-1, 2).T) for item in pairs])


# ln(ns) of the rows at some places, as they would be on such shares.
Predict = Callable[[ProductShares, Column], Column]


def _fit_shares(share: Column, others: Column, predict: Predict, log_ns: Column) -> ProductShares:
    """What shares of a GPU have, fitted to rows."""
    shares = np.unique(share)
    deviations = np.zeros((len(shares), len(mixture.COMPANY), len(mixture.FACTORS)))
    seen = np.zeros(deviations.shape[:2], dtype=bool)
    for row, number in enumerate(shares):
        for index in range(len(mixture.COMPANY)):
            mine = np.flatnonzero((share == number) & (np.maximum(others - 1, 0) == index))
            if len(mine):
                seen[row, index] = True
                _descend(ProductShares(shares, deviations), (row, index), predict, mine, log_ns[mine])
    for index in range(len(mixture.COMPANY)):
        known = seen[:, index]
        if known.any() and not known.all():
            for factor in range(len(mixture.FACTORS)):
                fitted = deviations[known, index, factor]
                deviations[~known, index, factor] = np.interp(np.log2(shares[~known]), np.log2(shares[known]), fitted)
    return ProductShares(shares, deviations)


def _descend(shares: ProductShares, cell: tuple[int, int], predict: Predict, mine: Column, log_ns: Column) -> None:
    """Moves one cell's factors, one at a time, while that lessens the mean error; halves the step when it no longer does."""
    deviations = shares.deviations

    def cost() -> float:
        error = np.abs(predict(shares, mine) - log_ns).mean()
        return float(error + _PULL * np.square(deviations[cell] / _SCALES).sum())

    best, step = cost(), _STEP
    while step > _LEAST_STEP:
        moved = False
        for factor in range(len(mixture.FACTORS)):
            for way in (step, -step):
                deviations[(*cell, factor)] += way
                tried = cost()
                if tried < best:
                    best, moved = tried, True
                    break
                deviations[(*cell, factor)] -= way
        if not moved:
            step /= 2
