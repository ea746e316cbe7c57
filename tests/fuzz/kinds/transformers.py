"""Configs of Transformers under every way to share them, some of their values changed to what nobody expects."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from tests.fuzz.case import Case, Kind, damaged_text
from tests.fuzz.samples import GPT

PLAIN: Mapping[str, Any] = {
    "layers": 4, "width": 128, "heads": 8, "kv_heads": 4, "sequence": 64, "vocabulary": 512, "batch": 32, "feed_forward": 256,
    "precision": "bf16", "positions": "rotary", "norm": "rms_norm", "activation": "swiglu", "optimizer": "adamw_fused",
}  # fmt: skip
_EXPERTS = {"count": 8, "top_k": 2, "width": 64, "shared": 64, "first_dense": 1, "imbalance": 1.5}
CONFIGS: tuple[Mapping[str, Any], ...] = (
    {"parallel": {"data": 2, "tensor": 2, "sequence": True, "zero": 1}, "fused": True},
    {"parallel": {"data": 4, "zero": 2, "overlap_grad_reduce": False}, "gradient_accumulation": 2},
    {"parallel": {"fsdp": 4, "data": 2, "reshard_after_forward": False, "no_sync": True}, "gradient_accumulation": 2},
    {"parallel": {"pipeline": 2, "data": 2}, "gradient_accumulation": 4, "tied_head": False},
    {"parallel": {"pipeline": 2, "schedule": "gpipe", "stages": [1, 3], "fsdp": 2}, "gradient_accumulation": 4},
    {
        "parallel": {"pipeline": 2, "schedule": "interleaved", "chunks": 2, "data": 2, "zero": 2},
        "gradient_accumulation": 16, "fused": True, "tied_head": False,
    },
    {"parallel": {"context": 2, "fsdp": 2, "context_exchange": "ring"}, "recompute": "full", "recompute_every": 2},
    {"parallel": {"context": 2, "tensor": 2, "context_exchange": "all_to_all"}, "window": 32, "full_every": 2},
    {"parallel": {"data": 4, "expert": 4}, "experts": _EXPERTS, "bias": False},
    {
        "parallel": {"data": 2, "tensor": 2, "sequence": True, "expert": 4, "zero": 1},
        "experts": _EXPERTS, "fused": True, "bias": False,
    },
    {"parallel": {"data": 2}, "experts": {"count": 4, "capacity": 1.25}, "bias": False, "tied_head": False},
    {"parallel": {"fsdp": 2}, "precision": "fp8", "fp8_recipe": "rowwise", "recompute": "ops", "recompute_keeps": ["mm/2"]},
    {"parallel": {"tensor": 4, "sequence": True}, "precision": "mxfp8", "fused": True, "recompute": ["attention", "norm"]},
    {"lora": {"rank": 8, "targets": ["query", "value"]}, "frozen": ["embedding"], "parallel": {"fsdp": 2}},
    {
        "latent_attention": {"kv_rank": 32, "q_rank": 64, "nope": 32, "rope": 16, "value": 32}, "kv_heads": 0, "bias": False,
        "parallel": {"data": 2},
    },
    {
        "pattern": "M*-E", "mamba": {"heads": 8, "head_width": 32, "state": 16, "groups": 4, "chunk": 32}, "bias": False,
        "experts": {"count": 4, "top_k": 2}, "parallel": {"data": 2},
    },
    {"attention": "unfused", "kv_heads": 0, "dropout": 0.1, "precision": "fp16", "parallel": {"tensor": 2, "pipeline": 2}},
    {"norm": "layer_norm", "positions": "learned", "activation": "gelu", "parallel": {"data": 2}, "precision": "bf16-autocast"},
    {"states": "bf16", "pad_vocab": 64, "vocabulary": 500, "parallel": {"fsdp": 2, "tensor": 2}, "gradient_accumulation": 2},
    {"parallel": {"data": 2, "pipeline": 2, "grad_reduce_in_fp32": False}, "precision": "fp8", "gradient_accumulation": 2},
    {"lora": {"rank": 8, "targets": ["query", "up"]}, "precision": "nvfp4", "projections": "separate", "parallel": {"data": 2}},
    {"qk_norm": True, "head_width": 32, "parallel": {"fsdp": 2, "tensor": 2, "sequence": True, "context": 2}},
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    0, 1, 2, 3, 5, 7, 8, 16, 48, 64, -1, -8, 1000, 4097, 10**6, 2**31 - 1, 2**31, 10**9, 10**30, 0.0, 0.5, 1.5, 1e300, True,
    False, "", "x", "none", "full", "ring", "interleaved", "1f1b", "zb", "fp8", "bf16", [], [1], [2, 2], [-1, 5], ["x"], ["mm"],
    {}, {"count": 4}, 1024, 128,
)  # fmt: skip
_PLATFORMS = ("8xh200-nvlink", "16xh100-ib400", "8xa100-nvlink")
_MORE = (
    "window", "full_every", "recompute_layers", "segments", "max_positions", "mask", "head", "classes", "causal", "weights",
    "norm_place", "projections", "attention", "precision", "fused", "dropout", "ranks",
    "states", "pad_vocab", "checkpointing", "qk_norm", "pattern",
)  # fmt: skip


def transformer(draw: random.Random) -> Case:
    """A prediction of a config with none to three of its values changed, lost or added."""
    return Case(("predict", "model.toml", "--platform", draw.choice(_PLATFORMS), "--json"), {"model.toml": model(draw)})


def model(draw: random.Random) -> str | bytes:
    """A config with none to three of its values changed, lost or added."""
    if draw.random() < 0.1:
        return damaged_text(draw, GPT)
    values: dict[str, Any] = json.loads(json.dumps({**PLAIN, **draw.choice(CONFIGS)}))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3))):
        _change(values, draw)
    return "\n".join(toml_lines(values))


def _change(values: dict[str, Any], draw: random.Random) -> None:
    tables = [value for value in values.values() if isinstance(value, dict)]
    table = draw.choice(tables) if tables and draw.random() < 0.5 else values
    kind = draw.random()
    if kind < 0.15 or not table:
        table[draw.choice(_MORE)] = draw.choice(_VALUES)
        return
    key = draw.choice(sorted(table))
    if kind < 0.3:
        del table[key]
    elif kind < 0.6 and type(table[key]) in (int, float):
        table[key] = type(table[key])(table[key] * draw.choice((-1, 0, 0.5, 2, 3, 4, 16, 1000, 10**7)))
    else:
        table[key] = draw.choice(_VALUES)


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """As TOML, where tables come last; JSON writes all other values alike."""
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in tables]
    for key, table in tables.items():
        inner = [f"{name} = {json.dumps(value) if not isinstance(value, dict) else '{}'}" for name, value in table.items()]
        lines += [f"[{key}]", *inner]
    return lines


KINDS: dict[str, Kind] = {"transformer": transformer}
