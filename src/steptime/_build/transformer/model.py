"""The forward pass of a `Transformer`: its layers and its loss, written to a tape."""

from __future__ import annotations

from collections.abc import Callable

from steptime._build.emit.autograd import Gradients
from steptime._build.emit.layers import DTYPE_NUMBERS, empty, zero
from steptime._build.transformer.activations import add, gelu, gelu_new, mul, silu, tanh
from steptime._build.transformer.attention import Attention, unfused
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.emit import TENSOR
from steptime._build.transformer.inputs import Inputs
from steptime._build.transformer.layers import conv1d, dropout, layer_norm, linear, rms_norm
from steptime._build.transformer.lookup import embedding
from steptime._build.transformer.loss import cross_entropy, split_cross_entropy
from steptime._build.transformer.rotary import rotated
from steptime._build.transformer.tape import StepTape
from steptime._build.transformer.tensor import enter, leave, split_embedding
from steptime._build.transformer.views import contiguous_copy, given, split, to_dtype, transpose, view
from steptime._build.transformer.weights import Affine, LayerWeights, ParameterSharding, Weights
from steptime._program.program import Tensor

# GPT-2's, and BERT's 1e-12 as traces round it.
_EPSILONS = {"before": 1e-5, "after": 0.0}


class Model:
    """The parameters of one rank, and the forward pass over them."""

    def __init__(self, tape: StepTape, config: Transformer, sharding: ParameterSharding) -> None:
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
        for number, layer in enumerate(self._weights.layers):
            run = self._checkpointed(layer) if self._config.checkpointing else self._runner(layer)
            x = self._sharding.layer(f"layers.{number}", x, run)
        if self._weights.final_norm is not None:
            x = self._normed(x, self._weights.final_norm)
        return self._scored(x)

    def _checkpointed(self, layer: LayerWeights) -> Callable[[Tensor], Tensor]:
        return lambda x: self._tape.checkpointed(lambda: self._run(layer, x))

    def _runner(self, layer: LayerWeights) -> Callable[[Tensor], Tensor]:
        return lambda x: self._run(layer, x)

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
            result = Attention(config.kernels, config.causal, config.dropout, inputs.mask)(tape, q, k, v)
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
            inner = mul(tape, silu(tape, self._applied(x, layer.gate)), self._applied(x, layer.up))
        else:
            active = gelu_new if self._config.activation == "gelu_new" else gelu
            inner = active(tape, self._applied(x, layer.up))
        return self._dropped(leave(tape, self._applied(inner, layer.down)))

    # The head

    def _scored(self, x: Tensor) -> Tensor:
        tape, config, inputs = self._tape, self._config, self._inputs
        if config.head == "language_model":
            x = enter(tape, x)
        elif self._weights.pooler is not None:
            x = tanh(tape, linear(tape, _first_token(tape, x), *self._weights.pooler))
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


def _first_token(tape: StepTape, x: Tensor) -> Tensor:
    """`x[:, 0]`."""
    emit = tape.emit
    assert x.strides is not None
    y = emit.view(x, (x.shape[0], x.shape[2]), (x.strides[0], x.strides[2]))
    with emit.around("aten::select", (x, 1, 0), (y,), sequence=emit.sequence):
        emit.op("aten::as_strided", (x, y.shape, y.strides, 0), (y,))

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(x.shape, x.dtype)
        gradient, row = given(gradients[0]), emit.view(result, y.shape, (x.shape[1] * x.shape[2], 1))
        with emit.around("aten::select_backward", (gradient, x.shape, 1, 0), (result,)):
            with emit.around("aten::zeros", (result.shape, DTYPE_NUMBERS[result.dtype], 0, emit.device, None), (result,)):
                empty(emit, result.shape, result.dtype, made=result)
                zero(emit, result)
            with emit.around("aten::select", (result, 1, 0), (row,)):
                emit.op("aten::as_strided", (result, row.shape, row.strides, 0), (row,))
            emit.op("aten::copy_", (row, gradient, False), (row,))
        return (result,)

    tape.record("SelectBackward0", (x,), (y,), backward)
    return y
