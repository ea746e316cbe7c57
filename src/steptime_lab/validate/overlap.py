"""Kernels and collectives beside each other: the overlap's constants on pairs of the split `test`, against each alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steptime._models.collectives.overlap import Overlap
from steptime._models.engine.splits import TEST
from steptime.errors import InputError
from steptime_lab.fit.overlap import CollectivePairs, KernelPairs, measured_pairs
from steptime_lab.validate.engine import Case, Compared, Validation, group, groups

_ALONE = "as if alone"


def validate_overlap(overlap: Overlap, fabric: str, rows: Sequence[Mapping[str, object]], in_steps: KernelPairs) -> Validation:
    """`rows` are of the measured set collectives, `in_steps` the pairs of profiled steps."""
    if not overlap.measured:
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
    compared = [item for name, entry in named.items() for item in _compared(name, entry, overlap)]
    return Validation(
        name="overlap",
        title="kernels and collectives beside each other, pairs of the split test",
        cases=[item.case for item in compared],
        whole=group(compared),
        groups=groups(compared, [(name, name.__eq__) for name in named]),
    )


def _compared(name: str, pairs: KernelPairs | CollectivePairs, overlap: Overlap) -> list[Compared[str]]:
    columns = (pairs.predicted_ns(overlap).tolist(), pairs.alone_ns.tolist(), pairs.beside_ns.tolist())
    results = []
    for text, predicted, alone, measured in zip(pairs.text, *columns, strict=True):
        case = Case(f"{name}: {text}", predicted, measured)
        results.append(Compared(name, case, {_ALONE: case.by(alone)}))
    return results
