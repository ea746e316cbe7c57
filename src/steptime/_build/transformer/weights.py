"""The parameters of one rank of a `Transformer`: of every kind of layer, the embedding and the head."""

from __future__ import annotations

from dataclasses import dataclass, replace

from steptime._build.emit.products import Affine
from steptime._build.emit.tape import Tape
from steptime._build.emit.writer import DATA, EXPERT_DATA
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.experts import ExpertWeights
from steptime._build.transformer.fsdp import Unsharded
from steptime._build.transformer.latent import LatentWeights
from steptime._build.transformer.lora import Adapter
from steptime._build.transformer.mamba import MambaWeights
from steptime._build.transformer.sampling import ModelPart
from steptime._program.program import Tensor


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The second half of a layer."""

    gate: Affine | None
    up: Affine
    down: Affine


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The parameters of one layer."""

    first_norm: Affine
    projections: tuple[Affine, ...]  # one, or of queries, keys and values
    output: Affine | None
    second_norm: Affine | None  # none where a layer is one half alone
    feed_forward: FeedForward | None  # that of all tokens: the layer's, or of the experts that all tokens share
    experts: ExpertWeights | None
    latent: LatentWeights | None = None  # instead of projections
    head_norms: tuple[Tensor, ...] = ()  # of queries and keys
    mamba: MambaWeights | None = None  # instead of attention
    window: int = 0  # tokens that attention sees at most; 0: all
    recomputed: bool = False  # in backward, as the config says


class Weights:
    """The parameters of a part, in the order in which modules register them: optimisers and FSDP take them so."""

    def __init__(self, tape: Tape, config: Transformer, sharding: Unsharded, part: ModelPart | None = None) -> None:
        self._tape, self._config, self._sharding = tape, config, sharding
        self._unit: list[Tensor] = []
        # With sequence parallelism, what every rank has and uses for its own tokens alone: gradients are summed over the ranks.
        self.summed: list[Tensor] = []
        self.of_experts: list[Tensor] = []  # whose gradients are summed over the ranks that hold the same experts
        self.all: list[Tensor] = []
        self.of_linears: list[Tensor] = []  # weights of the layers' products, without routers
        self.adapters: dict[int | None, Adapter] = {}  # by the weight that they are beside
        self._of = "embedding"  # the part of the model that is made
        self.part = part or ModelPart(range(config.layers), first=True, last=True)
        ways = config.parallel.tensor
        rows = config.vocabulary_rows // ways
        first, last = self.part.first, self.part.last
        # The head of a last stage that shares the embedding's weights has a copy of them.
        self.tokens = self._weight(rows, config.width) if first or (last and self._shared_head) else None
        learned = first and config.positions == "learned"
        self.positions = self._weight(config.position_rows, config.width) if learned else None
        self.segments = self._weight(config.segments, config.width) if first and config.segments else None
        self.embedding_norm = self._norm() if first and config.norm_place == "after" else None
        outside, self.layers = self._unit, dict[int, LayerWeights]()
        self.of_layer: dict[int, tuple[Tensor, ...]] = {}  # all that is in a layer
        for index in self.part.layers:
            self._unit = []
            layer = replace(self._layer(config.layer_kind(index)), recomputed=config.recomputes(index))
            self.layers[index] = replace(layer, window=config.window_of(index))
            self.of_layer[index] = tuple(self._unit)
            apart = self.of_experts if config.parallel.expert > 1 else ()
            sharding.unit(f"layers.{index}", self._unit, self.summed, apart)
        self._unit, self._of = outside, "head"
        self.final_norm = self._norm() if last and config.norm_place == "before" else None
        self.pooler = self._linear(config.width, config.width, bias=True) if last and config.head == "sequence" else None
        self.head = self._head(rows) if last else None
        sharding.unit("", self._unit, self.summed)

    @property
    def _shared_head(self) -> bool:
        return self._config.head == "language_model" and self._config.tied_head

    def _weight(self, *shape: int, group: str = DATA) -> Tensor:
        if self._config.trains(self._of):
            result = self._sharding.place(self._tape, shape, self._config, group)
        else:
            result = self._tape.emit.tensor(shape, self._config.dtype)
        self._unit.append(result)
        self.all.append(result)
        return result

    def _linear(self, inputs: int, outputs: int, target: str = "", *, bias: bool | None = None) -> Affine:
        shape = (inputs, outputs) if self._config.weights == "in_out" and bias is None else (outputs, inputs)
        weight = self._weight(*shape)
        self.of_linears += [weight] if bias is None else []
        lora = self._config.lora
        if lora.rank and target in lora.targets:
            adapter = [
                self._sharding.place(self._tape, each, self._config, DATA)
                for each in ((lora.rank, inputs), (outputs, lora.rank))
            ]
            self.adapters[weight.id] = adapter[0], adapter[1]
            self._unit += adapter
            self.all += adapter
        return weight, self._weight(outputs) if (self._config.biased if bias is None else bias) else None

    def _norm(self) -> Affine:
        before, self._of = self._of, "norms"
        weight = self._weight(self._config.width)
        bias = self._weight(self._config.width) if self._config.norm == "layer_norm" else None
        self._of = before
        self._used_by_part(weight, bias)
        return weight, bias

    def _used_by_part(self, *parameters: Tensor | None) -> None:
        if self._config.parallel.sequence:
            self.summed += [each for each in parameters if each is not None]

    def _alone(self, kind: str) -> LayerWeights:
        """A layer of a hybrid: a norm and one half."""
        norm = self._norm()
        if kind.startswith("attention"):
            projections, output, latent, head_norms = self._attention()
            return LayerWeights(norm, projections, output, None, None, None, latent, head_norms)
        if kind.startswith("mamba"):
            return LayerWeights(norm, (), None, None, None, None, mamba=self._mamba())
        return LayerWeights(norm, (), None, None, *self._second_half(kind))

    def _mamba(self) -> MambaWeights:
        config, mamba, ways = self._config, self._config.mamba, self._config.parallel.tensor
        heads, inner, both = mamba.heads // ways, mamba.inner // ways, mamba.groups * mamba.state // ways
        channels = inner + 2 * both
        inward = self._weight(inner + channels + heads, config.width)
        convolution, bias = self._weight(channels, 1, mamba.taps), self._weight(channels)
        of_heads = tuple(self._weight(heads) for _ in range(3))
        norm, outward = self._weight(inner), self._weight(config.width, inner)
        self.of_linears += [inward, outward]
        return MambaWeights(inward, convolution, bias, of_heads, norm, outward)

    def _layer(self, kind: str) -> LayerWeights:
        """A layer of one rank's part; a norm is registered where it stands, before its half of the layer or after."""
        if kind.endswith("alone"):
            return self._alone(kind)
        before = self._config.norm_place == "before"
        first_norm = self._norm() if before else None
        projections, output, latent, head_norms = self._attention()
        first_norm = first_norm or self._norm()
        second_norm = self._norm() if before else None
        feed_forward, experts = self._second_half(kind)
        second_norm = second_norm or self._norm()
        return LayerWeights(first_norm, projections, output, second_norm, feed_forward, experts, latent, head_norms)

    def _attention(self) -> tuple[tuple[Affine, ...], Affine, LatentWeights | None, tuple[Tensor, ...]]:
        config, ways = self._config, self._config.parallel.tensor
        width, keys = (heads * config.head_size // ways for heads in (config.heads, config.key_heads))
        widths = (width + 2 * keys,) if config.fused_projections else (width, keys, keys)
        names = ("",) if config.fused_projections else ("query", "key", "value")
        self._of = "attention"
        latent = self._latent() if config.latent_attention.kv_rank else None
        made = (self._linear(config.width, each, name) for each, name in zip(widths, names, strict=True))
        projections = tuple(made) if latent is None else ()
        values = width if latent is None else config.heads * config.latent_attention.value // ways
        output = self._linear(values, config.width, "output")
        head_norms = tuple(self._weight(config.head_size) for _ in range(2 if config.qk_norm else 0))
        self.summed += head_norms if ways > 1 else ()  # every rank's are of its own heads
        self._used_by_part(output[1])
        return projections, output, latent, head_norms

    def _second_half(self, kind: str) -> tuple[FeedForward | None, ExpertWeights | None]:
        self._of = "feed_forward"
        experts = self._experts() if kind.startswith("experts") else None
        inner = self._config.inner if experts is None else self._config.experts.shared
        return self._feed_forward(inner // self._config.parallel.tensor) if inner else None, experts

    def _latent(self) -> LatentWeights:
        config, widths = self._config, self._config.latent_attention
        heads, width = config.heads // config.parallel.tensor, config.width
        query_down = self._weight(widths.q_rank, width) if widths.q_rank else None
        query_norm = self._weight(widths.q_rank) if widths.q_rank else None
        query_up = self._weight(heads * (widths.nope + widths.rope), widths.q_rank or width)
        down, norm = self._weight(widths.kv_rank + widths.rope, width), self._weight(widths.kv_rank)
        up = self._weight(heads * (widths.nope + widths.value), widths.kv_rank)
        self._used_by_part(query_down, query_norm, down, norm)
        return LatentWeights(query_down, query_norm, query_up, down, norm, up)

    def _feed_forward(self, inner: int) -> FeedForward:
        width, gated = self._config.width, self._config.activation == "swiglu"
        whole = gated and self._config.fused  # both halves in one matrix
        gate = self._linear(width, inner, "gate") if gated and not whole else None
        up, down = self._linear(width, 2 * inner if whole else inner, "up"), self._linear(inner, width, "down")
        self._used_by_part(down[1])
        return FeedForward(gate, up, down)

    def _experts(self) -> ExpertWeights:
        config, parallel = self._config, self._config.parallel
        count, inner = config.experts.count // parallel.expert, config.expert_inner // parallel.expert_tensor
        router = self._weight(config.experts.count, config.width)
        self._used_by_part(router)
        group = EXPERT_DATA if parallel.expert > 1 else DATA
        gated = config.activation == "swiglu"
        gate = self._weight(count, inner, config.width, group=group) if gated and not config.fused else None
        up = self._weight(count, 2 * inner if gated and config.fused else inner, config.width, group=group)
        down = self._weight(count, config.width, inner, group=group)
        self.of_experts.extend(each for each in (gate, up, down) if each is not None)
        self.of_linears += [up, down] if config.fused else []
        return ExpertWeights(router, gate, up, down, gated, config.activation)

    def _head(self, rows: int) -> Affine:
        config = self._config
        if config.head != "language_model":
            return self._linear(config.width, config.classes, bias=True)
        if self.tokens is not None and config.tied_head:
            return self.tokens, None
        return self._weight(rows, config.width), None
