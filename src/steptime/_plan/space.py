"""`layouts_of`: every way to train a Transformer on so many GPUs, and why the others are none.

A layout says how ranks share the model and its batch (`Parallelism`), how many samples go through a rank at once, and what is
computed again in backward. The global batch stays as it is, so that the shortest step is the highest throughput.

Left out because another layout of the list is never slower: GPipe (1F1B takes as long and holds fewer micro-batches). Left out
unless asked for: parts of a sequence shorter than `FEWEST_TOKENS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from steptime._build.transformer.config import VOCABULARY_MULTIPLE, Transformer
from steptime._build.transformer.parallelism import Parallelism, divisors
from steptime._build.transformer.recompute import FULL, NONE, OPS, SELECTIVE
from steptime.errors import InputError

# A rank of a shared sequence keeps at least so many tokens of it: below, attention is too short to hide what ranks exchange.
FEWEST_TOKENS = 2048
# Micro-batches larger than this many tokens keep a device no busier; they only hold more memory.
MOST_TOKENS = 65536
RECOMPUTATIONS = (NONE, SELECTIVE, OPS, FULL)
_MOST_CHUNKS = 4
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """How a step is shared and cut."""

    parallel: Parallelism
    micro_batch: int  # samples that go through a rank at once
    recompute: str = NONE

    def of(self, model: Transformer) -> Transformer:
        """The model trained so; an error where it cannot be."""
        parts = model.batch // (self.parallel.replicas * self.micro_batch)
        again: dict[str, Any] = {"recompute": self.recompute, "checkpointing": False}
        if self.recompute == NONE:
            again |= {"recompute_layers": 0, "recompute_every": 1}
        if self.recompute != OPS:
            again["recompute_keeps"] = ()
        # Megatron-LM pads the vocabulary on one rank as on several, so that layouts differ in nothing else.
        again["pad_vocab"] = model.pad_vocab or VOCABULARY_MULTIPLE
        return replace(model, parallel=self.parallel, gradient_accumulation=max(parts, 1), **again)

    def to_dict(self) -> dict[str, int | bool | str | list[int]]:
        """As a config says it."""
        return {**self.parallel.to_dict(), "micro_batch": self.micro_batch, "recompute": self.recompute}

    def __str__(self) -> str:
        """In a few words: `tensor 8 x pipeline 4 x fsdp 8, micro-batch 2, recompute full`."""
        parallel = self.parallel
        ways = [f"{key} {count}" for key in _SHOWN if (count := getattr(parallel, key)) > 1]
        words = [" x ".join(ways) or "one GPU"]
        words += ["sequence parallel"] * parallel.sequence + [f"ZeRO {parallel.zero}"] * bool(parallel.zero)
        words += [f"{parallel.chunks} chunks"] * (parallel.chunks > 1) + [f"micro-batch {self.micro_batch}"]
        return ", ".join(words + [f"recompute {self.recompute}"] * (self.recompute != NONE))

    @property
    def short(self) -> str:
        """In as few letters as tables have: `tp8 pp4 fsdp8 sp mb2 full`."""
        parallel = self.parallel
        words = [f"{word}{count}" for key, word in _SHORT.items() if (count := getattr(parallel, key)) > 1]
        words += ["sp"] * parallel.sequence + [f"z{parallel.zero}"] * bool(parallel.zero)
        words += [f"v{parallel.chunks}"] * (parallel.chunks > 1)
        return " ".join([*words, f"mb{self.micro_batch}"] + [self.recompute] * (self.recompute != NONE))


_SHORT = {"tensor": "tp", "context": "cp", "pipeline": "pp", "expert": "ep", "fsdp": "fsdp", "data": "dp"}
SHORT_WORDS = "tp tensor, cp context, pp pipeline, ep expert, dp data, sp sequence parallel, z ZeRO, v chunks, mb micro-batch"
_SHOWN = ("tensor", "context", "pipeline", "expert", "fsdp", "data")


@dataclass(frozen=True)
class Choices:
    """What a search may choose of each part; None: whatever divides."""

    data: Sequence[int] | None = None
    fsdp: Sequence[int] | None = None
    tensor: Sequence[int] | None = None
    pipeline: Sequence[int] | None = None
    context: Sequence[int] | None = None
    expert: Sequence[int] | None = None
    chunks: Sequence[int] | None = None
    zero: Sequence[int] | None = None
    sequence: Sequence[bool] | None = None
    micro_batch: Sequence[int] | None = None
    recompute: Sequence[str] | None = None
    expert_tensor: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            values = getattr(self, each.name)
            if values is not None and not values:
                raise InputError(f"{each.name}: nothing to choose from; give at least one value, or leave it out")
        for key in ("data", "fsdp", "tensor", "pipeline", "context", "expert", "chunks", "micro_batch", "expert_tensor"):
            for value in getattr(self, key) or ():
                if type(value) is not int or value < 1:
                    raise InputError(f"{key} {value!r}: expected whole numbers of 1 or more")
        for name in self.recompute or ():
            if name not in RECOMPUTATIONS:
                raise InputError(f"recompute {name!r}: expected {', '.join(RECOMPUTATIONS[:-1])} or {RECOMPUTATIONS[-1]}")
        for value in self.zero or ():
            if value not in range(3):
                raise InputError(f"zero {value!r}: expected 0, 1 or 2")

    def of(self, key: str, usual: Sequence[int]) -> list[int]:
        """The usual values that may be chosen."""
        given = getattr(self, key)
        return [each for each in usual if given is None or each in given]


@dataclass(frozen=True)
class Space:
    """All layouts of a search, and how many there are none for each reason."""

    layouts: tuple[ModelLayout, ...]
    refused: Mapping[str, int] = field(default_factory=dict)  # reason, of the first it was met with -> how many


def layouts_of(model: Transformer, gpus: int, choices: Choices | None = None) -> Space:
    """The layouts of a model on so many GPUs; an error where there is none."""
    choices = choices or Choices()
    _check_degrees(gpus, choices)
    layouts: list[ModelLayout] = []
    refused: dict[str, tuple[str, int]] = {}
    for parallel in _parallelisms(model, gpus, choices):
        there, reason = _cut(model, parallel, choices)
        layouts += there
        if not there:
            key = _NUMBERS.sub("#", reason)
            first, count = refused.get(key, (reason, 0))
            refused[key] = first, count + 1
    reasons = dict(sorted(refused.values(), key=lambda each: -each[1]))
    if not layouts:
        why = next(iter(reasons), "what was chosen does not multiply to them")
        raise InputError(f"{model.title} has no layout on {gpus} GPUs: {why}")
    return Space(tuple(layouts), reasons)


def _check_degrees(gpus: int, choices: Choices) -> None:
    """An error where what is fixed does not divide the GPUs."""
    if gpus < 1:
        raise InputError(f"--gpus {gpus}: expected 1 or more")
    for key in ("data", "fsdp", "tensor", "pipeline", "context"):
        for value in getattr(choices, key) or ():
            if gpus % value:
                raise InputError(
                    f"--{key} {value} does not divide {gpus} GPUs; give one of {', '.join(map(str, divisors(gpus)))}"
                )


def _parallelisms(model: Transformer, gpus: int, choices: Choices) -> Iterator[Parallelism]:
    """All that multiply to the GPUs."""
    for tensor in choices.of("tensor", divisors(gpus)):
        for pipeline in choices.of("pipeline", divisors(gpus // tensor)):
            for context in _contexts(model, gpus // tensor // pipeline, choices):
                replicas = gpus // tensor // pipeline // context
                for fsdp in choices.of("fsdp", divisors(replicas)):
                    if choices.data is None or replicas // fsdp in choices.data:
                        wide = model.parallel.grad_reduce_in_fp32
                        shared = Parallelism(replicas // fsdp, fsdp, tensor, pipeline, context, grad_reduce_in_fp32=wide)
                        yield from _variants(model, shared, choices)


def _contexts(model: Transformer, ranks: int, choices: Choices) -> list[int]:
    """Parts of a sequence: as many as are asked for, or as leave each rank a fair part."""
    usual = [each for each in divisors(ranks) if choices.context or each == 1 or model.sequence // each >= FEWEST_TOKENS]
    return choices.of("context", usual)


def _variants(model: Transformer, shared: Parallelism, choices: Choices) -> Iterator[Parallelism]:
    """What else can be chosen of a way to share: tokens between matrices, optimiser state, chunks of a pipeline."""
    sequences = [each for each in (False, True) if choices.sequence is None or each in choices.sequence]
    stages = model.layers // shared.pipeline if model.layers % shared.pipeline == 0 else 1
    chunks = [each for each in divisors(stages) if each <= _MOST_CHUNKS or choices.chunks]
    options = (
        sequences if shared.tensor > 1 else [False],
        # In a pipeline, ZeRO 2 takes as long as ZeRO 1, and holds less only where chunks have their backward passes in a row:
        # there for who asks for it.
        choices.of("zero", (0, 1, 2) if shared.pipeline == 1 or choices.zero else (0, 1))
        if shared.fsdp == 1 and shared.data > 1
        else [0],
        choices.of("chunks", chunks) if shared.pipeline > 1 else [1],
        _experts(model, shared, choices),
    )
    for sequence, zero, parts, (expert, split) in product(*options):
        schedule = "interleaved" if parts > 1 else "1f1b"
        yield replace(shared, sequence=sequence, zero=zero, chunks=parts, schedule=schedule, expert=expert, expert_tensor=split)


def _experts(model: Transformer, shared: Parallelism, choices: Choices) -> list[tuple[int, int]]:
    """Among how many ranks of a stage a layer's experts can be dealt out, and by how many each is split."""
    if not model.experts.count:
        return [(each, 1) for each in choices.of("expert", [1])]
    splits = dict.fromkeys(choices.of("expert_tensor", (1, shared.tensor)))
    dealt = choices.of("expert", divisors(model.experts.count))
    return [(each, split) for split in splits for each in dealt if (shared.in_stage // split) % each == 0]


def _cut(model: Transformer, parallel: Parallelism, choices: Choices) -> tuple[list[ModelLayout], str]:
    """The micro-batches and recomputations of one way to share a model; where there are none, why."""
    if model.batch % parallel.replicas:
        fits = ", ".join(map(str, divisors(model.batch)))
        return [], (
            f"batch {model.batch} does not divide among {parallel.replicas} replicas (data x fsdp); replicas may be {fits}, "
            "or give another --batch"
        )
    share, tokens = model.batch // parallel.replicas, model.sequence // parallel.context
    usual = [each for each in divisors(share) if each == 1 or each * tokens <= MOST_TOKENS or choices.micro_batch]
    layouts, reason = [], f"micro-batches may be {', '.join(map(str, divisors(share)))}"
    for micro_batch in choices.of("micro_batch", usual):
        try:
            ModelLayout(parallel, micro_batch).of(model)
        except InputError as error:
            reason = str(error).removeprefix(f"{model.title}: ")
            continue
        layouts += [ModelLayout(parallel, micro_batch, again) for again in choices.recompute or _recomputations(model)]
    return layouts, reason


def _recomputations(model: Transformer) -> tuple[str, ...]:
    """Worth a try: fused attention keeps little, and is computed again anyway."""
    return tuple(each for each in RECOMPUTATIONS if each != SELECTIVE or model.kernels == "unfused")
