"""Collectives of whole steps: waiting for each other, and what they and kernels beside them do to each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from steptime._models.collectives.overlap import Overlap
from steptime._models.engine.splits import TEST
from steptime.errors import InputError
from steptime_lab.fit.overlap import CollectivePairs, KernelPairs, measured_pairs
from steptime_lab.fit.waiting import Waited
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation

Floats = npt.NDArray[np.float64]

_ALONE = "as if alone"
_WAITERS = 0.1  # the last to arrive tell nothing of waiting; those who waited so much of the time are shown apart


def case_factors(waited: Sequence[Waited]) -> dict[tuple[str, str], float]:
    """Per case and kind, how many times its estimate a collective took in the middle: the wire's speed on that day."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for item in waited:
        ratios[item.collective.case, item.kind].append(item.free_ns / item.alone_ns)
    return {key: float(np.median(entry)) for key, entry in ratios.items()}


def validate_waiting(waited: Sequence[Waited]) -> Validation:
    """Time of every collective on every rank: wait + the estimate of the fabric, times one factor per case and kind."""
    if not waited:
        raise InputError("no step with two collectives or more on several ranks")
    factors = case_factors(waited)
    rules: dict[str, Callable[[Waited], Floats]] = {
        "wait, estimate x factor": lambda item: item.waited_ns + item.alone_ns * factors[item.collective.case, item.kind],
        "wait, estimate": lambda item: item.waited_ns + item.alone_ns,
        "wait, shortest of the ranks": lambda item: item.waited_ns + float(item.collective.ran_ns.min()),
        "no wait, estimate x factor": lambda item: np.full(
            item.ranks, item.alone_ns * factors[item.collective.case, item.kind]
        ),
    }
    by_kind: dict[str, list[Waited]] = defaultdict(list)
    for item in sorted(waited, key=lambda item: (item.kind, item.ranks)):
        by_kind[_kind_and_ranks(item)].append(item)
    facts = {"waiting": waiting_share(waited)}
    for name, items in by_kind.items():
        facts[f"waiting, {name}"] = waiting_share(items)
        facts[f"ends_apart_us, {name}"] = float(np.median([item.apart_ns for item in items])) / 1e3
    return Validation.of(
        "waiting",
        "collectives of profiled steps on each rank: waiting + wait-free time",
        [rank for item in waited for rank in _ranks_of(item, rules)],
        facts=facts,
        notes=("arrivals are those of the profile; broadcasts are left out, because ranks do not leave them together",),
    )


def waiting_share(waited: Sequence[Waited]) -> float:
    """Of the time of collectives, what was waiting."""
    return float(sum(item.waited_ns.sum() for item in waited) / sum(item.collective.ran_ns.sum() for item in waited))


def _kind_and_ranks(item: Waited) -> str:
    return f"{item.kind}, {item.ranks} ranks"


def _ranks_of(item: Waited, rules: Mapping[str, Callable[[Waited], Floats]]) -> Iterator[Compared]:
    """Every rank by the first rule, beside the others."""
    name = f"{item.collective.case}, {item.kind} of {item.collective.message.bytes} bytes"
    chosen, *others = ((rule, predict(item).tolist()) for rule, predict in rules.items())
    for rank, (ran_ns, waited_ns) in enumerate(zip(item.collective.ran_ns.tolist(), item.waited_ns.tolist(), strict=True)):
        case = MeasuredCase(f"{name}, rank {rank}", chosen[1][rank], ran_ns)
        waiter = f"ranks that waited {_WAITERS:.0%} of the time or more" if waited_ns / ran_ns >= _WAITERS else None
        yield Compared(case, (_kind_and_ranks(item), waiter), {rule: case.by(times[rank]) for rule, times in others})


def validate_overlap(overlap: Overlap, fabric: str, rows: Sequence[Mapping[str, object]], in_steps: KernelPairs) -> Validation:
    """`rows` are of the measured set collectives, `in_steps` the pairs of profiled steps."""
    if not overlap.known:
        raise InputError(f"no pairs of collectives and kernels were measured on fabric {fabric}; choose another with --fabric")
    pairs = measured_pairs(rows, fabric)
    kernels, collectives, steps = pairs[0].of(TEST), pairs[1].of(TEST), in_steps.of(TEST)
    named: dict[str, KernelPairs | CollectivePairs] = {}
    for share in sorted(set(steps.share.tolist())):
        for persistent, what in ((False, "kernels"), (True, "persistent products")):
            named[f"{what} in steps, 1/{share:.0f}"] = steps.take((steps.share == share) & (steps.persistent == persistent))
    named["a product beside"] = kernels.take(kernels.persistent)
    named["a copy beside"] = kernels.take(~kernels.persistent)
    named["the collective beside compute"] = collectives.take(~collectives.busy)
    named["the collective beside busy cores"] = collectives.take(collectives.busy)
    return Validation.of(
        "overlap",
        "kernels and collectives beside each other, pairs of the split test",
        [item for place, (name, entry) in enumerate(named.items()) for item in _pairs(place, name, entry, overlap)],
    )


def _pairs(place: int, name: str, pairs: KernelPairs | CollectivePairs, overlap: Overlap) -> Iterator[Compared]:
    columns = (pairs.predicted_ns(overlap).tolist(), pairs.alone_ns.tolist(), pairs.beside_ns.tolist())
    for text, predicted, alone, measured in zip(pairs.text, *columns, strict=True):
        case = MeasuredCase(f"{name}: {text}", predicted, measured)
        yield Compared(case, (*(None,) * place, name), {_ALONE: case.by(alone)})
