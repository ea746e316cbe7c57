"""What the mixture reads of a product: sizes for its physics, and scaled logarithms and flags for the choice of a kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms.matmul.group import VECTOR, upright
from steptime._models.kernels.forms.matmul.product import Column, Products
from steptime._models.kernels.forms.matmul.shares import ProductShares

Floats = npt.NDArray[Any]  # float32

# Tiles whose number of waves the residual reads: small, square and wide ones.
_WAVE_TILES = ((64, 64), (128, 128), (128, 256), (256, 128), (32, 32))
_BATCHED, _ADDMM, _BADDBMM = 2, 1, 3  # places in OPERATIONS; batched ones are from 2 on


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
        """Some of them."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return ProductInputs(**{name: column if column.size == 1 else column[..., places] for name, column in columns.items()})


def bias_copied(products: Products) -> Column:
    """Whether the bias is copied into the result first: when it is a matrix, or where cublasLt has no epilogue for it."""
    no_epilogue = (products.operation == _ADDMM) & (products.bias == 1) & ((products.k == 1) | (products.n == 1))
    copied: Column = (products.bias >= 2) | no_epilogue
    return copied


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
            *((operation == _BADDBMM) & (products.bias == 0), products.bias >= 2, products.m == 1, products.n == 1),
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
    epilogue = (products.operation == _ADDMM) & ~bias_copied(products)
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
    result = inputs.m * inputs.n * inputs.batch
    outcome: Column = np.log2(np.stack([inputs.m, inputs.n, inputs.k, inputs.batch, result, result * inputs.k]))
    return outcome
