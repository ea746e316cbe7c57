"""GPT-2 (base) labelling tokens of sentences padded to 128."""

from __future__ import annotations

from typing import Any

import torch

from steptime_lab.workloads.case import Case, GroupLike, Step, Workload
from steptime_lab.workloads.training import BATCHES, Inputs, random_source
from steptime_lab.workloads.transformers import pretrained_class, tokens, transformer_step

BASE = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "tokens": 128, "classes": 9}
SMALL = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 97, "tokens": 16, "classes": 9}

IGNORED = -100
"""The label that the loss leaves out."""


def build(case: Case, group: GroupLike, device: torch.device) -> Step:
    """The step of `group.rank`."""
    source = random_source(group, device)
    inputs = [_inputs(case, device, source) for _ in range(BATCHES)]
    return transformer_step(case, group, device, lambda: _model(case.config), inputs)


def _inputs(case: Case, device: torch.device, source: torch.Generator) -> Inputs:
    """Sentences of a quarter to all of the tokens, then padding.

    The mask is the [batch, 1, tokens, tokens] one that the library would make of a padding mask in every step, waiting for it.
    """
    config, shape = case.config, (case.local_batch, case.config["tokens"])
    lengths = torch.randint(config["tokens"] // 4, config["tokens"] + 1, (shape[0], 1), device=device, generator=source)
    position = torch.arange(config["tokens"], device=device)
    real = position < lengths  # [batch, tokens]
    causal = position <= position[:, None]  # [tokens, tokens]
    labels = tokens(shape, config["classes"], device, source).masked_fill(~real, IGNORED)
    return {
        "input_ids": tokens(shape, config["vocabulary"], device, source),
        "attention_mask": causal & real[:, None, None, :],
        "labels": labels,
    }


def _model(config: dict[str, Any]) -> torch.nn.Module:
    result: torch.nn.Module = pretrained_class("gpt2.modeling_gpt2", "GPT2ForTokenClassification")(
        pretrained_class("gpt2.configuration_gpt2", "GPT2Config")(
            n_layer=config["layers"],
            n_embd=config["width"],
            n_head=config["heads"],
            vocab_size=config["vocabulary"],
            num_labels=config["classes"],
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,  # keys and values of earlier tokens serve generation, not training
        )
    )
    return result


def small_cases(ranks: int) -> tuple[Case, ...]:
    """Two narrow layers."""
    return (Case("gpt2", f"gpt2-small-r{ranks}", dict(SMALL), "fp32", 2 * ranks, ranks),)


WORKLOAD = Workload("gpt2", build, small_cases)
