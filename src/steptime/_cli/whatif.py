"""`steptime whatif`: which changes would save most of a step."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from steptime._cli.output import CalibrationFile, Json, Limit, read, show


def whatif(
    workload: Annotated[
        list[str],
        Argument(
            metavar="WORKLOAD",
            help="Traces, a saved workload, a config, a training script or module:function (its own arguments after --).",
            show_default=False,
        ),
    ],
    platform: Annotated[
        str | None,
        Option("--platform", metavar="NAME", help="The machine (`steptime platforms` lists them); without it, as recorded."),
    ] = None,
    batch: Annotated[int | None, Option("--batch", min=1, help="Global batch size, for a config or function.")] = None,
    ranks: Annotated[int | None, Option("--ranks", min=1, help="Number of ranks, for a config or function.")] = None,
    calibration: CalibrationFile = None,
    limit: Limit = None,
    json: Json = False,
) -> None:
    """List the changes that would save most of a step: each is made in the simulator, and what it saves is shown."""
    from steptime._api.predict import platform_ranks
    from steptime._api.whatif import whatif as suggested
    from steptime._report.whatif import print_suggestions

    job = read(workload, batch=batch, ranks=ranks, platform_ranks=platform_ranks(platform), limit_s=limit, quiet=json)
    answer = suggested(job, platform, calibration=calibration)
    show(json, answer.to_dict, lambda console: print_suggestions(console, answer))
