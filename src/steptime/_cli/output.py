"""Where output goes: answers to stdout, progress to stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from steptime.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from steptime._program.workload import Workload

# Reads shorter than this need no progress bar.
PATIENCE_S = 0.5
# Columns where stdout is no terminal and COLUMNS does not say.
FILE_WIDTH = 100
# Narrower than this, lines are left to the terminal to break.
WIDTH_AT_LEAST = 60


def read(
    paths: Sequence[Path],
    *,
    batch: int | None = None,
    ranks: int | None = None,
    plan: Path | None = None,
    platform_ranks: int | None = None,
) -> Workload:
    """The workload behind the arguments, with a progress line on long reads."""
    from steptime._api.read import read as read_workload

    with _progress() as progress:
        return read_workload(paths, batch=batch, ranks=ranks, plan=plan, platform_ranks=platform_ranks, progress=progress)


@contextmanager
def stdout() -> Iterator[Console]:
    """The console answers go to. A file or pipe gets the width COLUMNS says, or a fixed one, and no trailing spaces."""
    from rich.console import Console

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character shows another, never a traceback
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
    if console.is_terminal:
        console.width = max(console.width, WIDTH_AT_LEAST)
        yield console
        return
    asked = os.environ.get("COLUMNS", "")
    console.width = max(int(asked), WIDTH_AT_LEAST) if asked.isdecimal() else FILE_WIDTH
    with console.capture() as captured:
        yield console
    sys.stdout.writelines(line.rstrip() + "\n" for line in captured.get().splitlines())


def input_files(paths: Sequence[Path], *others: Path | str | None) -> list[Path]:
    """Every file that a command reads, as far as its arguments name them: what no output may replace."""
    from steptime._program.formats.files import find_files

    there = [path for path in paths if path.exists()]
    return [*there, *(file.path for file in find_files(there)), *(Path(each) for each in others if each is not None)]


def print_end(console: Console, file: Path | None, page: Path | None = None) -> None:
    """Where the Perfetto file and the page lie, and an empty line before the next prompt."""
    from steptime._report.layout import print_line

    if file is not None:
        print_line(console, "Timeline", f"{file}  (open it at https://ui.perfetto.dev)", spaced=False)
    if page is not None:
        print_line(console, "Page", f"{page}  (open it in a browser)", spaced=False)
    console.print()


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None] | None]:
    """A callback that shows what is being read once that takes a while; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TransferSpeedColumn

    columns = (SpinnerColumn(), TextColumn("reading {task.description}", markup=False), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    began, read_before = time.monotonic(), {"": 0}
    tasks: list[TaskID] = []

    def told(name: str, read_bytes: int) -> None:
        read_before[name] = read_bytes
        if not tasks:
            if time.monotonic() - began < PATIENCE_S:
                return
            bar.start()
            tasks.append(bar.add_task(printable(name), total=None))
        bar.update(tasks[0], description=printable(name), completed=sum(read_before.values()))

    try:
        yield told
    finally:
        if tasks:
            bar.stop()
