"""The lab's commands; `steptime` offers them where this package is installed."""

from steptime_lab.cli.fit import fit
from steptime_lab.cli.measure import measure
from steptime_lab.cli.validate import validate

__all__ = ["fit", "measure", "validate"]
