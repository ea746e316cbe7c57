"""The parameters of a `Transformer` that one rank has, and what happens to them around the layers that use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from steptime._build.transformer.config import Transformer
from steptime._build.transformer.tape import StepTape
from steptime._program.program import Tensor

# Megatron-LM pads the vocabulary so that every rank's part is a multiple of 128 (--make-vocab-size-divisible-by).
_VOCABULARY_MULTIPLE = 128

Affine = tuple[Tensor, Tensor | None]  # a weight, and a bias where there is one


class ParameterSharding(Protocol):
    """What happens to parameters around the units that hold them."""

    def unit(self, name: str, parameters: list[Tensor]) -> None:
        """Says which parameters belong together: a layer's, or, with an empty name, all that are in no layer."""

    def root(self) -> None:
        """Before the forward pass."""

    def layer(self, name: str, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Runs a layer with its parameters there."""

    def finished(self, y: Tensor) -> None:
        """After the forward pass gave `y`."""


class Unsharded:
    """Parameters that are always there."""

    def unit(self, name: str, parameters: list[Tensor]) -> None:
        """Nothing to keep."""

    def root(self) -> None:
        """Nothing to gather."""

    def layer(self, name: str, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Runs a layer."""
        del name
        return run(x)

    def finished(self, y: Tensor) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The parameters of one layer."""

    first_norm: Affine
    projections: tuple[Affine, ...]  # one, or of queries, keys and values
    output: Affine
    second_norm: Affine
    gate: Affine | None
    up: Affine
    down: Affine


class Weights:
    """All parameters, in the order in which modules register them: optimisers and FSDP take them so."""

    def __init__(self, tape: StepTape, config: Transformer, sharding: ParameterSharding) -> None:
        self._tape, self._config = tape, config
        self._unit: list[Tensor] = []
        ways = config.parallel.tensor
        rows = _padded(config.vocabulary, ways) // ways
        self.tokens = self._weight(rows, config.width)
        learned = config.positions == "learned"
        self.positions = self._weight(config.position_rows, config.width) if learned else None
        self.segments = self._weight(config.segments, config.width) if config.segments else None
        self.embedding_norm = self._norm() if config.norm_place == "after" else None
        outside, self.layers = self._unit, []
        for number in range(config.layers):
            self._unit = []
            self.layers.append(self._layer())
            sharding.unit(f"layers.{number}", self._unit)
        self._unit = outside
        self.final_norm = self._norm() if config.norm_place == "before" else None
        self.pooler = self._linear(config.width, config.width, bias=True) if config.head == "sequence" else None
        self.head = self._head(rows)
        sharding.unit("", self._unit)

    def _weight(self, *shape: int) -> Tensor:
        result = self._tape.parameter(self._tape.emit.tensor(shape, self._config.dtype))
        self._unit.append(result)
        return result

    def _linear(self, inputs: int, outputs: int, *, bias: bool | None = None) -> Affine:
        shape = (inputs, outputs) if self._config.weights == "in_out" and bias is None else (outputs, inputs)
        weight = self._weight(*shape)
        return weight, self._weight(outputs) if (self._config.biased if bias is None else bias) else None

    def _norm(self) -> Affine:
        weight = self._weight(self._config.width)
        return weight, self._weight(self._config.width) if self._config.norm == "layer_norm" else None

    def _layer(self) -> LayerWeights:
        """A layer of one rank's part; a norm is registered where it stands, before its half of the layer or after."""
        config, ways = self._config, self._config.parallel.tensor
        own, keys, inner = config.width // ways, config.key_heads * config.head_width // ways, config.inner // ways
        widths = (3 * own,) if config.fused_projections else (own, keys, keys)
        before = config.norm_place == "before"
        first_norm = self._norm() if before else None
        projections = tuple(self._linear(config.width, each) for each in widths)
        output = self._linear(own, config.width)
        first_norm = first_norm or self._norm()
        second_norm = self._norm() if before else None
        gate = self._linear(config.width, inner) if config.activation == "swiglu" else None
        up, down = self._linear(config.width, inner), self._linear(inner, config.width)
        return LayerWeights(first_norm, projections, output, second_norm or self._norm(), gate, up, down)

    def _head(self, rows: int) -> Affine:
        config = self._config
        if config.head != "language_model":
            return self._linear(config.width, config.classes, bias=True)
        return (self.tokens, None) if config.tied_head else (self._weight(rows, config.width), None)


def _padded(vocabulary: int, ways: int) -> int:
    multiple = _VOCABULARY_MULTIPLE * ways if ways > 1 else 1
    return -(-vocabulary // multiple) * multiple
