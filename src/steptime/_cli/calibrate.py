"""`steptime calibrate`: measures this machine, or takes its speed from a recording (`--from-run`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from steptime._cli.output import input_files, read, run_measuring, show
from steptime._notices import Notices

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from rich.console import Console

FROM_RUN = "--from-run"


def calibrate(context: typer.Context) -> None:
    """Measure this machine's host and fabric, in at most a minute and a half; or --from-run, from a recording."""
    from steptime._calibrate.harness.command import CALIBRATE, run_job

    if any(word == FROM_RUN or word.startswith(f"{FROM_RUN}=") for word in context.args):
        from_run(context.args)
        return
    run_measuring(lambda: run_job(CALIBRATE, context.args))


def _parser() -> ArgumentParser:
    from steptime._calibrate.harness.command import LineParser

    made = LineParser(
        prog="steptime calibrate", allow_abbrev=False, description="Takes the speed of a machine from a recording."
    )
    made.add_argument(
        FROM_RUN, type=Path, nargs="+", required=True, metavar="RECORDING", help="Kineto traces, one or many ranks"
    )
    made.add_argument(
        "--platform", default=None, metavar="NAME", help="the machine; of one rank, as the recording names its GPU"
    )
    about = "step times measured without a profiler; measured.json beside the traces if there is one"
    made.add_argument("--measured", type=Path, default=None, metavar="FILE", help=about)
    made.add_argument("-o", "--out", type=Path, default=None, metavar="FILE", help="for `predict --calibration`")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    return made


def from_run(arguments: Sequence[str]) -> None:
    """What a recording says of its machine, and the file that predictions take it from."""
    from steptime._api.predict import find_measured, platform_for
    from steptime._calibrate.calibrate import write
    from steptime._calibrate.from_run import CalibrationOfRun, device_of, platform_of
    from steptime._files import refuse_overwriting
    from steptime._sim.recorded.replay import read_measured

    given = _parser().parse_args(list(arguments))
    refuse_overwriting({"-o": given.out}, input_files(given.from_run, given.platform, given.measured))
    workload = read(given.from_run)
    measured = given.measured or find_measured(given.from_run)
    platform = platform_for(given.platform or platform_of(workload), workload.world_size)
    found = CalibrationOfRun.of(workload, platform, () if measured is None else read_measured(measured))
    if given.out is not None:
        write(given.out, found.content(device_of(workload)))
    parts = list(found.parts())

    def document() -> dict[str, Any]:
        return {
            "schema_version": 1,
            "platform": found.platform.name,
            "parts": {part.name: part.to_dict() for part in parts},
            "file": None if given.out is None else str(given.out),
            **Notices.of(workload.warnings).without_headline.to_dict(),
        }

    def text(console: Console) -> None:
        from steptime._report.layout import print_line

        print_line(console, "Platform", found.platform.name)
        for part in parts:
            print_line(console, part.name.capitalize().replace("_", " "), str(part))
        if given.out is not None:
            print_line(console, "File", f"{given.out}  (for predict --calibration)")

    show(given.json, document, text)
