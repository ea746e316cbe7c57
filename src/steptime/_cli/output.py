"""What commands share: options, where output goes (answers to stdout, progress to stderr), and reading with a progress line."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from steptime._cli.quantities import quantity
from steptime._units import DURATION, PRICE, SIZE
from steptime.errors import InputError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from steptime._program.workload import Workload

Traces = Annotated[
    list[Path],
    Argument(metavar="TRACES", help="Trace files, folders or tar archives; one or many ranks of one job.", show_default=False),
]
OnPlatform = Annotated[
    str | None,
    Option("--platform", metavar="NAME", help="The machine (`steptime platforms` lists them); without it, as recorded."),
]
Batch = Annotated[int | None, Option("--batch", min=1, help="Global batch size, for a config or function.")]
Ranks = Annotated[int | None, Option("--ranks", min=1, help="Number of ranks, for a config or function.")]
Set = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Another value of a key of a config, as parallel.fsdp=8 or tables.NAME.rows=1000 (docs/configs.md); may be given "
        "several times. Nothing after the = takes the key away.",
        show_default=False,
    ),
]
Profiled = Annotated[
    bool, Option("--profiled", help="A recorded run with what its profiler cost, instead of as it runs without one.")
]
Json = Annotated[bool, Option("--json", help="Write JSON with stable keys to stdout, and nothing else.")]
Trace = Annotated[
    Path | None,
    Option("--trace", metavar="FILE", help="Write the timeline as a Chrome trace (.json or .json.gz) for Perfetto."),
]
CalibrationFile = Annotated[
    Path | None,
    Option("--calibration", metavar="FILE", help="Calibration of the machine, written by `steptime calibrate`."),
]

Compile = Annotated[
    str | None,
    Option(
        "--compile",
        metavar="[MODE]",
        help="As torch.compile would run it (docs/compile.md): default if no mode is given, or reduce-overhead; off: eager.",
        show_default=False,
    ),
]

Memory = Annotated[
    int | None,
    Option(
        "--memory",
        metavar="SIZE",
        parser=quantity("--memory", SIZE, 1),
        help="Memory limit of a rank, as 30GB, 80GiB or bytes.",
    ),
]
Price = Annotated[
    float | None,
    Option("--price", metavar="$", parser=quantity("--price", PRICE), help="Of one GPU for an hour: adds what steps cost."),
]

Limit = Annotated[
    float | None,
    Option(
        "--limit",
        metavar="TIME",
        parser=quantity("--limit", DURATION),
        help="How long a training script may run, as 90 (s) or 5m; 2m if not given.",
    ),
]

ExpertSkew = Annotated[
    float | None,
    Option(
        "--expert-skew", metavar="FACTOR", help="Of a mixture of experts captured: tokens of the fullest, by the mean.",
        show_default=False,
    ),
]  # fmt: skip
_SKEW = "STEPTIME_EXPERT_SKEW"  # read where experts are routed to, also in the process of a script

NO_TORCH = "measuring needs PyTorch, which is not installed; pip install 'steptime[measure]' (predicting does without)"
# Reads shorter than this need no progress bar.
PATIENCE_S = 0.5
# A pipe or file gets a line of progress so often.
LINE_EVERY_S = 15.0
# Columns where stdout is no terminal and COLUMNS does not say.
FILE_WIDTH = 100
# Narrower than this, lines are left to the terminal to break.
WIDTH_AT_LEAST = 60


def skew_experts(factor: float | None) -> None:
    """Says how much fuller than the mean the fullest expert of what is captured from here on is."""
    if factor is not None:
        os.environ[_SKEW] = f"{factor:g}"


def settings_of(given: Sequence[str] | None) -> dict[str, Any]:
    """What `--set` says, by key."""
    from steptime._build.settings import parsed

    result: dict[str, Any] = {}
    for text in given or ():
        key, value = parsed(text)
        if key in result:
            raise InputError(f"--set {key} is given twice; give it once")
        result[key] = value
    return result


def read(
    paths: Sequence[Path | str],
    *,
    batch: int | None = None,
    ranks: int | None = None,
    plan: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    platform_ranks: int | None = None,
    limit_s: float | None = None,
    quiet: bool = False,
) -> Workload:
    """The workload behind the arguments, with a progress line on long reads. A script is announced, on stderr where `quiet`."""
    from steptime._api.read import read as read_workload

    announce(str(paths[0]), quiet=quiet)
    # What is built from a config reads nothing for long: there it is the building that takes a while.
    config = Path(paths[0]).suffix in (".toml", ".csv")
    with working("building") if config else nullcontext(), nullcontext() if config else _progress() as progress:
        return read_workload(
            paths, batch=batch, ranks=ranks, plan=plan, settings=settings,
            platform_ranks=platform_ranks, limit_s=limit_s, progress=progress,
        )  # fmt: skip


def announce(source: str, *, quiet: bool) -> None:
    """Says what running a script means, before it runs."""
    from steptime._api.read import is_script

    if is_script(source) and Path(source).is_file():
        from steptime._capture.launch import announcement

        print(announcement(source), file=sys.stderr if quiet else sys.stdout, flush=True)


def show(json: bool, document: Callable[[], dict[str, Any]], text: Callable[[Console], None]) -> None:
    """An answer on stdout, as JSON or as text with an empty line before the next prompt."""
    if json:
        from steptime._report.json import dumps

        print(dumps(document()), end="")
        return
    with stdout() as console:
        text(console)
        console.print()


def run_measuring(run: Callable[[], int], *, needs_torch: bool = True) -> None:
    """Run a measuring command; its options are parsed where they also work without this command line."""
    if needs_torch and find_spec("torch") is None:
        raise InputError(NO_TORCH)
    try:
        raise typer.Exit(run())
    except SystemExit as left:  # argparse leaves after printing help
        raise typer.Exit(int(left.code or 0)) from None


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
    columns = os.environ.get("COLUMNS", "")
    console.width = max(int(columns), WIDTH_AT_LEAST) if columns.isdecimal() else FILE_WIDTH
    with console.capture() as captured:
        yield console
    sys.stdout.writelines(line.rstrip() + "\n" for line in captured.get().splitlines())


def input_files(paths: Sequence[Path | str], *others: Path | str | None) -> list[Path]:
    """Every file that a command reads, as far as its arguments name them: what no output may replace."""
    from steptime._program.formats import find_files

    there = [path for path in map(Path, paths) if path.exists()]
    return [*there, *(file.path for file in find_files(there)), *(Path(each) for each in others if each is not None)]


def print_files(console: Console, trace: Path | None, page: Path | None = None) -> None:
    """Where the Perfetto file and the page lie."""
    from steptime._report.layout import print_line

    if trace is not None:
        print_line(console, "Timeline", f"{trace}  (open it at https://ui.perfetto.dev)", spaced=False)
    if page is not None:
        print_line(console, "Page", f"{page}  (open it in a browser)", spaced=False)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Says what takes longer than a second, until it is done, and what its callback is told; in a pipe a line now and then."""
    if not sys.stderr.isatty():
        told, done, began = [""], threading.Event(), time.monotonic()

        def lines() -> None:
            while not done.wait(LINE_EVERY_S):
                print(f"steptime: {what}: {told[0] or f'{time.monotonic() - began:.0f} s'}", file=sys.stderr, flush=True)

        threading.Thread(target=lines, daemon=True).start()
        try:
            yield lambda more: told.__setitem__(0, more)
        finally:
            done.set()
        return
    from rich.console import Console

    status = Console(stderr=True).status(what)
    begin = threading.Timer(PATIENCE_S, status.start)
    begin.daemon = True
    begin.start()
    try:
        yield lambda more: status.update(f"{what}: {more}")
    finally:
        begin.cancel()
        begin.join()
        status.stop()


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

    def update(name: str, read_bytes: int) -> None:
        read_before[name] = read_bytes
        if not tasks:
            if time.monotonic() - began < PATIENCE_S:
                return
            bar.start()
            tasks.append(bar.add_task(printable(name), total=None))
        bar.update(tasks[0], description=printable(name), completed=sum(read_before.values()))

    try:
        yield update
    finally:
        if tasks:
            bar.stop()
