"""`Evaluator`: how long the step of a DLRM takes under each of many plans, and where on which rank the time goes.

A plan says which rank holds which shard. A shard is a table of the model that is evaluated: a whole table, or a slice of the
columns of one, which is a table of fewer columns with the same lookups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.table_lookups import table_lookups
from steptime._models.lookups.contention import Contention, LookupsTogether, row_bytes
from steptime._models.lookups.question import BACKWARD, DIRECTIONS, FORWARD, TABLE_BATCHED
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.device import Device
from steptime._platforms.platform import Platform
from steptime._shard.evaluate.exact import ExactLookups, Setting, SubsetTimes
from steptime._shard.evaluate.exchange import Exchanges
from steptime._shard.evaluate.lookups import LookupCurves
from steptime._shard.evaluate.simulated import simulated
from steptime._shard.evaluate.template import composed_step
from steptime._sim.composed import ComposedStep, Ends, PlayedPlans
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
Plans = npt.NDArray[np.integer]

LOOKUPS, EXCHANGE, DENSE, HOST = "lookups", "exchange", "dense layers", "host"
BOUNDS = (LOOKUPS, EXCHANGE, DENSE, HOST)
"""What a step can be bound by; the dense layers with the all_reduces of their gradients."""

SAME, IDLE, COPYING = "same", "idle", "streaming"
"""What other shares of a GPU do, as lookup models are asked (`models.kernels.question.OTHERS`)."""

# Of so many tables all subsets are asked about: fewer than curves are put through.
_FEW_TABLES = 10
# Plans that are evaluated at once: their columns stay in a second-level cache.
_AT_ONCE = 2048
# A step is its host's where they differ by less.
_EXACT = 1e-6


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Plans with what they cost, nanoseconds of one step; [plans] or [plans, ranks]."""

    step_ns: Floats  # [plans] the steady-state period
    device_ns: Floats  # [plans] the same as fast as the device can, whatever the host takes; the step where it was played
    forward_ns: Floats  # [plans, ranks] lookups forward
    backward_ns: Floats  # [plans, ranks] lookups backward, with the update of the rows
    exchange_ns: Floats  # [plans, ranks] both exchanges of rows, from the last rank's arrival
    waiting_ns: Floats  # [plans, ranks] in collectives for ranks that arrive later
    nbytes: Floats  # [plans, ranks] weights and optimiser state of the tables
    bound: Places  # [plans] place in `BOUNDS`: what takes most of the step of the slowest rank

    def __len__(self) -> int:
        """How many plans there are."""
        return len(self.step_ns)

    @property
    def lookups_ns(self) -> Floats:
        """Both directions, [plans, ranks]."""
        return self.forward_ns + self.backward_ns

    def take(self, places: npt.NDArray[np.integer] | list[int]) -> Evaluation:
        """Some of the plans."""
        return Evaluation(**{field.name: getattr(self, field.name)[places] for field in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """The plans of all parts, one behind the other."""
        return cls(**{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class Laws:
    """Which of the platform's laws hold; without one, its effect is left out, to see what it is worth."""

    contention: bool = True  # lookups on shares of one GPU slow each other while they overlap; else all are always busy alike
    one_by_one: bool = True  # ranks leave an exchange as they are done, and find work done that came late


@dataclass(frozen=True, eq=False)
class Together:
    """What evaluates many plans at once: of table-batched lookups."""

    lookups: LookupCurves | ExactLookups | SubsetTimes
    step: ComposedStep
    exchanges: Exchanges | None  # None where there is one rank
    contention: Contention | None
    row_bytes: Mapping[str, Floats]  # direction -> [tables]


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates plans of one model on one platform."""

    model: Dlrm
    platform: Platform
    ranks: int
    calibration: Calibration
    together: Together | None  # None: every plan is played

    @classmethod
    def of(
        cls,
        model: Dlrm,
        platform: Platform,
        ranks: int,
        *,
        calibration: Calibration = UNCALIBRATED,
        laws: Laws | None = None,
        exact: bool = False,
        step: ComposedStep | None = None,
    ) -> Evaluator:
        """Of a model whose tables are the shards to place.

        `exact`: the lookup models are asked about every rank of every plan, which takes twenty times as long as curves through
        their answers about some subsets of the tables, and pays for less than a thousand plans.

        `step`: one composed for the same model with its tables divided otherwise, of which the rest of a step knows next to
        nothing.

        Plans of table-batched lookups are evaluated together. With one `nn.EmbeddingBag` for each table hosts wait for the
        device and every table launches its own kernels: such plans are played one by one, a few in a second.
        """
        if not 1 <= ranks <= platform.ranks:
            raise InputError(
                f"{model.name} on {ranks} ranks, platform {platform.name} has {platform.ranks}; choose one with {ranks} or more"
            )
        if model.lookup != TABLE_BATCHED:
            return cls(model, platform, ranks, calibration, None)
        chosen, device, fabric = laws or Laws(), platform.device, platform.fabric
        contention = Contention.of(device.limits) if chosen.contention else None
        settings = [
            (direction, other) for direction in DIRECTIONS for other in ((SAME,) if contention is None else (IDLE, COPYING))
        ]
        known = [table_lookups(table, model.batch) for table in model.tables]
        together = Together(
            _lookup_times(model, device, ranks, settings, exact=exact),
            step or composed_step(model, platform, ranks, calibration),
            None
            if fabric is None or ranks == 1
            else Exchanges.of(model, fabric, ranks, calibration, one_by_one=chosen.one_by_one),
            contention,
            {direction: row_bytes(known, direction, model.optimizer) for direction in DIRECTIONS},
        )
        return cls(model, platform, ranks, calibration, together)

    def exactly(self) -> Evaluator:
        """The same with the lookup models asked about every rank of every plan (`exact`); itself where plans are played."""
        if self.together is None or not isinstance(self.together.lookups, LookupCurves):
            return self
        asked = ExactLookups.of(self.model, self.platform.device, self.together.lookups.settings)
        return replace(self, together=replace(self.together, lookups=asked))

    def evaluate(self, rank_of: Plans) -> Evaluation:
        """The plans, [plans, shards]: the rank of every shard."""
        plans = checked(rank_of, len(self.model.tables), self.ranks)
        if self.together is None:
            return self.simulate(plans)
        starts = range(0, max(len(plans), 1), _AT_ONCE)
        parts = [self._evaluated(self.together, plans[first : first + _AT_ONCE]) for first in starts]
        return parts[0] if len(parts) == 1 else Evaluation.joined(parts)

    def __call__(self, rank_of: Plans) -> Evaluation:
        """As a search asks (`search_state.Evaluate`)."""
        return self.evaluate(rank_of)

    def _evaluated(self, together: Together, plans: Plans) -> Evaluation:
        times = together.lookups.times(plans, self.ranks)
        alone = SAME if together.contention is None else IDLE
        forward, backward = (times[direction, alone] for direction in (FORWARD, BACKWARD))
        played = self.play(together, plans, forward, backward, self._lookups_together(together, plans, times))
        step = np.maximum(played.device_ns, together.step.host_ns)
        result = Evaluation(
            step,
            played.device_ns,
            played.forward_ns,
            played.backward_ns,
            played.exchange_ns,
            played.waiting_ns,
            self._summed(plans, self._held_bytes),
            np.zeros(len(plans), dtype=np.intp),
        )
        return replace(result, bound=_bound(result, step > played.device_ns))

    def play(
        self, together: Together, plans: Plans, forward: Floats, backward: Floats, beside: LookupsTogether | None = None
    ) -> PlayedPlans:
        """Steps of plans whose lookups take so long, [plans, ranks], each rank by itself."""
        exchanges = together.exchanges
        ends: Ends = _nothing_to_exchange
        if exchanges is not None:
            ends = exchanges.ends(self._summed(plans, exchanges.column_bytes))
        return together.step.play(forward, backward, ends, beside)

    def _lookups_together(self, together: Together, plans: Plans, times: Mapping[Setting, Floats]) -> LookupsTogether | None:
        law = together.contention
        if law is None:
            return None
        alone = [times[direction, IDLE] for direction in (FORWARD, BACKWARD)]
        taken = [
            law.taken(direction, item, self._summed(plans, together.row_bytes[direction]))
            for direction, item in zip((FORWARD, BACKWARD), alone, strict=True)
        ]
        slowed = [law.slowed(item, times[way, COPYING]) for way, item in zip((FORWARD, BACKWARD), alone, strict=True)]
        return LookupsTogether(*alone, *taken, *slowed)

    def _summed(self, plans: Plans, of_shards: Floats) -> Floats:
        """Per rank, [plans, ranks]."""
        count = len(plans) * self.ranks
        place = (plans + self.ranks * np.arange(len(plans))[:, None]).ravel()
        return np.bincount(place, np.tile(of_shards, len(plans)), count).reshape(len(plans), self.ranks).astype(np.float64)

    @property
    def _held_bytes(self) -> Floats:
        """Weights and optimiser state of every shard."""
        return np.array([float(table.nbytes + self.model.state_bytes(table)) for table in self.model.tables])

    def simulate(self, rank_of: Plans) -> Evaluation:
        """The same the whole way, one plan after another: every workload built, every model asked, every step played."""
        plans = checked(rank_of, len(self.model.tables), self.ranks)
        results = [simulated(self.model, self.platform, self.ranks, plan, self.calibration) for plan in plans.tolist()]
        forward, backward, exchange, waiting = (
            np.array([getattr(item, name) for item in results], dtype=np.float64).reshape(len(plans), self.ranks)
            for name in ("forward_ns", "backward_ns", "exchange_ns", "waiting_ns")
        )
        step, host = (np.array([getattr(item, name) for item in results]) for name in ("step_ns", "host_ns"))
        held = self._summed(plans, self._held_bytes)
        result = Evaluation(step, step, forward, backward, exchange, waiting, held, np.zeros(len(plans), dtype=np.intp))
        return replace(result, bound=_bound(result, host >= step * (1.0 - _EXACT)))


def _lookup_times(
    model: Dlrm, device: Device, ranks: int, settings: Sequence[Setting], *, exact: bool
) -> LookupCurves | ExactLookups | SubsetTimes:
    if exact:
        return ExactLookups.of(model, device, settings)
    if len(model.tables) <= _FEW_TABLES:
        return ExactLookups.of(model, device, settings).every_subset()
    return LookupCurves.fit(model, device, ranks, settings)


def _nothing_to_exchange(_number: int, arrivals_ns: Floats) -> Floats:
    return np.zeros_like(arrivals_ns)


def _bound(found: Evaluation, host: npt.NDArray[np.bool_]) -> Places:
    """What takes most of a step, where the host is no slower than the device."""
    lookups, exchange = found.lookups_ns.max(axis=1), found.exchange_ns.max(axis=1)
    parts = np.stack([lookups, exchange, np.maximum(found.step_ns - lookups - exchange, 0.0)], axis=1)
    return np.where(host, BOUNDS.index(HOST), np.argmax(parts, axis=1))


def checked(rank_of: Plans, shards: int, ranks: int) -> Plans:
    """Plans as [plans, shards] of ranks that there are."""
    plans = np.atleast_2d(np.asarray(rank_of))
    if plans.ndim != 2 or plans.shape[1] != shards or plans.dtype.kind not in "iu":
        raise InputError(
            f"plans of shape {plans.shape} and type {plans.dtype}; expected whole numbers, one for each of {shards} shards"
        )
    if plans.size and not (int(plans.min()) >= 0 and int(plans.max()) < ranks):
        raise InputError(f"plans place shards on ranks {plans.min()} to {plans.max()}; expected 0 to {ranks - 1}")
    return plans
