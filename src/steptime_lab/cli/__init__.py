"""The lab's commands; `steptime` offers them where this package is installed."""

from steptime_lab.cli.commands import adopt, fit, measure, validate

__all__ = ["adopt", "fit", "measure", "validate"]
