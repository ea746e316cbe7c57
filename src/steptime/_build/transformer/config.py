"""`Transformer`: a Transformer's training step as data, read from a `.toml` file and checked.

Every mistake is one line that says which values do not go together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from steptime._build.config_values import Values
from steptime._program.program import MOST_RANKS
from steptime.errors import InputError

KIND = "transformer"
_REQUIRED = ("layers", "width", "heads", "sequence", "vocabulary", "batch")

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "activation": ("gelu", "gelu_new", "swiglu"),
    "norm": ("layer_norm", "rms_norm"),
    "norm_place": ("before", "after"),
    "positions": ("learned", "rotary"),
    "projections": ("fused", "separate"),
    "weights": ("out_in", "in_out"),
    "head": ("language_model", "tokens", "sequence"),
    "mask": ("none", "padding"),
    "attention": ("auto", "cudnn", "flash", "efficient", "unfused"),
    "precision": ("fp32", "tf32", "bf16-autocast", "bf16", "fp16"),
    "optimizer": ("adamw", "adamw_fused", "sgd"),
}
_POSITIVE = ("layers", "width", "heads", "sequence", "vocabulary", "batch", "classes", "gradient_accumulation")
_NOT_NEGATIVE = ("kv_heads", "feed_forward", "max_positions", "segments")
_SWITCHES = ("tied_head", "causal", "checkpointing")
# No step has more; what claims to comes from a slip of the keyboard, and would take the memory of the machine.
_MOST = 2**31
# A layer of one accumulated part takes about half a megabyte while a program is built.
_MOST_LAYERS = 8192


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How many ways each kind of parallelism divides the job; the sizes multiply to the ranks."""

    data: int = 1  # whole copies: DistributedDataParallel, or replicas of what FSDP shards
    fsdp: int = 1  # parameters sharded: FSDP2, a unit per layer
    tensor: int = 1  # every layer's matrices split by columns and rows, as Megatron-LM does

    @property
    def ranks(self) -> int:
        """All ranks of the job."""
        return self.data * self.fsdp * self.tensor

    @property
    def replicas(self) -> int:
        """Ranks, or groups of them, that get samples of their own."""
        return self.data * self.fsdp


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
    optimizer: str = "adamw"
    gradient_accumulation: int = 1
    checkpointing: bool = False  # every layer is computed again in backward
    parallel: Parallelism = field(default_factory=Parallelism)

    def __post_init__(self) -> None:
        for wrong in (_wrong_values(self), _wrong_sizes(self), _wrong_together(self)):
            for problem in wrong:
                raise InputError(f"{self.title}: {problem}")

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        """Width inside the feed-forward half of a layer."""
        return self.feed_forward or 4 * self.width

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
        return self.norm == "layer_norm" and self.key_heads == self.heads

    @property
    def kernels(self) -> str:
        """Which kernels compute attention."""
        if self.attention != "auto":
            return self.attention
        return "efficient" if self.dtype == "float32" and not self.autocast else "cudnn"

    @property
    def sequence_first(self) -> bool:
        """Whether activations lie as [sequence, batch, width], as in Megatron-LM: where attention is not fused."""
        return self.kernels == "unfused"

    @property
    def autocast(self) -> bool:
        """Whether weights are fp32 and the forward pass casts."""
        return self.precision == "bf16-autocast"

    @property
    def dtype(self) -> str:
        """Of weights and activations outside autocast, when FSDP has gathered them."""
        return {"bf16": "bfloat16", "fp16": "float16"}.get(self.precision, "float32")

    @property
    def ranks(self) -> int:
        """All ranks of the job."""
        return self.parallel.ranks

    @property
    def local_batch(self) -> int:
        """Samples of one rank in one part of an accumulated step."""
        return self.batch // (self.parallel.replicas * self.gradient_accumulation)

    def with_batch(self, batch: int) -> Transformer:
        """The same model on another global batch."""
        return replace(self, batch=batch)

    def with_ranks(self, ranks: int) -> Transformer:
        """The same job on so many ranks: tensor parallelism stays, and the ranks besides it share the batch as before."""
        parallel, (replicas, rest) = self.parallel, divmod(ranks, self.parallel.tensor)
        if ranks < 1 or rest:
            raise InputError(
                f"{self.title}: {ranks} ranks with parallel.tensor = {parallel.tensor}; give a multiple of {parallel.tensor}"
            )
        if parallel.fsdp > 1 and parallel.data > 1:
            if replicas % parallel.fsdp:
                raise InputError(
                    f"{self.title}: {ranks} ranks with parallel.fsdp = {parallel.fsdp} and parallel.tensor = "
                    f"{parallel.tensor}; give a multiple of {parallel.fsdp * parallel.tensor}"
                )
            return replace(self, parallel=replace(parallel, data=replicas // parallel.fsdp))
        return replace(self, parallel=replace(parallel, **{"fsdp" if parallel.fsdp > 1 else "data": replicas}))

    @property
    def title(self) -> str:
        """What messages call it."""
        return self.name or KIND

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a TOML file has them; what `from_dict` takes."""
        values = {key: value for key, value in asdict(self).items() if value not in ("", None)}
        return {"kind": KIND, **values, "parallel": asdict(self.parallel)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = KIND) -> Transformer:
        """The transformer that plain values describe; `where` begins the messages."""
        known = [field.name for field in fields(cls)]
        checked = Values(values, where)
        checked.choice("kind", (KIND,), KIND)
        checked.expect([*known, "kind", "ranks"], _REQUIRED)
        parallel = checked.table("parallel")
        parallel.expect([field.name for field in fields(Parallelism)])
        given = {key: value for key, value in values.items() if key in known and key != "parallel"}
        ranks = values.get("ranks")
        try:
            result = cls(**given, parallel=Parallelism(**parallel.values))
        except InputError as error:
            raise InputError(f"{where}: {str(error).removeprefix(given.get('name') or KIND).removeprefix(': ')}") from None
        if ranks is not None and ranks != result.ranks:
            raise InputError(
                f"{where}: ranks is {ranks!r} but data {result.parallel.data} x fsdp {result.parallel.fsdp} x tensor "
                f"{result.parallel.tensor} is {result.ranks}; give sizes that multiply to the ranks, or leave ranks out"
            )
        return result


def _wrong_values(model: Transformer) -> Iterator[str]:
    """Whole numbers where counts are meant, in their ranges; names that are known."""
    counts = {key: (getattr(model, key), 1 if key in _POSITIVE else 0) for key in (*_POSITIVE, *_NOT_NEGATIVE)}
    counts |= {f"parallel.{key}": (value, 1) for key, value in asdict(model.parallel).items()}
    for key, (value, least) in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MOST:
            yield f"{key} is {value!r}; expected a whole number of {least} or more"
    for key in (*_SWITCHES, "bias"):
        if not isinstance(getattr(model, key), bool) and (key, model.bias) != ("bias", None):
            yield f"{key} is {getattr(model, key)!r}; expected true or false"
    name: object = model.name  # what a file says may be anything
    dropout: object = model.dropout
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        yield f"dropout is {dropout!r}; expected a number from 0 to below 1"
    if model.layers * model.gradient_accumulation > _MOST_LAYERS:
        yield (
            f"{model.layers} layers in {model.gradient_accumulation} accumulated parts; "
            f"at most {_MOST_LAYERS} layers in all can be built"
        )
    if model.ranks > MOST_RANKS:
        yield f"{model.ranks} ranks; at most {MOST_RANKS} can be built"
    if not isinstance(name, str):
        yield f"name is {name!r}; expected text"
    for key, known in _CHOICES.items():
        value = getattr(model, key)
        if value not in known and not (key == "projections" and value == ""):
            yield f"{key} is {value!r}; expected {', '.join(known[:-1])} or {known[-1]}"


def _wrong_sizes(model: Transformer) -> Iterator[str]:
    """Sizes that divide each other where something is split."""
    parallel, heads, key_heads = model.parallel, ("heads", model.heads), ("kv_heads", model.key_heads)
    ways = ("parallel.tensor", parallel.tensor)
    inner = ("feed_forward", model.inner)
    for (what, size), (by, parts) in (
        (("width", model.width), heads),
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
    if model.positions == "rotary" and model.head_width % 2:
        yield f"heads are {model.head_width} wide; rotary positions turn pairs, give an even width"
    if model.positions == "learned" and model.position_rows < model.sequence:
        yield f"max_positions {model.max_positions} is below sequence {model.sequence}; give at least as many"
    if model.fused_projections and model.key_heads != model.heads:
        yield f"projections are fused with kv_heads {model.key_heads}; give projections = 'separate'"


def _wrong_together(model: Transformer) -> Iterator[str]:
    """Choices that exclude each other."""
    ways = model.parallel.tensor
    if ways > 1 and (model.weights == "in_out" or model.head != "language_model" or model.autocast):
        yield (
            f"parallel.tensor is {ways}, which needs weights = 'out_in', head = 'language_model' and a precision other than "
            "'bf16-autocast'"
        )
    if model.parallel.fsdp > 1 and model.autocast:
        yield "fsdp casts by itself; give precision = 'bf16', which shards fp32 and gathers bf16"
    if model.precision in ("fp32", "tf32") and model.attention in ("cudnn", "flash"):
        yield f"{model.attention} attention computes in 16 bits; give attention = 'efficient' or 'auto'"
    if model.mask == "padding" and model.kernels in ("flash", "unfused"):
        yield f"{model.kernels} attention takes no mask; give mask = 'none' or another attention"
    if model.sequence_first and (model.head != "language_model" or model.key_heads != model.heads or model.autocast):
        yield (
            "unfused attention, as in Megatron-LM, needs head = 'language_model', as many kv_heads as heads "
            "and a precision other than 'bf16-autocast'"
        )
    if model.weights == "in_out" and (model.activation == "swiglu" or not model.biased):
        yield "weights = 'in_out' goes with biases and without swiglu; give weights = 'out_in'"
