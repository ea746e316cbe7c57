"""GPT as Megatron-LM trains it, from the sizes that published measurements give.

vTrain's measurements (Bang et al., MICRO 2024; Megatron-DeepSpeed on A100s) name batch sizes, the model's sizes and how the
GPUs divide the work, and leave the rest open. What their times imply is taken for it:

- Activations are not recomputed. The largest of them (2048 wide, 16 sequences of 1024 per GPU) take 34.05 ms more for every
  layer (24 layers against 12), which is 157 TFLOP/s of forward and backward; with recomputation it would be 210 TFLOP/s on a
  GPU of 312, elementwise work included.
- Attention is not fused: products and elementwise work at an A100's usual rates leave about 3 ms of the 17 ms that a layer
  takes for 8 sequences, which is what scores of 268 MB, written and read some ten times, take.
- fp16 weights with fp32 masters, fused Adam, dropout 0.1, GPT-2's vocabulary, embeddings tied: Megatron-LM's defaults.

Gradients are reduced while the last backward runs; Megatron-DeepSpeed may do so after it.
"""

from __future__ import annotations

from collections.abc import Mapping

from steptime.build.transformer_config import Parallelism, Transformer
from steptime.errors import InputError

MEASURED = "iteration time (ms)"
_GPUS, _BATCH, _PART = "# GPUs", "global batch", "micro batch"
_WIDTH, _HEADS, _LAYERS, _SEQUENCE = "hidden size", "attention heads", "# layers", "sequence length"
_TENSOR, _DATA, _PIPELINE = "tensor parallelism", "data parallelism", "pipeline parallelism"
_VOCABULARY = 50257  # GPT-2's


def megatron_gpt(row: Mapping[str, str]) -> Transformer:
    """The config of one row of a table with vTrain's columns; rows with pipeline parallelism cannot be built."""
    gpus, batch, part = (_count(row, key) for key in (_GPUS, _BATCH, _PART))
    tensor, data, pipeline = (_count(row, key) for key in (_TENSOR, _DATA, _PIPELINE))
    if pipeline != 1:
        raise InputError(f"{_PIPELINE} is {pipeline}; only 1 can be built")
    if tensor * data != gpus:
        raise InputError(f"{_TENSOR} {tensor} x {_DATA} {data} is not {_GPUS} {gpus}; expected the sizes to multiply up")
    if batch % (part * data):
        raise InputError(f"{_BATCH} {batch} does not divide by {_PART} {part} x {_DATA} {data}; expected a multiple")
    width, layers = _count(row, _WIDTH), _count(row, _LAYERS)
    return Transformer(
        name=f"gpt-{layers}x{width}-b{batch}-m{part}-t{tensor}-d{data}",
        layers=layers,
        width=width,
        heads=_count(row, _HEADS),
        sequence=_count(row, _SEQUENCE),
        vocabulary=_VOCABULARY,
        batch=batch,
        attention="unfused",
        dropout=0.1,
        precision="fp16",
        optimizer="adamw_fused",
        gradient_accumulation=batch // (part * data),
        parallel=Parallelism(data=data, tensor=tensor),
    )


def _count(row: Mapping[str, str], key: str) -> int:
    value = row.get(key, "")
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise InputError(f"{key} is {value!r}; expected a whole number of 1 or more")
    return int(value)
