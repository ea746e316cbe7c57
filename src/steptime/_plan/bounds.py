"""`Bounds`: a closed form of a layout's step and memory, from what its layers take: quick, and about right.

A stage computes its layers for every micro-batch; gathers and reductions of FSDP run beside the layer at hand, slow it, and
show where they take longer; so do gradients of copies, which are reduced beside the last backward pass, and parameters that
ZeRO gathers beside the first forward pass. Stages of a pipeline wait for each other (`pipelined_ns`). What kernels and
collectives take is asked of the models that `predict` asks. It is no lower bound: how far it is off is measured by playing the
best layouts (`steptime._plan.search`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property, partial

import numpy as np

from steptime._build.emit.gradients import BUCKET_BYTES, IN_PLACE_BUCKET
from steptime._build.emit.writer import DATA, FSDP
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism, groups_of
from steptime._build.transformer.zero import least_bucket
from steptime._hardware.fabric import GroupPlacement
from steptime._models.collectives.message import Message, Messages
from steptime._plan.layers import TIMED_SHARDS, ActivationKey, Activations, LayerKey, LayerSizes, LayerTimes, StateKey, States
from steptime._plan.pipelines import ChunkTimes, StageTimes, pipelined_ns
from steptime._plan.space import ModelLayout
from steptime._platforms.platform import Platform
from steptime._units import dtype_bytes

PIPELINE = "pipeline"
# Stages are gone through pass by pass where a step without any waiting is less than so many times the shortest.
_WORTH_PLAYING = 1.5


@dataclass(frozen=True)
class Wires:
    """How long gradients and parameters take between ranks, by the fabric's models; each question once."""

    platform: Platform
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)
    _places: dict[tuple[object, ...], GroupPlacement | None] = field(default_factory=dict)

    def ns(self, kind: str, nbytes: float, parallel: Parallelism, group: str) -> float:
        """Of one collective of a group while all other groups like it run theirs."""
        place = (group, parallel.data, parallel.fsdp, parallel.tensor, parallel.context, parallel.pipeline)
        key = (kind, round(nbytes), *place)
        if key not in self._known:
            if place not in self._places:
                self._places[place] = self._placed(parallel, group)
            self._known[key] = self._asked(kind, round(nbytes), self._places[place])
        return self._known[key]

    @cached_property
    def moving(self) -> float:
        """How many times as long a collective takes while kernels run beside it."""
        return float(self.platform.overlap.moving_factor(2, beside=1.0, busy=True))

    def _placed(self, parallel: Parallelism, group: str) -> GroupPlacement | None:
        sets = _neighbours(parallel) if group == PIPELINE else groups_of(parallel).get(group, ())
        return self.platform.fabric.placed(sets[0], sets[1:]) if sets and self.platform.fabric is not None else None

    def _asked(self, kind: str, nbytes: int, place: GroupPlacement | None) -> float:
        if place is None or self.platform.fabric is None:
            return 0.0
        return float(self.platform.fabric.times_at(Messages.of([Message(kind, place.ranks, nbytes)]), place).ns[0])


def _neighbours(parallel: Parallelism) -> tuple[tuple[int, ...], ...]:
    """Ranks of the first stage, each with the one of the second that it sends to."""
    return tuple((rank, rank + parallel.in_stage) for rank in range(parallel.in_stage)) if parallel.pipeline > 1 else ()


@dataclass(frozen=True)
class Bounds:
    """Closed forms over what was asked about layers."""

    model: Transformer
    wires: Wires
    times: dict[LayerKey, LayerTimes]  # asked for where memory leaves a layout
    sizes: Mapping[Parallelism, LayerSizes]
    activations: Mapping[ActivationKey, Activations]
    states: Mapping[StateKey, States]

    def peak_bytes(self, layout: ModelLayout) -> float:
        """Of the fullest rank: of a pipeline the first, which holds most micro-batches, or the last, which has the head."""
        parallel, samples = layout.parallel, layout.micro_batch
        held, state = self.activations[ActivationKey.of(layout)], self.states[StateKey.of(layout)]
        layers, shards = self._layers(parallel), _shards(parallel)
        static = layers * (state.layer_whole + state.layer_shared / shards)
        ends = state.rest_whole + state.rest_shared / shards
        gathered = self._gathered_bytes(layout)

        def stage(in_flight: float, head: bool) -> float:
            passing = held.whole + samples * (in_flight * layers * held.layer + held.rest * head) + gathered
            return static + ends * (1.0 if parallel.pipeline == 1 else 0.5) + max(passing, state.passing * head)

        return max(stage(_in_flight(parallel, self._parts(layout)), head=parallel.pipeline == 1), stage(1.0, head=True))

    def _layers(self, parallel: Parallelism) -> int:
        """Of the longest stage."""
        return -(-self.model.layers // parallel.pipeline)

    def _parts(self, layout: ModelLayout) -> int:
        """Micro-batches of a rank."""
        return self.model.batch // (layout.parallel.replicas * layout.micro_batch)

    def _gathered_bytes(self, layout: ModelLayout) -> float:
        """What FSDP holds whole: a layer, the next one, and what is in none."""
        if layout.parallel.fsdp == 1:
            return 0.0
        sizes = self.sizes[LayerKey.of(layout).shared]
        return float((2 * sizes.layer + sizes.rest) * dtype_bytes(self.model.dtype))

    def steps_ns(self, layouts: Iterable[ModelLayout]) -> dict[ModelLayout, float]:
        """About what `predict` says of each layout."""
        passes = {layout: self._passes(layout) for layout in layouts}
        after = {layout: self._optimizer_ns(layout) + self._last_ns(layout) for layout in passes}
        result = {
            layout: each.least_ns(layout.parallel, self._parts(layout)) + after[layout] for layout, each in passes.items()
        }
        least = min(result.values(), default=0.0)
        alike: dict[tuple[object, ...], list[ModelLayout]] = {}
        for layout, step in result.items():
            parallel = layout.parallel
            if parallel.pipeline > 1 and step < _WORTH_PLAYING * least:
                alike.setdefault((parallel.pipeline, parallel.chunks, self._parts(layout)), []).append(layout)
        for every in alike.values():
            times = StageTimes(*np.array([astuple(passes[layout]) for layout in every]).T)
            beside = np.array([self.times[LayerKey.of(layout)].beside for layout in every])
            computed = pipelined_ns(every[0].parallel, self._parts(every[0]), times, beside)
            result |= {layout: step + after[layout] for layout, step in zip(every, computed.tolist(), strict=True)}
        return result

    def _optimizer_ns(self, layout: ModelLayout) -> float:
        times, parallel = self.times[LayerKey.of(layout)], layout.parallel
        whole = self._layers(parallel) * times.layer.optimizer_ns + times.rest.optimizer_ns
        return whole * _sampled_shards(parallel) / _shards(parallel)

    def _passes(self, layout: ModelLayout) -> ChunkTimes:
        """One micro-batch through a chunk of a stage, with what FSDP and copies of the model exchange beside it."""
        parallel, times = layout.parallel, self.times[LayerKey.of(layout)]
        sizes = self.sizes[LayerKey.of(layout).shared]
        layers, together = self._layers(parallel), partial(self._together_ns, times.beside)
        forward = layers * (times.layer.forward_ns - times.hidden.forward_ns)
        backward = layers * (times.layer.backward_ns - times.hidden.backward_ns)
        first, last, rest = forward, backward, times.rest
        head_forward, head_backward = rest.forward_ns, rest.backward_ns
        if parallel.fsdp > 1:
            gathered, reduced, summed = (layers * each for each in self._sharded_ns(layout, sizes.layer))
            first = forward = together(forward, gathered, gathered)
            last = backward = together(backward, max(gathered, reduced + summed), max(gathered, reduced, summed))
            # What is in no layer is gathered before and reduced after everything else.
            gathered, reduced, summed = self._sharded_ns(layout, sizes.rest)
            head_forward, head_backward = head_forward + gathered, head_backward + reduced + summed
        elif parallel.data * parallel.context > 1:
            reduced, gathered = self._copied_ns(layout, layers * sizes.layer + sizes.rest)
            first, last = together(forward, gathered, gathered), together(backward, reduced, reduced)
            backward = last if parallel.zero > 1 else backward
        return ChunkTimes(
            forward_ns=forward / parallel.chunks,
            first_ns=first / parallel.chunks,
            backward_ns=backward / parallel.chunks,
            last_ns=last / parallel.chunks,
            head_forward_ns=head_forward,
            head_backward_ns=head_backward,
            sent_ns=self._sent_ns(layout),
        )

    def _together_ns(self, beside: float, compute_ns: float, held_ns: float, longest_ns: float) -> float:
        """Layers with collectives beside them, which hold SMs for some time; the longest of them may outlast the layers."""
        moving = self.wires.moving
        slowed = min(held_ns * moving, compute_ns * beside)
        return max(compute_ns + slowed * (1.0 - 1.0 / beside), longest_ns * moving)

    def _sharded_ns(self, layout: ModelLayout, elements: float) -> tuple[float, float, float]:
        """To gather a unit of FSDP, to reduce its gradients, and then to sum them over copies."""
        parallel, wires = layout.parallel, self.wires
        gathered = wires.ns("all_gather", elements * dtype_bytes(self.model.dtype), parallel, FSDP)
        reduced = wires.ns("reduce_scatter", elements * self._reduced_bytes, parallel, FSDP)
        shard = elements * self._reduced_bytes / (parallel.fsdp * parallel.context)
        return gathered, reduced, wires.ns("all_reduce", shard, parallel, DATA)

    def _copied_ns(self, layout: ModelLayout, elements: float) -> tuple[float, float]:
        """Of copies of the model: to sum or scatter gradients bucket by bucket, and to gather parameters where ZeRO does."""
        parallel, wires, width = layout.parallel, self.wires, dtype_bytes(self.model.dtype)
        bucket = min(self._bucket(layout), elements)
        reduced = wires.ns("reduce_scatter" if parallel.zero else "all_reduce", bucket * self._reduced_bytes, parallel, DATA)
        if not parallel.zero:
            return elements / bucket * reduced, 0.0
        return elements / bucket * reduced, elements / bucket * wires.ns("all_gather", bucket * width, parallel, DATA)

    def _last_ns(self, layout: ModelLayout) -> float:
        """Of copies: the bucket that is full when backward is over."""
        parallel, wires = layout.parallel, self.wires
        if parallel.fsdp > 1 or parallel.data * parallel.context == 1:
            return 0.0
        kind = "reduce_scatter" if parallel.zero else "all_reduce"
        return wires.ns(kind, self._bucket(layout) * self._reduced_bytes, parallel, DATA)

    def _bucket(self, layout: ModelLayout) -> float:
        """Elements of a bucket of gradients: a parameter that is larger has one of its own."""
        parallel, largest = layout.parallel, self.sizes[LayerKey.of(layout).shared].largest
        if parallel.zero:
            return max(least_bucket(parallel.data * parallel.context), largest)
        in_place = self.model.reduce_dtype != self.model.dtype
        return max(IN_PLACE_BUCKET if in_place else BUCKET_BYTES / dtype_bytes(self.model.dtype), largest)

    @property
    def _reduced_bytes(self) -> int:
        """Of an element of a gradient that ranks sum."""
        return dtype_bytes(self.model.reduce_dtype)

    def _sent_ns(self, layout: ModelLayout) -> float:
        """From a stage to the next."""
        parallel, model = layout.parallel, self.model
        if parallel.pipeline == 1:
            return 0.0
        tokens = layout.micro_batch * model.sequence // parallel.context
        nbytes = tokens * model.width * dtype_bytes(model.dtype) / (parallel.tensor if parallel.sequence else 1)
        return self.wires.ns("send_recv", nbytes, parallel, PIPELINE)


def _shards(parallel: Parallelism) -> int:
    """Ranks that share the optimiser's state."""
    if parallel.fsdp > 1:
        return parallel.fsdp * parallel.context
    return parallel.data * parallel.context if parallel.zero else 1


def _sampled_shards(parallel: Parallelism) -> int:
    """And that shared it where the optimiser was asked for."""
    return TIMED_SHARDS if parallel.fsdp > 1 else 1


def _in_flight(parallel: Parallelism, parts: int) -> float:
    """Micro-batches that the first stage holds.

    Interleaving begins later chunks before the first is through: Narayanan et al., arXiv 2104.04473, section 2.2.
    """
    more = (parallel.pipeline - 1) / (parallel.pipeline * parallel.chunks) if parallel.chunks > 1 else 0.0
    return min(parts, parallel.pipeline) * (1.0 + more)
