"""`steptime measure` and `steptime calibrate`"""

from __future__ import annotations

import typer

NO_TORCH = "measuring needs PyTorch, which is not installed; pip install 'steptime[measure]' (predicting does without)"


def measure(context: typer.Context) -> None:
    """Measure kernels, lookups, host, collectives, steps or sharding on the GPUs of this machine."""
    _run(context.args)


def calibrate(context: typer.Context) -> None:
    """Measure this machine's host and fabric, in at most a minute and a half."""
    _run(["calibrate", *context.args])


def _run(arguments: list[str]) -> None:
    from importlib.util import find_spec

    from steptime.errors import InputError
    from steptime.measure.command import main

    if find_spec("torch") is None:
        raise InputError(NO_TORCH)
    try:
        raise typer.Exit(main(arguments))
    except SystemExit as left:  # argparse leaves after printing help
        raise typer.Exit(int(left.code or 0)) from None
