"""`steptime measure`, `adopt`, `fit` and `validate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from steptime._cli.output import Json, run_measuring, show, stdout
from steptime.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from steptime._report.json import Document
    from steptime_lab.validate.engine import Validation

SHIPPED = "shipped"
BARS_LEFT = 1
_RECOMMENDERS, _LAYOUTS, _BRIDGE = "recommenders", "layouts", "bridge"


def measure(context: typer.Context) -> None:
    """Measure kernels, lookups, host, collectives, steps, sharding or the zoo on the GPUs of this machine."""
    from steptime_lab.measure.command import JOBS, main

    # Help, noise and merge do without.
    run_measuring(lambda: main(context.args), needs_torch=context.args[:1] != [] and context.args[0] in JOBS)


def adopt(context: typer.Context) -> None:
    """Make a platform of the GPUs of this machine: measure for ten minutes, fit, and score it on rows held out."""
    from steptime_lab.adopt.command import main

    run_measuring(lambda: main(context.args), needs_torch=not {"--fit", "-h", "--help"} & set(context.args))


def fit(
    measurements: Annotated[
        Path | None,
        Argument(metavar="DIR", help="Output of `steptime measure`; by default the shipped rows.", show_default=False),
    ] = None,
    out: Annotated[Path, Option("-o", "--out", metavar="DIR", help="Output folder for the models.")] = Path("fitted"),
    name: Annotated[str, Option("--name", help="Name of the device; its limits are in NAME.toml.")] = "h200",
    host: Annotated[str, Option("--host", help="Name of the host.")] = "xeon-h200",
    only: Annotated[
        str,
        Option(
            "--only", help="Which of kernels, generated, lookups, host, fabrics, overlap, sharing, power and baselines to fit."
        ),
    ] = "kernels,lookups,host,fabrics,overlap,baselines",
    seed: Annotated[int, Option("--seed", help="Random seed of the fit.")] = 0,
) -> None:
    """Fit device and host models to measurements: minutes on two cores, the same rows and seed give the same models."""
    from steptime._files import check_file_name
    from steptime_lab.fit.models import WHAT, FitRun, fit_and_write
    from steptime_lab.measurements.shipped import FOLDER

    check_file_name("--name", name)
    check_file_name("--host", host)
    chosen = [word for word in only.split(",") if word]
    unknown = sorted(set(chosen) - set(WHAT))
    if unknown or not chosen:
        raise InputError(
            f"--only {only}: {'unknown ' + ', '.join(unknown) if unknown else 'nothing chosen'}; choose from {', '.join(WHAT)}"
        )
    if "kernels" in chosen and find_spec("torch") is None:
        raise InputError("fitting kernels needs PyTorch; pip install './lab[torch]' in a clone, or leave kernels out of --only")
    if measurements is not None and not measurements.is_dir():
        raise InputError(f"{measurements}: no folder of measurements; `steptime measure` writes one")
    run = FitRun(measurements or FOLDER, out, name, host, seed, lambda line: print(line, file=sys.stderr, flush=True))
    for file in fit_and_write(run, chosen):
        print(file)


def validate(
    what: Annotated[
        str | None,
        Argument(
            metavar="SET",
            help="kernels (the default), generated, lookups, collectives, waiting, overlap, device-time, memory, steps, "
            "intervals, sharding, committed, visit, power, recordings, recommenders, layouts, bridge, zoo or compiled.",
            show_default=False,
        ),
    ] = None,
    platform: Annotated[
        Path | None,
        Option("--platform", metavar="DIR", help="A platform of `steptime adopt`, scored on its own rows; all sets, or SET."),
    ] = None,
    device: Annotated[str, Option("--device", help="Device whose models to validate.")] = "h200",
    fabric: Annotated[str, Option("--fabric", help="Fabric to validate.")] = "loopback",
    models: Annotated[
        Path | None, Option("--models", metavar="DIR", help="Output of `steptime fit`; by default the shipped models.")
    ] = None,
    full: Annotated[bool, Option("--full", help="Finer groups as well: precisions of every family, ranks by regime.")] = False,
    source: Annotated[
        str | None, Option("--from", metavar="SOURCE", help="steps: from their trace (default), config or recorded host.")
    ] = None,
    explain: Annotated[bool, Option("--explain", help="steps, zoo: which component causes the error.")] = False,
    refit: Annotated[
        bool, Option("--refit", help="zoo: predict each group anew by models fitted without it, and keep the answers.")
    ] = False,
    bars: Annotated[
        str | None,
        Option("--bars", metavar="FILE", help="steps: fail if errors exceed these bounds; `shipped` for the shipped ones."),
    ] = None,
    rows: Annotated[
        Path | None,
        Option(
            "--rows",
            metavar="FILE",
            help="Timed by others; collectives: CSV (gpu, nodes, ranks, op, bytes, us, nccl), intervals: JSON, "
            "recordings: a folder of runs, recommenders: CSV (gpu, nodes, per_node, batch, ms_per_step), "
            "layouts: CSV as vTrain's, bridge: CSV as Megatron-Bridge's.",
        ),
    ] = None,
    config: Annotated[
        Path | None, Option("--config", metavar="FILE", help="recommenders: the config that the rows of --rows ran.")
    ] = None,
    leave_out: Annotated[
        bool,
        Option(
            "--leave-out",
            help="With --rows; collectives: each by a fit without its kind and ranks, intervals: without its source.",
        ),
    ] = False,
    per_box: Annotated[
        bool,
        Option(
            "--per-box",
            help="intervals: one number per source and device, from a few of its rows in --rows; layouts: one factor of the "
            "host for each width of the model, from rows of the others.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Predicted against measured on the shipped sets: errors, interval coverage, the noise floor, baselines beside."""
    from steptime_lab.report.validation import print_validation, validation_document
    from steptime_lab.validate.sets import SETS, Models, validated

    if platform is not None:
        from steptime_lab.adopt.scores import WHAT, scored

        if what is not None and what not in WHAT:
            raise InputError(f"{what}: an adopted platform has rows of {', '.join(WHAT)}")
        own = scored(platform, WHAT if what is None else (what,))
        show(json, lambda: validation_document(own), lambda console: print_validation(console, own, full=full))
        return
    _check_names(device, fabric, models)
    what = what or "kernels"
    if what == _RECOMMENDERS:
        published = _recommenders(rows, config)
        show(json, lambda: validation_document(published), lambda console: print_validation(console, published, full=full))
        return
    if what in (_LAYOUTS, _BRIDGE):
        compared = _layouts(what, rows, per_box)
        show(json, lambda: validation_document(compared), lambda console: print_validation(console, compared, full=full))
        return
    _check_set(what, SETS, models)
    _check_options(what, of_steps=source is not None or bars is not None, explain=explain, refit=refit)
    if what == "steps":
        _validate_steps(source or "trace", explain=explain, bars=bars, full=full, json=json)
        return
    if what == "zoo":
        _validate_zoo(refit=refit, explain=explain, full=full, json=json)
        return
    if what == "sharding":
        from steptime._report.json import dumps
        from steptime_lab.report.validation import sharding_document, sharding_lines
        from steptime_lab.validate.sharding.sharding import validate_sharding

        if models is not None:
            raise InputError("validate sharding asks the shipped models; drop --models")
        sharding = validate_sharding()
        print(dumps(sharding_document(sharding)).rstrip() if json else "\n".join(sharding_lines(sharding, full=full)))
        return
    if rows is None and (leave_out or per_box):
        raise InputError(f"--{'leave-out' if leave_out else 'per-box'}: is for rows of your own; give --rows FILE")
    if what == "intervals" and rows is not None:
        from steptime_lab.validate.intervals.intervals import validate_rows

        with _progress() as progress:
            result = validate_rows(rows, per_box=per_box, leave_out=leave_out, progress=progress)
        show(json, lambda: validation_document(result), lambda console: print_validation(console, result, full=full))
        return
    result = validated(what, Models(device, models, fabric)) if rows is None else _timed(what, rows, fabric, models, leave_out)
    show(json, lambda: validation_document(result), lambda console: print_validation(console, result, full=full))


def _recommenders(rows: Path | None, config: Path | None) -> Validation:
    """A config on steps of it that others published."""
    from steptime_lab.validate.recommenders import validate_recommenders

    if rows is None or config is None:
        raise InputError(f"validate {_RECOMMENDERS} scores a config on rows of others; give --rows FILE and --config FILE")
    return validate_recommenders(rows, config)


def _layouts(what: str, rows: Path | None, per_box: bool) -> Validation:
    """Published steps of one model under many layouts, or of many models."""
    from steptime_lab.validate.layouts.layouts import validate_layouts
    from steptime_lab.validate.published.bridge import validate_bridge

    if rows is None:
        raise InputError(f"validate {what} scores rows of others; give --rows FILE")
    with _progress() as progress:
        if what == _BRIDGE:
            return validate_bridge(rows, progress=progress)
        return validate_layouts(rows, per_box=per_box, progress=progress)


def _check_set(what: str, known: Collection[str], models: Path | None) -> None:
    """Says in one line what is no set, or asks no models but the shipped ones."""
    if what == "host":
        raise InputError("host-bound steps are a group of `steptime validate steps`, with --explain to see whose error it is")
    if what not in known:
        raise InputError(f"unknown set {what!r}; choose one of {', '.join((*known, _RECOMMENDERS))}")
    if what in ("steps", "zoo") and models is not None:
        raise InputError(f"validate {what} asks the shipped models; drop --models")


def _check_names(device: str, fabric: str, models: Path | None) -> None:
    """Says in one line what there is none of, before anything takes a minute."""
    from steptime._hardware.device import DEVICES
    from steptime._hardware.fabric import FABRICS

    DEVICES.file(device)
    FABRICS.file(fabric)
    if models is not None and not models.is_dir():
        raise InputError(f"--models {models}: no such folder; `steptime fit` writes one")


def _check_options(what: str, *, of_steps: bool, explain: bool, refit: bool) -> None:
    """Says in one line which option is for another set."""
    if what != "steps" and (of_steps or (explain and what != "zoo")):
        raise InputError(f"--from, --explain and --bars are for steps; drop them, or validate steps instead of {what}")
    if refit and what != "zoo":
        raise InputError(f"--refit is for zoo; drop it, or validate zoo instead of {what}")


def _timed(what: str, rows: Path, fabric: str, models: Path | None, leave_out: bool) -> Validation:
    """A fabric on collectives that others timed, or recorded runs."""
    if what == "recordings":
        from steptime_lab.validate.recordings import validate_recordings

        return validate_recordings(rows)
    from steptime._platforms.fabric import Fabric
    from steptime_lab.measurements.timed_collectives import read_timed_collectives
    from steptime_lab.validate.timed_collectives import validate_timed

    if what != "collectives" or models is not None:
        raise InputError(
            "--rows FILE is for validate collectives, with --fabric and without --models, for intervals and recordings"
        )
    return validate_timed(Fabric.load(fabric), read_timed_collectives(rows), leave_out=leave_out)


def _validate_steps(source: str, *, explain: bool, bars: str | None, full: bool, json: bool) -> None:
    """All shipped steps; leaves with 1 where a bar is not kept."""
    from steptime._report.json import dumps
    from steptime_lab.report.validation import print_splits, print_validation, split_document, validation_document
    from steptime_lab.validate.engine import SHIPPED_BARS, bars_left, read_bars
    from steptime_lab.validate.steps.sources import captured_steps
    from steptime_lab.validate.steps.steps import validate_steps

    limits = read_bars(SHIPPED_BARS if bars == SHIPPED else Path(bars), source) if bars else []
    with _progress() as progress:
        result = validate_steps(
            source, explain=explain, captured=captured_steps() if source == "config" else None, progress=progress
        )
    if json:
        document = validation_document(result.validation)
        print(dumps({**document, "explained": split_document(result.outcomes)} if explain else document), end="")
    else:
        with stdout() as console:
            print_validation(console, result.validation, full=full)
            if explain:
                print_splits(console, result.outcomes)
            console.print()
    left = bars_left(result.validation, limits)
    for line in left:
        print(f"steptime: bar not kept: {line}", file=sys.stderr)
    if left:
        raise typer.Exit(BARS_LEFT)


def _validate_zoo(*, refit: bool, explain: bool, full: bool, json: bool) -> None:
    """The zoo by stored answers, or by models fitted anew without each group."""
    from steptime_lab.report.validation import print_validation, validation_document
    from steptime_lab.report.zoo import print_explained, zoo_document
    from steptime_lab.validate.zoo.zoo import second_visit_cases, validate_zoo, zoo_cases

    if refit:
        if find_spec("torch") is None:
            raise InputError("--refit captures the architectures, which needs PyTorch; pip install './lab[torch]' in a clone")
        from steptime_lab.validate.zoo.refit import keep, refitted

        keep(*refitted(lambda line: print(line, file=sys.stderr, flush=True)))
    cases, second = zoo_cases(), second_visit_cases()
    results = [(cases, validate_zoo(cases))]
    results += [(second, validate_zoo(second, by_left_out=False))] if second else []

    def text(console: Console) -> None:
        for cases, result in results:
            print_validation(console, result, full=full)
            if explain:
                print_explained(console, cases)

    def document() -> Document:
        first, *later = (
            {**validation_document(result), **({"explained": zoo_document(cases)} if explain else {})}
            for cases, result in results
        )
        return {**first, "second_visit": later[0] if later else None}

    show(json, document, text)


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
