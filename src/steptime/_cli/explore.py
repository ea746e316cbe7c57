"""`steptime explore`: a workload in the browser, with controls for everything that can be changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from steptime._cli.output import CalibrationFile, Limit, read


def explore(
    workload: Annotated[
        list[str],
        Argument(
            metavar="WORKLOAD",
            help="A config, a saved workload, traces, a training script or module:function (its own arguments after --).",
            show_default=False,
        ),
    ],
    platform: Annotated[
        str | None,
        Option("--platform", metavar="NAME", help="The machine to begin with (`steptime platforms`).", show_default=False),
    ] = None,
    plan: Annotated[Path | None, Option("--plan", metavar="FILE", help="Where a DLRM's tables go.", show_default=False)] = None,
    calibration: CalibrationFile = None,
    limit: Limit = None,
    port: Annotated[
        int | None, Option("--port", min=1, max=65535, help="Port of 127.0.0.1; if taken, the next.", show_default=False)
    ] = None,
    no_browser: Annotated[bool, Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """Change batch, ranks, machine, precision, parallelism and more in the browser, and see the step move."""
    from steptime._api.predict import platform_ranks
    from steptime._explore.serve import PORT, serve
    from steptime._explore.subject import Subject

    job = read(workload, plan=plan, platform_ranks=platform_ranks(platform), limit_s=limit)
    subject = Subject(job, tuple(workload), platform, _named(plan), _named(calibration))
    serve(subject, port=port or PORT, browser=not no_browser, say=lambda text: print(text, flush=True))


def _named(file: Path | None) -> str | None:
    return None if file is None else str(file)
