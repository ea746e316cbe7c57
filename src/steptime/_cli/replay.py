"""`steptime replay`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steptime._cli.options import Json, Trace, Traces
from steptime._cli.output import print_end, read, stdout, write_trace


def replay(
    traces: Traces,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--measured",
            metavar="FILE",
            help="Step times measured without a profiler; measured.json beside the traces if there is one.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    trace: Trace = None,
) -> None:
    """Play a run's own kernel times and host gaps through the simulator and compare with the recorded steps."""
    from steptime._report.json import dumps, replay_document
    from steptime._report.replayed import find_measured, report_replay
    from steptime._report.text import print_replay
    from steptime._sim.recorded.replay import replay as replayed

    workload = read(traces)
    report = report_replay(replayed(workload), measured or find_measured(traces))
    write_trace(report.prediction.timeline, trace)
    if json:
        print(dumps(replay_document(report)), end="")
        return
    with stdout() as console:
        print_replay(console, workload, report)
        print_end(console, trace)
