"""A step on a platform it never ran on: the workload's programs with durations from the platform's models, played together.

`ModelledStep` holds what does not depend on how fast the host and the wire are today (`Calibration`), so that the same step
under another calibration, and the samples of an interval, ask no model again.

Recordings may lack what models need: made on a CPU, or without device events. Nothing is left out silently; tensors of a step
that was recorded on a CPU are taken to lie on the device that is asked about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from steptime._fuse.compiled import compiled_workload
from steptime._models.estimate import Source
from steptime._models.host.columns import host_columns
from steptime._models.host.model import Speed
from steptime._models.power.card import StepPower
from steptime._notices import Caveat
from steptime._ops.table import arguments_of, is_sparse
from steptime._platforms.calibration import UNCALIBRATED, UNKNOWN_HOSTS, Calibration
from steptime._platforms.device import Device
from steptime._platforms.names import joining
from steptime._platforms.platform import Platform
from steptime._program.one_step import OneStep, one_step
from steptime._program.program import CUDA_GRAPH, Collective, Program, Tensor, Value
from steptime._program.workload import Workload
from steptime._sim.core.steady import Steady, steady
from steptime._sim.core.timing import Cohort, Timeline, Timing
from steptime._sim.explain.critical_path import same_path
from steptime._sim.laws.departures import ExchangeDepartures
from steptime._sim.laws.slowdowns import (
    CollectivesBesideCollectives,
    CollectivesBesideKernels,
    KernelsBesideIdleParts,
    KernelsBesideKernels,
    Law,
    LookupsBesideLookups,
    Settling,
    steady_settled,
)
from steptime._sim.modelled.collective_work import collective_work
from steptime._sim.modelled.device_work import device_work
from steptime._sim.modelled.issue import Issued, issue
from steptime._sim.modelled.power import ROUNDS, SETTLED, STEP_SETTLED, Cards
from steptime._sim.modelled.stragglers import Stragglers
from steptime._sim.modelled.unroll import unrolled
from steptime._sim.prediction import PredictedStep
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]

_CPU, _DEVICE = "cpu", "cuda:0"
# Above so many ranks, those that do the same are played and listed as one.
MOST_LISTED = 64


@dataclass(frozen=True, eq=False)
class ModelledStep:
    """A workload's programs as issued on a platform."""

    workload: Workload
    platform: Platform
    programs: tuple[Issued, ...]  # in the order of the workload's
    warnings: tuple[str, ...] = ()
    host_error: float | None = None  # of the logarithm of its host times, where a recording has them; None: the machine's
    single_ns: float = 0.0  # what the only step of a recording took beyond its steady state
    host_code_ms: float | None = None  # of a recording: its host outside ops
    beside_idle: tuple[Floats, ...] = ()  # of stages on parts of one GPU: what kernels take beside idle parts, per estimate

    def cohorts(self, calibration: Calibration = UNCALIBRATED, clocks: Floats | None = None) -> list[Cohort]:
        """With all durations as the models say, one scenario; `clocks` of the cards, one per program."""
        speed, limits = self.speed(calibration), self.platform.device.limits
        factors = [self._factors(program, calibration) for program in self.programs]
        cards = self.cards(calibration)
        if cards is not None:
            clocks = cards.full if clocks is None else clocks
            for index, (program, factor) in enumerate(zip(self.programs, factors, strict=True)):
                factor[: len(program.draws)] *= cards.slowdown(index, clocks[index : index + 1])
        pairs = zip(self.programs, factors, strict=True)
        return [self._cohort(program, program.timing(speed, limits, factor), self.played) for program, factor in pairs]

    def cards(self, calibration: Calibration = UNCALIBRATED) -> Cards | None:
        """What draws power, on the machine of a calibration; None where nobody knows how much."""
        cards = self._cards
        if cards is None or (calibration.power_error is None and calibration.power_cap_w is None):
            return cards
        return cards.calibrated(calibration.energy, calibration.power_error, calibration.power_cap_w)

    @cached_property
    def _cards(self) -> Cards | None:
        device = self.platform.device
        if device.power is None:
            return None
        ranks = [len(self.workload.run_by(program.program.rank)) for program in self.programs]
        return Cards.of(device.power, device.limits.clock_hz.value, self.programs, ranks, device.limits.share)

    @cached_property
    def stragglers(self) -> Stragglers:
        """What the slowest of its ranks adds."""
        return Stragglers.of(self.workload, self.platform)

    def speed(self, calibration: Calibration) -> Speed:
        """The slowest host's, slower still where it shares its cores with what moves the collectives."""
        fabric, slower = self.platform.fabric, self.stragglers.host
        if self.workload.world_size > 1 and fabric is not None and fabric.limits.host_slowdown is not None:
            slower *= fabric.limits.host_slowdown.value
        return calibration.speed if slower == 1.0 else Speed.of_cpu(calibration.speed.cpu * slower)

    def _factors(self, issued: Issued, calibration: Calibration) -> Floats:
        """Per estimate, how many times as long it takes on the machine of a calibration; those of collectives come last."""
        kinds = issued.program.collectives
        compute = [calibration.device * self.stragglers.card] * (len(issued.estimates) - len(kinds))
        return np.array([*compute, *(calibration.wire_of(each.kind) for each in kinds)])[:, None]

    def _cohort(self, issued: Issued, timing: Timing, played: Mapping[int, tuple[int, ...]]) -> Cohort:
        ranks = played.get(issued.program.rank, ())
        present = frozenset(rank for ranks in played.values() for rank in ranks)
        if not self.workload.groups and len(present) == self.workload.world_size:
            return Cohort(issued.program, ranks, timing)
        known: dict[tuple[int, ...], tuple[int, ...]] = {}

        def met(rank: int, collective: Collective) -> tuple[int, ...]:
            members = self.workload.members(rank, collective)
            if members not in known:
                known[members] = tuple(member for member in members if member in present)
            return known[members]

        members = tuple(tuple(met(rank, collective) for collective in issued.program.collectives) for rank in ranks)
        return Cohort(issued.program, ranks, timing, members)

    @cached_property
    def played(self) -> Mapping[int, tuple[int, ...]]:
        """Per rank that owns a program, the ranks that are played: of those that do the same at the same time, one."""
        workload = self.workload
        every = {program.rank: workload.run_by(program.rank) for program in workload.programs}
        if (workload.world_size <= MOST_LISTED and not self._undisturbed) or not alike(workload):
            return every
        return {owner: ranks[:1] for owner, ranks in every.items()}

    @property
    def _undisturbed(self) -> bool:
        """Whether ranks that run one program never differ: they leave collectives together and share no memory."""
        together = ExchangeDepartures.of(self.platform.fabric) is None and self.platform.device.limits.share == 1
        one = len(self.programs) == 1 or all(program.program.repetition is not None for program in self.programs)
        return together and one and not any(any(program.memory) for program in self.programs)

    def everybody(self, predicted: PredictedStep) -> PredictedStep:
        """A prediction with every rank that one was played for, up to as many as are listed."""
        many = [self.workload.run_by(program.program.rank) for program in self.programs]
        listed = [played.cohort.ranks for played in predicted.timeline.cohorts]
        if self.workload.world_size > MOST_LISTED or [*map(len, many)] == [*map(len, listed)]:
            return predicted
        everybody = {program.program.rank: ranks for program, ranks in zip(self.programs, many, strict=True)}
        cohorts = tuple(
            played.of_all(self._cohort(program, played.cohort.timing, everybody))
            for program, played in zip(self.programs, predicted.timeline.cohorts, strict=True)
        )
        known = {of_rank.rank: of_rank for of_rank in predicted.ranks}
        if not known.keys() >= everybody.keys():
            return predicted
        owners = sorted((rank, owner) for owner, ranks in everybody.items() for rank in ranks)
        ranks = tuple(replace(known[owner], rank=rank) for rank, owner in owners)
        timeline = same_path(replace(predicted.timeline, cohorts=cohorts), predicted.timeline)
        return replace(predicted, timeline=timeline, ranks=ranks)

    def play(self, calibration: Calibration = UNCALIBRATED) -> PlayedStep:
        """The steady step, at the clocks that the power caps leave: played at some clocks, these follow from what it draws."""
        if self.platform.device.limits.analytic and calibration is UNCALIBRATED:
            # Nothing is known of the host of a device that nobody measured.
            calibration = replace(calibration, host_error=UNKNOWN_HOSTS)
        if self.host_error is not None:
            calibration = replace(calibration, host_error=self.host_error)
        cards = self.cards(calibration)
        if cards is None:
            return PlayedStep(self, calibration, *self._played(self.cohorts(calibration)), np.ones(len(self.programs)))
        clocks = cards.full
        cohorts = self.cohorts(calibration, clocks)
        result, settling = self._played(cohorts, rough=True)
        for rounds in range(ROUNDS):
            wanted = cards.clocks(result, clocks)
            if np.abs(wanted / clocks - 1.0).max() < SETTLED and (rounds or settling is None or settling.settled):
                break
            clocks, guess = wanted, _slowed(cohorts, result)
            cohorts = self.cohorts(calibration, clocks)
            before, (result, settling) = result, self._played(cohorts, guess)
            if np.abs(result.period_ns / before.period_ns - 1.0).max() < STEP_SETTLED:
                break
        return PlayedStep(self, calibration, result, settling, clocks)

    def _played(
        self, cohorts: Sequence[Cohort], guess: Sequence[Floats] | None = None, *, rough: bool = False
    ) -> tuple[Steady, Settling | None]:
        """With what ranks and streams do to each other where that was measured; `guess`: how much, at other clocks."""
        departures, laws = ExchangeDepartures.of(self.platform.fabric), self.laws(cohorts)
        if not laws:
            return steady(cohorts, departures=departures), None
        return steady_settled(cohorts, laws, departures, guess, rough=rough)

    def laws(self, cohorts: Sequence[Cohort]) -> list[Law]:
        """What slows what on this platform."""
        overlap, share = self.platform.overlap, self.platform.device.limits.share
        lookups = LookupsBesideLookups(tuple(tuple(program.memory[at] for at in program.estimate) for program in self.programs))
        result: list[Law] = [CollectivesBesideKernels.of(cohorts, overlap, share=share)] if overlap.known else []
        if self.platform.fabric is not None and self.platform.fabric.limits.cores is not None:
            cores = self.platform.fabric.limits.cores.value / self.workload.world_size
            together = CollectivesBesideCollectives.of(cohorts, cores)
            result += [together] if together.holds else []
        if self.beside_idle:
            pairs = zip(self.programs, self.beside_idle, strict=True)
            result.append(KernelsBesideIdleParts(tuple(ratio[np.array(issued.estimate)] for issued, ratio in pairs)))
        kernels = KernelsBesideKernels(tuple(program.own_streams for program in self.programs))
        return [*result, *(law for law in (kernels, lookups) if law.holds)]

    @property
    def coverage(self) -> dict[str, float]:
        """Source -> share of the device time of all ranks, collectives included; `out of range` is a part of these."""
        names = {source: source.value for source in Source}
        times: dict[str, float] = dict.fromkeys(names.values(), 0.0)
        outside = 0.0
        for program in self.programs:
            count = len(self.workload.run_by(program.program.rank))
            uses = np.bincount(np.array(program.estimate, dtype=np.int64), program.share, len(program.estimates))
            for estimate, often in zip(program.estimates, uses.tolist(), strict=True):
                times[names[estimate.source]] += count * often * estimate.time_ns
                outside += 0.0 if estimate.inside else count * often * estimate.time_ns
        total = sum(times.values()) or 1.0
        result = {source: float(time / total) for source, time in times.items() if time}
        return {**result, "out_of_range": float(outside / total)}


@dataclass(frozen=True, eq=False)
class PlayedStep:
    """The steady step on the machine of a calibration: the one that all answers about it are read from."""

    step: ModelledStep
    calibration: Calibration  # with how far its host may be off, as far as that is known
    steady: Steady
    settling: Settling | None  # of what works do to each other; None where they do nothing
    clocks: Floats  # of each program's card, as a share of the highest

    @property
    def timeline(self) -> Timeline:
        """When everything happens."""
        return self.steady.timeline

    @property
    def step_ns(self) -> float:
        """The time of a step."""
        return float(self.steady.period_ns[0]) + self.step.single_ns

    @property
    def power(self) -> StepPower | None:
        """Of the cards; None where nobody knows what they draw."""
        cards = self.step.cards(self.calibration)
        return None if cards is None else cards.drawn(self.steady, self.clocks)

    def slowdowns(self) -> list[Floats]:
        """Per program (work, rank, scenario): how many times as long as alone its works take."""
        factors = [np.ones(played.work_end_ns.shape) for played in self.timeline.cohorts]
        for law in self.step.laws(self.step.cohorts(self.calibration)):
            result = law.slowdowns(self.timeline, np.rint(self.steady.period_ns).astype(np.int64))
            factors = [factor * more for factor, more in zip(factors, result, strict=True)]
        return factors


def _slowed(alone: Sequence[Cohort], settled: Steady) -> list[Floats]:
    """How many times as long as alone works take in a steady state."""
    pairs = zip(alone, settled.timeline.cohorts, strict=True)
    return [played.cohort.timing.duration_ns / np.maximum(cohort.timing.duration_ns, 1) for cohort, played in pairs]


def modelled(workload: Workload, platform: Platform, *, strict: bool = False) -> ModelledStep:
    """The workload on a platform. `strict`: an op without a model is an error."""
    if strict:
        _refuse_lost_work(workload.programs)
    workload = compiled_workload(workload, platform.device.limits)
    steps, moved = _on_a_device([one_step(program) for program in workload.programs], strict=strict)
    workload = with_everybody(replace(workload, programs=tuple(each.program for each in steps)))
    check_ranks(workload, platform)
    wire = collective_work(workload, platform.fabric)
    programs, warnings = [], [*workload.warnings, *moved, *wire.warnings]
    samples = {id(step.program.ops): step for step in steps}  # stages of a pipeline may share one
    devices = dict(
        zip(samples, device_work(list(samples.values()), platform.device, workload.lookups, strict=strict), strict=True)
    )
    known: dict[int, Issued] = {}
    # The timeline is of this device, whichever one was recorded.
    device_name = platform.device.limits.name
    workload = replace(workload, programs=tuple(each.on_device(device_name) for each in workload.programs))
    for program in workload.programs:
        key = id(program.ops)
        if key not in known:
            device = devices[key]
            host = host_columns(program, platform.host, device.launches(len(program.ops)))
            if program.meta.get(CUDA_GRAPH):
                host = host.replayed(platform.host)
            known[key] = issue(program, host, device, wire.estimates[program.rank])
            warnings += known[key].warnings
        sampled = program.repetition is not None
        programs.append(unrolled(known[key], program, wire.estimates[program.rank]) if sampled else known[key])
    ratios = _beside_idle(programs, list(samples.values()), platform.device)
    return ModelledStep(workload, platform, tuple(programs), tuple(dict.fromkeys(warnings)), beside_idle=ratios)


def _beside_idle(programs: Sequence[Issued], steps: Sequence[OneStep], device: Device) -> tuple[Floats, ...]:
    """Per program and estimate, what stages of a pipeline on parts of one GPU take while the other parts idle; 1 for the wire.

    Other ranks are alike and work at the same time; a step of which a sample stands for the rest is played as if they were.
    """
    sends = [any(each.kind == "send" for each in issued.program.collectives) for issued in programs]
    if device.limits.share == 1 or len(steps) != len(programs) or len(steps) < 2 or not all(sends):
        return ()
    idle = device_work(steps, replace(device, beside="idle"))
    ratios = []
    for issued, work in zip(programs, idle, strict=True):
        if issued.program.repetition is not None:
            return ()
        times = np.array([estimate.time_ns for estimate in issued.estimates])
        alone = np.concatenate([[each.estimate.time_ns for each in work.works], times[len(work.works) :]])
        ratios.append(np.where(times > 0, alone / np.maximum(times, 1e-9), 1.0))
    return tuple(ratios)


def alike(workload: Workload) -> bool:
    """Whether ranks that share a program meet ranks of the same programs at every collective: then one stands for all."""
    owners = workload.owners
    if not owners:
        return False
    for program in workload.programs:
        for group in {collective.group for collective in program.collectives}:
            met = {tuple(sorted(map(owners.__getitem__, members))) for members in workload.groups.get(group, ())}
            met = {met_owners for met_owners in met if program.rank in met_owners}
            if len(met) > 1:
                return False
    return True


def with_everybody(workload: Workload) -> Workload:
    """Ranks without a program are taken to do what the first one does, and that is said."""
    if not workload.absent:
        return workload
    first = workload.programs[0].rank
    present = set(workload.ranks)
    owners = tuple(rank if rank in present else first for rank in range(workload.world_size))
    text = f"ranks without a program ({len(workload.absent)} of {workload.world_size}) are taken to do what rank {first} does"
    return replace(workload, owners=owners, warnings=(*workload.warnings, text))


def check_ranks(workload: Workload, platform: Platform) -> None:
    """An error where a job has more ranks than a platform, or a collective one that the job has not."""
    for program in workload.programs:
        beyond = max((max(each.ranks) for each in program.collectives if each.ranks), default=-1)
        if beyond >= workload.world_size:
            where = program.source or f"rank {program.rank}"
            raise InputError(f"{where}: a collective of rank {beyond} in a job of {workload.world_size} ranks; is it damaged?")
    if workload.world_size > platform.ranks:
        raise InputError(
            f"{workload.name or 'the workload'} has {workload.world_size} ranks, platform {platform.name} {platform.ranks}; "
            f"choose one with {workload.world_size} or more, as "
            f"{joining(workload.world_size, platform.parts.device) or '`steptime platforms` lists them'}, "
            "or fewer ranks of a config"
        )


def _on_a_device(steps: Sequence[OneStep], *, strict: bool) -> tuple[list[OneStep], list[str]]:
    """The steps with every tensor that a device would hold on one, and what to warn of; an error if `strict`."""
    moved = [step for step in steps if _on_cpu(step.program)]
    if not moved:
        return list(steps), []
    first = moved[0].program
    where = (
        f"{first.source or f'rank {first.rank}'}: recorded on a CPU: none of its {len(first.ops)} ops has a tensor of a device"
    )
    if strict:
        raise InputError(f"{where}; record it on a GPU, or drop --strict to take its tensors as lying on one")
    message = Caveat(f"{where}; all of them ({len(moved)} of {len(steps)} programs) are taken to run on one")
    return [replace(step, program=_moved(step.program)) if step in moved else step for step in steps], [message]


def _refuse_lost_work(programs: Sequence[Program]) -> None:
    """An error where ops were timed and nothing that they launched was recorded."""
    for program in programs:
        if not len(program.works) and bool((program.ops.start_ns >= 0).any()):
            raise InputError(
                f"{program.source or f'rank {program.rank}'}: {len(program.ops)} ops were recorded and no device event, so "
                "that collectives are missing; record them (ProfilerActivity.CUDA), or drop --strict for what the ops say"
            )


def _on_cpu(program: Program) -> bool:
    """Whether tensors are recorded and all of them lie on the CPU; numbers that became tensors do not count."""
    tensors = 0
    for signature in program.signatures:
        arguments = arguments_of(signature)
        for tensor in arguments.inputs + arguments.outputs:
            if tensor.device != _CPU and not is_sparse(tensor):
                return False
            tensors += bool(tensor.shape)
    return tensors > 0


def _moved(program: Program) -> Program:
    changed = (replace(each, inputs=_values(each.inputs), outputs=_values(each.outputs)) for each in program.signatures)
    return replace(program, signatures=tuple(changed))


def _values(values: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple(map(_value, values))


def _value(value: Value) -> Value:
    if isinstance(value, Tensor):
        # What has no dimensions is mostly a number that PyTorch wrapped, and lies on the CPU in a step of a GPU as well.
        return replace(value, device=_DEVICE) if value.shape and value.device == _CPU else value
    return _values(value) if isinstance(value, tuple) else value
