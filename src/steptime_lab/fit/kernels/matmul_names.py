"""What kernel names say of products: which tile of a group ran, whether it was split along k, what was launched beside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from steptime._models.kernels.forms.matmul.beside import COPY, EPILOGUE, MAIN, MEMSET, PATTERNS, REDUCE, SCALE
from steptime._models.kernels.forms.matmul.group import TILES, Tile
from steptime._models.kernels.forms.matmul.product import Column

# Words in a kernel's name -> what it is for, in this order.
_ROLES = (
    ("Memset", MEMSET),
    ("splitKreduce", REDUCE),
    ("execute_split_k", REDUCE),
    ("reduce_1Block", REDUCE),
    ("reduce_kernel", REDUCE),
    ("Memcpy", COPY),
    ("elementwise_kernel", COPY),
    ("scal_kernel", SCALE),
    ("epilogue::impl", EPILOGUE),
)
_KINDS = (
    ("nvjet", "nvjet"),
    ("wmma_tensorop", "wmma"),
    ("cutlass_75_tensorop", "tensor75"),
    ("cutlass_80_tensorop", "tensor80"),
    ("simt_sgemm", "simt"),
    ("sm90_xmma", "sm90"),
    ("tf32f32_tf32f32", "xmma_tf32"),
    ("sm80_xmma_gemm_f32f32_tf32", "xmma_tf32"),
    ("sm80_xmma", "ffma"),
    ("sgemm_largek", "large_k"),
    ("gemmSN", "small_n"),
    ("gemv", "gemv"),
    ("gemm", "other"),
)
_SIZE = re.compile(r"(?:tilesize|_)(\d+)x(\d+)(?:x\d+)?_")
_FARTHEST = 0.9  # octaves, both sides together, within which a tile counts as its nearest candidate


@lru_cache(maxsize=4096)
def role(name: str) -> str:
    """What a kernel is for, by its name."""
    return next((item for word, item in _ROLES if word in name), MAIN)


@lru_cache(maxsize=4096)
def tile_of(name: str) -> Tile | None:
    """The kind and tile of a product's main kernel; sizes are 0 where the name has none."""
    kind = next((item for word, item in _KINDS if word in name), "")
    if not kind:
        return None
    size = _SIZE.search(name)
    return Tile(kind, int(size[1]), int(size[2])) if size else Tile(kind, 0, 0)


def pattern_of(names: Sequence[str]) -> int:
    """Which of `PATTERNS` a row's kernels are; -1 for others."""
    roles = tuple(item for item in map(role, names) if item != COPY)
    return PATTERNS.index(roles) if roles in PATTERNS else -1


def candidate(names: Sequence[str], group: int) -> int:
    """The place of a row's kernel among its group's candidates (the second half: split along k); -1 where none is near."""
    main = next((name for name in names if role(name) == MAIN), "")
    ran = tile_of(main)
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


def candidates(rows_names: Sequence[Sequence[str]], group: int) -> Column:
    """`candidate` of many rows."""
    return np.array([candidate(names, group) for names in rows_names], dtype=np.int64)
