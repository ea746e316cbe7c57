"""Kept for one release: `python -m steptime.measure` is `python -m steptime_lab.measure` now."""
