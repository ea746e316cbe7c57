"""`steptime plan`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from steptime._cli.output import CalibrationFile, Compile, Json, Memory, Price, Set, settings_of, show, working
from steptime.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

_MOST_DIGITS = 9


def _degree(name: str, what: str) -> object:
    return Option(name, metavar="N[,N]", help=f"{what}; whatever divides if not given.", show_default=False)


def plan(
    model: Annotated[Path, Argument(metavar="MODEL", help="A Transformer config (.toml).", show_default=False)],
    *,
    platform: Annotated[
        str, Option("--platform", metavar="NAME", help="The machine (`steptime platforms` lists them).", show_default=False)
    ],
    gpus: Annotated[int | None, Option("--gpus", help="Number of GPUs; by default the platform's.")] = None,
    batch: Annotated[int | None, Option("--batch", min=1, help="Global batch size, if not the config's.")] = None,
    settings: Set = None,
    data: Annotated[str | None, _degree("--data", "Copies of the model, or of what FSDP shards")] = None,
    fsdp: Annotated[str | None, _degree("--fsdp", "Ranks that shard parameters; 1: none")] = None,
    tensor: Annotated[str | None, _degree("--tensor", "Ranks that share every layer's matrices")] = None,
    pipeline: Annotated[str | None, _degree("--pipeline", "Stages")] = None,
    context: Annotated[str | None, _degree("--context", "Ranks that share every sequence")] = None,
    expert: Annotated[str | None, _degree("--expert", "Ranks that share a layer's experts")] = None,
    chunks: Annotated[str | None, _degree("--chunks", "Chunks of an interleaved pipeline on every rank; 1: none")] = None,
    zero: Annotated[str | None, _degree("--zero", "What copies share: 0, 1 (state) or 2 (gradients too)")] = None,
    sequence: Annotated[
        bool | None,
        Option("--sequence/--no-sequence", help="Sequence parallelism beside tensor parallelism.", show_default=False),
    ] = None,
    micro_batch: Annotated[str | None, _degree("--micro-batch", "Samples that go through a rank at once")] = None,
    recompute: Annotated[
        str | None,
        Option("--recompute", metavar="HOW[,HOW]", help="What is computed again: none, selective, ops, full."),
    ] = None,
    memory: Memory = None,
    headroom: Annotated[
        float, Option("--headroom", min=0.0, max=0.99, metavar="SHARE", help="Share of a rank's memory left free.")
    ] = 0.0,
    price: Price = None,
    fabric: Annotated[str | None, Option("--fabric", metavar="NAME", help="Another fabric; a name or a .toml file.")] = None,
    calibration: CalibrationFile = None,
    compile_mode: Compile = None,
    json: Json = False,
    html: Annotated[Path | None, Option("--html", metavar="FILE", help="Write a single HTML page that works offline.")] = None,
    save: Annotated[Path | None, Option("--save", metavar="FILE", help="Write the best layout as a config (.toml).")] = None,
    torchtitan: Annotated[
        Path | None,
        Option("--torchtitan", metavar="FILE", help="Write the best layout that torchtitan runs as its configuration (.py)."),
    ] = None,
) -> None:
    """Find how to share a Transformer among GPUs for the most tokens a second, and say why."""
    from steptime._api.plan import plan as planned
    from steptime._files import check_outputs, write_output
    from steptime._report.plan_text import print_plan, print_written

    check_outputs({"--html": html, "--save": save, "--torchtitan": torchtitan}, (model, platform, calibration))
    with working("searching layouts") as progress:
        answer = planned(
            model,
            platform,
            gpus=gpus,
            batch=batch,
            settings=settings_of(settings),
            data=_numbers("--data", data),
            fsdp=_numbers("--fsdp", fsdp),
            tensor=_numbers("--tensor", tensor),
            pipeline=_numbers("--pipeline", pipeline),
            context=_numbers("--context", context),
            expert=_numbers("--expert", expert),
            chunks=_numbers("--chunks", chunks),
            zero=_numbers("--zero", zero),
            sequence=sequence,
            micro_batch=_numbers("--micro-batch", micro_batch),
            recompute=None if recompute is None else [each.strip() for each in recompute.split(",")],
            memory_bytes=memory,
            headroom=headroom,
            price=price,
            fabric=fabric,
            calibration=calibration,
            compile=compile_mode,
            framework=None if torchtitan is None else "torchtitan",
            progress=progress,
        )
    for file, text in ((save, answer.config), (torchtitan, answer.torchtitan)):
        if file is not None:
            write_output(file, text())
    if html is not None:
        answer.html(html)

    def said(console: Console) -> None:
        print_plan(console, answer)
        print_written(console, {"Config": save, "torchtitan": torchtitan, "Page": html})

    show(json, answer.to_dict, said)


def _numbers(option: str, text: str | None) -> list[int] | None:
    """Whole numbers between commas."""
    if text is None:
        return None
    parts = [each.strip() for each in text.split(",")]
    if not all(each.isascii() and each.isdecimal() and len(each) <= _MOST_DIGITS for each in parts):
        raise InputError(f"{option} {text!r}: expected whole numbers between commas, such as 1,2,4")
    return list(map(int, parts))
