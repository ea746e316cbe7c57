"""`Evaluator`: how long the step of a DLRM takes under each of many plans, and where on which rank the time goes.

A plan says which rank holds which shard. A shard is a table of the model that is evaluated: a whole table, or a slice of the
columns of one, which is a table of fewer columns with the same lookups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm
from steptime._models.lookups.company import Company
from steptime._models.lookups.question import BACKWARD, DIRECTIONS, FORWARD, TABLE_BATCHED
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._shard.evaluate.exact import ExactLookups, Setting
from steptime._shard.evaluate.exchange import Exchanges
from steptime._shard.evaluate.laws import AS_PLAYED, COPYING, IDLE, SHARED, Laws, row_bytes
from steptime._shard.evaluate.lookups import LookupCurves
from steptime._shard.evaluate.simulated import simulated
from steptime._shard.evaluate.stages import Ends, Played, Stages
from steptime._shard.evaluate.stages_template import stages_of
from steptime._shard.task.table_memory import table_bytes
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
Plans = npt.NDArray[np.integer]

LOOKUPS, EXCHANGE, DENSE, HOST = "lookups", "exchange", "dense layers", "host"
BOUNDS = (LOOKUPS, EXCHANGE, DENSE, HOST)
"""What a step can be bound by; the dense layers with the all_reduces of their gradients."""

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
        return Evaluation(**{one.name: getattr(self, one.name)[places] for one in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """The plans of all parts, one behind the other."""
        return cls(**{one.name: np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)})


@dataclass(frozen=True, eq=False)
class Together:
    """What evaluates many plans at once: of table-batched lookups."""

    lookups: LookupCurves | ExactLookups
    stages: Stages
    exchanges: Exchanges | None  # None where there is one rank
    row_bytes: tuple[Floats, Floats] | None  # forward, backward; None where no rank shares its GPU's memory


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates plans of one model on one platform."""

    model: Dlrm
    platform: Platform
    ranks: int
    calibration: Calibration
    laws: Laws
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
    ) -> Evaluator:
        """Of a model whose tables are the shards to place; `laws` say what ranks do to each other besides waiting.

        `exact`: the lookup models are asked about every rank of every plan, which takes twenty times as long as curves through
        their answers about some subsets of the tables, and pays for less than a thousand plans.

        Plans of table-batched lookups are evaluated together. With one `nn.EmbeddingBag` for each table hosts wait for the
        device and every table launches its own kernels: such plans are played one by one, a few in a second.
        """
        if not 1 <= ranks <= platform.ranks:
            raise InputError(
                f"{model.name} on {ranks} ranks, platform {platform.name} has {platform.ranks}; choose one with {ranks} or more"
            )
        chosen = Laws() if laws is None else laws
        if model.lookup != TABLE_BATCHED:
            return cls(model, platform, ranks, calibration, AS_PLAYED, None)
        device = platform.device
        sharing = device.limits.share > 1 and chosen.company == SHARED
        others = chosen.others if device.limits.share > 1 else chosen.others[:1]
        settings = [(direction, other) for direction in DIRECTIONS for other in others]
        together = Together(
            ExactLookups.of(model, device, settings) if exact else LookupCurves.fit(model, device, ranks, settings),
            stages_of(model, platform, ranks, calibration),
            None
            if platform.fabric is None or ranks == 1
            else Exchanges.of(model, platform.fabric, ranks, calibration, one_by_one=chosen.one_by_one),
            row_bytes(model) if sharing else None,
        )
        return cls(model, platform, ranks, calibration, chosen, together)

    def exactly(self) -> Evaluator:
        """The same with the lookup models asked about every rank of every plan (`exact`); itself where plans are played."""
        if self.together is None or isinstance(self.together.lookups, ExactLookups):
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
        forward, backward = (times[direction, self.laws.others[0]] for direction in (FORWARD, BACKWARD))
        company = self._company(together, plans, times)
        played = self.play(together, plans, forward, backward, company)
        step = np.maximum(played.device_ns, together.stages.host_ns)
        found = Evaluation(
            step,
            played.device_ns,
            played.forward_ns,
            played.backward_ns,
            played.exchange_ns,
            played.waiting_ns,
            self._summed(plans, table_bytes(self.model)),
            np.zeros(len(plans), dtype=np.intp),
        )
        return replace(found, bound=_bound(found, step > played.device_ns))

    def play(
        self, together: Together, plans: Plans, forward: Floats, backward: Floats, company: Company | None = None
    ) -> Played:
        """Steps of plans whose lookups take so long, [plans, ranks], each rank by itself."""
        exchanges, stretched = together.exchanges, None
        ends: Ends = _nothing_to_exchange
        if exchanges is not None:
            ends = exchanges.ends(self._summed(plans, exchanges.column_bytes))
        if company is not None:
            limits = self.platform.device.limits
            bandwidth = limits.bandwidth_bytes_per_s.value / 1e9
            between = together.stages.between_ns
            stretched = partial(company.stretched, between_ns=between, bytes_per_ns=bandwidth, parts=limits.share)
        return together.stages.play(forward, backward, ends, stretched)

    def _company(self, together: Together, plans: Plans, times: Mapping[Setting, Floats]) -> Company | None:
        if together.row_bytes is None:
            return None
        alone = [times[direction, IDLE] for direction in (FORWARD, BACKWARD)]
        copies = [
            np.maximum(times[direction, COPYING] / np.maximum(own, 1.0), 1.0)
            for direction, own in zip((FORWARD, BACKWARD), alone, strict=True)
        ]
        moved = [self._summed(plans, own) for own in together.row_bytes]
        return Company(*alone, *copies, *moved)

    def _summed(self, plans: Plans, of_shards: Floats) -> Floats:
        """Per rank, [plans, ranks]."""
        count = len(plans) * self.ranks
        place = (plans + self.ranks * np.arange(len(plans))[:, None]).ravel()
        return np.bincount(place, np.tile(of_shards, len(plans)), count).reshape(len(plans), self.ranks).astype(np.float64)

    def simulate(self, rank_of: Plans) -> Evaluation:
        """The same the whole way, one plan after another: every workload built, every model asked, every step played."""
        plans = checked(rank_of, len(self.model.tables), self.ranks)
        found = [simulated(self.model, self.platform, self.ranks, plan, self.calibration) for plan in plans.tolist()]
        forward, backward, exchange, waiting = (
            np.array([getattr(one, name) for one in found], dtype=np.float64).reshape(len(plans), self.ranks)
            for name in ("forward_ns", "backward_ns", "exchange_ns", "waiting_ns")
        )
        step, host = (np.array([getattr(one, name) for one in found]) for name in ("step_ns", "host_ns"))
        held = self._summed(plans, table_bytes(self.model))
        made = Evaluation(step, step, forward, backward, exchange, waiting, held, np.zeros(len(plans), dtype=np.intp))
        return replace(made, bound=_bound(made, host >= step * (1.0 - _EXACT)))


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
