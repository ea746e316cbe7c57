"""What is wrong with a Transformer's config: values out of range, sizes that do not divide, choices that exclude each other.

Every mistake is one line that says which values do not go together, and which would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from steptime._build.config_values import MOST_WIDTH, nearest_multiples
from steptime._build.transformer.fp8 import FEW_BITS, RECIPES
from steptime._build.transformer.parallelism import DEGREES, dividing, wrong_parallelism
from steptime._build.transformer.parts import FROZEN_PARTS, FUSED, PATTERN
from steptime._build.transformer.recompute import wrong_recompute
from steptime._program.program import MOST_RANKS

if TYPE_CHECKING:
    from steptime._build.transformer.config import Transformer

CHOICES: Mapping[str, tuple[str, ...]] = {
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
    "states": ("fp32", "bf16"),
    "optimizer": ("adamw", "adamw_fused", "sgd"),
    "compile": ("off", "default", "reduce-overhead"),
}
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
    "pad_vocab",
    "kv_heads",
    "feed_forward",
    "max_positions",
    "segments",
    "recompute_layers",
    "head_width",
    "window",
    "full_every",
)
_SWITCHES = ("tied_head", "causal", "checkpointing", "fused", "qk_norm")
# No step has more; what claims to comes from a slip of the keyboard, and would take the memory of the machine.
_MOST = 2**31
# Six times the widest that was published (MT-NLG 530B, arXiv 2201.11990: 20,480).
_WIDEST = 1 << 17
# Sixteen times the largest that was published (XLM-V, arXiv 2301.10472: a million tokens).
_MOST_WORDS = 1 << 24
_MOST_OF = {
    "width": _WIDEST,
    "vocabulary": _MOST_WORDS,
    "pad_vocab": _WIDEST,
    "head_width": MOST_WIDTH,
    "feed_forward": 4 * MOST_WIDTH,
}
# Ten times the largest that was ever published, of two million million: an optimizer's step is laid out chunk by chunk.
_MOST_PARAMETERS = 2 * 10**13
# A layer of one accumulated part takes about half a megabyte while a program is built.
_MOST_LAYERS = 8192
# Of a model: the deepest that was published has 1,000 (DeepNet, arXiv 2203.00555).
_DEEPEST = 2048


def wrong_config(model: Transformer) -> Iterator[str]:
    """What does not go together, each with what would; the first alone is sure, others may follow from it."""
    return chain(_wrong_values(model), _wrong_sizes(model), _wrong_together(model))


def _wrong_values(model: Transformer) -> Iterator[str]:
    """Whole numbers where counts are meant, in their ranges; names that are known."""
    counts = {key: (getattr(model, key), 1 if key in _POSITIVE else 0) for key in (*_POSITIVE, *_NOT_NEGATIVE)}
    counts |= {f"parallel.{key}": (getattr(model.parallel, key), 1) for key in (*DEGREES, "chunks", "expert_tensor")}
    for key, (value, least) in counts.items():
        most = _MOST_OF.get(key, _MOST - 1)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            upper = f", at most {most}" if key in _MOST_OF else ""
            yield f"{key} is {value!r}; expected a whole number of {least} or more{upper}"
    for key in (*_SWITCHES, "bias"):
        if not isinstance(getattr(model, key), bool) and (key, model.bias) != ("bias", None):
            yield f"{key} is {getattr(model, key)!r}; expected true or false"
    yield from _wrong_parts(model)
    name: object = model.name  # what a file says may be anything
    dropout: object = model.dropout
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        yield f"dropout is {dropout!r}; expected a number from 0 to below 1"
    if model.layers > _DEEPEST:
        yield f"layers is {model.layers}; expected a whole number of 1 or more, at most {_DEEPEST}"
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
    for key, known in CHOICES.items():
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
    """Sizes that divide each other where something is split, and no more of all than a machine can be asked about."""
    inner = model.inner + model.experts.count * model.expert_inner
    parameters = model.width * (model.layers * (2 * model.heads * model.head_size + 2 * inner) + model.vocabulary)
    if parameters > _MOST_PARAMETERS:
        yield f"about {parameters:.2g} parameters; expected at most {_MOST_PARAMETERS:.0e}: check width, layers and experts"
    parallel, heads, key_heads = model.parallel, ("heads", model.heads), ("kv_heads", model.key_heads)
    yield from wrong_parallelism(parallel, model.layers)
    yield from model.experts.wrong_together(parallel, model.expert_inner)
    for (what, size), (by, parts) in (
        (("width", model.width if not model.head_width else 0), heads),
        (heads, key_heads),
    ):
        if size % parts:
            yield f"{what} {size} does not divide by {by} {parts}; give a multiple of {parts}, or {by} that is {dividing(size)}"
    split = dict((heads, key_heads, ("feed_forward", model.inner)))
    for what, size in split.items():
        if size % parallel.tensor:
            yield (
                f"{what} {size} does not divide by parallel.tensor {parallel.tensor}; give {dividing(*split.values())}, "
                "which divide heads, kv_heads and feed_forward"
            )
    parts = parallel.replicas * model.gradient_accumulation
    if model.batch % parts:
        yield (
            f"batch {model.batch} does not divide into {parts} parts (data {parallel.data} x fsdp "
            f"{parallel.fsdp} x gradient_accumulation {model.gradient_accumulation}); give a multiple of {parts}"
            f"{nearest_multiples(model.batch, parts)}, or {dividing(model.batch)} parts"
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
        yield (
            f"sequence {model.sequence} does not divide by {by}; give a multiple of {multiple}, or {dividing(model.sequence)} "
            "parts in all"
        )
    share = parallel.tensor * parallel.context
    if parallel.context > 1 and parallel.context_exchange == "all_to_all" and model.key_heads % share:
        yield (
            f"kv_heads {model.key_heads} do not divide by parallel.tensor {parallel.tensor} x parallel.context "
            f"{parallel.context}, as all_to_all divides them; give a multiple of {share}, or another context_exchange"
        )
    if parallel.context > 1 and (model.mask != "none" or model.kernels == "unfused" or model.head != "language_model"):
        yield "parallel.context needs mask = 'none', an attention that is fused and head = 'language_model'"


def _wrong_exchanges(model: Transformer) -> Iterator[str]:
    beside, again = model.parallel.overlap_moe_expert_parallel_comm, model.recomputed
    if beside and (not model.fused or again == "full" or "feed_forward" in again):
        yield "parallel.overlap_moe_expert_parallel_comm goes with fused = true and experts that are not recomputed"
    if model.experts.exchange == FUSED and not model.fused:
        yield "experts.exchange = 'fused' goes with fused = true; give both, or exchange = 'all_to_all'"


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
    yield from _wrong_exchanges(model)
    if model.experts.capacity and model.fused:
        yield "experts.capacity cannot be built with fused = true; leave one of them out"
    yield from _wrong_attention(model)
    yield from _wrong_frozen(model)
    yield from _wrong_pattern(model)
    if model.experts.count and (model.weights == "in_out" or model.biased or model.activation == "gelu_new"):
        yield "experts have no biases and go with activation 'swiglu' or 'gelu'; give bias = false and weights = 'out_in'"
    yield from _wrong_states(model)
    of_fp8 = [each for each in RECIPES if each not in FEW_BITS]
    if model.fp8_recipe and (model.precision != "fp8" or model.fp8_recipe not in of_fp8):
        yield f"fp8_recipe is {model.fp8_recipe!r}; with precision = 'fp8' it is one of {', '.join(of_fp8)}, else left out"
    if model.recipe and model.weights == "in_out":
        yield f"precision = '{model.precision}' needs weights = 'out_in'"
    if model.parallel.tp_comm_overlap and (model.weights == "in_out" or model.autocast):
        yield "parallel.tp_comm_overlap goes with weights = 'out_in' and a precision other than 'bf16-autocast'"
    if model.fused and (model.weights == "in_out" or model.norm_place == "after" or model.autocast):
        yield "fused layers go with weights = 'out_in', norm_place = 'before' and a precision other than 'bf16-autocast'"
    if model.weights == "in_out" and (model.activation == "swiglu" or not model.biased):
        yield "weights = 'in_out' goes with biases and without swiglu; give weights = 'out_in'"


def _wrong_states(model: Transformer) -> Iterator[str]:
    if model.states == "bf16" and model.dtype != "bfloat16":
        yield f"states = 'bf16' goes with parameters in bf16; precision is {model.precision!r}: leave states out"
    if model.states == "bf16" and model.parallel.grad_reduce_in_fp32:
        yield "states = 'bf16' has gradients in bf16 too; leave out parallel.grad_reduce_in_fp32, or give states = 'fp32'"


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
