"""`steptime whatif` and `diff`: which changes would save most of a step, and why one step is longer than another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from steptime._cli.output import (
    Batch,
    CalibrationFile,
    Json,
    Limit,
    OnPlatform,
    Profiled,
    Ranks,
    input_files,
    print_files,
    read,
    show,
    working,
)

if TYPE_CHECKING:
    from rich.console import Console


def whatif(
    workload: Annotated[
        list[str],
        Argument(
            metavar="WORKLOAD",
            help="Traces, a saved workload, a config, a training script or module:function (its own arguments after --).",
            show_default=False,
        ),
    ],
    platform: OnPlatform = None,
    batch: Batch = None,
    ranks: Ranks = None,
    calibration: CalibrationFile = None,
    profiled: Profiled = False,
    limit: Limit = None,
    json: Json = False,
) -> None:
    """List the changes that would save most of a step: each is made in the simulator, and what it saves is shown."""
    from steptime._api.predict import platform_ranks
    from steptime._api.whatif import whatif as suggested
    from steptime._report.whatif import print_suggestions

    job = read(workload, batch=batch, ranks=ranks, platform_ranks=platform_ranks(platform), limit_s=limit, quiet=json)
    with working("trying changes"):
        answer = suggested(job, platform, calibration=calibration, profiled=profiled)
    show(json, answer.to_dict, lambda console: print_suggestions(console, answer))


_STEP = "a folder or file of traces, a saved workload, a config, a training script or module:function."


def diff(
    before: Annotated[str, Argument(metavar="A", help=f"The first step: {_STEP}", show_default=False)],
    after: Annotated[str, Argument(metavar="B", help="The second step, of the same model.", show_default=False)],
    platform: Annotated[
        str | None,
        Option("--platform", metavar="NAME", help="The machine of both (`steptime platforms`); without it, as recorded."),
    ] = None,
    before_platform: Annotated[str | None, Option("--before", metavar="NAME", help="The machine of A alone.")] = None,
    after_platform: Annotated[
        str | None, Option("--after", metavar="NAME", help="The machine of B alone: `diff RUN RUN --after 1xh200`.")
    ] = None,
    calibration: CalibrationFile = None,
    profiled: Profiled = False,
    json: Json = False,
    html: Annotated[
        Path | None, Option("--html", metavar="FILE", help="Write everything as a single HTML page that works offline.")
    ] = None,
) -> None:
    """Compare two steps of one model and say what makes the second longer or shorter, in parts that add up."""
    from steptime._api.diff import diff as compared
    from steptime._api.predict import platform_ranks
    from steptime._files import check_outputs
    from steptime._report.diff import print_diff

    check_outputs({"--html": html}, input_files([before, after], calibration))
    machines = before_platform or platform, after_platform or platform
    first, second = (
        read([source], platform_ranks=platform_ranks(machine), quiet=json)
        for source, machine in zip((before, after), machines, strict=True)
    )
    options = {"before_platform": machines[0], "after_platform": machines[1]}
    with working("comparing"):
        answer = compared(first, second, **options, calibration=calibration, profiled=profiled)
    if html is not None:
        answer.html(html)

    def text(console: Console) -> None:
        print_diff(console, answer)
        print_files(console, None, html)

    show(json, answer.to_dict, text)
