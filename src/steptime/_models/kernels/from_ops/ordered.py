"""Indices that count: tensors that `arange` made, seen through views, until something else is written where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from steptime._ops.catalogue import INDEX_ARGUMENT, Integers, op_kind
from steptime._program.program import Tensor, Value


class Ordered:
    """Storages that hold whole numbers in order, as far as a program has gone."""

    def __init__(self) -> None:
        self._storages: set[int] = set()

    def write(self, name: str, tensors: Iterable[Tensor]) -> None:
        """An op writes these: memory that held a count is given to other tensors once it is free."""
        counts = op_kind(name).counts
        for tensor in tensors:
            if tensor.storage is None:
                continue
            if counts and tensor.dtype.startswith("int"):
                self._storages.add(tensor.storage)
            else:
                self._storages.discard(tensor.storage)

    def index_of(self, name: str, values: Sequence[Value]) -> bool:
        """Whether an op indexes along a dimension by such a tensor."""
        if len(values) <= INDEX_ARGUMENT or op_kind(name).integers(INDEX_ARGUMENT) is not Integers.ALONG:
            return False
        index = values[INDEX_ARGUMENT]
        # What is broadcast repeats itself, and what was made of several dimensions is in another order.
        return isinstance(index, Tensor) and index.storage in self._storages and index.strides in (None, (1,))
