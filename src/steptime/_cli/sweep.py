"""`steptime sweep`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from steptime._cli.options import Json
from steptime._cli.output import read, stdout
from steptime.errors import InputError


def sweep(
    workload: Annotated[
        list[Path],
        typer.Argument(metavar="WORKLOAD", help="A config, module:function, a saved workload or traces.", show_default=False),
    ],
    platform: Annotated[
        str, typer.Option("--platform", metavar="NAME,...", help="Platforms, separated by commas.", show_default=False)
    ],
    batch: Annotated[
        str | None, typer.Option("--batch", metavar="N,...", help="Global batch sizes, for a config or function.")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option("--ranks", metavar="N,...", help="Numbers of ranks, for a config or function.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="Calibration of the machine, written by `steptime calibrate`."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Skip variants with an op that has no model.")] = False,
    json: Json = False,
) -> None:
    """Predict one job with several batches, ranks and machines, fastest first."""
    from steptime._api.predict import platform_ranks
    from steptime._api.sweep import sweep as swept
    from steptime._report.json import dumps
    from steptime._report.sweep import print_sweep

    platforms = _listed("--platform", platform)
    answer = swept(
        read(workload, platform_ranks=platform_ranks(platforms[0])),
        platforms,
        batch=None if batch is None else _numbers("--batch", batch),
        ranks=None if ranks is None else _numbers("--ranks", ranks),
        calibration=calibration,
        strict=strict,
    )
    if json:
        print(dumps(answer.to_dict()), end="")
        return
    with stdout() as console:
        print_sweep(console, answer)


def _listed(option: str, text: str) -> Sequence[str]:
    values = list(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    if not values:
        raise InputError(f"{option} {text!r}: expected one value or several with commas between")
    return values


def _numbers(option: str, text: str) -> list[int]:
    values = _listed(option, text)
    wrong = next((each for each in values if not each.isdecimal() or len(each) > 12 or int(each) < 1), None)
    if wrong is not None:
        raise InputError(f"{option} {text}: {wrong!r} is no whole number of 1 or more")
    return [int(each) for each in values]
