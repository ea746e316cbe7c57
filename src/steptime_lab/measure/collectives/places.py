"""Where collectives are swept: rank counts on fabrics, most wanted first."""

from __future__ import annotations

from steptime._calibrate.collectives.fabrics import LOOPBACK, Place
from steptime._calibrate.harness.options import Options
from steptime._calibrate.harness.ranks import Layout
from steptime.errors import InputError

# Sharded training on four ranks is measured first, so its wires are as well.
_ORDER_OF_WORTH = (4, 2, 8)


def places(options: Options, gpus: int) -> list[Place]:
    """What there is to measure, most wanted first: every rank count on the first fabric, then on the next."""
    ranks = rank_counts(options, gpus)
    if options.device != "cuda":
        return [Place(count, "gloo", 1) for count in ranks]
    if not options.share_gpu:
        return [Place(count, "default", 1) for count in ranks]
    return [Place(count, fabric, count) for fabric in LOOPBACK for count in ranks]


def rank_counts(options: Options, gpus: int) -> list[int]:
    """The rank counts asked for that can exchange something, most wanted first."""
    asked = [count for count in options.ranks if count > 1]
    if options.device == "cuda" and not options.share_gpu:
        fitting = [count for count in asked or (2, 4, 8) if count <= gpus]
        if not fitting:
            raise InputError(
                f"collectives need two ranks or more and this machine has {gpus} GPU(s); "
                "let the ranks share one (--share-gpu) or use a machine with more"
            )
        asked = fitting
    elif not asked:
        asked = [2, 4, 8] if options.device == "cuda" else [2]
    return sorted(set(asked), key=lambda count: (_ORDER_OF_WORTH.index(count) if count in _ORDER_OF_WORTH else 9, count))


def layout_of(place: Place, device: str) -> Layout:
    """Where its ranks live."""
    return Layout(place.ranks, share_gpu=device == "cuda" and place.share > 1, device=device)
