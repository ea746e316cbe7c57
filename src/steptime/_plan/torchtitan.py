"""The winner as a configuration of torchtitan: a Python function that changes one of torchtitan's own.

Fields are those of torchtitan/config/configs.py and torchtitan/trainer.py (github.com/pytorch/torchtitan at b5bcd76c,
2026-08-21), where a run is a function that returns a `Trainer.Config`. It has no ZeRO 1 or 2, no recomputation of attention
alone and no tensor parallelism inside experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from steptime._build.transformer.config import Transformer
from steptime._build.transformer.recompute import FULL, NONE, OPS
from steptime._fuse.compiled import OFF
from steptime._plan.space import Choices, ModelLayout
from steptime.errors import InputError

RECOMPUTATIONS = {NONE: "None", FULL: "FullAC.Config()", OPS: "SelectiveAC.Config()"}
_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
# Parameters as products take them, by the precision of a config.
_PRECISIONS = {"bf16": "bfloat16", "fp32": "float32", "tf32": "float32"}
_STATES = {"bf16": "bfloat16", "fp32": "float32"}
# Functions of torchtitan.models.llama3.config_registry, by layers and width of their models.
_LLAMAS = {(32, 4096): "llama3_8b", (80, 8192): "llama3_70b", (126, 16384): "llama3_405b"}


def runnable(model: Transformer, choices: Choices) -> Choices:
    """Return the choices that torchtitan has; refuse a model or a choice that it cannot run, before anything is searched."""
    if model.fused:
        raise _refusal("layers of Transformer Engine (fused = true)", "set fused = false")
    if model.pattern or model.lora.rank or model.frozen:
        raise _refusal("hybrids, adapters and frozen parts in its recipes", "use --save instead")
    if model.precision not in _PRECISIONS:
        raise _refusal(f"precision {model.precision!r} as a field", f"use {' or '.join(map(repr, _PRECISIONS))}")
    if any(choices.zero or ()):
        raise _refusal(f"ZeRO {max(choices.zero or ())}", "give --zero 0, or leave it out")
    other = next((each for each in choices.recompute or () if each not in RECOMPUTATIONS), None)
    if other is not None:
        raise _refusal(f"recomputation as {other!r}", f"give --recompute {','.join(RECOMPUTATIONS)}")
    return replace(choices, zero=(0,), expert_tensor=(1,), recompute=choices.recompute or tuple(RECOMPUTATIONS))


def _refusal(missing: str, remedy: str) -> InputError:
    return InputError(f"--torchtitan: torchtitan has no {missing}; {remedy}")


def torchtitan_text(model: Transformer, layout: ModelLayout, comment: str) -> str:
    """Write the module of the configuration; it says how to start it."""
    own = _LLAMAS.get((model.layers, model.width))
    registry = f"from torchtitan.models.llama3.config_registry import {own or 'llama3_8b'} as base"
    note = "" if own else f"  # replace it: your model has {model.layers} layers of width {model.width}"
    lines = [
        f'"""{comment}',
        "",
        "In torchtitan's folder, if this file is planned.py there:",
        "",
        f"    NGPU={layout.parallel.ranks} MODULE=planned CONFIG=planned ./run_train.sh",
        "",
        "on several nodes as torchtitan's multinode_trainer.slurm does. Data, optimizer and loss are those of the base.",
        '"""',
        "",
        "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC",
        f"{registry}{note}",
        "",
        "",
        "def planned():",
        "    config = base()",
        *(f"    config.{field} = {value}" for field, value in _fields(model, layout)),
        "    return config",
    ]
    return "\n".join(lines) + "\n"


def _fields(model: Transformer, layout: ModelLayout) -> Iterator[tuple[str, str]]:
    """Fields of a `Trainer.Config` and the Python of their values."""
    parallel = layout.parallel
    yield "training.max_context_length", str(model.sequence)
    yield "training.num_tokens_per_microbatch_per_dp_rank", str(layout.micro_batch * model.sequence)
    yield "training.num_tokens_per_train_step", str(model.batch * model.sequence)
    yield "training.dtype", repr(_STATES[model.states])
    yield "training.mixed_precision_param", repr(_PRECISIONS[model.precision])
    yield "training.disable_cuda_graphs", "True"  # as it was predicted
    yield "parallelism.data_parallel_replicate_degree", str(parallel.data)
    yield "parallelism.data_parallel_shard_degree", str(parallel.fsdp)
    yield "parallelism.tensor_parallel_degree", str(parallel.tensor)
    yield "parallelism.enable_sequence_parallel", str(parallel.sequence)
    yield "parallelism.context_parallel_degree", str(parallel.context)
    yield "parallelism.expert_parallel_degree", str(parallel.expert)
    yield "parallelism.pipeline_parallel_degree", str(parallel.pipeline)
    if parallel.pipeline > 1:
        yield "parallelism.pipeline_parallel_schedule", repr(_SCHEDULES[parallel.schedule])
        yield "parallelism.pipeline_parallel_first_stage_less_layers", "0"
        yield "parallelism.pipeline_parallel_last_stage_less_layers", "0"
        yield "parallelism.num_pp_microbatches", str(model.batch // parallel.replicas // layout.micro_batch)
    if parallel.chunks > 1:
        yield "parallelism.pipeline_parallel_layers_per_stage", str(model.layers // (parallel.pipeline * parallel.chunks))
    yield "activation_checkpoint", RECOMPUTATIONS[layout.recompute]
    yield "compile.enable", str(model.compile != OFF)
