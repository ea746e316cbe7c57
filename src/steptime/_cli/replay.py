"""`steptime replay`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steptime._cli.options import Json, Trace, Traces
from steptime._cli.output import input_files, print_end, read, stdout


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
    from steptime._api.predict import replay as replayed
    from steptime._files import refuse_overwriting
    from steptime._report.json import dumps
    from steptime._report.replayed import find_measured
    from steptime._report.text import print_replay

    refuse_overwriting({"--trace": trace}, input_files(traces, measured))
    answer = replayed(read(traces), measured=measured or find_measured(traces))
    if trace is not None:
        answer.trace(trace)
    if json:
        print(dumps(answer.to_dict()), end="")
        return
    with stdout() as console:
        print_replay(console, answer)
        print_end(console, trace)
