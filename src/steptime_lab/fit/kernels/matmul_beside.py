"""What products launch beside their main kernels, and shares of a GPU: curves, lines and factors fitted to measured rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from steptime._models.kernels.forms.matmul.beside import COPY, KNOTS, ROLES, Curves, Lines, copy_bytes
from steptime._models.kernels.forms.matmul.product import BIASES, Column, Products
from steptime._models.kernels.forms.matmul.shares import COMPANY, FACTORS, ProductShares
from steptime_lab.fit.kernels.matmul_names import role
from steptime_lab.measurements.kernels import Row

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
    result = np.log(_COPY_START_NS + np.exp2(KNOTS) / bytes_per_ns)
    offset = np.median(np.log(times_ns) - np.interp(place, KNOTS, result)) if len(bytes_) else 0.0
    result += offset
    for index, knot in enumerate(KNOTS):
        near = np.abs(place - knot) <= 1
        if near.sum() >= _LEAST_ROWS:
            result[index] = np.median(np.log(times_ns[near]))
    return np.maximum.accumulate(result)


def fit_curves(rows: Sequence[Row], products: Products, bytes_per_ns: float) -> Curves:
    """How long copies take by the bytes they move: of odd operands, then of each kind of bias."""
    bytes_ = copy_bytes(products)
    results: list[list[tuple[float, float]]] = [[] for _ in BIASES]
    for row, bias, item, operands in zip(rows, products.bias, bytes_, products.copied_bytes, strict=True):
        times = [time for name, time in zip(row.kernel_names, row.kernel_ns, strict=True) if role(name) == COPY]
        if len(times) == 1:
            results[bias if item else 0].append((float(item or operands), times[0]))
    columns = (np.array(pairs).reshape(-1, 2).T for pairs in results)
    return np.stack([_curve(sizes, times, bytes_per_ns) for sizes, times in columns])


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


def fit_lines(rows: Sequence[Row], products: Products) -> Lines:
    """How long each small kernel takes, by elements of the result."""
    result: dict[str, list[tuple[float, float]]] = {name: [] for name in ROLES}
    for row, count in zip(rows, products.batch * products.m * products.n, strict=True):
        for name, time in zip(row.kernel_names, row.kernel_ns, strict=True):
            if role(name) in ROLES:
                result[role(name)].append((float(count), time))
    return np.array([_line(*np.array(result[name]).reshape(-1, 2).T) for name in ROLES])


# ln(ns) of the rows at some places, as they would be on such shares.
Predict = Callable[["ProductShares", Column], Column]


def fit_shares(share: Column, others: Column, predict: Predict, log_ns: Column) -> ProductShares:
    """What shares of a GPU have, fitted to rows."""
    shares = np.unique(share)
    deviations = np.zeros((len(shares), len(COMPANY), len(FACTORS)))
    seen = np.zeros(deviations.shape[:2], dtype=bool)
    for row, number in enumerate(shares):
        for index in range(len(COMPANY)):
            mine = np.flatnonzero((share == number) & (np.maximum(others - 1, 0) == index))
            if len(mine):
                seen[row, index] = True
                _descend(ProductShares(shares, deviations), (row, index), predict, mine, log_ns[mine])
    for index in range(len(COMPANY)):
        known = seen[:, index]
        if known.any() and not known.all():
            for factor in range(len(FACTORS)):
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
        for factor in range(len(FACTORS)):
            for way in (step, -step):
                deviations[(*cell, factor)] += way
                tried = cost()
                if tried < best:
                    best, moved = tried, True
                    break
                deviations[(*cell, factor)] -= way
        if not moved:
            step /= 2
