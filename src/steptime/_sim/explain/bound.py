"""What the step is bound by, as one plain sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from steptime._sim.explain.activity import Activity, RankSummary
from steptime._sim.explain.critical_path import Reason
from steptime._sim.explain.path_summary import PathSummary
from steptime._sim.explain.straggler import Waiting

# The regimes by which errors are reported: device busy at least this share of the step, below that share, and
# communication that nothing hides above this share.
GPU_BOUND = 0.95
HOST_BOUND = 0.60
WIRE_BOUND = 0.40

_FAMILY_WORDS = {"softmax_loss": "softmax and loss", "indexing": "indexing and data movement"}

# Where the reasons of a critical path lie, in the order in which a tie is decided.
_PLACES: dict[str, tuple[Reason, ...]] = {
    "on the host": ("host", "hand-over", "sync", "launch latency"),
    "on the GPU": ("device", "stream order", "stream wait", "queue full", "queue order"),
    "on the wire": ("collective", "collective wait"),
    "waiting for absent ranks": ("absent peer",),
}


def bound_by(seen: Activity, path: PathSummary, waited: Waiting) -> str:
    """The regime and its evidence; and where the critical path lies, because a busy device need not be what decides."""
    exposed = _share(seen.ranks, lambda r: r.exposed_communication_ms)
    waiting = min(_share(seen.ranks, lambda r: r.waiting_ms), exposed)
    busy = _share(seen.ranks, lambda r: r.device_busy_ms)
    result = _regime(exposed, busy)
    if result == "wire-bound" and waiting > exposed / 2:
        return _waiting(seen.ranks, waiting, waited) + _decided(path, "")
    if result == "wire-bound":
        return _wire(exposed, waiting) + _decided(path, "on the wire")
    if result == "GPU-bound":
        evidence = f"the device is busy {_percent(busy)} of the step, {_largest(seen.breakdown)}"
        return f"GPU-bound: {evidence}" + _decided(path, "on the GPU")
    if result == "host-bound":
        return _host(seen.ranks, busy) + _decided(path, "on the host")
    return _mixed(seen.ranks, busy, exposed) + _decided(path, "")


def _regime(exposed: float, busy: float) -> str:
    """The regime, from the shares of the step that are exposed communication and device busy."""
    if exposed > WIRE_BOUND:
        return "wire-bound"
    if busy >= GPU_BOUND:
        return "GPU-bound"
    return "host-bound" if busy < HOST_BOUND else "mixed"


def _decided(path: PathSummary, expected: str) -> str:
    """Where most of the critical path lies, and that this matters more where it is not what the regime suggests."""
    shares = {index: path.share(*reasons) for index, reasons in _PLACES.items()}
    index = max(shares, key=lambda p: shares[p])
    if not shares[index]:
        return ""
    text = f"{_percent(shares[index])} of the critical path is {index}"
    return f"; {text}" if index == expected or not expected else f"; but {text}: start there"


def regime(rank: RankSummary) -> str:
    """The regime of one rank."""
    step = rank.step_ms or 1.0
    return _regime(rank.exposed_communication_ms / step, rank.device_busy_ms / step)


def family_words(family: str) -> str:
    """A family's name as people say it."""
    return _FAMILY_WORDS.get(family, family)


def _host(ranks: Sequence[RankSummary], busy: float) -> str:
    launches = _share(ranks, lambda r: r.host_bound_fraction * r.step_ms)
    until = _percent(launches / max(1 - busy, launches, 1e-9))
    return f"host-bound: the device idles {_percent(1 - busy)} of the step, {until} of that until the host launches something"


def _wire(exposed: float, waiting: float) -> str:
    return (
        f"wire-bound: {_percent(exposed)} of the step is communication that no computation hides "
        f"({_percent(waiting)} is waiting for peers)"
    )


def _waiting(ranks: Sequence[RankSummary], waiting: float, waited: Waiting) -> str:
    spent = f"ranks spend {_percent(waiting)} of the step in collectives until the last one arrives"
    if waited.absent_share > 1 / 2:
        return f"waiting for ranks without a trace: {spent}, and {_percent(waited.absent_share)} of that is for them"
    worst = waited.straggler
    if worst is None:
        return f"waiting for each other: {spent}"
    own = next((r for r in ranks if r.rank == worst.rank), None)
    because = f"; rank {worst.rank} itself is {regime(own)}" if own else ""
    return f"waiting for rank {worst.rank}: {spent}, and {_percent(worst.share)} of that is for rank {worst.rank}{because}"


def _mixed(ranks: Sequence[RankSummary], busy: float, exposed: float) -> str:
    launches = _share(ranks, lambda r: r.host_bound_fraction * r.step_ms)
    return (
        f"mixed: the device is busy {_percent(busy)} of the step ({_percent(exposed)} exposed communication) "
        f"and idles {_percent(1 - busy)} ({_percent(launches)} until the host launches something)"
    )


def _largest(breakdown: Mapping[str, float]) -> str:
    total = sum(breakdown.values()) or 1.0
    family = max(breakdown, key=lambda f: breakdown[f], default="other")
    return f"{_percent(breakdown.get(family, 0.0) / total)} of that with {family_words(family)}"


def _share(ranks: Sequence[RankSummary], value: Callable[[RankSummary], float]) -> float:
    """The mean over ranks of a quantity as a share of the rank's step."""
    return sum(value(r) / (r.step_ms or 1.0) for r in ranks) / max(len(ranks), 1)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
