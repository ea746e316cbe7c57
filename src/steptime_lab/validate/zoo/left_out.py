"""Models that never saw a group of kin: kernel forms fitted without the rows that came from steps like those of the group.

Most kernel rows are of sweeps, whose calls were drawn without looking at any architecture: they stay. A row whose source is a
workload has a call of that very workload's step, so that it is left out with the workload's kin, and so are rows of the zoo.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from steptime._measurements.store import read
from steptime_lab.measurements.sets import KERNELS
from steptime_lab.measurements.shipped import FOLDER

SWEEP, OF_ZOO = "sweep", "zoo:"
_TRANSFORMERS = ("decoders", "encoders", "vision transformers")
# Which groups the workloads of the measured steps are kin of, by how the source of a row begins.
_KIN = {
    "gpt2": _TRANSFORMERS,
    "xlnet": _TRANSFORMERS,
    "bert": _TRANSFORMERS,
    "large-": _TRANSFORMERS,
    "resnet50": ("residual convnets",),
    "inception_v3": ("residual convnets",),
    "dlrm": ("recommenders",),
}


def groups_of(source: str) -> tuple[str, ...]:
    """Which groups a kernel row is left out with, by its source; none for a sweep."""
    if source.startswith(OF_ZOO):
        return (source.removeprefix(OF_ZOO),)
    return next((groups for prefix, groups in _KIN.items() if source.startswith(prefix)), ())


def without(table: pa.Table, group: str) -> pa.Table:
    """Kernel rows without those of a group's kin."""
    keep = [group not in groups_of(source or SWEEP) for source in table["source"].to_pylist()]
    return table.filter(pa.array(keep, pa.bool_()))


def seen_kin(folder: Path = FOLDER) -> dict[str, int]:
    """Groups of which the shipped models have seen kin -> how many kernel rows."""
    result: dict[str, int] = {}
    for source in read(folder, KERNELS)["source"].to_pylist():
        for group in groups_of(source or SWEEP):
            result[group] = result.get(group, 0) + 1
    return result
