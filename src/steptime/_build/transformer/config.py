"""`Transformer`: a Transformer's training step as data, read from a `.toml` file and checked.

Every mistake is one line that says which values do not go together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from steptime._build.config_values import Values
from steptime._build.transformer.fp8 import RECIPES
from steptime._build.transformer.parallelism import DEGREES, Parallelism, wrong_parallelism
from steptime._build.transformer.parts import Experts, LatentAttention, Lora, Mamba
from steptime._build.transformer.recompute import FULL, NONE, wrong_recompute
from steptime._program.program import MOST_RANKS
from steptime.errors import InputError

KIND = "transformer"
_REQUIRED = ("layers", "width", "heads", "sequence", "vocabulary", "batch")

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "activation": ("gelu", "gelu_new", "relu_squared", "swiglu"),
    "norm": ("layer_norm", "rms_norm"),
    "norm_place": ("before", "after"),
    "positions": ("learned", "rotary"),
    "projections": ("fused", "separate"),
    "weights": ("out_in", "in_out"),
    "head": ("language_model", "tokens", "sequence"),
    "mask": ("none", "padding"),
    "attention": ("auto", "cudnn", "flash", "efficient", "unfused"),
    "precision": ("fp32", "tf32", "bf16-autocast", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"),
    "optimizer": ("adamw", "adamw_fused", "sgd"),
}
_FEW_BITS = ("fp8", "mxfp8", "nvfp4")
_POSITIVE = (
    "layers",
    "width",
    "heads",
    "sequence",
    "vocabulary",
    "batch",
    "classes",
    "gradient_accumulation",
    "recompute_every",
)
_NOT_NEGATIVE = (
    "kv_heads",
    "feed_forward",
    "max_positions",
    "segments",
    "recompute_layers",
    "head_width",
    "window",
    "full_every",
)
# What a layer of a hybrid is by its letter, as Megatron-core has them.
PATTERN = {"M": "mamba alone", "*": "attention alone", "-": "dense alone", "E": "experts alone"}
FROZEN_PARTS = ("embedding", "attention", "feed_forward", "norms", "head")
_Table = Experts | LatentAttention | Lora | Mamba
_TABLES: Mapping[str, Callable[..., _Table]] = {
    "experts": Experts,
    "latent_attention": LatentAttention,
    "lora": Lora,
    "mamba": Mamba,
}
_SWITCHES = ("tied_head", "causal", "checkpointing", "fused", "qk_norm")
_LISTS = ("recompute", "recompute_keeps", "frozen")
# Keys that are left out of a saved config where nothing was said, so that it reads as it always did.
_RECENT = (
    "fp8_recipe",
    "fused",
    "recompute",
    "recompute_keeps",
    "recompute_layers",
    "recompute_every",
    "head_width",
    "qk_norm",
    "window",
    "pattern",
    "frozen",
    "full_every",
)
# No step has more; what claims to comes from a slip of the keyboard, and would take the memory of the machine.
_MOST = 2**31
# A layer of one accumulated part takes about half a megabyte while a program is built.
_MOST_LAYERS = 8192


@dataclass(frozen=True, slots=True)
class Transformer:
    """One training step: the model, the global batch, and how ranks share both.

    `feed_forward` 0 is 4 times the width, `kv_heads` 0 as many as `heads`, `max_positions` 0 as many as `sequence`. `bias` and
    `projections` left out go by the norm and the heads: models with `rms_norm` have no biases, and grouped-query attention
    projects separately.
    """

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    batch: int  # global, over all replicas and accumulated parts
    name: str = ""
    kv_heads: int = 0
    feed_forward: int = 0
    activation: str = "gelu"
    norm: str = "layer_norm"
    norm_place: str = "before"
    positions: str = "learned"
    max_positions: int = 0  # rows of the table of learned positions
    segments: int = 0  # rows of a table of segment embeddings, as BERT has
    bias: bool | None = None  # of the linear layers
    projections: str = ""  # of queries, keys and values: one product or three
    weights: str = "out_in"  # how linear weights lie: as nn.Linear, or as the Conv1D of Hugging Face's GPT-2
    head: str = "language_model"
    tied_head: bool = True  # the language model's head shares the embedding's weights
    classes: int = 2  # of the heads that classify tokens or sequences
    causal: bool = True
    mask: str = "none"  # a mask of padded tokens makes attention read [batch, 1, sequence, sequence]
    attention: str = "auto"  # the kernels PyTorch chooses on Hopper: cuDNN in 16 bits, memory-efficient in fp32
    dropout: float = 0.0  # after embeddings, attention, both halves of a layer, and of the weights of attention
    precision: str = "fp32"
    fp8_recipe: str = ""  # of precision = "fp8": how operands are cast; empty: delayed
    optimizer: str = "adamw"
    gradient_accumulation: int = 1
    fused: bool = False  # layers as Transformer Engine and Megatron-core run them, one kernel where PyTorch has several
    checkpointing: bool = False  # the older way to say recompute = "full"
    recompute: str | tuple[str, ...] = NONE  # what of a layer is computed again in backward
    recompute_keeps: tuple[str, ...] = ()  # with "ops", whose results are kept; empty: as torchtitan keeps them
    recompute_layers: int = 0  # only the first so many layers of each stage; 0: all
    recompute_every: int = 1  # only every so many layers
    head_width: int = 0  # elements of a head; 0: the width divided by the heads
    qk_norm: bool = False  # RMS norms of every head's queries and keys, as in Qwen3
    window: int = 0  # tokens that attention sees at most, in layers with a sliding window; 0: all
    full_every: int = 0  # layers of which the last sees all tokens, where others have a window; 0: none does
    experts: Experts = field(default_factory=Experts)
    latent_attention: LatentAttention = field(default_factory=LatentAttention)
    frozen: tuple[str, ...] = ()  # parts of the model that are not trained; with adapters, all of it
    lora: Lora = field(default_factory=Lora)
    pattern: str = ""  # of a hybrid, a letter for every layer, which has one half alone: M Mamba-2, * attention, - or E
    mamba: Mamba = field(default_factory=Mamba)
    parallel: Parallelism = field(default_factory=Parallelism)

    def __post_init__(self) -> None:
        for wrong in (_wrong_values(self), _wrong_sizes(self), _wrong_together(self)):
            for problem in wrong:
                raise InputError(f"{self.title}: {problem}")

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.head_width or self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        """Width inside the feed-forward half of a layer."""
        return self.feed_forward or 4 * self.width

    @property
    def expert_inner(self) -> int:
        """Width inside an expert."""
        return self.experts.width or self.inner

    def trains(self, part: str) -> bool:
        """Whether weights of a part of the model get gradients."""
        return not self.lora.rank and part not in self.frozen

    def layer_kind(self, index: int) -> str:
        """What a layer's ops depend on: layers of one kind are alike."""
        if self.pattern:
            return PATTERN[self.pattern[index]]
        return ("experts" if self.experts.of_layer(index) else "dense") + (" window" if self.window_of(index) else "")

    def window_of(self, index: int) -> int:
        """Tokens that a layer's attention sees at most; 0: all of the sequence."""
        full = self.full_every and (index + 1) % self.full_every == 0
        return 0 if full or self.window >= self.sequence else self.window

    @property
    def tokens(self) -> int:
        """Of a sequence, those that a rank has; tensor-parallel ranks may share them in turn."""
        return self.sequence // self.parallel.context

    @property
    def position_rows(self) -> int:
        """Rows of the table of learned positions."""
        return self.max_positions or self.sequence

    @property
    def biased(self) -> bool:
        """Whether linear layers have biases."""
        return self.norm == "layer_norm" if self.bias is None else self.bias

    @property
    def fused_projections(self) -> bool:
        """Whether one product makes queries, keys and values."""
        if self.projections:
            return self.projections == "fused"
        return self.fused or (self.norm == "layer_norm" and self.key_heads == self.heads)

    @property
    def main_gradients(self) -> bool:
        """Whether gradients are summed in fp32 beside 16-bit weights, of which the optimiser has fp32 ones: Megatron-LM."""
        return self.fused and self.dtype == "bfloat16" and self.parallel.fsdp == 1

    @property
    def kernels(self) -> str:
        """Which kernels compute attention."""
        if self.attention != "auto":
            return self.attention
        return "efficient" if self.dtype == "float32" and not self.autocast else "cudnn"

    @property
    def sequence_first(self) -> bool:
        """Whether activations lie as [sequence, batch, width], as in Megatron-LM: unfused attention, sequence parallelism."""
        return self.kernels == "unfused" or self.parallel.sequence

    @property
    def autocast(self) -> bool:
        """Whether weights are fp32 and the forward pass casts."""
        return self.precision == "bf16-autocast"

    @property
    def dtype(self) -> str:
        """Of weights and activations outside autocast, when FSDP has gathered them."""
        if self.precision in ("bf16", *_FEW_BITS):
            return "bfloat16"
        return "float16" if self.precision == "fp16" else "float32"

    @property
    def recipe(self) -> str:
        """How products of eight or four bits are fed; empty where there are none."""
        if self.precision not in _FEW_BITS:
            return ""
        return self.precision if self.precision in RECIPES else self.fp8_recipe or "delayed"

    def recomputes(self, index: int) -> bool:
        """Whether a layer, by its place in its stage, is computed again as `recompute` says."""
        chosen = index < (self.recompute_layers or self.layers) and (index + 1) % self.recompute_every == 0
        return chosen and (self.checkpointing or self.recompute != NONE)

    @property
    def recomputed(self) -> str | tuple[str, ...]:
        """What of such a layer is computed again."""
        return FULL if self.checkpointing else self.recompute

    @property
    def ranks(self) -> int:
        """All ranks of the job."""
        return self.parallel.ranks

    @property
    def local_batch(self) -> int:
        """Samples of one rank in one part of an accumulated step."""
        return self.batch // (self.parallel.replicas * self.gradient_accumulation)

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """What a layer makes of one rank's micro-batch."""
        tokens = self.tokens
        if self.parallel.sequence:
            tokens //= self.parallel.tensor
        return (tokens, self.local_batch, self.width) if self.sequence_first else (self.local_batch, tokens, self.width)

    def with_batch(self, batch: int) -> Transformer:
        """The same model on another global batch."""
        return replace(self, batch=batch)

    def with_ranks(self, ranks: int) -> Transformer:
        """The same job on so many ranks: they share the batch as before, and everything else stays as it is."""
        parallel = self.parallel
        kept = {key: getattr(parallel, key) for key in ("tensor", "context", "pipeline")}
        if parallel.fsdp > 1 and parallel.data > 1:
            kept["fsdp"] = parallel.fsdp
        multiple = math.prod(kept.values())
        if ranks < 1 or ranks % multiple:
            sizes = " and ".join(f"parallel.{key} = {size}" for key, size in kept.items() if size > 1)
            raise InputError(f"{self.title}: {ranks} ranks with {sizes or 'one replica'}; give a multiple of {multiple}")
        replicas = ranks // multiple
        shards = parallel.fsdp > 1 and parallel.data == 1
        return replace(self, parallel=replace(parallel, fsdp=replicas) if shards else replace(parallel, data=replicas))

    @property
    def title(self) -> str:
        """What messages call it."""
        return self.name or KIND

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a TOML file has them; what `from_dict` takes."""
        unsaid = {each.name for each in fields(self) if each.name in _RECENT and getattr(self, each.name) == each.default}
        unsaid |= {key for key, made in _TABLES.items() if getattr(self, key) == made()}
        values = {key: value for key, value in asdict(self).items() if key not in unsaid and value not in ("", None)}
        lists = {key: list(value) for key, value in values.items() if isinstance(value, tuple)}
        return {"kind": KIND, **values, **lists, "parallel": self.parallel.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = KIND) -> Transformer:
        """The transformer that plain values describe; `where` begins the messages."""
        known = [field.name for field in fields(cls)]
        checked = Values(values, where)
        checked.choice("kind", (KIND,), KIND)
        checked.expect([*known, "kind", "ranks"], _REQUIRED)
        parallel = checked.table("parallel")
        parallel.expect([field.name for field in fields(Parallelism)])
        given = {key: value for key, value in values.items() if key in known and key not in ("parallel", *_TABLES)}
        given |= {key: tuple(given[key]) for key in _LISTS if isinstance(given.get(key), list)}
        given |= {key: _table(checked, key) for key in _TABLES if key in values}
        ranks = values.get("ranks")
        try:
            result = cls(**given, parallel=Parallelism(**_with_stages(parallel)))
        except InputError as error:
            raise InputError(f"{where}: {str(error).removeprefix(given.get('name') or KIND).removeprefix(': ')}") from None
        if ranks is not None and ranks != result.ranks:
            raise InputError(
                f"{where}: ranks is {ranks!r} but {_product(result.parallel)} is {result.ranks}; "
                "give sizes that multiply to the ranks, or leave ranks out"
            )
        return result


def _table(checked: Values, key: str) -> _Table:
    """A table of the config as what it describes."""
    table = checked.table(key)
    table.expect([each.name for each in fields(_TABLES[key]())])
    return _TABLES[key](**{name: tuple(value) if isinstance(value, list) else value for name, value in table.values.items()})


def _with_stages(parallel: Values) -> dict[str, Any]:
    """The keys of `[parallel]`, with the layers of its stages as a tuple of whole numbers."""
    stages = parallel.values.get("stages", [])
    if not isinstance(stages, list) or not all(type(each) is int for each in stages):
        raise InputError(f"{parallel.where}: stages is {stages!r}; expected a list of whole numbers, the layers of each stage")
    return {**parallel.values, "stages": tuple(stages)}


def _product(parallel: Parallelism) -> str:
    """The sizes that multiply to the ranks, in words."""
    sizes = {key: getattr(parallel, key) for key in DEGREES if key != "expert"}
    return " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1 or key in ("data", "fsdp", "tensor"))


def _wrong_values(model: Transformer) -> Iterator[str]:
    """Whole numbers where counts are meant, in their ranges; names that are known."""
    counts = {key: (getattr(model, key), 1 if key in _POSITIVE else 0) for key in (*_POSITIVE, *_NOT_NEGATIVE)}
    counts |= {f"parallel.{key}": (getattr(model.parallel, key), 1) for key in (*DEGREES, "chunks", "expert_tensor")}
    for key, (value, least) in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MOST:
            yield f"{key} is {value!r}; expected a whole number of {least} or more"
    for key in (*_SWITCHES, "bias"):
        if not isinstance(getattr(model, key), bool) and (key, model.bias) != ("bias", None):
            yield f"{key} is {getattr(model, key)!r}; expected true or false"
    yield from _wrong_parts(model)
    name: object = model.name  # what a file says may be anything
    dropout: object = model.dropout
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        yield f"dropout is {dropout!r}; expected a number from 0 to below 1"
    if model.layers * model.gradient_accumulation > _MOST_LAYERS * max(model.parallel.pipeline, 1):
        yield (
            f"{model.layers} layers in {model.gradient_accumulation} accumulated parts; "
            f"at most {_MOST_LAYERS} layers in all can be built for each stage of a pipeline"
        )
    if model.ranks > MOST_RANKS:
        yield f"{model.ranks} ranks; at most {MOST_RANKS} can be built"
    if not isinstance(name, str):
        yield f"name is {name!r}; expected text"
    yield from wrong_recompute(model.recompute, model.recompute_keeps, model.recompute_every, model.checkpointing)
    for key, known in _CHOICES.items():
        value = getattr(model, key)
        if value not in known and not (key == "projections" and value == ""):
            yield f"{key} is {value!r}; expected {', '.join(known[:-1])} or {known[-1]}"


def _wrong_parts(model: Transformer) -> Iterator[str]:
    yield from model.experts.wrong_values()
    yield from model.latent_attention.wrong_values()
    yield from model.lora.wrong_values()
    yield from model.mamba.wrong_values()
    pattern: object = model.pattern
    if not isinstance(pattern, str) or not set(pattern) <= set(PATTERN):
        yield f"pattern is {pattern!r}; expected letters of {' '.join(PATTERN)}"
    frozen: object = model.frozen
    if not isinstance(frozen, tuple) or not all(each in FROZEN_PARTS for each in frozen):
        yield f"frozen is {frozen!r}; expected a list of some of {', '.join(FROZEN_PARTS)}"


def _wrong_sizes(model: Transformer) -> Iterator[str]:
    """Sizes that divide each other where something is split."""
    parallel, heads, key_heads = model.parallel, ("heads", model.heads), ("kv_heads", model.key_heads)
    yield from wrong_parallelism(parallel, model.layers)
    yield from model.experts.wrong_together(parallel, model.expert_inner)
    ways = ("parallel.tensor", parallel.tensor)
    inner = ("feed_forward", model.inner)
    for (what, size), (by, parts) in (
        (("width", model.width if not model.head_width else 0), heads),
        (heads, key_heads),
        (heads, ways),
        (key_heads, ways),
        (inner, ways),
    ):
        if size % parts:
            yield f"{what} {size} does not divide by {by} {parts}; give a multiple of {parts}"
    parts = parallel.replicas * model.gradient_accumulation
    if model.batch % parts:
        yield (
            f"batch {model.batch} does not divide into {parts} parts (data {parallel.data} x fsdp "
            f"{parallel.fsdp} x gradient_accumulation {model.gradient_accumulation}); give a multiple of {parts}"
        )
    yield from _wrong_tokens(model)
    if parallel.chunks > 1 and model.gradient_accumulation % parallel.pipeline:
        yield (
            f"gradient_accumulation {model.gradient_accumulation} does not divide by parallel.pipeline {parallel.pipeline}, "
            f"as an interleaved schedule needs; give a multiple of {parallel.pipeline}"
        )
    if model.positions == "rotary" and model.head_size % 2:
        yield f"heads are {model.head_size} wide; rotary positions turn pairs, give an even width"
    if model.positions == "learned" and model.position_rows < model.sequence:
        yield f"max_positions {model.max_positions} is below sequence {model.sequence}; give at least as many"
    if model.projections == "fused" and model.key_heads != model.heads and not model.fused:
        yield f"projections are fused with kv_heads {model.key_heads}; give projections = 'separate'"


def _wrong_tokens(model: Transformer) -> Iterator[str]:
    """Tokens and heads that ranks which share sequences do not divide."""
    parallel = model.parallel
    parts = {"parallel.context": parallel.context, "parallel.tensor": parallel.tensor if parallel.sequence else 1}
    if parallel.context > 1 and model.causal and parallel.context_exchange != "all_to_all":
        parts["the 2 pieces that each rank has of a causal sequence"] = 2
    multiple = math.prod(parts.values())
    if model.sequence % multiple:
        by = " x ".join(
            f"{what} {count}" if what.startswith("parallel") else what for what, count in parts.items() if count > 1
        )
        yield f"sequence {model.sequence} does not divide by {by}; give a multiple of {multiple}"
    share = parallel.tensor * parallel.context
    if parallel.context > 1 and parallel.context_exchange == "all_to_all" and model.key_heads % share:
        yield (
            f"kv_heads {model.key_heads} do not divide by parallel.tensor {parallel.tensor} x parallel.context "
            f"{parallel.context}, as all_to_all divides them; give a multiple of {share}, or another context_exchange"
        )
    if parallel.context > 1 and (model.mask != "none" or model.kernels == "unfused" or model.head != "language_model"):
        yield "parallel.context needs mask = 'none', an attention that is fused and head = 'language_model'"


def _wrong_together(model: Transformer) -> Iterator[str]:
    """Choices that exclude each other."""
    ways = model.parallel.tensor
    if ways > 1 and (model.weights == "in_out" or model.head != "language_model"):
        yield f"parallel.tensor is {ways}, which needs weights = 'out_in' and head = 'language_model'"
    if model.precision in ("fp32", "tf32") and model.attention in ("cudnn", "flash"):
        yield f"{model.attention} attention computes in 16 bits; give attention = 'efficient' or 'auto'"
    if model.mask == "padding" and model.kernels in ("flash", "unfused"):
        yield f"{model.kernels} attention takes no mask; give mask = 'none' or another attention"
    if model.kernels == "unfused" and (model.head != "language_model" or model.key_heads != model.heads or model.autocast):
        yield (
            "unfused attention, as in Megatron-LM, needs head = 'language_model', as many kv_heads as heads "
            "and a precision other than 'bf16-autocast'"
        )
    if model.experts.capacity and model.fused:
        yield "experts.capacity cannot be built with fused = true; leave one of them out"
    yield from _wrong_attention(model)
    yield from _wrong_frozen(model)
    yield from _wrong_pattern(model)
    if model.experts.count and (model.weights == "in_out" or model.biased or model.activation == "gelu_new"):
        yield "experts have no biases and go with activation 'swiglu' or 'gelu'; give bias = false and weights = 'out_in'"
    of_fp8 = [each for each in RECIPES if each not in _FEW_BITS]
    if model.fp8_recipe and (model.precision != "fp8" or model.fp8_recipe not in of_fp8):
        yield f"fp8_recipe is {model.fp8_recipe!r}; with precision = 'fp8' it is one of {', '.join(of_fp8)}, else left out"
    if model.recipe and model.weights == "in_out":
        yield f"precision = '{model.precision}' needs weights = 'out_in'"
    if model.fused and (model.weights == "in_out" or model.norm_place == "after" or model.autocast):
        yield "fused layers go with weights = 'out_in', norm_place = 'before' and a precision other than 'bf16-autocast'"
    if model.weights == "in_out" and (model.activation == "swiglu" or not model.biased):
        yield "weights = 'in_out' goes with biases and without swiglu; give weights = 'out_in'"


def _wrong_pattern(model: Transformer) -> Iterator[str]:
    letters, mamba, ways = model.pattern, model.mamba, model.parallel.tensor
    if not letters and mamba.heads:
        yield "[mamba] is of layers of a hybrid; give pattern with an M for each of them, or leave it out"
    if not letters:
        return
    if len(letters) != model.layers:
        yield f"pattern has {len(letters)} letters for {model.layers} layers; give one for each"
    if ("M" in letters) != bool(mamba.heads) or ("E" in letters) != bool(model.experts.count):
        yield "pattern needs [mamba] for its M and [experts] for its E, and has letters for each that is given"
    if mamba.heads % (mamba.groups * ways) and mamba.groups % ways:
        yield f"mamba.heads {mamba.heads} and mamba.groups {mamba.groups} do not divide by parallel.tensor {ways}"
    if model.norm_place == "after" or model.norm != "rms_norm" or model.lora.rank or model.frozen or model.window:
        yield "pattern needs norm = 'rms_norm' before each layer, and no window, [lora] or frozen parts"
    if model.parallel.context > 1 and "M" in letters:
        yield "parallel.context with Mamba-2 layers cannot be built; give 1"


def _wrong_frozen(model: Transformer) -> Iterator[str]:
    if set(model.frozen) == set(FROZEN_PARTS) and not model.lora.rank:
        yield "all parts are frozen and nothing is trained; leave out one of them, or give [lora]"
    if (model.frozen or model.lora.rank) and (model.fused or model.parallel.tensor > 1 or model.parallel.zero):
        yield "frozen parts and adapters cannot be built with fused = true, parallel.tensor or parallel.zero; leave those out"
    if model.lora.rank and (model.fused_projections or model.weights == "in_out" or model.latent_attention.kv_rank):
        yield "adapters need projections = 'separate', weights = 'out_in' and no latent_attention"
    if model.lora.rank and model.experts.count and {"gate", "up", "down"} & set(model.lora.targets):
        yield "adapters of experts cannot be built; give lora.targets of attention: query, key, value, output"


def _wrong_attention(model: Transformer) -> Iterator[str]:
    if model.window and (not model.causal or model.mask != "none" or model.kernels in ("efficient", "unfused")):
        yield "window needs causal attention in 16 bits without a mask; give precision = 'bf16' and attention = 'auto'"
    if model.full_every and not model.window:
        yield f"full_every is {model.full_every} and no layer has a window; give window, or leave it out"
    if model.window and model.parallel.context > 1 and model.parallel.context_exchange != "all_to_all":
        yield "window with parallel.context cannot be built in rounds; give context_exchange = 'all_to_all'"
    if not model.latent_attention.kv_rank:
        return
    if model.kernels in ("flash", "unfused") or model.positions != "rotary" or model.biased or model.window or model.qk_norm:
        yield (
            "latent_attention needs attention = 'cudnn', 'efficient' or 'auto', positions = 'rotary' and bias = false, "
            "and no window or qk_norm"
        )
    if model.key_heads != model.heads or model.head_width:
        yield "latent_attention has as many heads of keys as of queries and its own widths; leave out kv_heads and head_width"
