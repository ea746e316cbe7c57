"""`Memory`: rows, gradients and a buffer to empty the caches with, drawn once; a case's tables are views, each further on."""

from __future__ import annotations

import torch

from steptime._units import MIB
from steptime_lab.measure.lookups.cases import LookupLimits

# Of the memory that a rank has: elements of the tables of one case, in any dtype.
_ELEMENTS_PER_BYTE = 0.035
# How many times that much the buffers have: tables of consecutive cases lie in different places.
_ROOM = {torch.float32: 1.4, torch.float16: 1.0, torch.bfloat16: 1.0}
# Whole-GPU limits; a rank of several has its share.
_MOST_LOOKUPS, _MOST_READ_BYTES, _MOST_OUTPUTS = 30_000_000, 3_000_000_000, 1 << 27
# Several times any last-level cache.
_FLUSH_BYTES = 256 * MIB
_CPU_ELEMENTS = 1 << 21
_ALIGNMENT = 64


class Memory:
    """What all cases of a process share."""

    def __init__(self, device: torch.device, share: int) -> None:
        self.device = device
        cuda = device.type == "cuda"
        self.limits = limits_of(torch.cuda.mem_get_info(device)[1] if cuda else 0, share)
        self._rows = {
            dtype: torch.empty(int(room * self.limits.elements) + (1 << 12), dtype=dtype, device=device).normal_(std=0.1)
            for dtype, room in _ROOM.items()
        }
        self._place = dict.fromkeys(_ROOM, 0)
        self._gradients = torch.randn(self.limits.outputs, device=device)
        self._flush = torch.randn((_FLUSH_BYTES if cuda else MIB) // 4, device=device)

    def rows(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat view for tables of so many elements in all."""
        buffer, index = self._rows[dtype], self._place[dtype]
        if index + elements > buffer.numel():
            index = 0
        self._place[dtype] = -(-(index + elements) // _ALIGNMENT) * _ALIGNMENT
        return buffer[index : index + elements]

    def gradient(self, batch: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Random values in the shape of an output."""
        return self._gradients[: batch * columns].view(batch, columns).to(dtype)

    def flush(self) -> None:
        """Reads more than the caches hold. Reading leaves nothing that the next kernel would have to write back."""
        self._flush.sum()


def limits_of(memory_bytes: int, share: int) -> LookupLimits:
    """What fits one of `share` parts of a device with so much memory; 0: the CPU."""
    if not memory_bytes:
        return LookupLimits(_CPU_ELEMENTS, 1 << 16, 1 << 22, 1 << 21)
    elements = int(_ELEMENTS_PER_BYTE * memory_bytes / share)
    return LookupLimits(elements, _MOST_LOOKUPS // share, _MOST_READ_BYTES // share, _MOST_OUTPUTS // share)
