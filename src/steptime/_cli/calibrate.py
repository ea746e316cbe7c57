"""`steptime calibrate`, and how the other measuring commands start."""

from __future__ import annotations

import typer

NO_TORCH = "measuring needs PyTorch, which is not installed; pip install 'steptime[measure]' (predicting does without)"


def calibrate(context: typer.Context) -> None:
    """Measure this machine's host and fabric, in at most a minute and a half."""
    run_measuring(["calibrate", *context.args])


def run_measuring(arguments: list[str]) -> None:
    """Run a measuring job; its options are parsed where they also work without this command line."""
    from importlib.util import find_spec

    from steptime._calibrate.harness.command import main
    from steptime.errors import InputError

    if find_spec("torch") is None:
        raise InputError(NO_TORCH)
    try:
        raise typer.Exit(main(arguments))
    except SystemExit as left:  # argparse leaves after printing help
        raise typer.Exit(int(left.code or 0)) from None
