"""`steptime compare`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from steptime._cli.output import CalibrationFile, Json, Price, Profiled, announce, input_files, show
from steptime._cli.parsing import SteptimeCommand

if TYPE_CHECKING:
    from rich.console import Console

AFTER = "steptime.after"  # how many arguments follow after --


class WithOwnArguments(SteptimeCommand):
    """A command of several answers: what follows after -- are arguments of those that are scripts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keeps how many there are: the parser puts them among the answers."""
        ctx.meta[AFTER] = len(args) - args.index("--") - 1 if "--" in args else 0
        return super().parse_args(ctx, args)


def compare(
    context: Context,
    answers: Annotated[
        list[str],
        Argument(
            metavar="A B...",
            help="Two or more: configs, traces, saved workloads, training scripts (arguments of all of them after --), or "
            "answers written by --json of predict and sweep, all of whose variants count.",
            show_default=False,
        ),
    ],
    platform: Annotated[
        str | None,
        Option(
            "--platform",
            metavar="NAME,...",
            help="The machine of what is not predicted yet (`steptime platforms`), each of several; without it, as recorded.",
            show_default=False,
        ),
    ] = None,
    calibration: CalibrationFile = None,
    profiled: Profiled = False,
    price: Price = None,
    json: Json = False,
    csv: Annotated[
        Path | None, Option("--csv", metavar="FILE", help="Write a table of all answers.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, Option("--html", metavar="FILE", help="Write everything as a single HTML page that works offline.")
    ] = None,
) -> None:
    """Compare answers: which is fastest, what differs, whether the difference exceeds its uncertainty; for two, why."""
    from steptime._api.compare import compare as compared
    from steptime._api.read import runs_code
    from steptime._files import check_outputs
    from steptime._report.compare_text import print_comparison
    from steptime._report.plan_text import print_written
    from steptime._sweep.axes import listed

    before = len(answers) - context.meta[AFTER]
    own = answers[before:] if any(runs_code(each) for each in answers[:before]) else []
    answers = answers[: len(answers) - len(own)]
    check_outputs({"--html": html, "--csv": csv}, input_files(answers, calibration))
    for each in answers:
        announce(each, quiet=json)
    machines = None if platform is None else listed(platform, "--platform")
    sources = [[each, *own] if own and runs_code(each) else each for each in answers]
    answer = compared(*sources, platform=machines, calibration=calibration, profiled=profiled, price=price)
    for path, write in ((csv, answer.csv), (html, answer.html)):
        if path is not None:
            write(path)

    def said(console: Console) -> None:
        print_comparison(console, answer)
        print_written(console, {"Table": csv, "Page": html})

    show(json, answer.to_dict, said)
