"""Decoders divided over ranks in every way that a config or a script can say, from host-bound to GPU-bound.

`steptime measure steps --only large` times them; they have no part in any fit. Models differ in width, depth, norms,
activations, heads of keys, positions and precision, so that no two ways to divide are told apart by one architecture alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steptime_lab.workloads.case import Case

LARGE = "large"
"""What `--only` calls those of the first two visits."""

AGAIN = "large_again"
"""Those of the third: other widths, depths, micro-batches and ways to divide, predicted with all that the first ones taught."""

Model = Mapping[str, Any]


def _plain(layers: int, width: int, heads: int, tokens: int, vocabulary: int = 16_000) -> Model:
    """As GPT-2 has it: layer norms, GELU, learned positions, biases."""
    sizes = {"layers": layers, "width": width, "heads": heads, "inner": 4 * width}
    return {**sizes, "tokens": tokens, "vocabulary": vocabulary}


def _gated(layers: int, width: int, heads: int, tokens: int, kv_heads: int = 0, vocabulary: int = 16_000) -> Model:
    """As Llama has it: RMS norms, SwiGLU, rotary positions, groups of heads, no biases."""
    gated = {"inner": 8 * width // 3 // 64 * 64, "norm": "rms", "activation": "swiglu", "rotary": True, "bias": False}
    return {**_plain(layers, width, heads, tokens, vocabulary), **gated, "kv_heads": kv_heads}


def _squared(layers: int, width: int, heads: int, tokens: int, vocabulary: int = 8_000) -> Model:
    """Squared ReLU, rotary positions, layer norms, no biases."""
    model = _plain(layers, width, heads, tokens, vocabulary)
    return {**model, "activation": "relu2", "rotary": True, "bias": False}


def _pipe(stages: int, schedule: str, micro_batches: int, **more: Any) -> Model:
    return {"pipeline": stages, "schedule": schedule, "micro_batches": micro_batches, **more}


def _cp(ranks: int, exchange: str) -> Model:
    return {"context": ranks, "exchange": exchange}


def _moe(experts: int, top: int, **more: Any) -> Model:
    return {"experts": experts, "top": top, **more}


_MIXED: Model = {"precision": "bf16-mixed", "optimizer": "adamw-fused"}

# By name: ranks, precision, samples of one rank, the model, and how it is divided.
_CASES: Mapping[str, tuple[int, str, int, Model, Model]] = {
    "pp2-1f1b": (2, "bf16", 8, _plain(8, 1024, 16, 512), _pipe(2, "1f1b", 8)),
    "pp2-gpipe": (2, "bf16", 8, _plain(8, 1024, 16, 512), _pipe(2, "gpipe", 8)),
    "pp2-interleaved": (2, "bf16", 8, _gated(8, 1024, 16, 512), _pipe(2, "1f1b", 8, chunks=2)),
    "pp2-1f1b-wide": (2, "bf16", 16, _gated(4, 2048, 16, 1024, 4), _pipe(2, "1f1b", 4, optimizer="adamw-fused")),
    "pp2-1f1b-small": (2, "fp32", 4, _plain(6, 768, 12, 256), _pipe(2, "1f1b", 8)),
    "pp2-gpipe-tf32": (2, "tf32", 8, _squared(4, 1536, 12, 512), _pipe(2, "gpipe", 4)),
    "pp2-1f1b-uneven": (2, "bf16", 16, _gated(8, 1024, 16, 512, 4), _pipe(2, "1f1b", 8, sizes=[5, 3])),
    "pp2-interleaved-deep": (2, "bf16", 8, _squared(16, 512, 8, 256), _pipe(2, "1f1b", 4, chunks=4)),
    "tp2": (2, "bf16", 4, _gated(8, 1024, 16, 512), {"tensor": 2}),
    "tp2-wide": (2, "bf16", 8, _gated(4, 2048, 32, 1024, 8), {"tensor": 2, "optimizer": "adamw-fused"}),
    "tp2-small": (2, "fp32", 1, _squared(6, 512, 8, 256), {"tensor": 2, "optimizer": "sgd"}),
    "cp2-ulysses": (2, "bf16", 2, _plain(4, 1024, 16, 2048), _cp(2, "ulysses")),
    "cp2-ring": (2, "bf16", 2, _gated(4, 512, 8, 1024), _cp(2, "ring")),
    "cp2-torch": (2, "bf16", 2, _gated(4, 1024, 16, 2048), _cp(2, "torch")),
    "ep2-loop": (2, "bf16", 4, _plain(4, 512, 8, 512), _moe(8, 2)),
    "ep2-grouped": (2, "bf16", 4, _squared(4, 1024, 16, 512), _moe(8, 2, grouped=True)),
    "ep2-capacity": (2, "bf16", 8, _gated(4, 1024, 16, 512), _moe(4, 1, capacity=1.25)),
    "pp4-1f1b": (4, "bf16", 4, _plain(8, 1024, 16, 512), _pipe(4, "1f1b", 8)),
    "pp4-gpipe": (4, "bf16", 4, _gated(8, 1024, 16, 512), _pipe(4, "gpipe", 8)),
    "pp4-1f1b-deep": (4, "bf16", 2, _squared(16, 512, 8, 256), _pipe(4, "1f1b", 8)),
    "pp4-1f1b-wide": (4, "bf16", 8, _gated(4, 2048, 16, 1024, 4), _pipe(4, "1f1b", 8, optimizer="adamw-fused")),
    "pp4-interleaved": (4, "bf16", 4, _gated(8, 1024, 16, 512, 4), _pipe(4, "1f1b", 8, chunks=2)),
    "pp4-1f1b-fp32": (4, "fp32", 4, _plain(8, 512, 8, 512), _pipe(4, "1f1b", 4, optimizer="sgd")),
    "pp4-gpipe-uneven": (4, "bf16", 8, _squared(8, 1024, 8, 512), _pipe(4, "gpipe", 4, sizes=[3, 2, 2, 1])),
    "pp2dp2-1f1b": (4, "bf16", 4, _plain(8, 512, 8, 512), _pipe(2, "1f1b", 4, copies="averaged")),
    "pp2dp2-gpipe": (4, "bf16", 8, _gated(4, 1024, 16, 512), _pipe(2, "gpipe", 4, copies="averaged")),
    "pp2dp2-interleaved": (4, "bf16", 4, _squared(8, 768, 12, 256), _pipe(2, "1f1b", 4, chunks=2, copies="averaged")),
    "pp2fsdp2-1f1b": (4, "bf16", 4, _gated(8, 512, 8, 512, 2), _pipe(2, "1f1b", 4, copies="fsdp")),
    "cp4-ulysses": (4, "bf16", 1, _gated(4, 1024, 16, 4096, 4), _cp(4, "ulysses")),
    "cp4-ulysses-fp32": (4, "fp32", 1, _plain(4, 512, 8, 1024), _cp(4, "ulysses")),
    "cp4-ring": (4, "bf16", 1, _gated(4, 512, 8, 2048), _cp(4, "ring")),
    "cp4-ring-tf32": (4, "tf32", 1, _squared(4, 768, 12, 1024), _cp(4, "ring")),
    "cp2dp2-ulysses": (4, "bf16", 2, _plain(6, 512, 8, 1024), _cp(2, "ulysses")),
    "cp4-torch": (4, "bf16", 1, _gated(4, 1024, 8, 4096), _cp(4, "torch")),
    "ep4-grouped": (4, "bf16", 4, _squared(4, 1024, 16, 512), _moe(16, 2, grouped=True)),
    "ep4-capacity": (4, "bf16", 4, _plain(4, 512, 8, 512), _moe(8, 2, capacity=1.25)),
    "ep4-loop-fp32": (4, "fp32", 2, _gated(2, 512, 8, 512), _moe(8, 2)),
    "ep4-capacity-wide": (4, "bf16", 8, _gated(2, 1024, 16, 512), _moe(8, 1, capacity=1.0)),
    "hsdp2x2": (4, "bf16", 4, _plain(8, 512, 8, 512), {"copies": 2, "precision": "bf16-mixed"}),
    "hsdp2x2-gated": (4, "bf16", 8, _gated(4, 1024, 16, 512), {"copies": 2, "precision": "bf16-mixed"}),
    "hsdp2x2-kept": (4, "bf16", 8, _squared(6, 768, 12, 512), {"copies": 2, "reshard": False}),
    "hsdp2x2-busy": (4, "bf16", 16, _gated(4, 512, 8, 1024, 2), {"copies": 2, "optimizer": "adamw-fused"}),
    "tp4": (4, "bf16", 2, _gated(4, 1024, 16, 1024, 4), {"tensor": 4}),
    "tp4-tf32": (4, "tf32", 2, _squared(4, 1024, 16, 512), {"tensor": 4, "optimizer": "sgd"}),
    "tp2fsdp2": (4, "bf16", 4, _gated(4, 1024, 16, 512), {"tensor": 2, "precision": "bf16-mixed"}),
    "pp4dp2-1f1b": (8, "bf16", 2, _plain(8, 512, 8, 256), _pipe(4, "1f1b", 8, copies="averaged")),
    "pp2fsdp4-gpipe": (8, "bf16", 4, _gated(4, 512, 8, 512), _pipe(2, "gpipe", 4, copies="fsdp")),
    "hsdp2x4": (8, "bf16", 4, _gated(4, 512, 8, 512), {"copies": 2, "precision": "bf16-mixed"}),
    "hsdp4x2": (8, "fp32", 2, _plain(4, 512, 8, 256), {"copies": 4}),
    "cp8-ulysses": (8, "bf16", 1, _plain(2, 512, 8, 4096), _cp(8, "ulysses")),
    "ep8-capacity": (8, "bf16", 4, _squared(2, 512, 8, 512), _moe(16, 2, capacity=1.25)),
    "tp2hsdp2x2": (8, "bf16", 2, _gated(2, 512, 8, 512), {"tensor": 2, "copies": 2, "precision": "bf16-mixed"}),
}  # fmt: skip

_AGAIN: Mapping[str, tuple[int, str, int, Model, Model]] = {
    "pp2-1f1b-640": (2, "bf16", 6, _plain(6, 640, 10, 384), _pipe(2, "1f1b", 6)),
    "pp2-gpipe-1280": (2, "bf16", 12, _gated(6, 1280, 20, 512, 5), _pipe(2, "gpipe", 6, optimizer="adamw-fused")),
    "pp2-interleaved-1536": (2, "bf16", 8, _squared(8, 1536, 12, 384), _pipe(2, "1f1b", 4, chunks=2)),
    "tp2-768": (2, "bf16", 6, _squared(5, 768, 12, 384), {"tensor": 2, "optimizer": "adamw-fused"}),
    "cp2-ulysses-768": (2, "bf16", 2, _gated(6, 768, 12, 1536, 4), _cp(2, "ulysses")),
    "cp2-ring-640": (2, "fp32", 1, _plain(4, 640, 10, 1536), _cp(2, "ring")),
    "ep2-capacity-768": (2, "bf16", 6, _squared(3, 768, 12, 512), _moe(8, 1, capacity=1.5)),
    "fsdp2-768": (2, "bf16", 8, _gated(6, 768, 12, 384), {"copies": 1, **_MIXED}),
    "pp4-1f1b-768": (4, "bf16", 6, _gated(12, 768, 12, 384), _pipe(4, "1f1b", 12, optimizer="adamw-fused")),
    "pp4-gpipe-1280": (4, "bf16", 6, _squared(4, 1280, 10, 512), _pipe(4, "gpipe", 6)),
    "pp4-interleaved-640": (4, "tf32", 4, _plain(8, 640, 10, 256), _pipe(4, "1f1b", 4, chunks=2, optimizer="sgd")),
    "pp2dp2-1f1b-896": (4, "bf16", 6, _gated(6, 896, 14, 384), _pipe(2, "1f1b", 6, copies="averaged")),
    "cp4-ulysses-768": (4, "bf16", 1, _plain(6, 768, 12, 2048), _cp(4, "ulysses")),
    "cp4-ring-384": (4, "bf16", 2, _gated(3, 384, 6, 1536), _cp(4, "ring")),
    "ep4-grouped-768": (4, "bf16", 3, _gated(3, 768, 12, 512), _moe(8, 2, grouped=True)),
    "hsdp2x2-768": (4, "bf16", 6, _gated(6, 768, 12, 384, 4), {"copies": 2, **_MIXED}),
    "hsdp2x2-deep": (4, "bf16", 8, _squared(12, 512, 8, 384), {"copies": 2, "reshard": False}),
    "tp4-1280": (4, "bf16", 3, _gated(3, 1280, 20, 512, 4), {"tensor": 4, "optimizer": "adamw-fused"}),
    "tp2fsdp2-768": (4, "bf16", 4, _squared(4, 768, 12, 512), {"tensor": 2, "optimizer": "sgd"}),
    "pp4dp2-gpipe-640": (8, "bf16", 3, _gated(8, 640, 10, 256), _pipe(4, "gpipe", 6, copies="averaged")),
    "hsdp2x4-640": (8, "bf16", 4, _plain(3, 640, 10, 384), {"copies": 2, **_MIXED}),
    "cp4dp2-ulysses-512": (8, "bf16", 1, _plain(3, 512, 8, 2048), _cp(4, "ulysses")),
    "ep8-capacity-640": (8, "bf16", 3, _gated(2, 640, 10, 512), _moe(8, 2, capacity=1.0)),
    "tp4fsdp2-512": (8, "bf16", 3, _squared(2, 512, 8, 512), {"tensor": 4, "optimizer": "adamw-fused"}),
}  # fmt: skip


def large_cases(ranks: int, group: str = LARGE) -> tuple[Case, ...]:
    """Those of so many ranks, of one of the two groups."""
    return tuple(
        Case(LARGE, f"{LARGE}-{name}-r{count}", {**model, **divided}, precision, samples * count, count, task=name, rule="")
        for name, (count, precision, samples, model, divided) in {LARGE: _CASES, AGAIN: _AGAIN}[group].items()
        if count == ranks
    )


def shrunk_large(case: Case) -> Case:
    """The same on few narrow features, few words and short samples, to try it out on a CPU."""
    config = case.config
    heads, tokens = config["heads"], 16 * case.ranks
    small = {**config, "width": 8 * heads, "inner": 64, "vocabulary": 128, "tokens": tokens}
    return Case(LARGE, case.name, small, case.precision, case.batch, case.ranks, task=case.task, rule=case.rule)
