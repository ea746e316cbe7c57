"""`steptime fit`"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from steptime.errors import InputError


def fit(
    measurements: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Output of `steptime measure`; by default the shipped rows.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Output folder for the models.")] = Path("fitted"),
    name: Annotated[str, typer.Option("--name", help="Name of the device; its limits are in NAME.toml.")] = "h200",
    host: Annotated[str, typer.Option("--host", help="Name of the host.")] = "xeon-h200",
    only: Annotated[
        str, typer.Option("--only", help="Which of kernels, lookups, host, fabrics, overlap, sharing and baselines to fit.")
    ] = "kernels,lookups,host,fabrics,overlap,baselines",
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the fit.")] = 0,
) -> None:
    """Fit device and host models to measurements: minutes on two cores, the same rows and seed give the same models."""
    from steptime._files import check_file_name
    from steptime_lab.fit.models import WHAT, Names, fit_and_write
    from steptime_lab.measurements.shipped import FOLDER

    check_file_name("--name", name)
    check_file_name("--host", host)
    chosen = [word for word in only.split(",") if word]
    unknown = sorted(set(chosen) - set(WHAT))
    if unknown or not chosen:
        raise InputError(
            f"--only {only}: {'unknown ' + ', '.join(unknown) if unknown else 'nothing chosen'}; choose from {', '.join(WHAT)}"
        )
    if "kernels" in chosen and find_spec("torch") is None:
        raise InputError("fitting kernels needs PyTorch; pip install './lab[torch]' in a clone, or leave kernels out of --only")
    if measurements is not None and not measurements.is_dir():
        raise InputError(f"{measurements}: no folder of measurements; `steptime measure` writes one")
    for file in fit_and_write(
        measurements or FOLDER, out, Names(name, host), chosen, seed, said=lambda line: print(line, file=sys.stderr, flush=True)
    ):
        print(file)
