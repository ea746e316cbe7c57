"""What a step of a `Transformer` is given: token ids, labels, a mask, and the buffers that the model keeps."""

from __future__ import annotations

from steptime._build.transformer.config import Transformer
from steptime._build.transformer.emit import GroupEmitter
from steptime._build.transformer.lookup import counted
from steptime._program.program import Tensor


class Inputs:
    """Tensors that are there before the step and get no gradient."""

    def __init__(self, emit: GroupEmitter, config: Transformer) -> None:
        shape = (config.local_batch, config.sequence)
        self._emit, self._config = emit, config
        self.ids = emit.tensor(shape, "int64")
        square = (shape[0], 1, config.sequence, config.sequence)
        self.mask = emit.tensor(square, "bool") if config.mask == "padding" else None
        self._labels = emit.tensor(shape[:1] if config.head == "sequence" else shape, "int64")
        row = (1, config.sequence)
        # As BERT keeps its positions and its tokens' segments.
        self.buffers = tuple(emit.tensor(row, "int64") for _ in range(2 if config.segments else 0))
        self._angles: dict[str, tuple[Tensor, Tensor]] = {}

    def labels(self) -> Tensor:
        """The labels in one row."""
        flat = self._emit.view(self._labels, (self._labels.numel,))
        self._emit.op("aten::view", (self._labels, (-1,)), (flat,))
        return flat

    def positions(self) -> Tensor:
        """The positions of a sequence: counted in every step, or kept where the model has segments too, as in BERT."""
        if self.buffers:
            return self.buffers[0]
        emit, length = self._emit, self._config.sequence
        numbers = counted(emit, length, (length, None, None, emit.device, False))
        shifted = emit.tensor((length,), "int64")
        emit.op("aten::add", (numbers, emit.tensor((), "int64", device="cpu"), 1), (shifted,))
        row = emit.view(shifted, (1, length))
        with emit.around("aten::unsqueeze", (shifted, 0), (row,)):
            emit.op("aten::as_strided", (shifted, row.shape, row.strides, None), (row,))
        return row

    def segments(self) -> Tensor:
        """The segment of every token: a kept row, picked by positions, for every sample."""
        emit, shape = self._emit, (self._config.local_batch, self._config.sequence)
        positions, segments = self.buffers
        row = emit.tensor(segments.shape, "int64")
        emit.op("aten::gather", (segments, 1, positions, False), (row,))
        wide = emit.view(row, shape, (0, 1))
        with emit.around("aten::expand", (row, shape, False), (wide,)):
            emit.op("aten::as_strided", (row, shape, (0, 1), None), (wide,))
        return wide

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of rotary positions for heads such as `x`, kept by the model."""
        if x.dtype not in self._angles:
            first = self._config.sequence_first
            shape = (self._config.sequence, 1, 1, x.shape[-1]) if first else (1, 1, self._config.sequence, x.shape[-1])
            self._angles[x.dtype] = self._emit.tensor(shape, x.dtype), self._emit.tensor(shape, x.dtype)
        return self._angles[x.dtype]
