"""Tables of a config besides its parallelism, and names of parts: experts, latent attention, adapters, Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from steptime._build.transformer.parallelism import Parallelism, dividing

PATTERN = {"M": "mamba alone", "*": "attention alone", "-": "dense alone", "E": "experts alone"}
"""What a layer of a hybrid is by its letter, as Megatron-core has them."""

FROZEN_PARTS = ("embedding", "attention", "feed_forward", "norms", "head")

_SCORES = ("softmax", "sigmoid")
EXCHANGES = ALL_TO_ALL, FUSED = "all_to_all", "fused"
_MOST = 2**31
# Ten times the widest that was published (DeepSeek-V3, arXiv 2412.19437: queries of rank 1,536).
_MOST_LATENT = 1 << 14
_MOST_IMBALANCE = 1024.0
# Of a layer: models have hundreds; every one of them has weights, which are written one by one.
_MOST_EXPERTS = 1 << 14


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer's feed-forward half; none where `count` is 0."""

    count: int = 0
    top_k: int = 1  # experts of a token
    width: int = 0  # inner width of an expert; 0: the feed-forward's
    shared: int = 0  # inner width of the experts that every token sees, together
    every: int = 1  # 2: every second layer has experts, the first of two is dense
    first_dense: int = 0  # layers before the first that may have experts
    scores: str = "softmax"  # how the router scores experts, in fp32; the chosen ones' are divided by their sum
    capacity: float = 0.0  # rows of an expert over the mean, others are dropped; 0: no token is dropped
    imbalance: float = 1.0  # tokens of the busiest rank of an expert-parallel group over the mean
    exchange: str = ALL_TO_ALL  # among ranks: every copy of a token, or with fused layers a token once to every rank (DeepEP)

    def of_layer(self, index: int) -> bool:
        """Whether a layer has experts."""
        return bool(self.count) and index >= self.first_dense and (index + 1) % self.every == 0

    def wrong_values(self) -> Iterator[str]:
        """Values out of their ranges."""
        least = {"count": 0, "top_k": 1, "width": 0, "shared": 0, "every": 1, "first_dense": 0}
        for key, low in least.items():
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value < _MOST:
                yield f"experts.{key} is {value!r}; expected a whole number of {low} or more"
            elif key == "count" and value > _MOST_EXPERTS:
                yield f"experts.count is {value}; expected a whole number from 0 to {_MOST_EXPERTS}"
        imbalance: object = self.imbalance  # what a file says may be anything
        if isinstance(imbalance, bool) or not isinstance(imbalance, int | float) or not 1 <= imbalance <= _MOST_IMBALANCE:
            yield f"experts.imbalance is {imbalance!r}; expected a number from 1 to {_MOST_IMBALANCE:g}"
        capacity: object = self.capacity
        if isinstance(capacity, bool) or not isinstance(capacity, int | float) or not 0 <= capacity <= _MOST_IMBALANCE:
            yield f"experts.capacity is {capacity!r}; expected 0 (no token is dropped) or a number up to {_MOST_IMBALANCE:g}"
        elif self.capacity and self.imbalance != 1:
            yield "experts.capacity gives every expert as many rows; leave out experts.imbalance"
        for key, known in (("scores", _SCORES), ("exchange", EXCHANGES)):
            if getattr(self, key) not in known:
                yield f"experts.{key} is {getattr(self, key)!r}; expected {' or '.join(known)}"

    def ranks_of_token(self, ways: int) -> float:
        """Ranks that hold one of a token's experts or more, on average over all choices of experts."""
        elsewhere = self.count - self.count // ways
        nobody = math.prod((elsewhere - chosen) / (self.count - chosen) for chosen in range(self.top_k))
        return ways * (1.0 - max(nobody, 0.0))

    def wrong_together(self, parallel: Parallelism, width: int) -> Iterator[str]:
        """What does not go with the rest of a config; `width` is the inner width of an expert."""
        if not self.count:
            if parallel.expert > 1 or parallel.expert_tensor > 1:
                yield "parallel.expert and expert_tensor share experts, the config has none; give [experts] or leave them out"
            return
        if self.top_k > self.count:
            yield f"experts.top_k {self.top_k} of {self.count} experts; give at most {self.count}"
        for what, size, by, parts in (
            ("experts.count", self.count, "parallel.expert", parallel.expert),
            ("experts.width", width, "parallel.expert_tensor", parallel.expert_tensor),
            ("experts.shared", self.shared, "parallel.tensor", parallel.tensor),
        ):
            if size % parts:
                yield f"{what} {size} does not divide by {by} {parts}; give {dividing(size)}"
        if parallel.tensor > parallel.expert_tensor and not (parallel.sequence and parallel.expert > 1):
            yield (
                f"parallel.tensor is {parallel.tensor} and experts are whole, which needs tokens of every rank's own: give "
                f"parallel.sequence = true and parallel.expert of 2 or more, or parallel.expert_tensor = {parallel.tensor}"
            )


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Keys and values by way of a narrow layer, and queries too where `q_rank` is not 0; none where `kv_rank` is 0.

    Positions turn `rope` elements of a head of queries, and as many of a key that all heads share, but not the `nope` others.
    """

    kv_rank: int = 0
    q_rank: int = 0
    nope: int = 128
    rope: int = 64
    value: int = 128
    fused_rope: bool = (
        False  # with fused layers: Megatron-core's kernels turn queries in place and join keys (experimental there)
    )

    def wrong_values(self) -> Iterator[str]:
        """Values out of their ranges."""
        fused: object = self.fused_rope  # what a file says may be anything
        if not isinstance(fused, bool):
            yield f"latent_attention.fused_rope is {fused!r}; expected true or false"
        for key in ("kv_rank", "q_rank", "nope", "rope", "value"):
            value, low = getattr(self, key), 0 if key.endswith("rank") else 1
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _MOST_LATENT:
                yield f"latent_attention.{key} is {value!r}; expected a whole number of {low} or more, at most {_MOST_LATENT}"
            elif key == "rope" and value % 2:
                yield f"latent_attention.rope is {value}; rotary positions turn pairs, give an even width"


LORA_TARGETS = ("query", "key", "value", "output", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Lora:
    """Narrow layers beside some of every layer's matrices, which alone are trained; none where `rank` is 0."""

    rank: int = 0
    targets: tuple[str, ...] = ("query", "value")

    def wrong_values(self) -> Iterator[str]:
        """Values out of their ranges."""
        rank: object = self.rank  # what a file says may be anything
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < _MOST:
            yield f"lora.rank is {rank!r}; expected a whole number of 0 or more"
        targets: object = self.targets
        if not isinstance(targets, tuple) or not targets or not all(each in LORA_TARGETS for each in targets):
            yield f"lora.targets is {targets!r}; expected some of {', '.join(LORA_TARGETS)}"


@dataclass(frozen=True, slots=True)
class Mamba:
    """The layers of a hybrid that scan (Mamba-2); none where `heads` is 0."""

    heads: int = 0
    head_width: int = 64
    state: int = 128
    groups: int = 8  # of heads that share the state's projections
    taps: int = 4  # of the convolution over time
    chunk: int = 128  # tokens that the scan takes together

    @property
    def inner(self) -> int:
        """Width inside a layer."""
        return self.heads * self.head_width

    def wrong_values(self) -> Iterator[str]:
        """Values out of their ranges."""
        for key in ("heads", "head_width", "state", "groups", "taps", "chunk"):
            value, low = getattr(self, key), 0 if key == "heads" else 1
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value < _MOST:
                yield f"mamba.{key} is {value!r}; expected a whole number of {low} or more"
