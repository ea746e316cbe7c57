"""The lab's commands; `steptime` offers them where this package is installed."""

from steptime_lab.cli.commands import fit, measure, validate

__all__ = ["fit", "measure", "validate"]
