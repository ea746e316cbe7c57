"""`steptime measure`"""

from __future__ import annotations

import typer

from steptime._cli.calibrate import run_measuring


def measure(context: typer.Context) -> None:
    """Measure kernels, lookups, host, collectives, steps or sharding on the GPUs of this machine."""
    from steptime_lab.measure.command import JOBS, main

    # Help, noise and merge do without.
    run_measuring(lambda: main(context.args), needs_torch=context.args[:1] != [] and context.args[0] in JOBS)
