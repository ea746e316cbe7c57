"""Arguments and options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Traces = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACES", help="Trace files, folders or tar archives; one or many ranks of one job.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON with stable keys to stdout, and nothing else.")]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Write the timeline as a Chrome trace (.json or .json.gz) for Perfetto."),
]
