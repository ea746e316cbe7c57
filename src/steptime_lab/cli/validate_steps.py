"""`steptime validate steps`"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from steptime._cli.output import stdout

SHIPPED = "shipped"
BARS_LEFT = 1


def validate_steps_command(source: str, *, explain: bool, bars: str | None, full: bool, json: bool) -> None:
    """All shipped steps; leaves with 1 where a bar is not kept."""
    from steptime._report.json import dumps
    from steptime_lab.report.steps import print_splits, split_document
    from steptime_lab.report.validation import print_validation, validation_document
    from steptime_lab.validate.captured_steps import captured_steps
    from steptime_lab.validate.steps.bars import SHIPPED_BARS, bars_left, read_bars
    from steptime_lab.validate.steps.steps import validate_steps

    asked = read_bars(SHIPPED_BARS if bars == SHIPPED else Path(bars), source) if bars else []
    with _progress() as text:
        result = validate_steps(source, explain=explain, captured=captured_steps() if source == "config" else None, said=text)
    if json:
        document = validation_document(result.validation)
        print(dumps({**document, "explained": split_document(result.outcomes)} if explain else document), end="")
    else:
        with stdout() as console:
            print_validation(console, result.validation, full=full)
            if explain:
                print_splits(console, result.outcomes)
            console.print()
    left = bars_left(result.validation, asked)
    for line in left:
        print(f"steptime: bar not kept: {line}", file=sys.stderr)
    if left:
        raise typer.Exit(BARS_LEFT)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A callback that shows how many cases are done; shows nothing where nobody watches."""
    if not sys.stderr.isatty():
        yield lambda _done, _all: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (SpinnerColumn(), TextColumn("predicting steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, every: bar.update(task, completed=done, total=every)
