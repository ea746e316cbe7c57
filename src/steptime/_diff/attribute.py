"""Why one step takes longer than another, in parts that add up.

From the first step to the second in stages, each played by the simulator: works that the second does not have are taken out,
family by family; those that both have get the second's times; then the host, and where it waits. That is the first program with
the second's times. From the other end, the second program without what only it has; the two differ in order and in waiting
alone. Then what was added comes back. Every part is the difference between two stages, so that their sum is the difference of
the steps, whatever hides behind what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._diff.units import Rows, Units, matched
from steptime._ops.families import WorkFamily, work_families
from steptime._program.host_code import long_outside_ops
from steptime._sim.core.steady import play_again
from steptime._sim.core.timing import Cohort
from steptime._sim.prediction import PredictedStep
from steptime._units import ms
from steptime._whatif.edits import Mask, emptied_works, scaled_host, scaled_works, without_synchronisations
from steptime._whatif.targets import synchronising

Floats = npt.NDArray[np.float64]
Cohorts = tuple[Cohort, ...]

HOST, CODE, WAITING = "host", "host code outside ops", "order and waiting"
REMOVED, ADDED, SLOWER, FASTER = "removed", "added", "slower", "faster"
SYNCHRONISATION = "synchronisation"
_FAMILIES = {family: family.label for family in WorkFamily}


@dataclass(frozen=True)
class OpTime:
    """What units of one name take in one step."""

    count: float = 0.0
    device_ms: float = 0.0
    host_ms: float = 0.0  # calls, and the host work before them


@dataclass(frozen=True)
class OpDifference:
    """All units of one name: per step and in the mean over ranks, how many, and milliseconds on the device and on the host."""

    name: str
    family: str
    before: OpTime
    after: OpTime

    @property
    def device_ms(self) -> float:
        """What it takes more of the device in the second."""
        return self.after.device_ms - self.before.device_ms

    @property
    def host_ms(self) -> float:
        """What it takes more of the host in the second."""
        return self.after.host_ms - self.before.host_ms


@dataclass(frozen=True)
class Difference:
    """Two steps and what makes the second longer (above zero) or shorter."""

    before: PredictedStep
    after: PredictedStep
    parts: Mapping[str, float]  # name -> ms; they add up to the difference of the steps
    ops: tuple[OpDifference, ...]  # most changed first
    matched: float  # share of the device time of both that is of units found in the other

    @property
    def total_ms(self) -> float:
        """What the second takes more."""
        return self.after.step_time_ms - self.before.step_time_ms


class _ComparedStep:
    """One of the two steps, with what of it is in the other."""

    def __init__(self, step: PredictedStep) -> None:
        self.step = step
        self.cohorts: Cohorts = tuple(each.cohort for each in step.timeline.cohorts)
        self.units = [Units(cohort.program) for cohort in self.cohorts]
        self.families = [work_families(cohort.program) for cohort in self.cohorts]

    def of_rank(self, rank: int) -> int:
        """The cohort of a rank, or the first."""
        return next((at for at, cohort in enumerate(self.cohorts) if rank in cohort.ranks), 0)

    def period_ms(self, cohorts: Cohorts) -> float:
        """What the step takes with these cohorts."""
        return ms(play_again(self.step.timeline, cohorts).period_ns[0])


def difference(before: PredictedStep, after: PredictedStep) -> Difference:
    """What makes the second step longer or shorter than the first."""
    one, other = _ComparedStep(before), _ComparedStep(after)
    here = [_Matched(one, at, other) for at in range(len(one.cohorts))]
    there = [_Matched(other, at, one) for at in range(len(other.cohorts))]
    parts: dict[str, float] = {}
    _book(one, _to_other(one, here), parts, sign=1.0)
    _book(other, _without_added(there), parts, sign=-1.0)
    parts[WAITING] = after.step_time_ms - before.step_time_ms - sum(parts.values())
    times = [(each, _device_ns(each.cohort, each.units)) for each in (*here, *there)]
    total, found = (sum(float(spent[rows(each)].sum()) for each, spent in times) for rows in (_all, _found))
    return Difference(before, after, _sorted(parts), tuple(_ops(one, other)), found / total if total else 1.0)


def _all(each: _Matched) -> Mask:
    return np.ones(len(each.to), dtype=bool)


def _found(each: _Matched) -> Mask:
    return np.asarray(each.to >= 0)


class _Matched:
    """One cohort, and per unit what the other side says of it."""

    def __init__(self, side: _ComparedStep, at: int, other: _ComparedStep) -> None:
        self.cohort, self.units, self.families = side.cohorts[at], side.units[at], side.families[at]
        partner = other.of_rank(self.cohort.ranks[0])
        self.to: Rows = matched(self.units, other.units[partner])
        self._there, self._units_there = other.cohorts[partner], other.units[partner]
        self.alone: Mask = np.append(self.to < 0, True)[self.units.of_work]
        self.work_factor = self._factor(_device_ns(self.cohort, self.units), _device_ns(self._there, self._units_there))

    def _factor(self, own: Floats, others: Floats) -> Floats:
        """Per unit how many times as long it takes on the other side; 1 where it is not there or takes no time here."""
        there = np.append(others, 0.0)[self.to]
        return np.where((self.to >= 0) & (own > 0), there / np.where(own > 0, own, 1.0), 1.0)

    def of_family(self, family: int) -> Mask:
        """The works of a family."""
        return np.asarray(self.families == family)

    def works_factor(self) -> Floats:
        """Per work, of its unit."""
        return np.append(self.work_factor, 1.0)[self.units.of_work]

    def waiting_alone(self) -> Mask:
        """The synchronising calls of units that the other side has not."""
        return np.asarray(synchronising(self.cohort.program) & np.append(self.to < 0, False)[self.units.of_call])

    def host(self, cohort: Cohort, *, all_of_it: bool) -> Cohort:
        """A cohort with the other side's host times: of code outside ops alone, or of all."""
        own, others = _Host.of(self.cohort, self.units), _Host.of(self._there, self._units_there)
        code, rest = (np.where(self.to >= 0, np.append(each, 0.0)[self.to], 0.0) for each in (others.code_ns, others.rest_ns))
        timing, kept = self.cohort.timing, 1.0 - own.share
        gap_ns = _moved_to(timing.gap_ns * own.share[:, None, None], self.units, own.code_ns, code)
        if not all_of_it:
            gap_ns = gap_ns + timing.gap_ns * kept[:, None, None]
            return replace(cohort, timing=replace(cohort.timing, gap_ns=np.rint(gap_ns).astype(np.int64)))
        gap_ns = gap_ns + _moved_to(timing.gap_ns * kept[:, None, None], self.units, own.rest_ns, rest)
        call_ns = timing.call_ns * _ratio(rest, own.rest_ns)[self.units.of_call][:, None, None]
        whole_gap_ns, whole_call_ns = (np.rint(values).astype(np.int64) for values in (gap_ns, call_ns))
        return replace(cohort, timing=replace(cohort.timing, gap_ns=whole_gap_ns, call_ns=whole_call_ns))


def _ratio(wanted: Floats, own: Floats) -> Floats:
    return np.where(own > 0, wanted / np.where(own > 0, own, 1.0), 0.0)


def _moved_to(gap_ns: Floats, units: Units, own: Floats, wanted: Floats) -> Floats:
    """Host work before calls, so that it is so much for every unit; a unit that has none gets it before its first call."""
    here, first = np.unique(units.of_call, return_index=True)
    added = np.zeros(len(units.of_call))
    added[first] = np.where(own > 0, 0.0, wanted)[here]
    return np.asarray(gap_ns * _ratio(wanted, own)[units.of_call][:, None, None] + added[:, None, None])


@dataclass(frozen=True, eq=False)
class _Host:
    """Host time of every unit, in nanoseconds: code outside ops, and all else."""

    share: Floats  # per call: of the host work before it, what is code outside ops
    code_ns: Floats
    rest_ns: Floats

    @classmethod
    def of(cls, cohort: Cohort, units: Units) -> _Host:
        """As a cohort has it."""
        share = long_outside_ops(cohort.program)
        gap_ns, call_ns = (values.mean(axis=(1, 2)) for values in (cohort.timing.gap_ns, cohort.timing.call_ns))
        count = len(units.units)
        code_ns, rest_ns = (_sums(units.of_call, spent, count) for spent in (gap_ns * share, gap_ns * (1.0 - share) + call_ns))
        return cls(share, code_ns, rest_ns)


def _device_ns(cohort: Cohort, units: Units) -> Floats:
    """Per unit what its works take."""
    return _sums(units.of_work, cohort.timing.duration_ns.mean(axis=(1, 2)), len(units.units))


def _host_ns(cohort: Cohort, units: Units) -> Floats:
    """Per unit what its calls and the host work before them take."""
    host = _Host.of(cohort, units)
    return host.code_ns + host.rest_ns


def _sums(unit: Rows, values: Floats, count: int) -> Floats:
    inside = unit >= 0
    return np.bincount(unit[inside], weights=values[inside], minlength=count).astype(np.float64)


_Stage = tuple[str, Cohorts]


def _book(side: _ComparedStep, stages: Iterator[_Stage], parts: dict[str, float], *, sign: float) -> None:
    """Books what every stage changes of the step."""
    last = side.period_ms(side.cohorts)
    for name, cohorts in stages:
        now = side.period_ms(cohorts)
        if now != last:
            parts[name] = parts.get(name, 0.0) + sign * (now - last)
        last = now


def _to_other(side: _ComparedStep, here: Sequence[_Matched]) -> Iterator[_Stage]:
    """The first step with the second's times, stage by stage."""
    cohorts = side.cohorts
    for family, label in _FAMILIES.items():
        gone = [each.of_family(family) & each.alone for each in here]
        if any(each.any() for each in gone):
            cohorts = tuple(map(emptied_works, cohorts, gone))
            yield f"{REMOVED} {label}", cohorts
    for family, label in _FAMILIES.items():
        for name, sooner in ((FASTER, True), (SLOWER, False)):
            factors = [each.works_factor() for each in here]
            changed = [
                each.of_family(family) & ~each.alone & ((factor < 1.0) if sooner else (factor > 1.0))
                for each, factor in zip(here, factors, strict=True)
            ]
            if any(each.any() for each in changed):
                cohorts = tuple(map(scaled_works, cohorts, changed, factors))
                yield f"{name} {label}", cohorts
    yield from _without_waiting(cohorts, here, REMOVED)
    cohorts = tuple(map(without_synchronisations, cohorts, [each.waiting_alone() for each in here]))
    for name, all_of_it in ((CODE, False), (HOST, True)):
        yield name, tuple(each.host(cohort, all_of_it=all_of_it) for each, cohort in zip(here, cohorts, strict=True))


def _without_waiting(cohorts: Cohorts, of: Sequence[_Matched], name: str) -> Iterator[_Stage]:
    waits = [each.waiting_alone() for each in of]
    if any(each.any() for each in waits):
        yield f"{name} {SYNCHRONISATION}", tuple(map(without_synchronisations, cohorts, waits))


def _without_added(there: Sequence[_Matched]) -> Iterator[_Stage]:
    """The second step without what only it has, stage by stage."""
    cohorts = tuple(each.cohort for each in there)
    for family, label in _FAMILIES.items():
        gone = [each.of_family(family) & each.alone for each in there]
        if any(each.any() for each in gone):
            cohorts = tuple(map(emptied_works, cohorts, gone))
            yield f"{ADDED} {label}", cohorts
    yield from _without_waiting(cohorts, there, ADDED)
    cohorts = tuple(map(without_synchronisations, cohorts, [each.waiting_alone() for each in there]))
    only = [np.append(each.to < 0, False)[each.units.of_call] for each in there]
    yield HOST, tuple(scaled_host(cohort, calls, calls, 0.0) for cohort, calls in zip(cohorts, only, strict=True))


def _sorted(parts: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(parts.items(), key=lambda part: (-abs(part[1]), part[0])))


def _ops(one: _ComparedStep, other: _ComparedStep) -> list[OpDifference]:
    """Time by the names of units, most changed first."""
    families: dict[str, str] = {}
    before, after = _by_name(one, families), _by_name(other, families)
    none = OpTime()
    rows = [OpDifference(name, families[name], before.get(name, none), after.get(name, none)) for name in families]
    return sorted(rows, key=lambda row: (-max(abs(row.device_ms), abs(row.host_ms)), row.name))


def _by_name(side: _ComparedStep, families: dict[str, str]) -> dict[str, OpTime]:
    """Name of units -> what they take; notes the family of each."""
    sums: dict[str, list[float]] = {}
    for cohort, units, family in zip(side.cohorts, side.units, side.families, strict=True):
        per = 1.0 / (units.steps * len(side.cohorts))
        of_unit = np.full(len(units.units) + 1, WorkFamily.OTHER, dtype=np.int64)
        of_unit[units.of_work] = family
        spent = zip(units.units, _device_ns(cohort, units).tolist(), _host_ns(cohort, units).tolist(), strict=True)
        for at, (unit, device_ns, host_ns) in enumerate(spent):
            total = sums.setdefault(unit.name, [0.0, 0.0, 0.0])
            for place, value in enumerate((float(unit.count), ms(device_ns), ms(host_ns))):
                total[place] += value * per
            families.setdefault(unit.name, WorkFamily(int(of_unit[at])).label if device_ns else "")
    return {name: OpTime(*total) for name, total in sums.items()}
