"""The forward pass of a `Transformer`: the parameters of one rank, what a step is given, layers and loss, written to a tape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.layers import activation, add, conv1d, dropout, embedding, gelu_new, layer_norm, linear, mul, rms_norm
from steptime._build.emit.losses import cross_entropy, split_cross_entropy
from steptime._build.emit.tape import Tape
from steptime._build.emit.views import contiguous_copy, first_token, split, to_dtype, transpose, view
from steptime._build.emit.writer import TENSOR
from steptime._build.transformer.attention import Attention, fused, rotated, unfused
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallel import Unsharded, enter, leave, split_embedding
from steptime._program.program import Tensor

# Megatron-LM pads the vocabulary so that every rank's part is a multiple of 128 (--make-vocab-size-divisible-by).
_VOCABULARY_MULTIPLE = 128
# GPT-2's, and BERT's 1e-12 as traces round it.
_EPSILONS = {"before": 1e-5, "after": 0.0}

Affine = tuple[Tensor, Tensor | None]  # a weight, and a bias where there is one


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

    def __init__(self, tape: Tape, config: Transformer, sharding: Unsharded) -> None:
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
        for index in range(config.layers):
            self._unit = []
            self.layers.append(self._layer())
            sharding.unit(f"layers.{index}", self._unit)
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
        width, keys, inner = config.width // ways, config.key_heads * config.head_width // ways, config.inner // ways
        widths = (3 * width,) if config.fused_projections else (width, keys, keys)
        before = config.norm_place == "before"
        first_norm = self._norm() if before else None
        projections = tuple(self._linear(config.width, each) for each in widths)
        output = self._linear(width, config.width)
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


class Inputs:
    """Tensors that are there before the step and get no gradient."""

    def __init__(self, emit: Emitter, config: Transformer) -> None:
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
        return self._emit.viewed(self._labels, (self._labels.numel,), (-1,))

    def positions(self) -> Tensor:
        """The positions of a sequence: counted in every step, or kept where the model has segments too, as in BERT."""
        if self.buffers:
            return self.buffers[0]
        emit = self._emit
        numbers = emit.arange(self._config.sequence, from_python=True)
        return emit.unsqueezed(emit.new("add", (numbers, emit.number("int64"), 1)), 0)

    def segments(self) -> Tensor:
        """The segment of every token: a kept row, picked by positions, for every sample."""
        positions, segments = self.buffers
        row = self._emit.new("gather", (segments, 1, positions, False))
        return self._emit.expanded(row, self.ids.shape, (0, 1))

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of rotary positions for heads such as `x`, kept by the model."""
        if x.dtype not in self._angles:
            first = self._config.sequence_first
            shape = (self._config.sequence, 1, 1, x.shape[-1]) if first else (1, 1, self._config.sequence, x.shape[-1])
            self._angles[x.dtype] = self._emit.tensor(shape, x.dtype), self._emit.tensor(shape, x.dtype)
        return self._angles[x.dtype]


class Model:
    """The parameters of one rank, and the forward pass over them."""

    def __init__(self, tape: Tape, config: Transformer, sharding: Unsharded) -> None:
        self._tape, self._config, self._sharding = tape, config, sharding
        self._weights = Weights(tape, config, sharding)
        self._inputs = Inputs(tape.emit, config)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """What the model keeps and registers besides its parameters; DistributedDataParallel gives it to all ranks."""
        return self._inputs.buffers

    def loss(self) -> Tensor:
        """Writes one forward pass; gives the loss."""
        self._tape.casts.clear()
        self._sharding.root()
        x = self._embedded()
        for index, layer in enumerate(self._weights.layers):
            x = self._sharding.layer(f"layers.{index}", x, partial(self._run, layer))
        if self._weights.final_norm is not None:
            x = self._normed(x, self._weights.final_norm)
        return self._scored(x)

    # Layers

    def _applied(self, x: Tensor, layer: Affine) -> Tensor:
        weight, bias = layer
        if self._config.weights == "in_out" and bias is not None:
            return conv1d(self._tape, x, weight, bias)
        return linear(self._tape, x, weight, bias)

    def _normed(self, x: Tensor, norm: Affine) -> Tensor:
        weight, bias = norm
        if bias is None:
            return rms_norm(self._tape, x, weight)
        return layer_norm(self._tape, x, weight, bias, _EPSILONS[self._config.norm_place])

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(self._tape, x, self._config.dropout)

    def _embedded(self) -> Tensor:
        tape, inputs = self._tape, self._inputs
        looked_up = split_embedding if self._config.parallel.tensor > 1 else embedding
        x = looked_up(tape, self._weights.tokens, inputs.ids)
        if self._weights.segments is not None:
            x = add(tape, x, embedding(tape, self._weights.segments, inputs.segments()))
        if self._weights.positions is not None:
            x = add(tape, x, embedding(tape, self._weights.positions, inputs.positions()))
        if self._weights.embedding_norm is not None:
            x = self._normed(x, self._weights.embedding_norm)
        if self._config.sequence_first:
            x = contiguous_copy(tape, transpose(tape, x, 0, 1))
        return self._dropped(x)

    def _run(self, layer: LayerWeights, x: Tensor) -> Tensor:
        if self._config.checkpointing:
            return self._tape.checkpointed(lambda: self._computed(layer, x))
        return self._computed(layer, x)

    def _computed(self, layer: LayerWeights, x: Tensor) -> Tensor:
        tape = self._tape
        if self._config.norm_place == "after":
            x = self._normed(add(tape, self._attended(layer, x), x), layer.first_norm)
            return self._normed(add(tape, self._forwarded(layer, x), x), layer.second_norm)
        x = add(tape, self._attended(layer, self._normed(x, layer.first_norm)), x)
        return add(tape, x, self._forwarded(layer, self._normed(x, layer.second_norm)))

    def _attended(self, layer: LayerWeights, x: Tensor) -> Tensor:
        tape, config, inputs = self._tape, self._config, self._inputs
        q, k, v = self._projected(layer, enter(tape, x))
        if config.positions == "rotary":
            q, k = (rotated(tape, each, *inputs.angles(each)) for each in (q, k))
        if config.sequence_first:
            result = unfused(tape, q, k, v, config.dropout)
        else:
            result = fused(tape, q, k, v, Attention(config.kernels, config.causal, config.dropout, inputs.mask))
        return self._dropped(leave(tape, self._applied(result, layer.output)))

    def _projected(self, layer: LayerWeights, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values by heads."""
        if len(layer.projections) > 1:
            return tuple(self._by_heads(self._applied(x, each)) for each in layer.projections)
        fused = self._applied(x, layer.projections[0])
        if self._config.sequence_first:
            heads = self._config.heads // self._config.parallel.tensor
            by_heads = view(self._tape, fused, (*fused.shape[:2], heads, fused.shape[-1] // heads))
            return split(self._tape, by_heads, self._config.head_width)
        q, k, v = split(self._tape, fused, fused.shape[-1] // 3)
        # Hugging Face's GPT-2 turns keys and values before queries.
        k, v, q = (self._by_heads(each) for each in (k, v, q))
        return q, k, v

    def _by_heads(self, x: Tensor) -> Tensor:
        """[batch, heads, sequence, head width], or [sequence, batch, heads, head width] where the sequence is first."""
        width = self._config.head_width
        result = view(self._tape, x, (*x.shape[:2], x.shape[2] // width, width), (*x.shape[:2], -1, width))
        return result if self._config.sequence_first else transpose(self._tape, result, 1, 2)

    def _forwarded(self, layer: LayerWeights, x: Tensor) -> Tensor:
        tape = self._tape
        x = enter(tape, x)
        if layer.gate is not None:
            inner = mul(tape, activation(tape, "silu", self._applied(x, layer.gate)), self._applied(x, layer.up))
        elif self._config.activation == "gelu_new":
            inner = gelu_new(tape, self._applied(x, layer.up))
        else:
            inner = activation(tape, "gelu", self._applied(x, layer.up))
        return self._dropped(leave(tape, self._applied(inner, layer.down)))

    # The head

    def _scored(self, x: Tensor) -> Tensor:
        tape, config, inputs = self._tape, self._config, self._inputs
        if config.head == "language_model":
            x = enter(tape, x)
        elif self._weights.pooler is not None:
            x = activation(tape, "tanh", linear(tape, first_token(tape, x), *self._weights.pooler))
        if config.head == "tokens":
            x = view(tape, x, x.shape, (-1, *x.shape[1:]))
        if config.head != "language_model":
            x = self._dropped(x)
        scores = linear(tape, x, *self._weights.head)
        self._sharding.finished(scores)
        scores = view(tape, scores, (scores.numel // scores.shape[-1], scores.shape[-1]), (-1, scores.shape[-1]))
        labels = inputs.labels()
        if tape.emit.group_size(TENSOR) > 1:
            return split_cross_entropy(tape, to_dtype(tape, scores, "float32"), labels)
        if config.head == "language_model":
            scores = to_dtype(tape, scores, "float32")
        return cross_entropy(tape, scores, labels)
