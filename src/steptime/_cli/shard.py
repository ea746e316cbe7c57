"""`steptime shard`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steptime._cli.options import Json
from steptime._cli.output import stdout
from steptime.errors import InputError

if TYPE_CHECKING:
    from steptime._platforms.platform import Platform
    from steptime._shard.explain.explain import Explained
    from steptime._shard.search.search import Searched
    from steptime._shard.task.task import Task

TaskFile = Annotated[
    Path,
    typer.Argument(
        metavar="TASK",
        help="A DLRM config (.toml, .json) with \\[constraints], a .csv of tables, or a TorchRec collection (.json).",
        show_default=False,
    ),
]


def shard(
    task: TaskFile,
    platform: Annotated[
        str,
        typer.Option("--platform", metavar="NAME", help="The machine (`steptime platforms` lists them).", show_default=False),
    ],
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="How many ranks; else the task's or the platform's.")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Another global batch.")] = None,
    memory: Annotated[int | None, typer.Option("--memory", min=1, metavar="BYTES", help="Of a rank, at most.")] = None,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", metavar="FILE", help="What `steptime calibrate` wrote on the machine.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", min=0.0, metavar="S", help="Seconds that the search may take.")
    ] = None,
    evaluations: Annotated[
        int | None,
        typer.Option("--evaluations", min=1, help="Plans that the search may ask for; the same number finds the same plan."),
    ] = None,
    evaluate: Annotated[
        Path | None,
        typer.Option(
            "--evaluate",
            metavar="PLANS.json",
            help="Predict given plans instead: what --json or --torchrec wrote, or JSON of plans by name.",
        ),
    ] = None,
    json: Json = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one page, for a browser, offline.")] = None,
    torchrec: Annotated[
        Path | None, typer.Option("--torchrec", metavar="FILE", help="Write the best plan as TorchRec's ShardingPlan (JSON).")
    ] = None,
) -> None:
    """Find the embedding sharding with the shortest step, and say why."""
    from steptime._platforms.calibration import UNCALIBRATED, Calibration
    from steptime._report.json import dumps
    from steptime._report.shard.document import evaluated_document, shard_document
    from steptime._report.shard.text import print_evaluated, print_shard
    from steptime._shard.evaluate.plans import evaluated, plans_in
    from steptime._shard.search.search import evaluators, search, usual_evaluations
    from steptime._shard.search.state import Budget

    machine = _platform(platform, ranks)
    given = _task(task, machine, ranks, batch, memory)
    speed = UNCALIBRATED if calibration is None else Calibration.read(calibration, machine)
    if evaluate is not None:
        if html is not None or torchrec is not None:
            raise InputError(
                "--evaluate compares given plans and writes no page or TorchRec plan; leave --html and --torchrec out"
            )
        plans = evaluated(given, machine, plans_in(evaluate, given), speed)
        if json:
            print(dumps(evaluated_document(given, plans)), end="")
            return
        with stdout() as console:
            print_evaluated(console, given, machine.name, plans)
        return
    from steptime._shard.explain.explain import explain

    limits = Budget(evaluations or usual_evaluations(given.model), budget)
    found = search(given, machine, limits, make=evaluators(machine, speed))
    why = explain(found, machine, speed)
    _write(html, torchrec, found, why, machine)
    if json:
        print(dumps(shard_document(found, why, machine.name)), end="")
        return
    with stdout() as console:
        print_shard(console, found, why, machine.name, html, torchrec)


def _platform(name: str, ranks: int | None) -> Platform:
    from steptime._platforms.platform import Platform, platform_parts

    parts = platform_parts(name)
    # Fewer ranks than a platform has leave the others idle; more are refused by whoever knows the task.
    return Platform.of(parts.swapped(ranks=ranks if ranks is not None and 1 < ranks < parts.ranks else None))


def _task(file: Path, machine: Platform, ranks: int | None, batch: int | None, memory: int | None) -> Task:
    from steptime._build.dlrm.config import Overrides
    from steptime._shard.search.search import check_ranks
    from steptime._shard.task.task import read_task

    given = read_task(file, Overrides(batch, ranks, machine.ranks), memory)
    check_ranks(given, machine)
    return given


def _write(html: Path | None, torchrec: Path | None, found: Searched, why: Explained, machine: Platform) -> None:
    from steptime._build.dlrm.plan_files import torchrec_document
    from steptime._report.json import dumps
    from steptime._report.shard.html import write_shard_page

    if html is not None:
        write_shard_page(html, found, why, machine.name)
    if torchrec is not None:
        torchrec.write_text(dumps(torchrec_document(found.best.plan, found.task.tables)), encoding="utf-8")
