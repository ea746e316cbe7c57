"""`Transformer`: a Transformer's training step as data, read from a `.toml` file and checked.

Every mistake is one line that says which values do not go together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from steptime._build.config_values import Overrides, Values
from steptime._build.settings import applied
from steptime._build.transformer.config_checks import wrong_config
from steptime._build.transformer.fp8 import FEW_BITS, RECIPES
from steptime._build.transformer.parallelism import DEGREES, Parallelism, resized
from steptime._build.transformer.parts import PATTERN, Experts, LatentAttention, Lora, Mamba
from steptime._build.transformer.recompute import FULL, NONE
from steptime.errors import InputError

KIND = "transformer"
_REQUIRED = ("layers", "width", "heads", "sequence", "vocabulary", "batch")

_Table = Experts | LatentAttention | Lora | Mamba
_TABLES: Mapping[str, Callable[..., _Table]] = {
    "experts": Experts,
    "latent_attention": LatentAttention,
    "lora": Lora,
    "mamba": Mamba,
}
_LISTS = ("recompute", "recompute_keeps", "frozen")
# Megatron-LM pads the vocabulary so that every rank's part is a multiple of it (--make-vocab-size-divisible-by).
VOCABULARY_MULTIPLE = 128
_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# Keys that are left out of a saved config where nothing was said, so that it reads as it always did.
_RECENT = (
    "compile",
    "pad_vocab",
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
    pad_vocab: int = (
        0  # every rank's part of the vocabulary is a multiple of it; 0: as Megatron-LM where it is like that, else 1
    )
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
    precision: str = "fp32"  # of computation: of parameters as products take them, and of activations
    states: str = "fp32"  # of master weights and the optimiser's state; "bf16" with 16-bit parameters: all in bf16, no masters
    fp8_recipe: str = ""  # of precision = "fp8": how operands are cast; empty: delayed
    optimizer: str = "adamw"
    compile: str = "off"  # as torch.compile would run it, in this mode
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
        for problem in wrong_config(self):
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
    def vocabulary_rows(self) -> int:
        """Rows of the embedding and of the language model's head on all tensor-parallel ranks together."""
        ways = self.parallel.tensor
        usual = VOCABULARY_MULTIPLE if self.fused or ways > 1 else 1
        multiple = (self.pad_vocab or usual) * ways
        return -(-self.vocabulary // multiple) * multiple

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
    def state_dtype(self) -> str:
        """In which weights are updated and the optimiser's state is kept: masters of 16-bit parameters, or FSDP's shards."""
        return "bfloat16" if self.states == "bf16" else "float32"

    @property
    def reduce_dtype(self) -> str:
        """In which gradients are summed over micro-batches and ranks: as in Megatron-LM, fp32 with bf16 and fp16 with fp16."""
        wide = self.parallel.grad_reduce_in_fp32
        wide = self.dtype != "float16" if wide is None else wide
        return "float32" if wide and self.state_dtype == "float32" else self.dtype

    @property
    def main_gradients(self) -> bool:
        """Whether every rank has sums of its gradients in fp32 beside 16-bit parameters (Megatron-LM's main_grad)."""
        return self.reduce_dtype != self.dtype and self.parallel.fsdp == 1

    @property
    def numerics(self) -> dict[str, str]:
        """What is computed, kept and exchanged in which precision."""
        parameters, states = _SHORT[self.dtype], _SHORT[self.state_dtype]
        computed = f"fp8 ({self.recipe})" if self.precision == "fp8" else "bf16" if self.autocast else self.precision
        return {
            "products": computed,
            "parameters": parameters,
            "sums_of_gradients": _SHORT[self.reduce_dtype],
            "master_weights": states if states != parameters else "none",
            "optimizer_states": states,
        }

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
        if self.precision in ("bf16", *FEW_BITS):
            return "bfloat16"
        return "float16" if self.precision == "fp16" else "float32"

    @property
    def recipe(self) -> str:
        """How products of eight or four bits are fed; empty where there are none."""
        if self.precision not in FEW_BITS:
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
        sizes = {key: getattr(self.parallel, key) for key in DEGREES}
        chosen = resized(sizes, ranks, self.title)
        return replace(self, parallel=replace(self.parallel, data=chosen["data"], fsdp=chosen["fsdp"]))

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


def keys() -> tuple[str, ...]:
    """All keys of a config, dotted."""
    own = [field.name for field in fields(Transformer)] + ["ranks"]
    inner = {"parallel": Parallelism(), **{key: made() for key, made in _TABLES.items()}}
    return (*own, *(f"{key}.{each.name}" for key, table in inner.items() for each in fields(table)))


def with_overrides(values: Mapping[str, Any], overrides: Overrides, where: str) -> dict[str, Any]:
    """The values of a file with other ones: its settings, its batch, and its parallelism on other ranks.

    Sizes that are set stay as they are set; ranks that no option says are then those of the file.
    """
    result = applied(values, overrides.settings, keys(), where)
    if overrides.batch is not None:
        result["batch"] = overrides.batch
    chosen = [each for each in DEGREES if f"parallel.{each}" in overrides.settings]
    if isinstance(overrides.settings.get("parallel"), Mapping):
        chosen += [each for each in DEGREES if each in overrides.settings["parallel"]]
    ranks = overrides.ranks if overrides.ranks is not None or not chosen else result.get("ranks")
    parallel = result.get("parallel", {})
    if type(ranks) is not int or not isinstance(parallel, Mapping):
        return result
    sizes = {key: parallel[key] for key in DEGREES if key in parallel}
    if all(type(size) is int and size > 0 for size in sizes.values()):
        result.pop("ranks", None)
        result["parallel"] = {**parallel, **resized(sizes, ranks, where, chosen)}
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
