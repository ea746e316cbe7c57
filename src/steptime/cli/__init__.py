"""The command line: one file per command."""

from steptime.cli.app import main

__all__ = ["main"]
