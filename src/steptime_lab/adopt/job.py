"""The measuring of an adoption, as a job of the harness: the sweeps that its device, host and fabric are fitted to."""

from __future__ import annotations

import shutil
from pathlib import Path

import steptime_lab
from steptime._calibrate.harness.command import Job, Options
from steptime._calibrate.harness.session import Session
from steptime_lab.adopt.jobs import Spent, measure, shares
from steptime_lab.measure.host.issued import SMALL_FILE
from steptime_lab.measure.kernels.cases import FILE_NAME

# Within the folder of an adoption.
MEASUREMENTS = "measurements"
# The calls of recorded steps that ship beside their rows: what launches, and what only a host does (of ops that the first do
# not have, two of each; recorded by `steptime measure host --device cpu`, 2026-11-16). A bare machine cannot record them.
_CALLS = Path(steptime_lab.__file__).parent / "data" / MEASUREMENTS
ADOPT = Job(
    "adopt", "kernels, lookups, host, power and collectives of this machine", __name__, minutes=10.0, command="steptime"
)


def run(session: Session, options: Options) -> None:
    """Every sweep for its share of the time; the calls of real steps come first."""
    for name in (FILE_NAME, SMALL_FILE):
        if not (session.folder / name).exists():
            shutil.copyfile(_CALLS / name, session.folder / name)
    minutes = session.budget.left_s() / 60
    measure(session, options, shares(minutes, max(options.ranks)), Spent.read(session.folder))
