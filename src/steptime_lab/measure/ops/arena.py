"""`Arena`: device memory that is filled once with random values and lent out as views, each further on than the last.

A view is cheap (about 2 us) and, because the place moves on through gigabytes before it comes round again, cold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from steptime._models.kernels.call import TensorArg
from steptime._units import MIB

# cudaMalloc's own alignment: a kernel chosen for its operands' alignment is the one a fresh tensor would get.
ALIGNMENT_BYTES = 256

# Of the device memory that one rank has; the rest is for outputs, workspaces and index tensors.
_OF_MEMORY = 0.3
_CPU_BYTES = 64 * MIB
# What copies from and to the host need at most; pinning more costs seconds.
_HOST_BYTES = 1024 * MIB

# Shares of the arena by (dtype, values, whether ops write to it); any other region gets the last one.
_SHARES = {
    ("float32", "normal", False): 0.30,
    ("float32", "normal", True): 0.25,
    ("bfloat16", "normal", False): 0.15,
    ("float16", "normal", False): 0.10,
}
_OTHER_SHARE = 0.05

# How many host values are drawn; the rest repeats them, for drawing a gigabyte on one core takes seconds.
_HOST_DRAWN = 1 << 22


class DoesNotFitError(RuntimeError):
    """A call's tensors are larger than the region they would be views of."""


@dataclass
class Region:
    """Memory of one dtype and one kind of values. `place` is the next free element."""

    flat: torch.Tensor
    size: int
    place: int = 0

    def reserve(self, elements: int) -> None:
        """Goes back to the start where so many elements do not fit behind the place; views taken next do not overlap."""
        if self.place + elements > self.size:
            self.place = 0

    def take(self, shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> torch.Tensor:
        """A view at the place, which moves on by `step` elements."""
        place = self.place
        self.place = place + step
        return self.flat.as_strided(shape, strides, place)


@dataclass
class Arena:
    """Regions are made when they are first needed. `nbytes` is what they may take together, roughly."""

    device: torch.device
    nbytes: int
    seed: int = 0
    host_bytes: int = _HOST_BYTES
    _regions: dict[tuple[str, str, str, bool], Region] = field(default_factory=dict)

    @classmethod
    def on(cls, device: torch.device, share: int, seed: int = 0) -> Arena:
        """As large as suits a device of which this rank has one of `share` parts."""
        if device.type != "cuda":
            return cls(device, _CPU_BYTES, seed, host_bytes=_CPU_BYTES // 4)
        total = torch.cuda.mem_get_info(device)[1]
        return cls(device, int(_OF_MEMORY * total / share), seed, host_bytes=_HOST_BYTES // share)

    def region(self, tensor: TensorArg, *, mutable: bool) -> Region:
        """Where views for this floating tensor come from. What ops write is kept apart from what they only read."""
        mutable = mutable and tensor.device == "device"
        key = (tensor.dtype, tensor.values, tensor.device, mutable)
        if key not in self._regions:
            self._regions[key] = self._make(tensor, mutable)
        return self._regions[key]

    def refill(self) -> None:
        """Draws anew what ops have written over; otherwise it drifts to zeros, infinities and less power."""
        for (_, values, _, mutable), region in self._regions.items():
            if mutable:
                draw(region.flat, values)

    def _make(self, tensor: TensorArg, mutable: bool) -> Region:
        dtype = torch_dtype(tensor.dtype)
        on_device = tensor.device == "device"
        share = _SHARES.get((tensor.dtype, tensor.values, mutable), _OTHER_SHARE)
        size = int(share * self.nbytes if on_device else self.host_bytes) // dtype.itemsize
        if on_device:
            flat = torch.empty(size, dtype=dtype, device=self.device)
            draw(flat, tensor.values)
            return Region(flat, size)
        pinned = tensor.device == "pinned" and self.device.type == "cuda"
        flat = torch.empty(size, dtype=dtype, pin_memory=pinned)
        drawn = min(size, _HOST_DRAWN)
        draw(flat[:drawn], tensor.values)
        for start in range(drawn, size, drawn):
            flat[start : start + drawn] = flat[: min(drawn, size - start)]
        return Region(flat, size)


def draw(flat: torch.Tensor, values: str) -> None:
    """Fills a floating tensor with random values of a kind."""
    if values == "unit":
        flat.uniform_(0.0, 1.0)
        return
    flat.normal_()
    if values == "positive":
        # Away from 0: what is divided by a variance or put under a root stays finite.
        flat.abs_().add_(0.01)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name."""
    result = getattr(torch, name, None)
    if not isinstance(result, torch.dtype):
        raise TypeError(f"no dtype is called {name!r}")
    return result


def step_of(tensor: TensorArg) -> int:
    """Elements from one view to the next, aligned."""
    granule = max(1, ALIGNMENT_BYTES // torch_dtype(tensor.dtype).itemsize)
    return -(-tensor.extent // granule) * granule
