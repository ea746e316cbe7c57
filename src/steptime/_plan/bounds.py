"""`Bounds`: a closed form of a layout's step and memory, from what its layers take: quick, and about right.

A stage computes its layers for every micro-batch; gathers and reductions of FSDP run beside the layer at hand and show where
they take longer; gradients of copies are summed beside the last backward pass; a pipeline waits for its first and last
micro-batch to pass all other stages. What kernels and collectives take is asked of the models that `predict` asks. How far the
closed form is off is measured by playing the best layouts (`steptime._plan.search`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from steptime._build.emit.writer import DATA, FSDP
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism, groups_of
from steptime._models.collectives.message import Message
from steptime._plan.layers import TIMED_SHARDS, ActivationKey, Activations, LayerKey, LayerSizes, LayerTimes, StateKey, States
from steptime._plan.space import ModelLayout
from steptime._platforms.platform import Platform
from steptime._units import dtype_bytes

PIPELINE = "pipeline"
_REDUCED_BYTES = 4  # FSDP reduces gradients in fp32
# DistributedDataParallel's buckets: the last one is summed when backward is over.
_BUCKET_BYTES = 25 << 20
_LONG_NS = 1e6  # of a kernel that fills the device


@dataclass(frozen=True)
class Wires:
    """How long gradients and parameters take between ranks, by the fabric's models; each question once."""

    platform: Platform
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def ns(self, kind: str, nbytes: float, parallel: Parallelism, group: str) -> float:
        """Of one collective of a group while all other groups like it run theirs."""
        key = (kind, round(nbytes), group, parallel.data, parallel.fsdp, parallel.tensor, parallel.context, parallel.pipeline)
        if key not in self._known:
            self._known[key] = self._asked(kind, round(nbytes), parallel, group)
        return self._known[key]

    @property
    def beside(self) -> float:
        """How many times as long kernels take while a collective runs beside them."""
        return float(self.platform.overlap.compute_factor(_LONG_NS, self.platform.device.limits.share, persistent=True))

    def _asked(self, kind: str, nbytes: int, parallel: Parallelism, group: str) -> float:
        sets = _neighbours(parallel) if group == PIPELINE else groups_of(parallel).get(group, ())
        if not sets or self.platform.fabric is None:
            return 0.0
        (answer,) = self.platform.fabric.estimates([Message(kind, len(sets[0]), nbytes)], sets[0], sets[1:])
        return answer.time_ns


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

    def step_ns(self, layout: ModelLayout) -> float:
        """About what `predict` says."""
        parallel = layout.parallel
        times, sizes = self.times[LayerKey.of(layout)], self.sizes[LayerKey.of(layout).shared]
        layers, parts = self._layers(parallel), self._parts(layout)
        stage, last = layers * self._layer_ns(layout), self._rest_ns(layout)
        stages = stage * parallel.pipeline + last
        longest = stage + last
        step = parts * longest + (stages - longest) / parallel.chunks + self._sent_ns(layout, parts)
        optimizer = (
            (layers * times.layer.optimizer_ns + times.rest.optimizer_ns) * _sampled_shards(parallel) / _shards(parallel)
        )
        return (
            step + optimizer + self._gradients_ns(layout, layers * sizes.layer + sizes.rest, layers * times.layer.backward_ns)
        )

    def _layer_ns(self, layout: ModelLayout) -> float:
        """One layer, one micro-batch, forward and backward, with what FSDP adds where it takes longer."""
        parallel, passes = layout.parallel, self.times[LayerKey.of(layout)].layer
        if parallel.fsdp == 1:
            return passes.forward_ns + passes.backward_ns
        gathered, reduced = self._sharded_ns(layout, self.sizes[LayerKey.of(layout).shared].layer)
        slower = self.wires.beside - 1.0
        forward = max(passes.forward_ns + slower * min(gathered, passes.forward_ns), gathered)
        hidden = max(gathered, reduced)
        backward = max(passes.backward_ns + slower * min(hidden, passes.backward_ns), hidden)
        return float(forward + backward)

    def _rest_ns(self, layout: ModelLayout) -> float:
        """What is in no layer: FSDP gathers it before and reduces it after everything else."""
        parallel, passes = layout.parallel, self.times[LayerKey.of(layout)].rest
        if parallel.fsdp == 1:
            return passes.forward_ns + passes.backward_ns
        return (
            passes.forward_ns + passes.backward_ns + sum(self._sharded_ns(layout, self.sizes[LayerKey.of(layout).shared].rest))
        )

    def _sharded_ns(self, layout: ModelLayout, elements: float) -> tuple[float, float]:
        """To gather a unit of FSDP, and to reduce its gradients, over copies too."""
        parallel, wires = layout.parallel, self.wires
        gathered = wires.ns("all_gather", elements * dtype_bytes(self.model.dtype), parallel, FSDP)
        reduced = wires.ns("reduce_scatter", elements * _REDUCED_BYTES, parallel, FSDP)
        shard = elements * _REDUCED_BYTES / (parallel.fsdp * parallel.context)
        return gathered, max(reduced, wires.ns("all_reduce", shard, parallel, DATA))

    def _gradients_ns(self, layout: ModelLayout, elements: float, backward_ns: float) -> float:
        """Of copies of the model: what of their sum the last backward pass does not hide."""
        parallel, wires = layout.parallel, self.wires
        if parallel.fsdp > 1 or parallel.data * parallel.context == 1:
            return 0.0
        nbytes = elements * dtype_bytes(self.model.dtype)
        last = wires.ns("all_reduce", min(nbytes, _BUCKET_BYTES), parallel, DATA)
        if not parallel.zero:
            return max(wires.ns("all_reduce", nbytes, parallel, DATA) - backward_ns, last)
        reduced = wires.ns("reduce_scatter", nbytes, parallel, DATA)
        return max(reduced - backward_ns, last / 2) + wires.ns("all_gather", nbytes, parallel, DATA)

    def _sent_ns(self, layout: ModelLayout, parts: int) -> float:
        """Between stages: what fills and drains the pipeline, each way."""
        parallel, model = layout.parallel, self.model
        if parallel.pipeline == 1:
            return 0.0
        tokens = layout.micro_batch * model.sequence // parallel.context
        nbytes = tokens * model.width * dtype_bytes(model.dtype) / (parallel.tensor if parallel.sequence else 1)
        sent = self.wires.ns("send_recv", nbytes, parallel, PIPELINE)
        return 2 * sent * (parallel.pipeline - 1 + (parallel.chunks - 1) * parts)


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
