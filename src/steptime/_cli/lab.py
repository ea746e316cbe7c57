"""`measure`, `fit` and `validate`: the lab's commands where it is installed, else a line that says how to get it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import typer

NAMES = ("measure", "fit", "validate")
LAB_INSTALLED = find_spec("steptime_lab") is not None


def lab_commands() -> dict[str, Callable[..., None]]:
    """The commands by name."""
    if not LAB_INSTALLED:
        return {name: _absent(name) for name in NAMES}
    lab = import_module("steptime_lab.cli")
    return {name: getattr(lab, name) for name in NAMES}


def _absent(name: str) -> Callable[..., None]:
    def command(context: typer.Context) -> None:
        from steptime.errors import InputError

        raise InputError(f"{context.command.name} is part of the lab, which is not installed; pip install ./lab in a clone")

    command.__doc__ = f"Part of the lab, which is not installed ({name})."
    return command
