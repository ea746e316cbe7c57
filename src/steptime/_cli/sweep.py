"""`steptime sweep`"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from steptime._cli.output import Json, announce, input_files, show
from steptime.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

_EVERY_S = 10.0  # lines of progress where nobody watches


def _values(name: str, metavar: str, what: str) -> Any:
    return Option(name, metavar=f"{metavar},...", help=what, show_default=False)


def _file(name: str, what: str) -> Any:
    return Option(name, metavar="FILE", help=what, show_default=False)


def sweep(
    workload: Annotated[
        list[str],
        Argument(
            metavar="WORKLOAD",
            help="A config, a training script or module:function (its own arguments after --), a saved workload or traces.",
            show_default=False,
        ),
    ],
    platform: Annotated[str | None, _values("--platform", "NAME", "Platforms, separated by commas.")] = None,
    batch: Annotated[
        str | None,
        _values("--batch", "N", "Global batch sizes; 32:512 doubles from 32 to 512, 32:512:64 goes in steps of 64."),
    ] = None,
    ranks: Annotated[str | None, _values("--ranks", "N", "Numbers of ranks; 1:8 doubles.")] = None,
    settings: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE,...",
            help="Values of a key of the config, as parallel.fsdp=1,8 or layers=12:48:12 (docs/sweep.md); may be given several "
            "times. Commas inside brackets belong to a value: bottom=[256,64],[512,64].",
            show_default=False,
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        Option(
            "--variant",
            metavar="'NAME: KEY=VALUE, ...'",
            help="A named combination, as 'tp: parallel.tensor=8' or 'ddp:'; may be given several times.",
            show_default=False,
        ),
    ] = None,
    plan: Annotated[str | None, _values("--plan", "FILE", "Plans of a DLRM's tables.")] = None,
    device: Annotated[str | None, _values("--device", "NAME", "Other devices in the platform.")] = None,
    host: Annotated[str | None, _values("--host", "NAME", "Other hosts in the platform.")] = None,
    fabric: Annotated[str | None, _values("--fabric", "NAME", "Other fabrics in the platform.")] = None,
    power_cap: Annotated[
        str | None, _values("--power-cap", "WATTS", "What each card may draw; 300:700:100 is a range.")
    ] = None,
    lookups: Annotated[str | None, _values("--lookups", "FILE", "What each rank looks up in its tables.")] = None,
    calibration: Annotated[str | None, _values("--calibration", "FILE", "Calibrations of the machine.")] = None,
    what_if: Annotated[
        list[str] | None,
        Option(
            "--what-if",
            metavar="CHANGE",
            help="A change of the step (docs/whatif.md), 'none' for the step as it is; each is a variant, and several with ; "
            "between are one.",
            show_default=False,
        ),
    ] = None,
    compile_mode: Annotated[
        str | None, _values("--compile", "MODE", "As torch.compile would run it: off, default, reduce-overhead.")
    ] = None,
    strict: Annotated[bool, Option("--strict", help="Leave out variants with an op that has no model.")] = False,
    profiled: Annotated[bool, Option("--profiled", help="A recorded run with what its profiler cost.")] = False,
    price: Annotated[
        str | None,
        Option(
            "--price",
            metavar="DOLLARS",
            help="Of one GPU for an hour, or of each platform: NAME=4,NAME=2.5.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None, Option("--workers", min=1, help="Processes; by default one for every core, if that is faster.")
    ] = None,
    resume: Annotated[
        Path | None, _file("--resume", "Keep finished variants in this file, and go on from there if it has some.")
    ] = None,
    json: Json = False,
    csv: Annotated[Path | None, _file("--csv", "Write a table of all variants.")] = None,
    parquet: Annotated[Path | None, _file("--parquet", "Write the same table as Parquet.")] = None,
    html: Annotated[Path | None, _file("--html", "Write a single HTML page with curves that works offline.")] = None,
) -> None:
    """Predict one job in many variants (machines, batches, ranks, any key of its config): which fits, which is best."""
    from steptime._api.sweep import sweep as swept
    from steptime._files import check_outputs
    from steptime._report.sweep_text import print_sweep
    from steptime._sweep.axes import listed, quantities, whole_numbers
    from steptime._units import POWER

    def several(option: str, text: str | None) -> list[str] | None:
        return None if text is None else listed(text, option)

    files = {"--csv": csv, "--parquet": parquet, "--html": html}
    options = {"--plan": plan, "--lookups": lookups, "--calibration": calibration, "--fabric": fabric, "--platform": platform}
    read = [each for option, text in options.items() for each in several(option, text) or ()]
    check_outputs({**files, "--resume": resume}, input_files(workload, *read))
    announce(workload[0], quiet=json)
    with _progress() as progress:
        answer = swept(
            workload,
            several("--platform", platform),
            batch=None if batch is None else whole_numbers("--batch", batch),
            ranks=None if ranks is None else whole_numbers("--ranks", ranks),
            settings=_axes(settings),
            variants=_variants(variant),
            plan=several("--plan", plan),
            device=several("--device", device),
            host=several("--host", host),
            fabric=several("--fabric", fabric),
            power_cap_w=None if power_cap is None else quantities("--power-cap", power_cap, POWER),
            lookups=several("--lookups", lookups),
            calibration=several("--calibration", calibration),
            what_if=what_if,
            compile=several("--compile", compile_mode),
            strict=strict,
            profiled=profiled,
            price=_price(price),
            workers=workers,
            journal=resume,
            progress=progress,
        )
    for path, write in ((csv, answer.csv), (parquet, answer.parquet), (html, answer.html)):
        if path is not None:
            write(path)

    def said(console: Console) -> None:
        from steptime._report.plan_text import print_written

        print_sweep(console, answer)
        print_written(console, {"Table": csv, "Parquet": parquet, "Page": html, "Journal": resume})

    show(json, answer.to_dict, said)


def _axes(given: Sequence[str] | None) -> dict[str, list[Any]]:
    """What `--set` says, by key."""
    from steptime._sweep.axes import setting_axis

    result: dict[str, list[Any]] = {}
    for text in given or ():
        key, values = setting_axis(text)
        if key in result:
            raise InputError(f"--set {key} is given twice; give all of its values at once, with commas between")
        result[key] = values
    return result


def _variants(given: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """What `--variant` says, by name."""
    from steptime._sweep.axes import named_variant

    result: dict[str, dict[str, Any]] = {}
    for text in given or ():
        name, values = named_variant(text)
        if name in result:
            raise InputError(f"--variant {name}: is given twice; give each variant a name of its own")
        result[name] = values
    return result


def _price(text: str | None) -> float | dict[str, float] | None:
    """A number, or one of every platform."""
    from steptime._cli.quantities import quantity
    from steptime._sweep.axes import listed
    from steptime._units import PRICE

    if text is None:
        return None
    amount_of = quantity("--price", PRICE)
    if "=" not in text:
        return amount_of(text.strip())
    pairs = [each.rpartition("=") for each in listed(text, "--price")]
    return {name.strip(): amount_of(amount.strip()) for name, _, amount in pairs}


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Tells on stderr how many variants are done: a bar, or a line now and then where nobody watches."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("variants"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("variants", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    said = [time.monotonic()]

    def tell(done: int, total: int) -> None:
        if time.monotonic() - said[0] >= _EVERY_S:
            said[0] = time.monotonic()
            print(f"steptime: {done:,} of {total:,} variants", file=sys.stderr, flush=True)

    yield tell
