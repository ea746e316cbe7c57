"""Divided decoders as configs, where a config says the same: pipelines alone, HSDP, exchanged heads and PyTorch's contexts.

Two things differ: PyTorch's schedules divide gradients by the number of micro-batches, one by one, and the optimisers of the
scripts that are not fused go through parameters one by one.
"""

from __future__ import annotations

from typing import Any

from steptime_lab.workloads.case import Case

_EXCHANGES = {"ulysses": "all_to_all", "torch": "all_gather"}
_ACTIVATIONS = ("gelu", "swiglu")


def as_config(case: Case) -> dict[str, Any] | None:
    """A Transformer config of the case; None where there is none that says the same."""
    config = case.config
    parallel = _parallel(case)
    if parallel is None or config.get("activation", "gelu") not in _ACTIVATIONS:
        return None
    gated = config.get("norm") == "rms"
    return {
        "kind": "transformer",
        "name": case.name,
        **{key: config[key] for key in ("layers", "width", "heads", "vocabulary")},
        "sequence": config["tokens"],
        "batch": case.batch,
        "kv_heads": config.get("kv_heads") or config["heads"],
        "feed_forward": config["inner"],
        "activation": config.get("activation", "gelu"),
        "norm": "rms_norm" if gated else "layer_norm",
        "positions": "rotary" if config.get("rotary") else "learned",
        "projections": "separate",
        "tied_head": False,
        "precision": case.precision,
        "states": "bf16" if case.precision == "bf16" and "precision" not in config else "fp32",
        "optimizer": "adamw_fused" if config.get("optimizer") == "adamw-fused" else "adamw",
        "gradient_accumulation": config.get("micro_batches", 1),
        "parallel": parallel,
    }


def _parallel(case: Case) -> dict[str, Any] | None:
    config = case.config
    if config.get("optimizer") == "sgd":  # with momentum, which configs have not
        return None
    if "pipeline" in config:
        if config["pipeline"] != case.ranks:
            return None
        sizes = {"stages": config["sizes"]} if "sizes" in config else {}
        schedule = (
            {"schedule": "interleaved", "chunks": config["chunks"]} if "chunks" in config else {"schedule": config["schedule"]}
        )
        return {"pipeline": case.ranks, **schedule, **sizes}
    if config.get("exchange") in _EXCHANGES:
        ranks = config["context"]
        return {"context": ranks, "data": case.ranks // ranks, "context_exchange": _EXCHANGES[config["exchange"]]}
    if config.get("precision") == "bf16-mixed" and "tensor" not in config:
        return {"data": config["copies"], "fsdp": case.ranks // config["copies"]}
    return None
