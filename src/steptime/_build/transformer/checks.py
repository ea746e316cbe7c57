"""What a `Transformer` must satisfy to be built: every mistake is one line that says which values do not go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from steptime._program.program import MOST_RANKS
from steptime.errors import InputError

if TYPE_CHECKING:
    from steptime._build.transformer.config import Transformer

_POSITIVE = ("layers", "width", "heads", "sequence", "vocabulary", "batch", "classes", "gradient_accumulation")
_NOT_NEGATIVE = ("kv_heads", "feed_forward", "max_positions", "segments")
_SIZES = ("data", "fsdp", "tensor")
_SWITCHES = ("tied_head", "causal", "checkpointing")
# No step has more; what claims to comes from a slip of the keyboard, and would take the memory of the machine.
_MOST = 2**31
# A layer of one accumulated part takes about half a megabyte while a program is built.
_MOST_LAYERS = 8192


def check_numbers(model: Transformer) -> None:
    """Whole numbers where counts are meant, in their ranges."""
    for key in (*_POSITIVE, *_NOT_NEGATIVE):
        _whole(model, key, getattr(model, key), 1 if key in _POSITIVE else 0)
    for key in _SIZES:
        _whole(model, f"parallel.{key}", getattr(model.parallel, key), 1)
    for key in _SWITCHES:
        if not isinstance(getattr(model, key), bool):
            raise InputError(f"{model.title}: {key} is {getattr(model, key)!r}; expected true or false")
    if model.bias is not None and not isinstance(model.bias, bool):
        raise InputError(f"{model.title}: bias is {model.bias!r}; expected true or false")
    dropout: object = model.dropout
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(f"{model.title}: dropout is {dropout!r}; expected a number from 0 to below 1")
    if model.layers * model.gradient_accumulation > _MOST_LAYERS:
        raise InputError(
            f"{model.title}: {model.layers} layers in {model.gradient_accumulation} accumulated parts; "
            f"at most {_MOST_LAYERS} layers in all can be built"
        )
    if model.ranks > MOST_RANKS:
        raise InputError(f"{model.title}: {model.ranks} ranks; at most {MOST_RANKS} can be built")


def _whole(model: Transformer, key: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MOST:
        raise InputError(f"{model.title}: {key} is {value!r}; expected a whole number of {least} or more")


def check_choices(model: Transformer, choices: Mapping[str, tuple[str, ...]]) -> None:
    """Names that are known."""
    if not isinstance(model.name, str):
        raise InputError(f"{model.title}: name is {model.name!r}; expected text")
    for key, known in choices.items():
        value = getattr(model, key)
        if value not in known and not (key == "projections" and value == ""):
            raise InputError(f"{model.title}: {key} is {value!r}; expected {', '.join(known[:-1])} or {known[-1]}")


def check_sizes(model: Transformer) -> None:
    """Sizes that divide each other where something is split."""
    parallel = model.parallel
    _divides(model, "width", model.width, "heads", model.heads)
    _divides(model, "heads", model.heads, "kv_heads", model.key_heads)
    _divides(model, "heads", model.heads, "parallel.tensor", parallel.tensor)
    _divides(model, "kv_heads", model.key_heads, "parallel.tensor", parallel.tensor)
    _divides(model, "feed_forward", model.inner, "parallel.tensor", parallel.tensor)
    _batch(model)
    if model.positions == "rotary" and model.head_width % 2:
        raise InputError(f"{model.title}: heads are {model.head_width} wide; rotary positions turn pairs, give an even width")
    if model.positions == "learned" and model.position_rows < model.sequence:
        raise InputError(
            f"{model.title}: max_positions {model.max_positions} is below sequence {model.sequence}; give at least as many"
        )
    if model.fused_projections and model.key_heads != model.heads:
        raise InputError(f"{model.title}: projections are fused with kv_heads {model.key_heads}; give projections = 'separate'")
    _together(model)


def _batch(model: Transformer) -> None:
    parts = model.parallel.replicas * model.gradient_accumulation
    if model.batch % parts:
        raise InputError(
            f"{model.title}: batch {model.batch} does not divide into {parts} parts (data {model.parallel.data} x fsdp "
            f"{model.parallel.fsdp} x gradient_accumulation {model.gradient_accumulation}); give a multiple of {parts}"
        )


def _together(model: Transformer) -> None:
    """Choices that exclude each other."""
    if model.parallel.tensor > 1 and (model.weights == "in_out" or model.head != "language_model" or model.autocast):
        raise InputError(
            f"{model.title}: parallel.tensor is {model.parallel.tensor}, which needs weights = 'out_in', "
            "head = 'language_model' and a precision other than 'bf16-autocast'"
        )
    if model.parallel.fsdp > 1 and model.autocast:
        raise InputError(f"{model.title}: fsdp casts by itself; give precision = 'bf16', which shards fp32 and gathers bf16")
    if model.precision == "fp32" and model.attention in ("cudnn", "flash"):
        raise InputError(
            f"{model.title}: {model.attention} attention computes in 16 bits; give attention = 'efficient' or 'auto'"
        )
    if model.mask == "padding" and model.kernels in ("flash", "unfused"):
        raise InputError(f"{model.title}: {model.kernels} attention takes no mask; give mask = 'none' or another attention")
    if model.sequence_first and (model.head != "language_model" or model.key_heads != model.heads or model.autocast):
        raise InputError(
            f"{model.title}: unfused attention, as in Megatron-LM, needs head = 'language_model', as many kv_heads as heads "
            "and a precision other than 'bf16-autocast'"
        )
    if model.weights == "in_out" and (model.activation == "swiglu" or not model.biased):
        raise InputError(f"{model.title}: weights = 'in_out' goes with biases and without swiglu; give weights = 'out_in'")


def _divides(model: Transformer, what: str, size: int, by: str, parts: int) -> None:
    if size % parts:
        raise InputError(f"{model.title}: {what} {size} does not divide by {by} {parts}; give a multiple of {parts}")
