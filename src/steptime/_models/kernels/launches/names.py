"""Kernels by name: the short name of a profiled kernel, and those that many families launch."""

from __future__ import annotations

import re
from functools import cache

VECTORIZED = "vectorized_elementwise_kernel"
UNROLLED = "unrolled_elementwise_kernel"
STRIDED = "elementwise_kernel"
WITH_INDEX = "elementwise_kernel_with_index"
REDUCE = "reduce_kernel"
OVER_LISTS = "multi_tensor_apply_kernel"
GATHER = "vectorized_gather_kernel"
SCATTER_GATHER = "_scatter_gather_elementwise_kernel"
INDEXED = "index_elementwise_kernel"
SMALL_INDEX = "indexSelectSmallIndex"
MEMCPY = "Memcpy"
MEMSET = "Memset"

_FUNCTION = re.compile(r"(?:void )?([\w:]+)")


@cache
def short_name(kernel: str) -> str:
    """The name of a profiled kernel without its namespaces, template arguments and parameters."""
    result = _FUNCTION.match(kernel.replace("(anonymous namespace)::", ""))
    return result.group(1).split("::")[-1] if result else kernel
