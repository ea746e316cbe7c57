"""Indices that count: tensors that `arange` made, seen through views, until something else is written where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from steptime._models.kernels.from_ops.arguments import ALONG_A_DIMENSION, INDEX_PLACE
from steptime._program.program import Tensor, Value

_COUNTS = "aten::arange"


class Ordered:
    """Storages that hold whole numbers in order, as far as a program has gone."""

    def __init__(self) -> None:
        self._storages: set[int] = set()

    def write(self, name: str, tensors: Iterable[Tensor]) -> None:
        """An op writes these: memory that held a count is given to other tensors once it is free."""
        for tensor in tensors:
            if tensor.storage is None:
                continue
            if name == _COUNTS and tensor.dtype.startswith("int"):
                self._storages.add(tensor.storage)
            else:
                self._storages.discard(tensor.storage)

    def index_of(self, name: str, values: Sequence[Value]) -> bool:
        """Whether an op indexes along a dimension by such a tensor."""
        if name not in ALONG_A_DIMENSION or len(values) <= INDEX_PLACE:
            return False
        index = values[INDEX_PLACE]
        # What is broadcast repeats itself, and what was made of several dimensions is in another order.
        return isinstance(index, Tensor) and index.storage in self._storages and index.strides in (None, (1,))
