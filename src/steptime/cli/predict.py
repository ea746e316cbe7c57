"""`steptime predict`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steptime.cli.options import Json, Trace, Traces
from steptime.cli.output import print_end, read, stdout, write_trace

if TYPE_CHECKING:
    from steptime.graph.workload import Workload
    from steptime.sim.prediction import Prediction

DEVICE = "h200"


def predict(
    traces: Traces,
    platform: Annotated[
        str | None, typer.Option("--platform", metavar="NAME", help="The machine to predict for; without it, as recorded.")
    ] = None,
    lookups: Annotated[
        Path | None,
        typer.Option(
            "--lookups", metavar="FILE", help="What ranks look up in each iteration: how the step time varies with it."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help=f"Whose lookup models say how iterations differ; {DEVICE} if not given."),
    ] = None,
    json: Json = False,
    trace: Trace = None,
) -> None:
    """Predict the steady-state step time, say where the time goes and why."""
    from steptime.errors import InputError
    from steptime.report.json import dumps, prediction_document
    from steptime.report.text import print_prediction
    from steptime.sim.prediction import NO_PLATFORMS

    if platform is not None:
        raise InputError(f"platform {platform!r}: {NO_PLATFORMS}")
    if device is not None and lookups is None:
        raise InputError(f"--device {device}: says whose lookup models answer; give the lookups too, with --lookups FILE")
    workload = read(traces)
    found = _predicted(workload, lookups, device or DEVICE)
    write_trace(found.timeline, trace)
    if json:
        print(dumps(prediction_document(found)), end="")
        return
    with stdout() as console:
        print_prediction(console, workload, found)
        print_end(console, trace)


def _predicted(workload: Workload, lookups: Path | None, device: str) -> Prediction:
    if lookups is None:
        from steptime.sim.prediction import predict as predicted

        return predicted(workload)
    from steptime.build.step_lookups import WorkloadLookups
    from steptime.platforms.device import Device
    from steptime.sim.lookup_scenarios import predict_iterations

    return predict_iterations(workload, WorkloadLookups.load(lookups), Device.load(device))
