"""Kernels and collectives beside each other: the overlap's constants on pairs of the split `test`, against each alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from steptime._models.collectives.overlap import Overlap
from steptime._models.engine.splits import TEST
from steptime.errors import InputError
from steptime_lab.fit.overlap import CollectivePairs, KernelPairs, measured_pairs
from steptime_lab.validate.summary import Case, Part, Validation, summary

_ALONE = "as if alone"


def validate_overlap(overlap: Overlap, fabric: str, rows: Sequence[Mapping[str, object]], in_steps: KernelPairs) -> Validation:
    """`rows` are of the measured set collectives, `in_steps` the pairs of profiled steps."""
    if not overlap.measured:
        raise InputError(f"no pairs of collectives and kernels were measured on fabric {fabric}; choose another with --fabric")
    pairs = measured_pairs(rows, fabric)
    kernels, collectives, steps = pairs[0].of(TEST), pairs[1].of(TEST), in_steps.of(TEST)
    groups: dict[str, KernelPairs | CollectivePairs] = {}
    for share in sorted(set(steps.share.tolist())):
        for persistent, what in ((False, "kernels"), (True, "persistent products")):
            groups[f"{what} in steps, 1/{share:.0f}"] = steps.take((steps.share == share) & (steps.persistent == persistent))
    groups["a product beside"] = kernels.take(kernels.persistent)
    groups["a copy beside"] = kernels.take(~kernels.persistent)
    groups["the collective beside compute"] = collectives.take(~collectives.busy)
    groups["the collective beside busy cores"] = collectives.take(collectives.busy)
    cases = {name: _cases(name, some, some.predicted_ns(overlap)) for name, some in groups.items() if len(some.text)}
    alone = {name: _cases(name, groups[name], groups[name].alone_ns) for name in cases}
    every, plain = ([case for some in lots.values() for case in some] for lots in (cases, alone))
    return Validation(
        name="overlap",
        title="kernels and collectives beside each other, pairs of the split test",
        cases=every,
        whole=Part(summary(every), {_ALONE: summary(plain)}),
        parts={name: Part(summary(some), {_ALONE: summary(alone[name])}) for name, some in cases.items()},
    )


def _cases(group: str, pairs: KernelPairs | CollectivePairs, predicted_ns: np.ndarray) -> list[Case]:
    times = zip(pairs.text, predicted_ns.tolist(), pairs.beside_ns.tolist(), strict=True)
    return [Case(f"{group}: {text}", predicted, measured) for text, predicted, measured in times]
