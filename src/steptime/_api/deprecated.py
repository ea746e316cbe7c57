"""What the public names of the last release gave, for one more release; `steptime.__getattr__` warns of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steptime._api.predict import predict
from steptime._api.read import read
from steptime._lookups.workload import WorkloadLookups
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._program.workload import Progress, UnnamedMemory, Workload
from steptime._report.answers import Prediction


def load(paths: Sequence[Path | str], *, progress: Progress | None = None) -> Workload:
    """`read` of several paths."""
    return read(paths, progress=progress)


def predict_on(
    workload: Workload,
    platform: Platform,
    *,
    lookups: WorkloadLookups | None = None,
    unnamed: Mapping[int, UnnamedMemory] | None = None,
    calibration: Calibration = UNCALIBRATED,
    strict: bool = False,
) -> Prediction:
    """`predict` of a workload whose lookups and unnamed memory may be given beside it."""
    carried = workload if unnamed is None else replace(workload, unnamed=unnamed)
    return predict(carried, platform, lookups=lookups, calibration=calibration, strict=strict)


@dataclass(frozen=True)
class Configured:
    """The workload of a config, with what it carries beside it."""

    workload: Workload

    @property
    def lookups(self) -> WorkloadLookups | None:
        """What its ranks look up."""
        return self.workload.lookups

    @property
    def unnamed(self) -> Mapping[int, UnnamedMemory]:
        """Memory that no op names."""
        return self.workload.unnamed

    @property
    def batch(self) -> int | None:
        """Samples of all ranks."""
        return self.workload.description.batch

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to doubt."""
        return self.workload.warnings

    def with_batch(self, batch: int) -> Configured:
        """The same on another global batch."""
        return Configured(self.workload.varied(batch=batch))

    def with_ranks(self, ranks: int) -> Configured:
        """The same on other ranks."""
        return Configured(self.workload.varied(ranks=ranks))


def configured_in(path: Path | str, *, batch: int | None = None, ranks: int | None = None) -> Configured:
    """`read` of a config."""
    return Configured(read(path, batch=batch, ranks=ranks))
