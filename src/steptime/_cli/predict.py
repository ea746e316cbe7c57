"""`steptime predict`"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steptime._cli.options import Json, Trace
from steptime._cli.output import print_end, read, stdout, write_trace

if TYPE_CHECKING:
    from steptime._platforms.platform import Platform
    from steptime._program.workload import Workload
    from steptime._sim.prediction import Prediction

DEVICE = "h200"

Workloads = Annotated[
    list[Path],
    typer.Argument(
        metavar="WORKLOAD",
        help="Traces (files, folders, archives; one or many ranks), a captured workload, a config, a sharding task, or "
        "module:function.",
        show_default=False,
    ),
]
Name = Annotated[
    str | None,
    typer.Option("--platform", metavar="NAME", help="The machine (`steptime platforms` lists them); without it, as recorded."),
]


def predict(
    workload: Workloads,
    platform: Name = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Another global batch, of a config or function.")] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="Other ranks, of a config or function.")] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", metavar="FILE", help="Where a DLRM's tables go: what `steptime shard` wrote, or TorchRec's plan."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="NAME", help="Another device in the platform.")] = None,
    host: Annotated[str | None, typer.Option("--host", metavar="NAME", help="Another host in the platform.")] = None,
    fabric: Annotated[str | None, typer.Option("--fabric", metavar="NAME", help="Another fabric in the platform.")] = None,
    lookups: Annotated[
        Path | None,
        typer.Option("--lookups", metavar="FILE", help="What ranks look up in their tables, in one or many iterations."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="What `steptime calibrate` wrote on the machine: its own speed."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on an op without a model instead of guessing.")] = False,
    json: Json = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one page with everything, for a browser, offline.")
    ] = None,
    trace: Trace = None,
) -> None:
    """Predict the steady-state step time, say how sure that is, where the time goes and why."""
    from steptime._report.json import dumps, prediction_document
    from steptime._report.text import print_prediction

    given = read(workload, batch=batch, ranks=ranks, plan=plan, platform_ranks=_ranks_of(platform))
    chosen = _platform(given, platform, device, host, fabric, lookups)
    if chosen is None:
        found = _recorded(given, lookups, device, strict=strict, calibration=calibration)
    else:
        found = _modelled(given, chosen, lookups, strict=strict, calibration=calibration)
    write_trace(found.timeline, trace)
    if html is not None:
        from steptime._report.html.page import write_page

        write_page(html, found, given)
    if json:
        print(dumps(prediction_document(found)), end="")
        return
    with stdout() as console:
        print_prediction(console, given, found)
        print_end(console, trace, html)


def _ranks_of(name: str | None) -> int | None:
    """How many ranks a platform has; None where none was named."""
    if name is None:
        return None
    from steptime._platforms.platform import platform_parts

    return platform_parts(name).ranks


def _platform(
    given: Workload, name: str | None, device: str | None, host: str | None, fabric: str | None, lookups: Path | None
) -> Platform | None:
    """The platform that was asked for; None: as recorded."""
    from steptime._platforms.platform import Platform, platform_parts
    from steptime.errors import InputError

    ranks = given.world_size
    if name is None:
        if not any(program.recorded for program in given.programs):
            raise InputError(
                f"{given.name or 'the workload'} was never run: give the machine to predict for, as in "
                f"--platform {_suggested(ranks)}"
            )
        for option, value in (("--host", host), ("--fabric", fabric)):
            if value is not None:
                raise InputError(f"{option} {value}: says a part of a platform; give the platform too, with --platform NAME")
        if device is not None and lookups is None:
            raise InputError(f"--device {device}: a part of a platform; give --platform NAME too, or --lookups FILE")
        return None
    parts = platform_parts(name)
    # Fewer ranks than a platform has leave the others idle; more of them are joined by a fabric that was named for them.
    enough = ranks < parts.ranks or fabric is not None
    return Platform.of(parts.swapped(ranks=ranks if enough else None, device=device, host=host, fabric=fabric))


def _suggested(ranks: int) -> str:
    """A platform that has so many ranks; no shipped one has more than a few nodes."""
    if ranks == 1:
        return "1xh200"
    most = 8  # of the fabric h200-nvlink
    return f"{ranks}xh200-nvlink" if ranks <= most else "8xh200-nvlink --fabric FILE, a fabric of yours (`steptime fabric`)"


def _recorded(
    given: Workload, lookups: Path | None, device: str | None, *, strict: bool, calibration: Path | None
) -> Prediction:
    from steptime.errors import InputError

    for option, wanted in (("--strict", strict), ("--calibration", calibration is not None)):
        if wanted:
            raise InputError(f"{option}: is about models; give the machine to predict for with --platform NAME")
    if lookups is None:
        from steptime._sim.prediction import predict as predicted

        return predicted(given)
    from steptime._lookups.workload import WorkloadLookups
    from steptime._platforms.device import Device
    from steptime._sim.recorded.lookup_scenarios import predict_iterations

    return predict_iterations(given, WorkloadLookups.load(lookups), Device.load(device or DEVICE))


def _modelled(
    given: Workload, platform: Platform, lookups: Path | None, *, strict: bool, calibration: Path | None
) -> Prediction:
    from steptime._lookups.workload import WorkloadLookups
    from steptime._platforms.calibration import UNCALIBRATED, Calibration
    from steptime._sim.modelled.prediction import predict_on

    if lookups is not None:
        given = replace(given, lookups=WorkloadLookups.load(lookups))
    speed = UNCALIBRATED if calibration is None else Calibration.read(calibration, platform)
    return predict_on(given, platform, calibration=speed, strict=strict)
