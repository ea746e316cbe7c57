"""`steptime shard`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from steptime._cli.output import CalibrationFile, Json, Memory, Price, Set, settings_of, show, working
from steptime._cli.quantities import quantity
from steptime._units import DURATION
from steptime.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console


def shard(
    task: Annotated[
        Path,
        Argument(
            metavar="TASK",
            help="A DLRM config (.toml, .json) with \\[constraints], a .csv of tables, or a TorchRec collection (.json).",
            show_default=False,
        ),
    ],
    more: Annotated[list[Path] | None, Argument(metavar="[DAY]...", hidden=True)] = None,
    *,
    platform: Annotated[
        str,
        Option("--platform", metavar="NAME", help="The machine (`steptime platforms` lists them).", show_default=False),
    ],
    ranks: Annotated[
        int | None, Option("--ranks", min=1, help="Number of ranks; by default the task's or the platform's.")
    ] = None,
    batch: Annotated[int | None, Option("--batch", min=1, help="Global batch size.")] = None,
    settings: Set = None,
    fabric: Annotated[str | None, Option("--fabric", metavar="NAME", help="Another fabric; a name or a .toml file.")] = None,
    memory: Memory = None,
    headroom: Annotated[
        float | None, Option("--headroom", min=0.0, max=0.99, metavar="SHARE", help="Share of a rank's memory left free.")
    ] = None,
    price: Price = None,
    calibration: CalibrationFile = None,
    budget: Annotated[
        float | None,
        Option(
            "--budget", metavar="TIME", parser=quantity("--budget", DURATION), help="Time limit of the search, as 10 (s) or 2m."
        ),
    ] = None,
    evaluations: Annotated[
        int | None,
        Option("--evaluations", min=1, help="Maximum number of plans to evaluate; the same number finds the same plan."),
    ] = None,
    lookups: Annotated[
        list[Path] | None,
        Option(
            "--lookups",
            metavar="DAY...",
            help="Statistics of lookups, a file for every day: the plan that is best on all of them.",
        ),
    ] = None,
    objective: Annotated[
        str, Option("--objective", metavar="worst|mean", help="With --lookups: what of the days' steps is to be shortest.")
    ] = "worst",
    evaluate: Annotated[
        Path | None,
        Option(
            "--evaluate",
            metavar="PLANS.json",
            help="Evaluate these plans instead of searching: output of --json or --torchrec, or JSON of plans by name.",
        ),
    ] = None,
    json: Json = False,
    html: Annotated[Path | None, Option("--html", metavar="FILE", help="Write a single HTML page that works offline.")] = None,
    torchrec: Annotated[
        Path | None, Option("--torchrec", metavar="FILE", help="Write the best plan as TorchRec's ShardingPlan (JSON).")
    ] = None,
) -> None:
    """Find the embedding sharding with the shortest step, and say why."""
    from steptime._api.predict import calibration_for
    from steptime._api.shard import machine_for, task_for
    from steptime._api.shard import shard as sharded
    from steptime._files import check_outputs, write_output
    from steptime._report.json import dumps
    from steptime._report.shard.document import evaluated_document
    from steptime._report.shard.text import print_evaluated, print_files, print_shard
    from steptime._shard.given_plans import evaluated, plans_in

    days = [*(lookups or ()), *(more or ())]
    if more and not lookups:
        raise InputError(f"{more[0]}: one task at a time; files of several days go behind --lookups")
    check_outputs({"--html": html, "--torchrec": torchrec}, (task, platform, calibration, evaluate, *days))
    machine = machine_for(platform, ranks, fabric)
    chosen = settings_of(settings)
    sharding_task = task_for(task, machine, ranks=ranks, batch=batch, settings=chosen, memory_bytes=memory, headroom=headroom)
    speed = calibration_for(calibration, machine)
    if evaluate is not None:
        if days:
            raise InputError("--evaluate takes the task's own lookups; leave --lookups out")
        if html is not None or torchrec is not None:
            raise InputError(
                "--evaluate compares given plans and writes no page or TorchRec plan; leave --html and --torchrec out"
            )
        plans = evaluated(sharding_task, machine, plans_in(evaluate, sharding_task), speed)
        show(
            json,
            lambda: evaluated_document(sharding_task, plans),
            lambda console: print_evaluated(console, sharding_task, machine.name, plans),
        )
        return
    with working("searching plans") as progress:
        answer = sharded(
            sharding_task,
            machine,
            calibration=speed,
            budget_s=budget,
            evaluations=evaluations,
            lookups=days,
            objective=objective,
            price=price,
            progress=progress,
        )
    if html is not None:
        answer.html(html)
    if torchrec is not None:
        write_output(torchrec, dumps(answer.torchrec()))

    def said(console: Console) -> None:
        print_shard(console, answer)
        print_files(console, html, torchrec)

    show(json, answer.to_dict, said)
