"""XLNet-base as a permutation language model over 512 tokens, as published for wikitext-2."""

from __future__ import annotations

from typing import Any

import torch

from steptime_lab.workloads.case import Case, GroupLike, Step, Workload
from steptime_lab.workloads.training import BATCHES, Inputs, random_source
from steptime_lab.workloads.transformers import pretrained_class, tokens, transformer_step

BASE = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 32000, "tokens": 512}
SMALL = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 97, "tokens": 16}

IGNORED = -100
"""The label that the loss leaves out."""

PREDICTED = 1 / 6
"""Share of tokens to predict: the library makes such batches with spans of 1 to 5 tokens in a context six times as long."""


def build(case: Case, group: GroupLike, device: torch.device) -> Step:
    """The step of `group.rank`."""
    source = random_source(group, device)
    inputs = [_inputs(case, device, source) for _ in range(BATCHES)]
    return transformer_step(case, group, device, lambda: _model(case.config), inputs)


def _inputs(case: Case, device: torch.device, source: torch.Generator) -> Inputs:
    """Tokens in a random order of prediction: a token sees those before it in that order, a predicted one not even itself."""
    count, shape = case.config["tokens"], (case.local_batch, case.config["tokens"])
    ids = tokens(shape, case.config["vocabulary"], device, source)
    predicted = torch.rand(shape, device=device, generator=source) < PREDICTED
    # Tokens that are not predicted come first: everyone sees them.
    order = torch.rand(shape, device=device, generator=source) + predicted
    hidden = (order[:, :, None] <= order[:, None, :]) & predicted[:, None, :]  # [batch, token, hidden from it]
    return {
        "input_ids": ids,
        "perm_mask": hidden.float(),
        "target_mapping": torch.eye(count, device=device).expand(shape[0], count, count).contiguous(),
        "labels": ids.masked_fill(~predicted, IGNORED),
    }


def _model(config: dict[str, Any]) -> torch.nn.Module:
    result: torch.nn.Module = pretrained_class("xlnet.modeling_xlnet", "XLNetLMHeadModel")(
        pretrained_class("xlnet.configuration_xlnet", "XLNetConfig")(
            n_layer=config["layers"],
            d_model=config["width"],
            d_inner=4 * config["width"],
            n_head=config["heads"],
            vocab_size=config["vocabulary"],
        )
    )
    for name, weight in result.named_parameters():
        # Of segments, which these batches have none of: without a gradient, DDP would wait for theirs in vain.
        weight.requires_grad_(not name.endswith(("seg_embed", "r_s_bias")))
    return result


def small_cases(ranks: int) -> tuple[Case, ...]:
    """Two narrow layers."""
    return (Case("xlnet", f"xlnet-small-r{ranks}", dict(SMALL), "fp32", 2 * ranks, ranks),)


WORKLOAD = Workload("xlnet", build, small_cases)
