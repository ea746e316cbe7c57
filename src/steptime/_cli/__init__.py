"""The command line: one file per command."""

from steptime._cli.app import main

__all__ = ["main"]
