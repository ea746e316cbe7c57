"""The forward pass of a `Transformer`: what a step is given, layers and loss, written to a tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.layers import activation, add, conv1d, curved, dropout, embedding, layer_norm, linear, mul, rms_norm
from steptime._build.emit.losses import cross_entropy, split_cross_entropy
from steptime._build.emit.products import Affine, LinearProducts, fused_linear
from steptime._build.emit.tape import Tape
from steptime._build.emit.views import contiguous_copy, first_token, split, to_dtype, transpose, view
from steptime._build.emit.writer import TENSOR
from steptime._build.transformer import fused as fused_layers
from steptime._build.transformer.attention import fused, rotated, unfused
from steptime._build.transformer.attention_kernels import Attention
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.experts import ExpertWeights, routed
from steptime._build.transformer.fp8 import RECIPES, ScaledProducts
from steptime._build.transformer.fsdp import Unsharded
from steptime._build.transformer.latent import Surroundings, latent_heads
from steptime._build.transformer.lora import adapted
from steptime._build.transformer.mamba import mixed
from steptime._build.transformer.recompute import DROPPED_WHOLE, FULL, OPS, keeps_of, parts_of
from steptime._build.transformer.sampling import ModelPart
from steptime._build.transformer.schedules import BACKWARD, FORWARD
from steptime._build.transformer.tensor import enter, gathered_linears, gathered_tokens, leave, own_part, split_embedding
from steptime._build.transformer.tensor_overlap import scattered_linear
from steptime._build.transformer.weights import FeedForward, LayerWeights, Weights
from steptime._program.program import Tensor

# GPT-2's, and BERT's 1e-12 as traces round it.
_EPSILONS = {"before": 1e-5, "after": 0.0}


def _scaled_products(tape: Tape, config: Transformer) -> ScaledProducts | None:
    """Products of fewer than 16 bits; FSDP lets go of weights, so that they are cast where they are gathered."""
    if not config.recipe:
        return None
    return ScaledProducts(tape, RECIPES[config.recipe], cast_once=config.parallel.fsdp == 1)


class Inputs:
    """Tensors that are there before the step and get no gradient."""

    def __init__(self, emit: Emitter, config: Transformer) -> None:
        shape = (config.local_batch, config.tokens)
        self._emit, self._config = emit, config
        self.ids = emit.tensor(shape, "int64")
        square = (shape[0], 1, config.tokens, config.tokens)
        self.mask = emit.tensor(square, "bool") if config.mask == "padding" else None
        self._labels = emit.tensor(shape[:1] if config.head == "sequence" else shape, "int64")
        row = (1, config.tokens)
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
        numbers = emit.arange(self._config.tokens, from_python=True)
        return emit.unsqueezed(emit.new("add", (numbers, emit.number("int64"), 1)), 0)

    def segments(self) -> Tensor:
        """The segment of every token: a kept row, picked by positions, for every sample."""
        positions, segments = self.buffers
        row = self._emit.new("gather", (segments, 1, positions, False))
        return self._emit.expanded(row, self.ids.shape, (0, 1))

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of rotary positions for heads such as `x`, kept by the model."""
        if x.dtype not in self._angles:
            first, tokens = self._config.sequence_first, self._config.tokens
            shape = (tokens, 1, 1, x.shape[-1]) if first else (1, 1, tokens, x.shape[-1])
            self._angles[x.dtype] = self._emit.tensor(shape, x.dtype), self._emit.tensor(shape, x.dtype)
        return self._angles[x.dtype]


class Model:
    """The parameters of one rank's part of a model, and the forward pass over them."""

    def __init__(self, tape: Tape, config: Transformer, sharding: Unsharded, part: ModelPart | None = None) -> None:
        self._tape, self._config, self._sharding = tape, config, sharding
        self.weights = Weights(tape, config, sharding, part)
        self._inputs = Inputs(tape.emit, config)
        self._again = parts_of(config.recomputed)
        self._keeps = keeps_of(config.recomputed, config.recompute_keeps)
        self._plain = LinearProducts(tape) if config.fused else None  # of the head
        self._scaled = _scaled_products(tape, config)
        self._products = self._scaled or self._plain

    def begin(self) -> None:
        """Before the first micro-batch of a step."""
        if self._scaled is not None:
            self._scaled.begin(self.weights.of_linears)

    def copies(self, weight: Tensor) -> tuple[Tensor, ...]:
        """What a step keeps of a weight beside itself."""
        return () if self._scaled is None else self._scaled.copies(weight)

    @property
    def summed(self) -> list[Tensor]:
        """Parameters whose gradients tensor-parallel ranks sum when the backward passes are over."""
        return self.weights.summed

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """What the model keeps and registers besides its parameters; DistributedDataParallel gives it to all ranks."""
        return self._inputs.buffers

    @property
    def expert_parameters(self) -> list[Tensor]:
        """Those whose gradients are summed over the ranks that hold the same experts, where ranks hold different ones."""
        return self.weights.of_experts if self._config.parallel.expert > 1 else []

    def forward(self, x: Tensor | None, layers: Sequence[int], named: Callable[[str, int], str]) -> Tensor:
        """Writes a forward pass through these layers: of `x`, or of the batch in the first part; gives the loss in the last.

        `named` gives the section of a layer, forward and backward; what is before the first and behind the last layer has a
        number below them all and one above.
        """
        tape, part = self._tape, self.weights.part
        tape.casts.clear()
        self._sharding.root()
        if part.first:
            x = self._embedded()
            tape.section_before_node_of(x, named(BACKWARD, part.layers.start - 1))
        assert x is not None
        for index in layers:
            tape.emit.section(named(FORWARD, index))
            x = self._sharding.layer(f"layers.{index}", x, partial(self._run, self.weights.layers[index]))
            tape.emit.land()
            tape.section_before_node_of(x, named(BACKWARD, index))
        tape.emit.section(named(FORWARD, part.layers.stop))
        if not part.last:
            self._sharding.finished(x)
            return x
        if self.weights.final_norm is not None:
            x = self._normed(x, self.weights.final_norm)
        return self._scored(x)

    # Layers

    def _applied(self, x: Tensor, layer: Affine, *, of_head: bool = False) -> Tensor:
        weight, bias = layer
        if self._config.weights == "in_out" and bias is not None:
            return conv1d(self._tape, x, weight, bias)
        tape, products = self._tape, self._plain if of_head else self._products
        y = linear(tape, x, weight, bias) if products is None else fused_linear(tape, products, x, weight, bias)
        adapter = self.weights.adapters.get(weight.id)
        return y if adapter is None else adapted(self._tape, x, y, adapter)

    def _normed(self, x: Tensor, norm: Affine) -> Tensor:
        weight, bias = norm
        if bias is None:
            return self._rms_normed(x, weight)
        if self._config.fused:
            return fused_layers.norm(self._tape, x, weight, bias)
        return layer_norm(self._tape, x, weight, bias, _EPSILONS[self._config.norm_place])

    def _rms_normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return fused_layers.norm(self._tape, x, weight, None) if self._config.fused else rms_norm(self._tape, x, weight)

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(self._tape, x, self._config.dropout)

    def _dropped_later(self, x: Tensor) -> Tensor:
        """What a residual is added to: dropped by the kernel that adds where layers are fused."""
        return x if self._config.fused else self._dropped(x)

    def _embedded(self) -> Tensor:
        tape, inputs, sequence = self._tape, self._inputs, self._config.parallel.sequence
        looked_up = split_embedding if self._config.parallel.tensor > 1 else embedding
        assert self.weights.tokens is not None
        x = looked_up(tape, self.weights.tokens, inputs.ids)
        alone = self.weights.segments is None and self.weights.positions is None and self.weights.embedding_norm is None
        if not (sequence and alone):
            x = leave(tape, x, sequence=False)
        if self.weights.segments is not None:
            x = add(tape, x, embedding(tape, self.weights.segments, inputs.segments()))
        if self.weights.positions is not None:
            x = add(tape, x, embedding(tape, self.weights.positions, inputs.positions()))
        if self.weights.embedding_norm is not None:
            x = self._normed(x, self.weights.embedding_norm)
        if not tape.needs(x):  # as PEFT's `enable_input_require_grads`
            x = tape.leaf(x)
        if self._config.sequence_first:
            x = contiguous_copy(tape, transpose(tape, x, 0, 1))
        if sequence:
            x = leave(tape, x, sequence=True) if alone else own_part(tape, x)
        return self._dropped(x)

    def _run(self, layer: LayerWeights, x: Tensor) -> Tensor:
        if layer.recomputed and self._config.recomputed in (FULL, OPS):
            return self._tape.checkpointed(lambda: self._computed(layer, x), self._keeps)
        return self._computed(layer, x)

    def _part(self, layer: LayerWeights, name: str, run: Callable[[], Tensor]) -> Tensor:
        """A part of a layer, computed again in backward where the config says so."""
        if layer.recomputed and name in self._again:
            return self._tape.checkpointed(run, drops_output=name in DROPPED_WHOLE)
        return run()

    def _normed_part(self, layer: LayerWeights, x: Tensor, norm: Affine) -> Tensor:
        return self._part(layer, "norm", lambda: self._normed(x, norm))

    def _forwarded_part(self, layer: LayerWeights, x: Tensor) -> Tensor:
        return self._part(layer, "feed_forward", lambda: self._forwarded(layer, x))

    def _computed(self, layer: LayerWeights, x: Tensor) -> Tensor:
        tape = self._tape
        if layer.second_norm is None:
            return self._added(self._half(layer, self._normed_part(layer, x, layer.first_norm)), x)
        if self._config.norm_place == "after":
            x = self._normed_part(layer, add(tape, self._attended(layer, x), x), layer.first_norm)
            return self._normed_part(layer, add(tape, self._forwarded_part(layer, x), x), layer.second_norm)
        x = self._added(self._attended(layer, self._normed_part(layer, x, layer.first_norm)), x)
        return self._added(x, self._forwarded_part(layer, self._normed_part(layer, x, layer.second_norm)), second=True)

    def _added(self, x: Tensor, y: Tensor, *, second: bool = False) -> Tensor:
        """The two halves of a sum, one of them the residual: of the second half of a layer, the first one."""
        if not self._config.fused:
            return add(self._tape, x, y)
        made, residual = (y, x) if second else (x, y)
        return fused_layers.dropout_add(self._tape, made, residual, self._config.dropout)

    def _half(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """What a layer of a hybrid makes, which has one half alone."""
        if layer.mamba is not None:
            made = mixed(self._tape, x, layer.mamba, self._config.mamba, self._around.by_columns)
            return self._dropped_later(self._by_rows(made, (layer.mamba.outward, None)))
        return self._forwarded_part(layer, x) if layer.output is None else self._attended(layer, x)

    def _attended(self, layer: LayerWeights, x: Tensor) -> Tensor:
        assert layer.output is not None
        if layer.latent is not None:
            q, k, v = latent_heads(self._tape, x, layer.latent, self._config.latent_attention, self._around)
        else:
            q, k, v = self._projected(layer, x)
            if self._config.positions == "rotary":
                q, k = self._rotated(q), self._rotated(k)
        result = self._part(layer, "attention", lambda: self._seen(layer, q, k, v))
        return self._dropped_later(self._by_rows(result, layer.output))

    def _rotated(self, x: Tensor) -> Tensor:
        angles = self._inputs.angles(x)
        return fused_layers.rotary(self._tape, x, angles[0]) if self._config.fused else rotated(self._tape, x, *angles)

    @property
    def _around(self) -> Surroundings:
        sequence = self._config.parallel.sequence

        def by_columns(x: Tensor, weight: Tensor) -> Tensor:
            (result,) = self._by_columns(x, ((weight, None),))
            return result

        for_all = gathered_tokens if sequence else enter
        fused, first = self._config.fused and self._config.latent_attention.fused_rope, self._config.sequence_first
        angles = (lambda x: self._inputs.angles(x)[0]) if fused else None
        return Surroundings(by_columns, partial(for_all, self._tape), self._rotated, self._rms_normed, first, angles)

    def _by_columns(self, x: Tensor, layers: Sequence[Affine], *, of_head: bool = False) -> Iterator[Tensor]:
        """What layers split by columns make of one input, one after the other."""
        if self._config.parallel.sequence and not self._tape.autocast:
            products, overlapped = self._plain if of_head else self._products, self._config.parallel.tp_comm_overlap
            yield from gathered_linears(self._tape, x, layers, products, overlapped=overlapped)
            return
        # Autocast casts what products take, not what ranks gather: as with DTensor, inputs are gathered once and kept.
        x = gathered_tokens(self._tape, x) if self._config.parallel.sequence else enter(self._tape, x)
        for each in layers:
            yield self._applied(x, each, of_head=of_head)

    def _by_rows(self, x: Tensor, layer: Affine) -> Tensor:
        if self._config.parallel.tp_comm_overlap:
            return scattered_linear(self._tape, x, layer, self._products)
        return leave(self._tape, self._applied(x, layer), sequence=self._config.parallel.sequence)

    def _seen(self, layer: LayerWeights, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The core of attention: what the heads attend to."""
        config = self._config
        if config.kernels == "unfused":
            return unfused(self._tape, q, k, v, config.dropout)
        exchange = config.parallel.context_exchange if config.parallel.context > 1 else ""
        said = (config.causal, config.dropout, self._inputs.mask, config.sequence_first, exchange, config.fused, layer.window)
        return fused(self._tape, q, k, v, Attention(config.kernels, *said, in_place=config.fused))

    def _projected(self, layer: LayerWeights, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values by heads."""
        made, norms = self._by_columns(x, layer.projections), (*(layer.head_norms or (None, None)), None)
        if len(layer.projections) > 1:
            return tuple(self._by_heads(each, norm) for each, norm in zip(made, norms, strict=True))
        (fused,) = made
        even = self._config.key_heads == self._config.heads
        if self._config.sequence_first and even:
            heads = self._config.heads // self._config.parallel.tensor
            by_heads = view(self._tape, fused, (*fused.shape[:2], heads, fused.shape[-1] // heads))
            q, k, v = split(self._tape, by_heads, self._config.head_size)
            if layer.head_norms:
                q, k = (self._rms_normed(each, norm) for each, norm in zip((q, k), layer.head_norms, strict=True))
            return q, k, v
        keys = self._config.key_heads * self._config.head_size // self._config.parallel.tensor
        q, k, v = split(self._tape, fused, keys if even else (fused.shape[-1] - 2 * keys, keys, keys))
        # Hugging Face's GPT-2 turns keys and values before queries.
        k, v, q = (self._by_heads(each, norm) for each, norm in zip((k, v, q), (norms[1], None, norms[0]), strict=True))
        return q, k, v

    def _by_heads(self, x: Tensor, norm: Tensor | None = None) -> Tensor:
        """[batch, heads, sequence, head width], or [sequence, batch, heads, head width] where the sequence is first."""
        width = self._config.head_size
        result = view(self._tape, x, (*x.shape[:2], x.shape[2] // width, width), (*x.shape[:2], -1, width))
        result = result if norm is None else self._rms_normed(result, norm)
        return result if self._config.sequence_first else transpose(self._tape, result, 1, 2)

    def _forwarded(self, layer: LayerWeights, x: Tensor) -> Tensor:
        made = [] if layer.feed_forward is None else [self._fed_forward(layer, layer.feed_forward, x)]
        if layer.experts is not None:
            made.append(self._routed(layer.experts, x))
        return self._dropped_later(made[0] if len(made) == 1 else add(self._tape, *made))

    def _fed_forward(self, layer: LayerWeights, half: FeedForward, x: Tensor) -> Tensor:
        tape = self._tape
        made = self._by_columns(x, (half.up,) if half.gate is None else (half.gate, half.up))
        if half.gate is None:
            up = next(made)
            inner = self._part(layer, "activation", lambda: self._curved(up))
        elif layer.recomputed and "activation" in self._again:
            gate, up = made
            inner = self._part(layer, "activation", lambda: mul(tape, activation(tape, "silu", gate), up))
        else:
            inner = mul(tape, activation(tape, "silu", next(made)), next(made))
        return self._by_rows(inner, half.down)

    def _routed(self, layer: ExpertWeights, x: Tensor) -> Tensor:
        """Tokens to their experts, which may be split as the rest of a layer is."""
        tape, config, products = self._tape, self._config, self._products if self._config.fused else None
        if config.parallel.expert_tensor == 1:
            return routed(tape, x, layer, config.experts, products, beside=config.parallel.overlap_moe_expert_parallel_comm)
        sequence = config.parallel.sequence
        x = gathered_tokens(tape, x) if sequence else enter(tape, x)
        return leave(tape, routed(tape, x, layer, config.experts, products), sequence=sequence)

    def _curved(self, x: Tensor) -> Tensor:
        if self._config.fused:
            swiglu = self._config.activation == "swiglu"
            return fused_layers.swiglu(self._tape, x) if swiglu else fused_layers.gelu(self._tape, x)
        return curved(self._tape, self._config.activation, x)

    # The head

    def _scored(self, x: Tensor) -> Tensor:
        tape, config, inputs = self._tape, self._config, self._inputs
        if self.weights.pooler is not None:
            x = activation(tape, "tanh", linear(tape, first_token(tape, x), *self.weights.pooler))
        if config.head == "tokens":
            x = view(tape, x, x.shape, (-1, *x.shape[1:]))
        if config.head != "language_model":
            x = self._dropped(x)
        assert self.weights.head is not None
        if config.parallel.tensor > 1:
            (scores,) = self._by_columns(x, (self.weights.head,), of_head=True)
        else:
            scores = self._applied(x, self.weights.head, of_head=True) if config.fused else linear(tape, x, *self.weights.head)
        self._sharding.finished(scores)
        scores = view(tape, scores, (scores.numel // scores.shape[-1], scores.shape[-1]), (-1, scores.shape[-1]))
        labels = inputs.labels()
        if config.fused and config.head == "language_model":
            return fused_layers.cross_entropy(tape, scores, labels)
        if tape.emit.group_size(TENSOR) > 1:
            return split_cross_entropy(tape, to_dtype(tape, scores, "float32"), labels)
        if config.head == "language_model":
            scores = to_dtype(tape, scores, "float32")
        return cross_entropy(tape, scores, labels)
