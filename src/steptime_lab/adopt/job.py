"""The measuring of an adoption, as a job of the harness: the sweeps that its device, host and fabric are fitted to."""

from __future__ import annotations

import shutil
from pathlib import Path

import steptime_lab
from steptime._calibrate.harness.command import Job, Options
from steptime._calibrate.harness.session import Session
from steptime_lab.adopt.jobs import Spent, measure, shares
from steptime_lab.measure.kernels.cases import FILE_NAME

# Within the folder of an adoption.
MEASUREMENTS = "measurements"
# The calls of recorded steps that ship beside their rows.
_CALLS = Path(steptime_lab.__file__).parent / "data" / MEASUREMENTS / FILE_NAME
ADOPT = Job(
    "adopt", "kernels, lookups, host, power and collectives of this machine", __name__, minutes=10.0, command="steptime"
)


def run(session: Session, options: Options) -> None:
    """Every sweep for its share of the time; the calls of real steps come first."""
    if not (session.folder / FILE_NAME).exists():
        shutil.copyfile(_CALLS, session.folder / FILE_NAME)
    minutes = session.budget.left_s() / 60
    measure(session, options, shares(minutes, max(options.ranks)), Spent.read(session.folder))
