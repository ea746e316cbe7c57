"""`steptime predict`"""

from __future__ import annotations

from typing import Annotated

import typer

from steptime.cli.options import Json, Trace, Traces
from steptime.cli.output import print_end, read, stdout, write_trace


def predict(
    traces: Traces,
    platform: Annotated[
        str | None, typer.Option("--platform", metavar="NAME", help="The machine to predict for; without it, as recorded.")
    ] = None,
    json: Json = False,
    trace: Trace = None,
) -> None:
    """Predict the steady-state step time, say where the time goes and why."""
    from steptime.errors import InputError
    from steptime.report.json import dumps, prediction_document
    from steptime.report.text import print_prediction
    from steptime.sim.prediction import NO_PLATFORMS
    from steptime.sim.prediction import predict as predicted

    if platform is not None:
        raise InputError(f"platform {platform!r}: {NO_PLATFORMS}")
    workload = read(traces)
    found = predicted(workload)
    write_trace(found.timeline, trace)
    if json:
        print(dumps(prediction_document(found)), end="")
        return
    with stdout() as console:
        print_prediction(console, workload, found)
        print_end(console, trace)
