"""`steptime calibrate`, and how measuring commands start."""

from __future__ import annotations

from collections.abc import Callable

import typer

NO_TORCH = "measuring needs PyTorch, which is not installed; pip install 'steptime[measure]' (predicting does without)"


def calibrate(context: typer.Context) -> None:
    """Measure this machine's host and fabric, in at most a minute and a half."""
    from steptime._calibrate.harness.command import run_job
    from steptime._calibrate.harness.job import CALIBRATE

    run_measuring(lambda: run_job(CALIBRATE, context.args))


def run_measuring(run: Callable[[], int], *, needs_torch: bool = True) -> None:
    """Run a measuring command; its options are parsed where they also work without this command line."""
    from importlib.util import find_spec

    from steptime.errors import InputError

    if needs_torch and find_spec("torch") is None:
        raise InputError(NO_TORCH)
    try:
        raise typer.Exit(run())
    except SystemExit as left:  # argparse leaves after printing help
        raise typer.Exit(int(left.code or 0)) from None
