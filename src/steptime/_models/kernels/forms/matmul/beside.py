"""What a product launches beside its main kernel: copies, which follow rules, and small kernels, which the mixture names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms.matmul.features import bias_copied
from steptime._models.kernels.forms.matmul.names import COPY, EPILOGUE, MAIN, MEMSET, PATTERNS, REDUCE, SCALE, role
from steptime._models.kernels.forms.matmul.parts import FACTORS, Parts
from steptime._models.kernels.forms.matmul.product import BIASES, Column, Products
from steptime._models.kernels.question import LaunchTime
from steptime._models.kernels.rows import Row

ROLES = (MEMSET, REDUCE, SCALE, EPILOGUE)
_ROUNDS = 20  # of reweighting; the fit has settled after about ten
_LEAST_MAIN = 0.3  # of what the mixture predicts: the main kernel never takes less beside its small ones

# Curves of copies: log2 of the bytes at knots, what is assumed where no rows are (a small kernel's 1 us and 3 TB/s, as in the
# largest copies), and how many rows make a knot.
_KNOTS = np.arange(6.0, 31.0)
_COPY_START_NS, _COPY_BYTES_PER_NS = 1000.0, 3000.0
_LEAST_ROWS = 3

Lines = npt.NDArray[np.float64]  # per role: ns at no size, ns per element
Curves = npt.NDArray[np.float64]  # odd operands and kinds of bias x knots: ln(ns)


@dataclass(frozen=True)
class Beside:
    """How long what is launched beside the main kernel takes."""

    lines: Lines
    curves: Curves


def copy_bytes(products: Products) -> Column:
    """Bytes that a copy of the bias into the result moves; 0 where there is none."""
    size = products.element_bytes
    result = products.batch * products.m * products.n * size
    bias = np.select([products.bias == 1, products.bias == 2], [products.n * size, products.m * products.n * size], result)
    return np.where(bias_copied(products), result + bias, 0)


def copies(products: Products) -> Column:
    """How many copies each product launches first."""
    found: Column = bias_copied(products).astype(np.int64) + products.copied
    return found


def copy_ns(curves: Curves, products: Products, parts: Parts) -> Column:
    """ns that all copies of each product take."""
    if not (bias_copied(products).any() or products.copied.any()):
        return np.zeros(len(products))
    bytes_, found = copy_bytes(products), np.zeros(len(products))
    for kind in (1, 2, 3):
        mine = (bytes_ > 0) & (products.bias == kind)
        found[mine] = _along(curves[kind], bytes_[mine])
    odd = products.copied > 0
    found[odd] += _along(curves[0], products.copied_bytes[odd])
    if (products.share > 1).any():
        found /= parts.factors(products.share, products.others)[FACTORS.index("memory")]
    return found


def _along(curve: Column, bytes_: Column) -> Column:
    """ns at so many bytes: between knots by powers, beyond the last one in proportion."""
    place = np.log2(np.maximum(bytes_, 1))
    beyond = np.maximum(place - _KNOTS[-1], 0) * np.log(2)
    found: Column = np.exp(np.interp(place, _KNOTS, curve) + beyond)
    return found


def _curve(bytes_: Column, times_ns: Column) -> Column:
    """ln(ns) at every knot: medians of the nearest rows, never falling; knots without rows follow a memory-bound copy."""
    place = np.log2(np.maximum(bytes_, 1)) if len(bytes_) else np.zeros(0)
    found = np.log(_COPY_START_NS + np.exp2(_KNOTS) / _COPY_BYTES_PER_NS)
    offset = np.median(np.log(times_ns) - np.interp(place, _KNOTS, found)) if len(bytes_) else 0.0
    found += offset
    for index, knot in enumerate(_KNOTS):
        near = np.abs(place - knot) <= 1
        if near.sum() >= _LEAST_ROWS:
            found[index] = np.median(np.log(times_ns[near]))
    return np.maximum.accumulate(found)


def fit_curves(rows: Sequence[Row], products: Products) -> Curves:
    """How long copies take by the bytes they move: of odd operands, then of each kind of bias."""
    bytes_ = copy_bytes(products)
    found: list[list[tuple[float, float]]] = [[] for _ in BIASES]
    for row, bias, own, operands in zip(rows, products.bias, bytes_, products.copied_bytes, strict=True):
        times = [time for name, time in zip(row.kernel_names, row.kernel_ns, strict=True) if role(name) == COPY]
        if len(times) == 1:
            found[bias if own else 0].append((float(own or operands), times[0]))
    return np.stack([_curve(*np.array(pairs).reshape(-1, 2).T) for pairs in found])


def _line(sizes: Column, times_ns: Column) -> tuple[float, float]:
    """The line through (size, ns) with the least sum of relative errors, neither end negative."""
    if len(sizes) == 0:
        return 1000.0, 0.0  # about what any small kernel takes
    read = np.stack([1 / times_ns, sizes / times_ns], axis=1)
    scale = np.maximum(np.abs(read).max(axis=0), 1e-30)
    weight = np.ones(len(sizes))
    start, slope = float(np.median(times_ns)), 0.0
    for _ in range(_ROUNDS):
        found = np.linalg.lstsq(read / scale * weight[:, None], weight, rcond=None)[0] / scale
        start, slope = float(found[0]), float(found[1])
        if slope < 0 or start < 0:
            return float(np.median(times_ns)), 0.0
        weight = 1 / np.sqrt(np.maximum(np.abs(read @ found - 1), 1e-3))
    return start, slope


def fit_lines(rows: Sequence[Row], products: Products) -> Lines:
    """How long each small kernel takes, by elements of the result."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ROLES}
    for row, count in zip(rows, products.batch * products.m * products.n, strict=True):
        for name, time in zip(row.kernel_names, row.kernel_ns, strict=True):
            if role(name) in ROLES:
                found[role(name)].append((float(count), time))
    return np.array([_line(*np.array(found[name]).reshape(-1, 2).T) for name in ROLES])


def launches(beside: Beside, products: Products, parts: Parts, main_ns: Column, scores: Column) -> list[tuple[LaunchTime, ...]]:
    """Every product's launches: copies, then the likeliest pattern, whose kernels share `main_ns` (all but copies)."""
    elements = (products.batch * products.m * products.n).astype(float)
    small = {name: beside.lines[place, 0] + beside.lines[place, 1] * elements for place, name in enumerate(ROLES)}
    each = copy_ns(beside.curves, products, parts) / np.maximum(copies(products), 1)
    listed = []
    for index, (pattern, count) in enumerate(zip(scores.argmax(axis=0), copies(products), strict=True)):
        total = float(main_ns[index])
        extra = {name: float(small[name][index]) for name in PATTERNS[pattern] if name != MAIN}
        shrink = min(1.0, (1 - _LEAST_MAIN) * total / max(sum(extra.values()), 1e-9))
        own = {name: time * shrink for name, time in extra.items()}
        own[MAIN] = total - sum(own.values())
        first = [LaunchTime(COPY, float(each[index]))] * int(count)
        listed.append((*first, *(LaunchTime(name, own[name]) for name in PATTERNS[pattern])))
    return listed
