"""`Device`: a GPU or a part of one, its limits on paper and its fitted models of kernels and lookups, or another device's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from steptime._hardware.description import Quantity
from steptime._hardware.device import FOLDER, DeviceLimits, read_device
from steptime._models.estimate import Estimate, Source
from steptime._models.kernels.call import flop_of, moved_bytes, precision_of
from steptime._models.kernels.fitted import Answered, KernelModels
from steptime._models.kernels.from_ops import warm_within_bytes
from steptime._models.kernels.question import LaunchTime, Question
from steptime._models.lookups.fbgemm import of_question
from steptime._models.lookups.fbgemm_kernels import fbgemm_estimate
from steptime._models.lookups.fitted import LookupEstimate, LookupModels, lookups_file
from steptime._models.lookups.question import BACKWARD, FBGEMM, Lookup
from steptime._models.power.features import kernel_draw
from steptime._models.power.model import KernelDraw, PowerModel, power_file, read_power
from steptime._platforms.few_bits import as_run_after_hopper, is_after_hopper
from steptime._platforms.lookup_kin import KIN_FACTOR, by_nearest, nearest_measured
from steptime._platforms.transfer import Transfer, carried_kind
from steptime._units import dtype_bytes, dtype_name
from steptime.errors import InputError, UnsupportedError

_PRODUCTS = ("matmul", "grouped_products")  # the families
_MOST_POWER_W = 10_000.0
# How far off a guess may be, to either side.
FACTOR = 4.0
# Tensor cores multiply all types of one byte at the rate of each other.
_ONE_BYTE = "float8"


def guess(limits: DeviceLimits, flop: float, nbytes: float, precision: str) -> Estimate:
    """What computing and moving so much takes at least, beside what the shortest kernel takes."""
    name = dtype_name(precision)
    rate = _ONE_BYTE if dtype_bytes(name) == 1 else name or precision
    return guessed(limits.reach.start_ns.value + limits.roofline_ns(flop, nbytes, rate))


def guessed(time_ns: float) -> Estimate:
    """A time that is no more than a guess."""
    return Estimate(time_ns, time_ns / FACTOR, time_ns * FACTOR, Source.FALLBACK, inside=False)


_Asked = TypeVar("_Asked", Question, Lookup)


@dataclass(frozen=True, slots=True)
class KernelEstimate:
    """The device time of one call: in all, and launch by launch. `why` says what keeps it from being a fitted one."""

    estimate: Estimate
    launches: tuple[LaunchTime, ...]
    family: str
    why: str = ""
    draw: KernelDraw | None = None  # None: what it draws is not known


_TOO_LARGE = "its size is beyond what the model can compute"


@dataclass(frozen=True)
class Device:
    """Answers how long a call takes on this device."""

    limits: DeviceLimits
    models: KernelModels
    lookups: LookupModels | Path | None = None  # or where they lie: few ask, and then they are read
    transfer: Transfer | None = None  # where the models are another device's
    stand_in: Device | None = None  # who answers what the models do not know, another one's scaled to it
    timed_power: PowerModel | None = None  # of the card that the models were fitted on
    power: PowerModel | None = None  # of this card; None: nobody knows what it draws
    beside: str = "same"  # what the other parts of a divided GPU do

    @classmethod
    def load(cls, name: str | Path) -> Device:
        """A shipped device by its name, or one of the user's by the path of its TOML file."""
        limits = read_device(name)
        # A user's models lie beside the file that describes the device.
        folder = Path(name).resolve().parent if str(name).endswith(".toml") else FOLDER
        transfer = None if limits.transfer is None else Transfer(_fitted_on(folder, limits), limits, limits.transfer)
        if transfer is not None and not (folder / f"{limits.models}.npz").is_file():
            folder = FOLDER
        own = _models(folder / f"{limits.models}.npz")
        stand_in = cls.carried(limits)
        timed = read_power(folder / power_file(limits.models))
        power = timed if timed is None or transfer is None else timed.carried(transfer.here, limits)
        if timed is None and stand_in is not None:
            timed, power = stand_in.timed_power, stand_in.power
        return cls(limits, own, lookups_file(folder, limits.models), transfer, stand_in, timed, power)

    @classmethod
    def carried(cls, limits: DeviceLimits) -> Device | None:
        """The shipped device that answers for a user's what that one's models do not know."""
        if limits.carried is None:
            return None
        there = replace(limits, models=limits.carried_from, transfer=limits.carried)
        here = _fitted_on(FOLDER, there)
        own = _models(FOLDER / f"{here.models}.npz")
        timed = read_power(FOLDER / power_file(here.models))
        power = None if timed is None else timed.carried(here, there)
        lookups = lookups_file(FOLDER, here.models)
        return cls(there, own, lookups, Transfer(here, there, limits.carried), timed_power=timed, power=power)

    def capped(self, power_w: float) -> Device:
        """The same card, allowed to draw so much."""
        if self.power is None:
            raise InputError(f"--power-cap {power_w:g}: nobody knows what {self.limits.name} draws, so a cap cannot be applied")
        if not self.power.base_w < power_w < _MOST_POWER_W:
            raise InputError(
                f"--power-cap {power_w:g}: expected watts, more than the {self.power.base_w:.0f} that {self.limits.name} draws "
                f"at rest and less than {_MOST_POWER_W:g}"
            )
        limits = replace(self.limits, power_w=Quantity(power_w, "--power-cap"))
        return replace(self, limits=limits, power=replace(self.power, cap_w=power_w))

    def draw(self, question: Question, family: str, time_ns: float, timed_ns: float) -> KernelDraw | None:
        """What a call draws that takes so long alone here, and `timed_ns` where its model was fitted."""
        if self.power is None or self.timed_power is None:
            return None
        result = kernel_draw(self.power, question, family, time_ns, self.limits)
        if self.power is self.timed_power:
            return result
        basis = self.limits.transfer
        if family in _PRODUCTS and basis is not None and basis.product_flop_per_s:  # its time is by a rate at the highest clock
            return replace(result, isolated=self.power.tensor_clock if result.tensor else 1.0)
        # Its time is of the clock that it had where the model was fitted; peaks, by which times are carried, are of others.
        here = self.limits if self.transfer is None else self.transfer.here
        isolated = kernel_draw(self.timed_power, question, family, timed_ns, here).isolated
        return replace(result, isolated=isolated * (_rated(self.limits) / _rated(here) if result.tensor else 1.0))

    @property
    def cached_bytes(self) -> int:
        """Bytes that may be touched between writing something and reading it from the cache: of a part, its share of them."""
        if self.transfer is None:
            return warm_within_bytes(self.limits) // self.limits.share
        return int(warm_within_bytes(self.transfer.here) * self.transfer.cache) // self.limits.share

    def estimates(self, questions: Sequence[Question], *, strict: bool = False) -> list[KernelEstimate]:
        """What each question's call takes here. A call no model answers gets a labelled roofline, or raises if `strict`."""
        # Programs share questions as objects: what does not depend on the op is done once for each.
        distinct = {id(question): question for question in questions}
        placed = [self._as_run(self._placed(question)) for question in distinct.values()]
        answers = map(self._estimate, placed, self.models.ask(placed))
        estimates = dict(zip(distinct, answers, strict=True))
        results = [estimates[id(question)] for question in questions]
        if strict:
            self._refuse(questions, results)
        return results

    def lookup_estimates(self, lookups: Sequence[Lookup], *, strict: bool = False) -> list[LookupEstimate]:
        """What each lookup takes here. One beyond what was measured has a wide interval, or raises if `strict`."""
        placed = [self._placed(lookup) for lookup in lookups]
        fitted = iter(self._by_models([lookup for lookup in placed if lookup.implementation != FBGEMM]))
        result = [self._by_data_sheet(lookup) if lookup.implementation == FBGEMM else next(fitted) for lookup in placed]
        if strict:
            self._refuse_lookups(lookups, result)
        return result

    def measured(self, lookup: Lookup) -> bool:
        """Whether a model fitted to such lookups on this very device answers."""
        return self.transfer is None and lookup.implementation != FBGEMM and nearest_measured(lookup) is lookup

    def _by_data_sheet(self, lookup: Lookup) -> LookupEstimate:
        """FBGEMM's kernels: what they do is known, and no model was fitted to them."""
        return fbgemm_estimate(of_question(lookup), self.limits, lookup.tables, backward=lookup.direction == BACKWARD)

    def _by_models(self, placed: Sequence[Lookup]) -> list[LookupEstimate]:
        if not placed:
            return []
        nearest = [nearest_measured(lookup) for lookup in placed]
        fitted_on = self.limits if self.transfer is None else self.transfer.here
        result = by_nearest(placed, nearest, self._lookup_estimates(nearest), fitted_on)
        return result if self.transfer is None else self.transfer.lookups(placed, result)

    def _lookup_estimates(self, placed: Sequence[Lookup]) -> list[LookupEstimate]:
        """By its own models, and what those do not know by whoever stands in."""
        if self.stand_in is None:
            return self._lookup_models().estimates(placed)
        there = isinstance(self.lookups, LookupModels) or (self.lookups is not None and self.lookups.is_file())
        models = self._lookup_models() if there else None
        known = [models is not None and (lookup.implementation, lookup.direction) in models.forms for lookup in placed]
        others = [lookup for lookup, own in zip(placed, known, strict=True) if not own]
        carried = iter(self.stand_in.lookup_estimates(others) if others else ())
        mine = [lookup for lookup, own in zip(placed, known, strict=True) if own]
        fitted = iter(models.estimates(mine) if models is not None and mine else ())
        return [next(fitted if own else carried) for own in known]

    def _lookup_models(self) -> LookupModels:
        if isinstance(self.lookups, LookupModels):
            return self.lookups
        if self.lookups is None or not self.lookups.is_file():
            missing = "" if self.lookups is None else f" ({self.lookups} is not there)"
            raise InputError(f"{self.limits.name} has no fitted lookup models{missing}; `steptime fit` writes them")
        return _read_lookups(self.lookups)

    def _refuse_lookups(self, lookups: Sequence[Lookup], estimates: Sequence[LookupEstimate]) -> None:
        for index, (lookup, item) in enumerate(zip(lookups, estimates, strict=True)):
            if not item.estimate.inside:
                tables = f"table {lookup.tables[0].table}" if len(lookup.tables) == 1 else f"{len(lookup.tables)} tables"
                raise UnsupportedError(
                    f"lookup {index} ({lookup.implementation} {lookup.direction} of {tables}) is beyond what was measured on "
                    f"{self.limits.name}; drop --strict for an estimate with a wide interval"
                )

    def _placed(self, question: _Asked) -> _Asked:
        """The question on this part of the device, beside what its other parts do unless it says otherwise."""
        others = "none" if self.limits.share == 1 else question.others if question.others != "none" else self.beside
        return replace(question, share=self.limits.share, others=others)

    def _as_run(self, question: Question) -> Question:
        """The question whose answer is carried over: newer architectures have less to do for products of few bits."""
        if self.transfer is None or not is_after_hopper(self.limits):
            return question
        call = as_run_after_hopper(question.call)
        return question if call is question.call else replace(question, call=call)

    def _estimate(self, question: Question, answered: Answered) -> KernelEstimate:
        answer = answered.answer
        if answer is None and self.stand_in is not None:
            return self.stand_in.estimates([question])[0]
        if answer is None or not math.isfinite(answer.time_ns):
            return self._fallback(question, answered)
        time_ns = answer.time_ns
        if self.models.residuals.knows(answered.family):
            residuals = self.models.residuals
            low, high = residuals.interval_ns(answered.family, time_ns, self.limits.share, inside=answer.inside)
            estimate = Estimate(time_ns, low, high, Source.FITTED, answer.inside)
        else:  # a form answers for it by what it has in common with what was measured
            estimate = Estimate(time_ns, time_ns / KIN_FACTOR, time_ns * KIN_FACTOR, Source.ANALYTIC, inside=False)
        if self.transfer is None:
            draw = self.draw(question, answered.family, time_ns, time_ns)
            return KernelEstimate(estimate, answer.launches, answered.family, draw=draw)
        launches = self.transfer.launches(question, answered.family, answer.launches)
        there_ns = sum(launch.time_ns for launch in launches)
        there = self.transfer.estimate(estimate, there_ns, carried_kind(question, there_ns))
        draw = self.draw(question, answered.family, there_ns, time_ns)
        return KernelEstimate(there, launches, answered.family, f"carried over from {self.limits.models}", draw)

    def _fallback(self, question: Question, answered: Answered) -> KernelEstimate:
        call = question.call
        estimate = guess(self.limits, flop_of(call), moved_bytes(call), precision_of(call, question.tf32))
        draw = self.draw(question, answered.family, estimate.time_ns, estimate.time_ns)
        launches = (LaunchTime("roofline", estimate.time_ns),)
        return KernelEstimate(estimate, launches, answered.family, answered.why or _TOO_LARGE, draw)

    def _refuse(self, questions: Sequence[Question], estimates: Sequence[KernelEstimate]) -> None:
        total_ns = sum(item.estimate.time_ns for item in estimates)
        for question, item in zip(questions, estimates, strict=True):
            if item.estimate.source is Source.FALLBACK:
                op = question.call.op
                of_op_ns = sum(b.estimate.time_ns for a, b in zip(questions, estimates, strict=True) if a.call.op == op)
                share = f"{of_op_ns / total_ns:.1%} of the device time" if total_ns else "no device time"
                raise UnsupportedError(
                    f"{op} has no fitted model on {self.limits.name} ({item.why}); it is {share}; drop --strict for a roofline"
                )


def _rated(limits: DeviceLimits) -> float:
    """The clock that the data sheet's peaks on tensor cores are of, as a fraction of the highest."""
    return 1.0 if limits.tensor_clock_hz is None else limits.tensor_clock_hz.value / limits.clock_hz.value


def _fitted_on(folder: Path, limits: DeviceLimits) -> DeviceLimits:
    """The device whose models answer: beside a user's file, or a shipped one."""
    beside = folder / f"{limits.models}.toml"
    result = read_device(str(beside) if beside.is_file() else limits.models)
    if result.analytic:
        raise InputError(f"{limits.name} takes the models of {result.name}, which has none of its own")
    return result


@cache
def _models(file: Path) -> KernelModels:
    return KernelModels.load(file)


@cache
def _read_lookups(file: Path) -> LookupModels:
    return LookupModels.load(file)
