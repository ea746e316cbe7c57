"""Which arguments of a call are in the cache when it comes: by the bytes touched since they were touched last."""

from __future__ import annotations

from collections.abc import Iterable

from steptime._ops.table import Touch, tensors_in
from steptime._program.program import Tensor, Value
from steptime._units import MIB

# What calls are recorded with: an argument counts as just written within so many written bytes and so many tensors.
_WRITTEN_WITHIN_BYTES = 32 * MIB
_REMEMBERED = 64


class Touched:
    """Storages in the order in which a program's works touch them."""

    def __init__(self) -> None:
        self._written_bytes = 0
        self._touched_bytes = 0
        self._written: dict[int, int] = {}  # storage -> bytes written when it was written last, in the order of the writes
        self._touched: dict[int, int] = {}  # storage -> bytes touched when it was read or written last

    def since(self, value: Value) -> tuple[bool, int]:
        """Whether an argument counts as just written, and the bytes touched since it was read or written (-1: it never was)."""
        recent, nearest = False, -1
        for tensor in (value,) if isinstance(value, Tensor) else tensors_in((value,)):
            storage = tensor.storage
            if storage is None:
                continue
            if storage in self._touched:
                age = self._touched_bytes - self._touched[storage]
                nearest = age if nearest < 0 else min(nearest, age)
            recent = recent or self._written_bytes - self._written.get(storage, -_WRITTEN_WITHIN_BYTES) < _WRITTEN_WITHIN_BYTES
        return recent, nearest

    def read(self, touches: Iterable[Touch]) -> None:
        """A work reads these tensors of the device."""
        for storage, size in touches:
            self._touched_bytes += size
            if storage is not None:
                self._touched[storage] = self._touched_bytes

    def write(self, touches: Iterable[Touch]) -> None:
        """A work writes these."""
        for storage, size in touches:
            self._written_bytes += size
            self._touched_bytes += size
            if storage is not None:
                self._touched[storage] = self._touched_bytes
                self._written.pop(storage, None)
                self._written[storage] = self._written_bytes
                if len(self._written) > _REMEMBERED:
                    del self._written[next(iter(self._written))]
