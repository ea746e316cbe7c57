"""Models that others published step times of (`data/published_models.toml`), and how Megatron-core lays them out."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import steptime_lab
from steptime.errors import InputError

FILE = Path(steptime_lab.__file__).parent / "data" / "published_models.toml"
_ALIKE = {"activation": "swiglu", "norm": "rms_norm", "positions": "rotary", "tied_head": False, "bias": False}
# What Megatron-core adds to a model: Transformer Engine's layers, a fused Adam.
MEGATRON: Mapping[str, Any] = {"fused": True, "optimizer": "adamw_fused"}


@cache
def _models() -> dict[str, dict[str, Any]]:
    return dict(tomllib.loads(FILE.read_text(encoding="utf-8"))["models"])


def model(name: str) -> dict[str, Any]:
    """The sizes of a published model, as a config has them."""
    found = _models().get(name)
    if found is None:
        raise InputError(f"no published model is called {name!r}; known are {', '.join(_models())}")
    return _ALIKE | {key: value for key, value in found.items() if key != "source"}


def stages(layers: int, chunks: int) -> list[int]:
    """Layers of each part of a pipeline as Megatron-core divides them; empty: evenly.

    Where layers do not divide, the embedding and the loss count as one each; where these do not either, the last part gets what
    is left, as in the published layouts of DeepSeek-V3.
    """
    if layers % chunks == 0:
        return []
    each, left = divmod(layers + 2, chunks)
    if not left:
        return [each - 1, *[each] * (chunks - 2), each - 1]
    full = -(-layers // chunks)
    last = layers - full * (chunks - 1)
    return [*[full] * (chunks - 1), last] if last >= 0 else []


def pipeline(layers: int, ranks: int, chunks: int) -> dict[str, Any]:
    """`[parallel]` of a pipeline of so many ranks, each with so many parts of the model.

    As Megatron-core's: receives are overlapped where ranks have several parts; where they have one, hosts wait for what was
    sent and received together (`batch_p2p_sync`, on by default in its `ModelParallelConfig`).
    """
    if ranks == 1:
        return {}
    several: dict[str, Any] = {"chunks": chunks, "schedule": "interleaved", "overlap_p2p_comm": True}
    moves = several if chunks > 1 else {"batch_p2p_sync": True}
    return {"pipeline": ranks, **moves, "stages": stages(layers, ranks * chunks)}
