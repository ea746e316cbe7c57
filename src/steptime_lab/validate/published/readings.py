"""What published rows ran, by their names: SimuMax's and torchtitan's, read again from what their authors ran.

SimuMax (MooreThreads/SimuMax 4dcaae51, simu_tools/megatron_scripts, Apache-2.0): Megatron-core with Transformer Engine, bf16, a
distributed optimiser whose exchanges are not overlapped, sequence parallelism, nothing recomputed, contexts exchanged by
all_to_all, experts that all get as many tokens, all but the first layer with experts, and 16 heads of keys in its 405 B.
torchtitan (pytorch/torchtitan b5bcd76c, benchmarks, BSD-3): FSDP2, op-wise selective recomputation unless it says otherwise,
two sequences of 8,192 tokens on a GPU; with contexts one sequence, all recomputed, in eight bits. Compiled steps are predicted
as PyTorch runs them one op after the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steptime_lab.validate.published.models import MEGATRON, model, pipeline

COMPILED = "compiled, predicted as if not"
_SIMUMAX, _TORCHTITAN = "simumax", "torchtitan"
_MODELS = {
    "llama3_8b": "llama3-8b",
    "llama3_70b": "llama3-70b",
    "llama3_405b": "llama3-405b",
    "deepseekv2": "deepseek-v2",
    "deepseekv3": "deepseek-v3",
}
_PARTS = re.compile(r"_(l|tp|pp|dp|cp|ep|seq|mbc)(\d{1,6})(?=_|$)")
_NODE = 8
_SEQUENCE, _KEY_HEADS_405B, _TITAN_SEQUENCE, _TITAN_BATCH = 4096, 16, 8192, 2
# Of Megatron-LM's flags, those that are off unless somebody sets them.
_NOT_OVERLAPPED = {"zero": 1, "overlap_grad_reduce": False, "overlap_param_gather": False}
# Of torchtitan's rows with async tensor parallelism: split 8 ways, all of it compiled; the 70 B recomputes all, and the 8 B has
# 12 sequences in each group (benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, commit 5ecb74e5).
_ASYNC_TENSOR, _ASYNC_BATCH_8B = 8, 12


@dataclass(frozen=True)
class Reading:
    """A row's config, the device and fabric that it ran on, and the group of rows that it belongs to, if any."""

    config: Mapping[str, Any]
    device: str | None = None  # None: as the row says
    fabric: str | None = None
    group: str | None = None


def reading(source: str, name: str, ranks: int) -> Reading | None:
    """What a row ran; None where its file's own reading stands."""
    lowered = source.lower()
    if _SIMUMAX in lowered:
        return _simumax(name)
    return _torchtitan(name, ranks) if _TORCHTITAN in lowered else None


def _simumax(name: str) -> Reading | None:
    sizes = {"tp": 1, "pp": 1, "dp": 1, "cp": 1, "ep": 1, "seq": _SEQUENCE, "mbc": 1}
    sizes |= {key: int(value) for key, value in _PARTS.findall(name)}
    known = next((name_there for prefix, name_there in _MODELS.items() if name.startswith(f"{prefix}_")), None)
    if known is None or "l" not in sizes or min(sizes.values()) < 1:
        return None
    values = {**model(known), **MEGATRON, "layers": sizes["l"], "sequence": sizes["seq"], "precision": "bf16"}
    if known == "llama3-405b":
        values["kv_heads"] = _KEY_HEADS_405B
    if "experts" in values:
        values["experts"] = {**values["experts"], "first_dense": 1, "scores": "softmax"}
    shared = _NOT_OVERLAPPED if sizes["dp"] * sizes["cp"] > 1 else {}
    values |= {
        "batch": sizes["dp"] * sizes["mbc"],
        "gradient_accumulation": sizes["mbc"],
        "parallel": {
            "data": sizes["dp"],
            "tensor": sizes["tp"],
            "sequence": sizes["tp"] > 1,
            "context": sizes["cp"],
            **({"context_exchange": "all_to_all"} if sizes["cp"] > 1 else {}),
            "expert": sizes["ep"],
            **shared,
            **pipeline(sizes["l"], sizes["pp"], 1),
        },
    }
    return Reading(values, "b200", "b200-nvlink")


def _torchtitan(name: str, ranks: int) -> Reading | None:
    words = name.lower()
    known = next((f"llama3-{size}" for size in ("8b", "70b", "405b") if words.startswith(f"{size} ")), None)
    ways = {key: int(value) for key, value in re.findall(r"\b(fsdp|tp|cp)(\d{1,5})\b", words)}
    inside = "asynctp" in words
    tensor, context = ways.get("tp", _ASYNC_TENSOR if inside else 1), ways.get("cp", 1)
    shards = ways.get("fsdp", ranks // max(tensor * context, 1))
    if known is None or min(tensor, context, shards) < 1:
        return None
    longer = re.search(r"\b(\d{1,4})k\b", words)
    sequence = 1024 * int(longer[1]) if longer else _TITAN_SEQUENCE
    full = "full ac" in words.partition("(")[0] or context > 1 or (inside and known == "llama3-70b")
    values = {
        **model(known),
        "sequence": sequence,
        "batch": shards * (1 if context > 1 else _TITAN_BATCH),
        "precision": "fp8" if "fp8" in words or context > 1 else "bf16",
        "optimizer": "adamw_fused",
        "recompute": "full" if full else "ops",
        "parallel": {"fsdp": shards, "tensor": tensor, "sequence": tensor > 1, "context": context},
    }
    if tensor > 1:
        values["batch"] = shards * (_ASYNC_BATCH_8B if inside and known == "llama3-8b" else _TITAN_BATCH * tensor)
        values["parallel"] |= {"tp_comm_overlap": inside}
    if values["precision"] == "fp8":
        values["fp8_recipe"] = "tensorwise"
    chip = "h200" if "h200" in words else "h100"
    fabric = f"{chip}-nvlink" if ranks <= _NODE else f"{chip}-ib400"
    compiled = "compile" in words or "fp8" in words or context > 1 or inside
    return Reading(values, chip if chip == "h200" else "h100-96gb", fabric, COMPILED if compiled else None)
