"""Recurrent layers: what cuDNN computes one after the other, by the models of products and by measured kernels of gates.

A layer is one product of all inputs, and for every time step a product of the hidden state and the kernel of the gates
(Appleyard, Kocisky and Blunsom, "Optimizing Performance of Recurrent Neural Networks on GPUs", 2016). The two directions run
beside each other; layers of one direction do as well, each a time step behind the one before, so that the longest chain has as
many steps as there are, and one more for every further layer. What is beside the chain is not free: a measured share of its
time is added. Times are those that any kernel runs. Small layers keep their weights on the chip in one kernel; which do is
PyTorch's choice (native/cudnn/RNN.cpp, get_algo).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from steptime._hardware.device import DeviceLimits
from steptime._models.engine.constants import constants_of
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.question import Question
from steptime._program.program import Tensor, Value
from steptime._units import dtype_bytes

WITHIN = {False: 1.3, True: 1.35}
"""What an estimate may be off by to either side: nine of ten measured passes are."""
_ON_CHIP_WITHIN = 1.7

_LSTM, _GRU = 2, 3  # of cuDNN's modes; 0 and 1 are plain ones
_GATES = {_LSTM: 4, _GRU: 3}


@dataclass(frozen=True)
class RecurrentConstants:
    """Of cuDNN's kernels, from measured passes of one direction."""

    gates_ns: float  # of the kernel of the gates of one time step, and how much more by the bytes of all gates
    gates_bytes_per_ns: float
    product: float  # how long a product of one time step takes, of what the models say of it in a step
    tf32_product: float
    inputs: float  # the same of products over all time steps, beside which others run
    beside: float  # share of the time of what runs beside the longest chain that is added to it
    chip_ns: float  # of a layer that stays on the chip, for every time step: at least, and more by weights and by the batch
    chip_weights_per_ns: float
    chip_gates_per_ns: float
    chip_inputs: float


@dataclass(frozen=True, slots=True)
class StepPart:
    """Kernels of one kind: calls that models answer, times a factor, or kernels of a known time."""

    calls: int
    question: Question | None = None
    factor: float = 1.0
    time_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A call of cuDNN for all layers and time steps."""

    backward: bool
    mode: int
    dtype: str
    steps: int
    batch: int
    rows: int  # inputs of all time steps
    features: int
    hidden: int
    given: int  # features of a hidden state: fewer than it has inside where it is projected
    layers: int
    directions: int
    packed: bool
    tf32: bool = False

    @classmethod
    def of(cls, name: str, values: Sequence[Value], *, tf32: bool | None = None) -> Recurrent | None:
        """From the arguments of `_cudnn_rnn` or its backward pass; None where they do not tell. TF32 is PyTorch's default."""
        backward = name.endswith("_backward")
        first, settings = values[0] if values else None, values[10:] if backward else values[6:]
        if not isinstance(first, Tensor) or len(settings) < 9:
            return None
        mode, hidden, projected, layers, batch_first, _, _, both, sizes = settings[:9]
        if not (isinstance(mode, int) and isinstance(hidden, int) and isinstance(layers, int) and isinstance(projected, int)):
            return None
        batches = [size for size in sizes if isinstance(size, int)] if isinstance(sizes, tuple) else []
        if len(first.shape) != (2 if batches else 3):
            return None
        rows = first.shape[0] if batches else first.shape[0] * first.shape[1]
        steps = len(batches) or first.shape[1 if batch_first else 0]
        if not rows or not steps or not hidden:
            return None
        batch = max(batches, default=rows // steps)
        return cls(
            backward, mode, first.dtype, steps, batch, rows, first.shape[-1], hidden, projected or hidden, layers,
            2 if both else 1, bool(batches), first.dtype == "float32" and tf32 is not False,
        )  # fmt: skip

    @property
    def width(self) -> int:
        """Features of all gates."""
        return _GATES.get(self.mode, 1) * self.hidden

    @property
    def stays_on_chip(self) -> bool:
        """Whether one kernel goes through all time steps of a layer, on GPUs like the reference device."""
        if self.packed or self.given != self.hidden or self.dtype == "float64":
            return False
        small = (128 if self.backward else 192) if self.mode in _GATES else (256 if self.backward else 384)
        even = not self.hidden % 128 and not self.features % 128 and not self.batch % 8
        one = self.layers == self.directions == 1 and self.hidden <= 1024 and self.batch <= 128 and self.mode != _GRU
        return self.dtype != "bfloat16" and (self.hidden <= small or (self.dtype == "float16" and even and one))

    @property
    def within(self) -> float:
        """What the estimate may be off by to either side."""
        return _ON_CHIP_WITHIN if self.stays_on_chip else WITHIN[self.backward]

    @property
    def _chained(self) -> float:
        """Share of all time steps of all layers and directions that the longest chain has."""
        if self.directions > 1:
            return 1 / self.directions
        return (self.steps + self.layers - 1) / (self.steps * self.layers)

    def parts(self, limits: DeviceLimits) -> list[StepPart]:
        """What it computes, in the order of what is waited for."""
        constants = constants_of(limits, "recurrent_backward" if self.backward else "recurrent", RecurrentConstants)
        inputs, steps = list(self._inputs(constants)), list(self._steps(constants))
        return [*inputs, *steps] if not self.backward else [*steps, *inputs]

    def _inputs(self, constants: RecurrentConstants) -> Iterator[StepPart]:
        """Products over all time steps at once: of the inputs; backward, gradients of inputs and of both weights."""
        factor = constants.chip_inputs if self.stays_on_chip else constants.inputs
        for layer in range(self.layers):
            features = self.given * self.directions if layer else self.features
            if not self.backward:
                yield StepPart(self.directions, self._product(self.rows, features, self.width), factor)
                continue
            yield StepPart(self.directions, self._product(self.rows, self.width, features), factor)
            for columns in (features, self.given):
                yield StepPart(self.directions, self._product(self.width, self.rows, columns), factor)

    def _steps(self, constants: RecurrentConstants) -> Iterator[StepPart]:
        chains = self.layers * self.directions
        if self.stays_on_chip:
            step_ns = constants.chip_ns + self.width * self.hidden / constants.chip_weights_per_ns
            step_ns += self.width * self.batch / constants.chip_gates_per_ns
            yield StepPart(chains, time_ns=self.steps * step_ns)
            return
        seen = self._chained + constants.beside * (1 - self._chained)
        product = constants.tf32_product if self.tf32 else constants.product
        sizes = [(self.given, self.width), *([(self.hidden, self.given)] if self.given != self.hidden else [])]
        for features, width in sizes:
            pair = (width, features) if self.backward else (features, width)
            yield StepPart(self.steps * chains, self._product(self.batch, *pair), product * seen)
        nbytes = self.batch * self.width * dtype_bytes(self.dtype)
        gates_ns = constants.gates_ns + nbytes / constants.gates_bytes_per_ns
        yield StepPart(self.steps * chains, time_ns=gates_ns * seen)

    def _product(self, rows: int, inner: int, columns: int) -> Question:
        left, right = TensorArg((rows, inner), self.dtype), TensorArg((columns, inner), self.dtype).transposed()
        return Question(Call("aten::mm.default", (left, right)), tf32=self.tf32, warm=True)


def cell_parts(values: Sequence[Value]) -> list[StepPart]:
    """Of one fused cell: a kernel over all of its gates."""
    matrices = [value for value in values if isinstance(value, Tensor) and len(value.shape) == 2]
    if not matrices:
        return []
    largest = max(matrices, key=lambda tensor: tensor.numel)
    argument = TensorArg(tuple(largest.shape), largest.dtype)
    return [StepPart(1, Question(Call("aten::add.Tensor", (argument, argument)), warm=True))]
