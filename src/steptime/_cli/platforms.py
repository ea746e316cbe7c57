"""`steptime platforms`"""

from __future__ import annotations

from typing import Annotated

import typer

from steptime._cli.options import Json
from steptime._cli.output import stdout


def platforms(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A platform, a fabric, or the TOML file of either; by default all that ship.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", metavar="N", help="Number of ranks, if not the platform's.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="Another device; a name or a .toml file.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", metavar="NAME", help="Another host; a name or a .json file.")] = None,
    fabric: Annotated[
        str | None, typer.Option("--fabric", metavar="NAME", help="Another fabric; a name or a .toml file.")
    ] = None,
    json: Json = False,
) -> None:
    """The shipped platforms; one in detail, every number of device, host and fabric with its source."""
    from steptime._platforms.fabric import Fabric
    from steptime._platforms.platform import Platform, fabrics_without_device, is_fabric, shipped_platforms
    from steptime._report import platforms as report
    from steptime._report.json import dumps
    from steptime.errors import InputError

    swaps = {"--ranks": ranks, "--device": device, "--host": host, "--fabric": fabric}
    given = [option for option, value in swaps.items() if value is not None]
    if given and (name is None or is_fabric(name)):
        raise InputError(
            f"{given[0]}: swaps a part of a platform; give the platform's name too, as in steptime platforms 1xh200"
        )
    if name is None:
        shipped, without = shipped_platforms(), fabrics_without_device()
        if json:
            print(dumps(report.platforms_document(shipped, without)), end="")
            return
        with stdout() as console:
            report.print_platforms(console, shipped, without)
            console.print()
        return
    if is_fabric(name):
        alone = Fabric.load(name)
        if json:
            print(dumps(report.fabric_document(alone)), end="")
            return
        with stdout() as console:
            report.print_fabric(console, alone)
            console.print()
        return
    platform = Platform.load(name, ranks=ranks, device=device, host=host, fabric=fabric)
    if json:
        print(dumps(report.platform_document(platform)), end="")
        return
    with stdout() as console:
        report.print_platform(console, platform)
        console.print()
