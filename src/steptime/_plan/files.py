"""The winner as files: a config of ours, and a job config of torchtitan.

Keys of torchtitan's are those of its torchtitan/config/job_config.py (github.com/pytorch/torchtitan at 000204a4). It has no
ZeRO 1 or 2, always runs sequence parallelism beside tensor parallelism, and counts micro-batches of a pipeline otherwise than
those it accumulates over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime._build.transformer.config import Transformer
from steptime._build.transformer.recompute import FULL, NONE, OPS
from steptime._plan.space import ModelLayout
from steptime.errors import InputError

_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
_ROTATIONS = {"all_gather": "allgather", "all_to_all": "alltoall"}


def config_text(model: Transformer, layout: ModelLayout, comment: str) -> str:
    """The model with a layout, as `steptime predict` reads it."""
    return toml_text(layout.of(model).to_dict(), comment)


def torchtitan_text(model: Transformer, layout: ModelLayout, comment: str) -> str:
    """What torchtitan is told of a layout; the model itself is chosen by its own [model] section."""
    parallel = layout.parallel
    if parallel.zero:
        raise InputError(f"--torchtitan: torchtitan has no ZeRO {parallel.zero}, which {layout} needs; give --zero 0")
    share = model.batch // parallel.replicas
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": parallel.data,
        "data_parallel_shard_degree": parallel.fsdp,
        "tensor_parallel_degree": parallel.tensor,
        "pipeline_parallel_degree": parallel.pipeline,
        "context_parallel_degree": parallel.context,
        "expert_parallel_degree": parallel.expert,
    }
    if parallel.tp_comm_overlap:
        parallelism["enable_async_tensor_parallel"] = True
    if parallel.pipeline > 1:
        parallelism["pipeline_parallel_schedule"] = _SCHEDULES[parallel.schedule]
        parallelism["pipeline_parallel_layers_per_stage"] = -(-model.layers // (parallel.pipeline * parallel.chunks))
        parallelism["pipeline_parallel_microbatch_size"] = layout.micro_batch
    if parallel.context > 1:
        parallelism["context_parallel_rotate_method"] = _ROTATIONS.get(parallel.context_exchange, "alltoall")
    again = {NONE: {"mode": "none"}, FULL: {"mode": "full"}, OPS: {"mode": "selective", "selective_ac_option": "op"}}
    if layout.recompute not in again:
        raise InputError(
            f"--torchtitan: torchtitan has no recomputation as {layout.recompute!r}; give --recompute none,ops,full"
        )
    training = {
        "local_batch_size": share if parallel.pipeline > 1 else layout.micro_batch,
        "global_batch_size": model.batch,
        "seq_len": model.sequence,
    }
    return toml_text(
        {"training": training, "parallelism": parallelism, "activation_checkpoint": again[layout.recompute]}, comment
    )


def toml_text(values: Mapping[str, Any], comment: str) -> str:
    """Plain values as TOML under a comment, tables last."""
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    for name, table in values.items():
        if isinstance(table, Mapping) and table:
            lines += ["", f"[{_key(name)}]", *(f"{_key(key)} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        if any(isinstance(each, Mapping) for each in value):  # a table to a line
            return "[\n" + "".join(f"  {_value(each)},\n" for each in value) + "]"
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_value(each)}' for key, each in value.items())} }}"
    if isinstance(value, str):
        escaped = "".join(_ESCAPES.get(each, each if each.isprintable() else f"\\U{ord(each):08x}") for each in value)
        return f'"{escaped}"'
    return repr(value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _value(key)


_ESCAPES = {"\\": "\\\\", '"': '\\"'}
_BARE = re.compile(r"[A-Za-z0-9_-]+")
