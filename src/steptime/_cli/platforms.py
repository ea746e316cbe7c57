"""`steptime platforms` and `steptime fabric`: the machines that steps are predicted for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from steptime._cli.output import Json, show
from steptime._cli.quantities import quantity
from steptime._units import GB_PER_S, MICROSECONDS
from steptime.errors import InputError

if TYPE_CHECKING:
    from steptime._platforms.own_fabric import OwnFabric


def platforms(
    name: Annotated[
        str | None,
        Argument(
            metavar="NAME",
            help="A platform, a fabric, or the TOML file of either; by default all that ship.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[int | None, Option("--ranks", metavar="N", help="Number of ranks, if not the platform's.")] = None,
    device: Annotated[str | None, Option("--device", metavar="NAME", help="Another device; a name or a .toml file.")] = None,
    host: Annotated[str | None, Option("--host", metavar="NAME", help="Another host; a name or a .json file.")] = None,
    fabric: Annotated[str | None, Option("--fabric", metavar="NAME", help="Another fabric; a name or a .toml file.")] = None,
    json: Json = False,
) -> None:
    """The shipped platforms; one in detail, every number of device, host and fabric with its source."""
    from steptime._platforms.fabric import Fabric
    from steptime._platforms.platform import Platform, fabrics_without_device, is_fabric, shipped_platforms
    from steptime._report import platforms as report

    swaps = {"--ranks": ranks, "--device": device, "--host": host, "--fabric": fabric}
    options = [option for option, value in swaps.items() if value is not None]
    if options and (name is None or is_fabric(name)):
        raise InputError(
            f"{options[0]}: swaps a part of a platform; give the platform's name too, as in steptime platforms 1xh200"
        )
    if name is None:
        shipped, without = shipped_platforms(), fabrics_without_device()
        show(
            json,
            lambda: report.platforms_document(shipped, without),
            lambda console: report.print_platforms(console, shipped, without),
        )
    elif is_fabric(name):
        alone = Fabric.load(name)
        show(json, lambda: report.fabric_document(alone), lambda console: report.print_fabric(console, alone))
    else:
        platform = Platform.load(name, ranks=ranks, device=device, host=host, fabric=fabric)
        show(json, lambda: report.platform_document(platform), lambda console: report.print_platform(console, platform))


def fabric(
    files: Annotated[
        list[Path] | None,
        Argument(
            metavar="FILES",
            help="Output of nccl-tests (text or JSON, one or more files), or a folder of `steptime measure collectives`.",
            show_default=False,
        ),
    ] = None,
    *,
    out: Annotated[Path, Option("-o", "--out", metavar="DIR", help="Output folder for NAME.toml and NAME.json.")] = Path(),
    name: Annotated[str, Option("--name", metavar="NAME", help="Name of the fabric.")] = "",
    gpus_per_node: Annotated[
        int | None,
        Option("--gpus-per-node", metavar="N", help="GPUs of a node, where the files do not show all of them."),
    ] = None,
    links: Annotated[
        str | None, Option("--links", metavar="KIND", help="Within a node: nvswitch, nvlink, pcie or loopback.")
    ] = None,
    like: Annotated[
        str | None,
        Option("--like", metavar="FABRIC", help="A shipped fabric with such links: helps where few kinds or ranks were timed."),
    ] = None,
    of: Annotated[str | None, Option("--of", metavar="NAME", help="Which of the folder's fabrics.")] = None,
    bandwidth: Annotated[
        float | None,
        Option(
            "--bandwidth",
            metavar="GB/S",
            parser=quantity("--bandwidth", GB_PER_S),
            help="From a data sheet: of one rank in one direction.",
        ),
    ] = None,
    latency: Annotated[
        float | None,
        Option(
            "--latency",
            metavar="US",
            parser=quantity("--latency", MICROSECONDS),
            help="From a data sheet: of the smallest message of two ranks.",
        ),
    ] = None,
    ranks: Annotated[int | None, Option("--ranks", metavar="N", help="From a data sheet: number of ranks it connects.")] = None,
    network_bandwidth: Annotated[
        float | None,
        Option(
            "--network-bandwidth",
            metavar="GB/S",
            parser=quantity("--network-bandwidth", GB_PER_S),
            help="From a data sheet: of one network card.",
        ),
    ] = None,
    network_latency: Annotated[
        float | None,
        Option(
            "--network-latency",
            metavar="US",
            parser=quantity("--network-latency", MICROSECONDS),
            help="From a data sheet: between two nodes.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Make a fabric of your own: from nccl-tests output, from measured collectives, or from a data sheet."""
    from steptime._files import refuse_overwriting
    from steptime._platforms.own_fabric import DataSheet, from_data_sheet
    from steptime._report.platforms import own_fabric_document, print_own_fabric

    if not name:
        raise InputError("--name is missing: what the fabric is called, as in --name my-cluster")
    _check_links(links)
    sheet = {
        "--bandwidth": bandwidth,
        "--latency": latency,
        "--ranks": ranks,
        "--network-bandwidth": network_bandwidth,
        "--network-latency": network_latency,
    }
    options = [option for option, value in sheet.items() if value is not None]
    if files:
        if options:
            raise InputError(f"{options[0]}: is for a fabric from a data sheet; leave it out, or leave the files out")
        result = _measured(name, files, of, links, gpus_per_node, like)
    else:
        if not options:
            raise InputError("nothing to make a fabric from: give files of nccl-tests, or --bandwidth, --latency and --ranks")
        if bandwidth is None or latency is None or ranks is None:
            missing = next(option for option in ("--bandwidth", "--latency", "--ranks") if sheet[option] is None)
            raise InputError(f"{missing} is missing: a data sheet needs --bandwidth (GB/s), --latency (us) and --ranks")
        if of is not None or like is not None:
            raise InputError(f"{'--like' if of is None else '--of'}: is for timed collectives; a data sheet needs none")
        result = from_data_sheet(
            name, DataSheet(ranks, bandwidth, latency, gpus_per_node, network_bandwidth, network_latency), links=links
        )
    refuse_overwriting({"--name": out / f"{name}.toml", "-o": out / f"{name}.json"}, files or ())
    file = result.write(out)
    show(json, lambda: own_fabric_document(result, file), lambda console: print_own_fabric(console, result, file))


def _measured(
    name: str, files: list[Path], of: str | None, links: str | None, gpus_per_node: int | None, like: str | None
) -> OwnFabric:
    from steptime._hardware.fabric import FABRICS
    from steptime._platforms.own_fabric import from_measured, from_nccl_tests

    absent = [file for file in files if not file.exists()]
    if absent:
        raise InputError(f"{absent[0]}: no such file or folder")
    if like is not None:
        FABRICS.file(like)  # an unknown name is an error before anything is fitted
    folders = [file for file in files if file.is_dir()]
    if folders and len(files) > 1:
        raise InputError(
            f"{folders[0]}: is a folder; give one folder of `steptime measure collectives`, or files of nccl-tests"
        )
    if folders:
        return from_measured(name, folders[0], of=of, links=links, gpus_per_node=gpus_per_node, like=like)
    if of is not None:
        raise InputError("--of: is for a folder of measured collectives")
    return from_nccl_tests(name, files, links=links, gpus_per_node=gpus_per_node, like=like)


def _check_links(links: str | None) -> None:
    from steptime._hardware.fabric import KINDS, NETWORK

    within = [kind for kind in KINDS if kind != NETWORK]
    if links is not None and links not in within:
        raise InputError(f"--links {links}: expected one of {', '.join(within)}")
