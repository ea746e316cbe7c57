"""BERT-base classifying texts of 512 tokens into 5 classes, as published for yelp_review_full."""

from __future__ import annotations

from typing import Any

import torch

from steptime_lab.workloads.case import Case, GroupLike, Step, Workload
from steptime_lab.workloads.training import BATCHES, Inputs, random_source
from steptime_lab.workloads.transformers import pretrained_class, tokens, transformer_step

BASE = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 28996, "tokens": 512, "classes": 5}  # base-cased
SMALL = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 97, "tokens": 16, "classes": 5}


def build(case: Case, group: GroupLike, device: torch.device) -> Step:
    """The step of `group.rank`: whole texts, so no padding mask."""
    config, source = case.config, random_source(group, device)
    inputs: list[Inputs] = [
        {
            "input_ids": tokens((case.local_batch, config["tokens"]), config["vocabulary"], device, source),
            "labels": tokens((case.local_batch,), config["classes"], device, source),
        }
        for _ in range(BATCHES)
    ]
    return transformer_step(case, group, device, lambda: _model(config), inputs)


def _model(config: dict[str, Any]) -> torch.nn.Module:
    result: torch.nn.Module = pretrained_class("bert.modeling_bert", "BertForSequenceClassification")(
        pretrained_class("bert.configuration_bert", "BertConfig")(
            num_hidden_layers=config["layers"],
            hidden_size=config["width"],
            intermediate_size=4 * config["width"],
            num_attention_heads=config["heads"],
            vocab_size=config["vocabulary"],
            num_labels=config["classes"],
            problem_type="single_label_classification",
            pad_token_id=None,  # with one, every step would look for it among the tokens and wait for the device
        )
    )
    return result


def small_cases(ranks: int) -> tuple[Case, ...]:
    """Two narrow layers."""
    return (Case("bert", f"bert-small-r{ranks}", dict(SMALL), "fp32", 2 * ranks, ranks),)


WORKLOAD = Workload("bert", build, small_cases)
