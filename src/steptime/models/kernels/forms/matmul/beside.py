"""What a product launches beside its main kernel: copies, which follow rules, and small kernels, which the mixture names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from steptime.models.kernels.forms.matmul.features import bias_copied
from steptime.models.kernels.forms.matmul.names import COPY, EPILOGUE, MAIN, MEMSET, PATTERNS, REDUCE, SCALE, role
from steptime.models.kernels.forms.matmul.product import Column, Products
from steptime.models.kernels.question import LaunchTime
from steptime.models.kernels.rows import Row

ROLES = (COPY, MEMSET, REDUCE, SCALE, EPILOGUE)
_ROUNDS = 20  # of reweighting; the fit has settled after about ten
_LEAST_MAIN = 0.3  # of what the mixture predicts: the main kernel never takes less beside its small ones

Lines = npt.NDArray[np.float64]  # per role: ns at no size, ns per byte or element


def copy_bytes(products: Products) -> Column:
    """Bytes that copies of a bias or of oddly strided operands move, per product."""
    size = products.element_bytes
    result = products.batch * products.m * products.n * size
    bias = np.select(
        [products.bias == 1, products.bias == 2, products.bias == 3],
        [products.n * size, products.m * products.n * size, result],
        0,
    )
    found: Column = np.where(bias_copied(products), result + bias, 0) + products.copied_bytes
    return found


def copies(products: Products) -> Column:
    """How many copies each product launches first."""
    found: Column = bias_copied(products).astype(np.int64) + products.copied
    return found


def copy_ns(lines: Lines, products: Products) -> Column:
    """ns that all copies of each product take."""
    start, per_byte = lines[ROLES.index(COPY)]
    found: Column = copies(products) * start + copy_bytes(products) * per_byte
    return found


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
    """How long each small kernel takes, by bytes copied or elements of the result."""
    moved, elements = copy_bytes(products), products.batch * products.m * products.n
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ROLES}
    for row, bytes_, count in zip(rows, moved, elements, strict=True):
        copied = [time for name, time in zip(row.kernel_names, row.kernel_ns, strict=True) if role(name) == COPY]
        for name, time in zip(row.kernel_names, row.kernel_ns, strict=True):
            if role(name) in ROLES:
                size = float(bytes_) / len(copied) if role(name) == COPY else float(count)
                found[role(name)].append((size, time))
    return np.array([_line(*np.array(found[name]).reshape(-1, 2).T) for name in ROLES])


def launches(lines: Lines, products: Products, main_ns: Column, scores: Column) -> list[tuple[LaunchTime, ...]]:
    """Every product's launches: copies, then the likeliest pattern, whose kernels share `main_ns` (all but copies)."""
    elements = (products.batch * products.m * products.n).astype(float)
    small = {name: lines[place, 0] + lines[place, 1] * elements for place, name in enumerate(ROLES)}
    each = copy_ns(lines, products) / np.maximum(copies(products), 1)
    listed = []
    for index, (pattern, count) in enumerate(zip(scores.argmax(axis=0), copies(products), strict=True)):
        total = float(main_ns[index])
        beside = {name: float(small[name][index]) for name in PATTERNS[pattern] if name != MAIN}
        shrink = min(1.0, (1 - _LEAST_MAIN) * total / max(sum(beside.values()), 1e-9))
        own = {name: time * shrink for name, time in beside.items()}
        own[MAIN] = total - sum(own.values())
        first = [LaunchTime(COPY, float(each[index]))] * int(count)
        listed.append((*first, *(LaunchTime(name, own[name]) for name in PATTERNS[pattern])))
    return listed
