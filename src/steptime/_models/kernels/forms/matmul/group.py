"""Which of the library's code a product can run: groups by precision and alignment, and each group's kernels and tiles.

Read off the kernel names of the measured rows: within a group the same kinds always appear, across groups hardly ever. Kernel
kinds: `nvjet` (Hopper, half precision), `sm90` (Hopper, TF32), `tensor80` and `tensor75` (Ampere's and Turing's tensor cores),
`wmma` (their small tiles), `xmma_tf32`, `ffma` and `simt` (single precision without tensor cores), `gemv`, and a few
for odd shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from steptime._models.kernels.forms.matmul.product import Column, Products

GROUPS = ("fp32", "tf32_aligned", "tf32_odd", "half_16", "half_4", "half_2", "vector")
FP32, TF32_ALIGNED, TF32_ODD, HALF_16, HALF_4, HALF_2, VECTOR = range(len(GROUPS))
_VECTOR_LOAD_BYTES = 16  # cuBLAS's fast kernels load 16 bytes at once, so every leading dimension has to be a multiple of that


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel: its kind and the part of the result one block makes, as kernel names give it (along n, then along m)."""

    kind: str
    along_n: int
    along_m: int


def _tiles(kind: str, sizes: str) -> tuple[Tile, ...]:
    return tuple(Tile(kind, *map(int, size.split("x"))) for size in sizes.split())


_SMALL_TENSOR = "64x64 128x64 64x128 128x128 256x64 64x256"
TILES: tuple[tuple[Tile, ...], ...] = (
    _tiles("ffma", "32x32 64x32 32x64 64x64 128x32 128x64 64x128 128x128 256x64 64x256 256x128")
    + _tiles("simt", "64x64 128x32 32x128 128x64 64x128 128x128 256x128 128x256")
    + _tiles("large_k", "32x32")
    + _tiles("small_n", "64x8"),
    _tiles("ffma", "32x32")
    + _tiles("tensor80", f"{_SMALL_TENSOR} 128x256")
    + _tiles("sm90", "64x64 128x64 64x128 128x128 64x256 256x128 128x256"),
    _tiles("ffma", "32x32 64x32 64x64")
    + _tiles("xmma_tf32", "32x32")
    + _tiles("simt", "128x32")
    + _tiles("tensor80", f"{_SMALL_TENSOR} 256x128 128x256")
    + _tiles("small_n", "64x8"),
    _tiles("nvjet", "64x8 64x16 64x24 64x32 64x48 64x64 96x64 128x64 128x96 96x128 128x128 128x160 192x128 128x192 192x192")
    + _tiles("nvjet", "256x128 128x256 256x160 320x128 8x64 16x64 32x64 64x96 64x128 64x256 256x64"),
    _tiles("wmma", "16x16 32x32") + _tiles("tensor80", f"{_SMALL_TENSOR} 256x128 128x256"),
    _tiles("wmma", "16x16 32x32")
    + _tiles("tensor75", "64x64 128x64 128x128 256x128 128x256")
    + _tiles("small_n", "64x8")
    + _tiles("other", "32x32"),
    _tiles("gemv", "1x4 1x16 1x64 1x256"),
)


def _alignment_bytes(elements: Column, element_bytes: Column) -> Column:
    offset = elements * element_bytes
    result: Column = np.minimum(offset & -offset, _VECTOR_LOAD_BYTES)
    return result


def groups_of(products: Products) -> Column:
    """The group of each product: a place in `GROUPS`."""
    size = products.element_bytes
    aligned = np.minimum(_alignment_bytes(products.leading_a, size), _alignment_bytes(products.leading_b, size))
    aligned = np.minimum(aligned, _alignment_bytes(products.n, size))
    tf32 = np.where(aligned >= _VECTOR_LOAD_BYTES, TF32_ALIGNED, TF32_ODD)
    half = np.where(aligned >= _VECTOR_LOAD_BYTES, HALF_16, np.where(aligned >= 4, HALF_4, HALF_2))
    group = np.where(products.precision == 0, FP32, np.where(products.precision == 1, tf32, half)).astype(np.int8)
    group[((products.m == 1) | (products.n == 1)) & (group != HALF_16)] = VECTOR
    return group


def upright(products: Products) -> Products:
    """Products with one row turned into the same ones with one column: a matrix times a vector either way."""
    turn = (products.m == 1) & (products.n > 1)

    def either(turned: Column, kept: Column) -> Column:
        return np.where(turn, turned, kept)

    return replace(
        products,
        precision=np.where(products.precision == 1, 0, products.precision),  # no tensor cores, so no TF32
        m=either(products.n, products.m),
        n=either(products.m, products.n),
        # How the vector lies makes no difference.
        layout=either(1 - (products.layout >> 1), products.layout & 1),
        leading_a=either(products.leading_b, products.leading_a),
        leading_b=np.ones_like(products.leading_b),
        hot_a=either(products.hot_b, products.hot_a),
        hot_b=either(products.hot_a, products.hot_b),
    )
