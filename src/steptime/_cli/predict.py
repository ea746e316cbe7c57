"""`steptime predict`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steptime._cli.options import Json, Trace
from steptime._cli.output import input_files, print_end, read, stdout

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
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Global batch size, for a config or function.")] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="Number of ranks, for a config or function.")] = None,
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
        typer.Option("--lookups", metavar="FILE", help="What each rank looks up in its tables, for one or more iterations."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="Calibration of the machine, written by `steptime calibrate`."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on an op without a model instead of estimating it.")] = False,
    json: Json = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write everything as a single HTML page that works offline.")
    ] = None,
    trace: Trace = None,
) -> None:
    """Predict the steady-state step time, say how sure that is, where the time goes and why."""
    from steptime._api.predict import platform_ranks
    from steptime._api.predict import predict as predicted
    from steptime._files import refuse_overwriting
    from steptime._report.json import dumps
    from steptime._report.text import print_prediction

    outputs = {"--html": html, "--trace": trace}
    refuse_overwriting(outputs, input_files(workload, plan, platform, device, host, fabric, lookups, calibration))
    answer = predicted(
        read(workload, batch=batch, ranks=ranks, plan=plan, platform_ranks=platform_ranks(platform)),
        platform,
        device=device,
        host=host,
        fabric=fabric,
        lookups=lookups,
        calibration=calibration,
        strict=strict,
    )
    if trace is not None:
        answer.trace(trace)
    if html is not None:
        answer.html(html)
    if json:
        print(dumps(answer.to_dict()), end="")
        return
    with stdout() as console:
        print_prediction(console, answer)
        print_end(console, trace, html)
