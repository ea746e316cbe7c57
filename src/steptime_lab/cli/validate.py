"""`steptime validate`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steptime._cli.options import Json
from steptime._cli.output import stdout
from steptime.errors import InputError


def validate(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SET",
            help="kernels, lookups, collectives, waiting, overlap, device-time, memory, steps, sharding, committed or visit.",
        ),
    ] = "kernels",
    device: Annotated[str, typer.Option("--device", help="Device whose models to validate.")] = "h200",
    fabric: Annotated[str, typer.Option("--fabric", help="Fabric to validate.")] = "loopback",
    models: Annotated[
        Path | None, typer.Option("--models", metavar="DIR", help="Output of `steptime fit`; by default the shipped models.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Finer groups as well: precisions of every family, ranks by regime.")
    ] = False,
    source: Annotated[
        str | None, typer.Option("--from", metavar="SOURCE", help="steps: from their trace (default), config or recorded host.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="steps: which component causes the error.")] = False,
    bars: Annotated[
        str | None,
        typer.Option(
            "--bars", metavar="FILE", help="steps: fail if errors exceed these bounds; `shipped` for the shipped ones."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Predicted against measured on the shipped sets: errors, interval coverage, the noise floor, baselines beside."""
    from steptime._report.json import dumps
    from steptime_lab.report.validation import print_validation, validation_document
    from steptime_lab.validate.shipped import SETS, Models, validated

    if what == "host":
        raise InputError("host-bound steps are a group of `steptime validate steps`, with --explain to see whose error it is")
    if what not in SETS:
        raise InputError(f"unknown set {what!r}; choose one of {', '.join(SETS)}")
    if what == "steps":
        from steptime_lab.cli.validate_steps import validate_steps_command

        if models is not None:
            raise InputError("validate steps asks the shipped models; drop --models")
        validate_steps_command(source or "trace", explain=explain, bars=bars, full=full, json=json)
        return
    if source is not None or explain or bars is not None:
        raise InputError(f"--from, --explain and --bars are for steps; drop them, or validate steps instead of {what}")
    if what == "sharding":
        from steptime_lab.cli.validate_sharding import validate_sharding_command

        if models is not None:
            raise InputError("validate sharding asks the shipped models; drop --models")
        validate_sharding_command(full=full, json=json)
        return
    result = validated(what, Models(device, models, fabric))
    if json:
        print(dumps(validation_document(result)), end="")
        return
    with stdout() as console:
        print_validation(console, result, full=full)
        console.print()
