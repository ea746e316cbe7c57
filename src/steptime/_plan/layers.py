"""What one layer of a model takes, and what is in no layer: asked once for all layouts that run their layers alike.

Two short models, of one layer and of two, are built and their kernels, collectives and host times asked for, as `predict` does;
what the second has more is a layer's. A layer depends on how many ranks share its matrices, its tokens and its experts, on the
micro-batch and on what is computed again; not on how many stages or copies of the model there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.tape import Tape
from steptime._build.emit.writer import DATA, EXPERT_DATA, FSDP, GROUP
from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.fsdp import Unsharded
from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.parts import Experts
from steptime._build.transformer.recompute import NONE
from steptime._build.transformer.weights import Weights
from steptime._models.collectives.overlap import is_persistent
from steptime._models.memory.lifetimes import MemoryKind
from steptime._models.memory.peak import peak_memory
from steptime._plan.space import ModelLayout
from steptime._platforms.calibration import Calibration
from steptime._platforms.platform import Platform
from steptime._program.one_step import one_step
from steptime._program.program import Collective, Phase, Program, WorkKind
from steptime._sim.core.steady import Steady
from steptime._sim.core.timing import Timing
from steptime._sim.explain.activity import fold
from steptime._sim.modelled.step import ModelledStep, modelled

Answer = TypeVar("Answer")

_PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
# Ranks of FSDP in a sample of times: every layout with FSDP has as many.
TIMED_SHARDS = 2
# Ranks that share what is sharded, in a sample of memory: so many that a shard is small beside what passes.
_SHARDS = 8
# Layers and samples of a micro-batch, in a sample of activations.
_FEW, _SAMPLES = 2, 4
# Of the micro-batch at which it is asked what FSDP and recomputation add to a layer.
_USUAL_SAMPLES = 2
_STATIC = (MemoryKind.PARAMETERS, MemoryKind.OPTIMIZER_STATE, MemoryKind.GRADIENTS)
_SHARED_BY_ZERO: Mapping[int, tuple[MemoryKind, ...]] = {
    0: (),
    1: (MemoryKind.OPTIMIZER_STATE,),
    2: (MemoryKind.OPTIMIZER_STATE, MemoryKind.GRADIENTS),
}


@dataclass(frozen=True, slots=True)
class LayerKey:
    """What a layer's times depend on."""

    shared: Parallelism  # by tensor, context and expert parallelism, and whether FSDP copies parameters in and out
    micro_batch: int
    recompute: str

    @classmethod
    def of(cls, layout: ModelLayout) -> LayerKey:
        """Of the layers of a layout."""
        return cls(_with_fsdp(layout.parallel), layout.micro_batch, layout.recompute)

    @property
    def asked(self) -> tuple[LayerKey, ...]:
        """The layer as it is without FSDP and recomputation; and what those add, at one micro-batch for all.

        FSDP's copies do not depend on the micro-batch, and recomputation is as large a part of forward in all.
        """
        plain = replace(self, shared=_within_layers(self.shared), recompute=NONE)
        usual = replace(plain, micro_batch=_USUAL_SAMPLES)
        if self.shared.fsdp == 1 and self.recompute == NONE:
            return (plain,)
        return (plain, usual, replace(usual, shared=self.shared), replace(usual, recompute=self.recompute))


@cache
def _within_layers(parallel: Parallelism) -> Parallelism:
    """What ranks share of a layer itself; those that hold its experts are there too."""
    names = ("tensor", "context", "expert", "sequence", "context_exchange", "expert_tensor", "grad_reduce_in_fp32")
    together = parallel.tensor * parallel.context // parallel.expert_tensor
    kept: dict[str, Any] = {name: getattr(parallel, name) for name in names}
    return Parallelism(data=max(1, parallel.expert // together), **kept)


@cache
def _with_fsdp(parallel: Parallelism) -> Parallelism:
    alone = _within_layers(parallel)
    if parallel.fsdp == 1:
        return alone
    shared = alone.data % TIMED_SHARDS == 0  # ranks that hold experts may be those of FSDP
    return replace(alone, fsdp=TIMED_SHARDS, data=alone.data // TIMED_SHARDS if shared else alone.data)


@dataclass(frozen=True, slots=True)
class Passes:
    """Nanoseconds of one micro-batch forward and backward, and of the optimiser, on one rank."""

    forward_ns: float
    backward_ns: float
    optimizer_ns: float

    def __sub__(self, other: Passes) -> Passes:
        return Passes(
            max(self.forward_ns - other.forward_ns, 0.0),
            max(self.backward_ns - other.backward_ns, 0.0),
            max(self.optimizer_ns - other.optimizer_ns, 0.0),
        )


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Of one layer and of what is in none, the embedding and the head."""

    layer: Passes
    rest: Passes
    hidden: Passes  # of a layer: what of its exchanges runs beside its own kernels, less what that slows them
    beside: float  # how many times as long a layer takes while another collective runs

    @classmethod
    def put_together(cls, key: LayerKey, known: Mapping[LayerKey, LayerTimes]) -> LayerTimes:
        """From what was asked."""
        plain, *more = (known[each] for each in key.asked)
        if not more:
            return plain
        usual, sharded, again = more
        ratio = max(again.layer.backward_ns - usual.layer.backward_ns, 0.0) / max(usual.layer.forward_ns, 1.0)
        passes = []
        for name in ("layer", "rest"):
            alone, copies = getattr(plain, name), getattr(sharded, name) - getattr(usual, name)
            computed_again = ratio * alone.forward_ns if name == "layer" else 0.0
            passes.append(
                Passes(
                    alone.forward_ns + copies.forward_ns,
                    alone.backward_ns + copies.backward_ns + computed_again,
                    getattr(sharded, name).optimizer_ns,
                )
            )
        return cls(passes[0], passes[1], plain.hidden, plain.beside)


def mean_layer(model: Transformer, asked: Callable[[Transformer], Answer]) -> Answer:
    """What is asked about a layer, in the mean over a model's layers: some may have experts and others none."""
    expert_layers = sum(map(model.experts.of_layer, range(model.layers)))
    if not 0 < expert_layers < model.layers:
        return asked(model)
    dense = asked(replace(model, experts=Experts()))
    routed = asked(replace(model, experts=replace(model.experts, every=1, first_dense=0)))
    return _mixed(dense, routed, expert_layers / model.layers)


def _mixed(first: Answer, second: Answer, share: float) -> Answer:
    """Numbers between those of two answers."""
    if not is_dataclass(first):
        return (1.0 - share) * first + share * second  # type: ignore[operator,return-value]
    values = {each.name: _mixed(getattr(first, each.name), getattr(second, each.name), share) for each in fields(first)}
    return replace(first, **values)  # type: ignore[type-var]


def layer_times(model: Transformer, key: LayerKey, platform: Platform, calibration: Calibration) -> LayerTimes:
    """Asks the models about two samples, at the clock that power leaves the larger one."""
    one, two = (modelled(build(sample(model, key, layers)), platform) for layers in (1, 2))
    played = two.play(calibration)
    timings = [each.cohorts(calibration, played.clocks)[0].timing for each in (one, two)]
    shorter, longer = (_passes(each, timing) for each, timing in zip((one, two), timings, strict=True))
    layer = longer - shorter
    return LayerTimes(layer, shorter - layer, _hidden(two, timings[1], played.steady), _beside(two, timings[1]))


def sample(model: Transformer, key: LayerKey, layers: int, parts: int = 1) -> Transformer:
    """A model with few layers, and so many micro-batches."""
    shared = key.shared if model.experts.count else replace(key.shared, expert=1, expert_tensor=1)  # a dense layer of several
    layout = ModelLayout(shared, key.micro_batch, key.recompute)
    return layout.of(replace(model, layers=layers, batch=key.micro_batch * key.shared.replicas * parts))


def _passes(step: ModelledStep, timing: Timing) -> Passes:
    """The longer of host and device, of each part of a step: what is exchanged within a layer is waited for."""
    program = step.programs[0].program
    times, host = timing.duration_ns[:, 0, 0].astype(np.float64), (timing.gap_ns + timing.call_ns)[:, 0, 0].astype(np.float64)
    times[_copying(step)] = 0.0
    op = program.calls.op
    phase = np.where(op >= 0, program.ops.phase[op], Phase.OTHER)
    device_ns, host_ns = _by_phase(_phase_of_work(program), times), _by_phase(phase, host)
    return Passes(*(float(max(device_ns[each], host_ns[each])) for each in _PASSES))


def _hidden(step: ModelledStep, timing: Timing, played: Steady) -> Passes:
    """Of one of two layers, by how much less time works cover in a step as it was played than they take one by one."""
    (of_rank, *_), program = played.timeline.cohorts, step.programs[0].program
    length = np.rint(played.period_ns[:1]).astype(np.int64)
    spans = fold(of_rank.work_start_ns[:, :1, 0], of_rank.work_end_ns[:, :1, 0], length)
    phases, inside, times = _phase_of_work(program), ~_copying(step), timing.duration_ns[:, 0, 0]
    hidden = []
    for phase in _PASSES:
        chosen = np.flatnonzero((phases == phase) & inside)
        hidden.append(float(times[chosen].sum() - spans.keep(chosen).covered_ns()[0]) / 2)
    return Passes(*hidden)


def _beside(step: ModelledStep, timing: Timing) -> float:
    """By the law of kernels beside collectives, kernel by kernel; exchanges within layers are not slowed."""
    program, overlap, share = step.programs[0].program, step.platform.overlap, step.platform.device.limits.share
    inside = ~_copying(step)
    times = timing.duration_ns[inside, 0, 0].astype(np.float64)
    persistent = np.array([is_persistent(name) for name in program.names], dtype=np.bool_)[program.works.name[inside]]
    factors = overlap.compute_factor(times, share, persistent=persistent)
    slowed = np.where(program.works.kind[inside] == WorkKind.KERNEL, factors, 1.0)
    return float((times * slowed).sum() / max(times.sum(), 1.0))


def _copying(step: ModelledStep) -> npt.NDArray[np.bool_]:
    """Per work whether it is about what other ranks hold too."""
    program = step.programs[0].program
    parallelism = step.workload.description.parallelism or {}
    between = [_between_copies(each, parallelism) for each in program.collectives]
    return np.array([*between, False], dtype=np.bool_)[program.works.collective]


def _phase_of_work(program: Program) -> npt.NDArray[np.int8]:
    op = program.calls.op
    return np.asarray(np.where(op >= 0, program.ops.phase[op], Phase.OTHER)[program.works.call])


def _between_copies(collective: Collective, parallelism: Mapping[str, int]) -> bool:
    """Whether a collective is about parameters or gradients, which other ranks hold too: not within a layer."""
    if collective.group in (DATA, EXPERT_DATA, FSDP):
        return True
    alone = parallelism.get("tensor", 1) * parallelism.get("context", 1) == 1
    return collective.group == GROUP and alone and collective.kind != "all_to_all"


def _by_phase(phase: npt.NDArray[np.int8], times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.bincount(phase, weights=times, minlength=len(Phase)).astype(np.float64)


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Elements of one rank's parameters: of one layer, and of what is in none."""

    layer: float
    rest: float
    largest: float  # parameter of a layer


def layer_sizes(model: Transformer, shared: Parallelism) -> LayerSizes:
    """Counts parameters as they are built."""
    counts, sizes = [], Counter[int]()
    for layers in (1, 2):
        tape = Tape(Emitter(source=model.title))
        Weights(tape, sample(model, LayerKey(shared, 1, NONE), layers), Unsharded())
        numels = Counter(each.numel for each in tape.parameters)
        counts.append(sum(numel * often for numel, often in numels.items()))
        sizes = numels - sizes
    return LayerSizes(counts[1] - counts[0], 2 * counts[0] - counts[1], max(sizes))


@dataclass(frozen=True, slots=True)
class ActivationKey:
    """What the activations of a layer depend on, in proportion to the micro-batch."""

    shared: Parallelism
    recompute: str

    @classmethod
    def of(cls, layout: ModelLayout) -> ActivationKey:
        """Of the layers of a layout."""
        return cls(_within_layers(layout.parallel), layout.recompute)


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes that a micro-batch of one sample leaves for backward in one layer, and of everything else, the process included."""

    layer: float
    rest: float  # for each sample
    whole: float  # whatever the micro-batch


@dataclass(frozen=True, slots=True)
class StateKey:
    """What the memory of parameters, gradients and optimiser state depends on."""

    shared: Parallelism  # by tensor, context and expert parallelism alone
    fsdp: bool
    data: bool
    zero: int

    @classmethod
    def of(cls, layout: ModelLayout) -> StateKey:
        """Of the layers of a layout."""
        parallel = layout.parallel
        alone = _within_layers(parallel)
        if parallel.expert == 1:  # experts that are dealt out whole need it
            alone = replace(alone, sequence=False)
        return cls(alone, parallel.fsdp > 1, parallel.data > 1 and parallel.fsdp == 1, parallel.zero)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of one layer and of the rest: what every rank has, and what ranks share, all of them together."""

    layer_whole: float
    layer_shared: float
    rest_whole: float
    rest_shared: float
    passing: float  # what else a step needs at least, of one sample in a few layers: buffers to gather and to reduce


def activations(model: Transformer, key: ActivationKey, platform: Platform) -> Activations:
    """Plays the allocator on micro-batches so large that activations are most of what there is, in few layers and in more."""
    few, more, larger = (
        _peak(model, LayerKey(key.shared, samples, key.recompute), layers, platform)
        for layers, samples in ((_FEW, _SAMPLES), (2 * _FEW, _SAMPLES), (_FEW, 2 * _SAMPLES))
    )
    layer = max(more.allocated - few.allocated - (more.static - few.static), 0.0) / (_FEW * _SAMPLES)
    each = max(larger.passing - few.passing, 0.0) / _SAMPLES
    return Activations(layer, max(each - _FEW * layer, 0.0), few.passing - _SAMPLES * each)


def states(model: Transformer, key: StateKey, platform: Platform) -> States:
    """Plays the allocator on samples of one and two layers whose ranks share as they will."""
    shards = _SHARDS if key.fsdp or key.zero else 1
    copies = _SHARDS if key.data else 1
    shared = replace(key.shared, zero=key.zero, fsdp=shards if key.fsdp else 1, data=max(key.shared.data, copies))
    kinds = _STATIC if key.fsdp else _SHARED_BY_ZERO[key.zero]
    one, two = (_peak(model, LayerKey(shared, 1, NONE), layers, platform, kinds) for layers in (1, 2))
    layer_whole, layer_shared = two.whole - one.whole, shards * (two.shared - one.shared)
    return States(layer_whole, layer_shared, one.whole - layer_whole, shards * one.shared - layer_shared, two.passing)


@dataclass(frozen=True, slots=True)
class _Peak:
    whole: float
    shared: float  # of one rank
    allocated: float
    passing: float  # the rest of all that the process holds of its device

    @property
    def static(self) -> float:
        return self.whole + self.shared


def _peak(model: Transformer, of: LayerKey, layers: int, platform: Platform, kinds: Sequence[MemoryKind] = _STATIC) -> _Peak:
    """Of a sample of two micro-batches, so that gradients are there when activations are; `kinds` are shared."""
    workload = build(sample(model, of, layers, parts=2))
    limits = platform.device.limits
    peak = peak_memory(one_step(workload.programs[0]).program, device=limits)
    shared = float(sum(peak.parts[kind] for kind in kinds))
    # Buckets of gradients lie beside parameters as long as the job runs.
    copies = of.shared.data > 1
    lasting = (*_STATIC, MemoryKind.COMMUNICATION) if copies else _STATIC
    whole = float(sum(peak.parts[kind] for kind in lasting if kind not in kinds))
    return _Peak(whole, shared, peak.steady_allocated, peak.device_bytes(workload.world_size, limits.share) - shared - whole)
