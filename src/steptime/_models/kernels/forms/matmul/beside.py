"""What a product launches beside its main kernel: copies, which follow rules, and small kernels, which the mixture names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms.matmul.features import bias_copied
from steptime._models.kernels.forms.matmul.product import Column, Products
from steptime._models.kernels.forms.matmul.shares import FACTORS, ProductShares
from steptime._models.kernels.question import LaunchTime

COPY, MEMSET, REDUCE, SCALE, EPILOGUE, MAIN = "copy", "memset", "split_k_reduce", "scale", "epilogue", "gemm"
# What is launched beside copies of operands and bias: nothing, a clearing of counters, a sum over the parts of k, and single
# precision's large-k kernel with what it needs. 27,725 of 27,789 rows are one of these.
PATTERNS = ((MAIN,), (MEMSET, MAIN), (MAIN, REDUCE), (MEMSET, SCALE, MAIN, EPILOGUE))
ROLES = (MEMSET, REDUCE, SCALE, EPILOGUE)
_LEAST_MAIN = 0.3  # of what the mixture predicts: the main kernel never takes less beside its small ones

# Curves of copies: log2 of the bytes at knots.
KNOTS = np.arange(6.0, 31.0)

Lines = npt.NDArray[np.float64]  # per role: ns at no size, ns per element
Curves = npt.NDArray[np.float64]  # odd operands and kinds of bias x knots: ln(ns)


@dataclass(frozen=True)
class SmallKernels:
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
    result: Column = bias_copied(products).astype(np.int64) + products.copied
    return result


def copy_ns(curves: Curves, products: Products, shares: ProductShares) -> Column:
    """ns that all copies of each product take."""
    if not (bias_copied(products).any() or products.copied.any()):
        return np.zeros(len(products))
    bytes_, result = copy_bytes(products), np.zeros(len(products))
    for kind in (1, 2, 3):
        mine = (bytes_ > 0) & (products.bias == kind)
        result[mine] = _along(curves[kind], bytes_[mine])
    odd = products.copied > 0
    result[odd] += _along(curves[0], products.copied_bytes[odd])
    if (products.share > 1).any():
        result /= shares.factors(products.share, products.others)[FACTORS.index("memory")]
    return result


def _along(curve: Column, bytes_: Column) -> Column:
    """ns at so many bytes: between knots by powers, beyond the last one in proportion."""
    place = np.log2(np.maximum(bytes_, 1))
    beyond = np.maximum(place - KNOTS[-1], 0) * np.log(2)
    result: Column = np.exp(np.interp(place, KNOTS, curve) + beyond)
    return result


def launches(
    beside: SmallKernels, products: Products, shares: ProductShares, main_ns: Column, scores: Column
) -> list[tuple[LaunchTime, ...]]:
    """Every product's launches: copies, then the likeliest pattern, whose kernels share `main_ns` (all but copies)."""
    elements = (products.batch * products.m * products.n).astype(float)
    small = {name: beside.lines[position, 0] + beside.lines[position, 1] * elements for position, name in enumerate(ROLES)}
    each = copy_ns(beside.curves, products, shares) / np.maximum(copies(products), 1)
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
