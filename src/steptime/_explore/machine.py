"""Controls of the job and of the machine: batch and ranks, the platform and its parts, power, and what-ifs."""

from __future__ import annotations

from collections.abc import Iterator

from steptime._capture.launch import RunAgain
from steptime._explore.controls import CHANGES, CHOICE, NUMBER, WHOLE, Control, doubling
from steptime._hardware.device import device_names, read_device
from steptime._hardware.fabric import fabric_names, read_fabric
from steptime._models.host.model import HOSTS
from steptime._platforms.platform import PlatformParts, platform_parts, shipped_platforms
from steptime._program.workload import Workload, fixed

_OF_SCRIPT = "a script chooses its batch itself: start explore with its own option after --, as in -- --batch-size 64"
JOB, MACHINE, WHAT_IF = "Job", "Machine", "What if"
AS_RECORDED = "as recorded"
_MOST_BATCH, _MOST_RANKS = 1 << 24, 1 << 16
_DOUBLED_RANKS = 6  # a slider ends at 64, or at four times as many ranks as there are
# In eighths of a doubling, from a quarter to four times: each step moves a number by 9 %.
_FACTORS = tuple(round(2 ** (eighth / 8), 3) for eighth in range(-16, 17))
_WATTS, _LEAST_W, _MOST_W = 25, 100, 2000
_MOST_PRICE = 10_000


def job_controls(workload: Workload, plan: str | None) -> Iterator[Control]:
    """Batch and ranks, where the workload can be made again with others."""
    can = workload.rebuild is not None
    batch, ranks = workload.description.batch, workload.world_size
    why = "" if can else fixed(batch or 0, None).partition(": ")[2]
    no_batch = why or (_OF_SCRIPT if isinstance(workload.rebuild, RunAgain) else "")
    least = 1 if batch is None else ranks if batch % ranks == 0 else 1
    yield Control(
        "batch", JOB, "Batch", WHOLE, batch, unit="samples", least=1, most=_MOST_BATCH,
        steps=() if batch is None else doubling(batch, least, _MOST_BATCH), disabled=no_batch, optional=batch is None,
        empty="as it is", help="Samples of all ranks in one step",
    )  # fmt: skip
    doublings = max(_DOUBLED_RANKS, ranks.bit_length() + 1)
    steps = tuple(sorted({ranks, *(1 << power for power in range(doublings + 1))}))
    pinned = f"the plan {plan} is for {ranks} ranks" if plan is not None else why
    yield Control(
        "ranks", JOB, "Ranks", WHOLE, ranks, unit="GPUs", least=1, most=_MOST_RANKS, steps=steps, disabled=pinned,
        help="Transformers keep tensor, context and pipeline parallelism and divide the rest anew",
    )  # fmt: skip


def machine_controls(workload: Workload, platform: str | None) -> Iterator[Control]:
    """The machine and its parts."""
    recorded = any(program.recorded for program in workload.programs)
    given, choices = _platforms(platform or ("" if recorded else _usual(workload.world_size)), workload.world_size)
    if recorded:
        choices = ((AS_RECORDED, "As recorded"), *choices)
    yield Control("platform", MACHINE, "Platform", CHOICE, given or AS_RECORDED, choices=choices)
    yield _part("device", "GPU", [(name, read_device(name).title or name) for name in device_names()])
    yield _part("fabric", "Links", [(name, f"{name} (up to {read_fabric(name).ranks:,})") for name in fabric_names()])
    yield _part("host", "Host", [(name, name) for name in HOSTS.names()])
    yield Control(
        "power_cap_w", MACHINE, "Power cap", WHOLE, None, unit="W", least=1, most=_MOST_W, optional=True,
        steps=tuple(range(_LEAST_W, 1501, _WATTS)), empty="as rated", help="What each card may draw",
    )  # fmt: skip
    yield Control(
        "price", MACHINE, "Price", NUMBER, None, unit="/ GPU-h", least=0, most=_MOST_PRICE, optional=True, empty="none",
        help="What one GPU costs for an hour, in any currency",
    )  # fmt: skip


def what_if_controls() -> Iterator[Control]:
    """What if parts of the step took longer or shorter, or were done otherwise."""
    yield _factor("host_factor", "Host takes", "All host work takes so many times as long")
    yield _factor("wire_factor", "Communication takes", "All collectives take so many times as long")
    yield Control(
        "what_if", WHAT_IF, "Changes", CHANGES, [], choices=_EXAMPLES,
        help="As steptime predict --what-if takes them: matmul * 0.5, sync remove, tf32 on",
    )  # fmt: skip


# What people ask most; any other change can be written.
_EXAMPLES = tuple(
    (each, each)
    for each in (
        "matmul * 0.5", "attention * 0.5", "elementwise * 0.5", "optimizer * 0.5", "embedding * 0.5", "sync remove",
        "all_reduce overlap", "all_to_all * 0.5", "bf16 on", "tf32 on", "optimizer fused", "cuda graph", "rank:0 * 1.1",
    )
)  # fmt: skip


def _factor(name: str, label: str, text: str) -> Control:
    return Control(name, WHAT_IF, label, NUMBER, 1, unit="x", least=0.01, most=100, steps=_FACTORS, help=text)


def _part(name: str, label: str, choices: list[tuple[str, str]]) -> Control:
    return Control(
        name, MACHINE, label, CHOICE, None, choices=tuple(choices), optional=True, empty="of the platform", more=True
    )


def _platforms(given: str, ranks: int) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The name to begin with, and all there are: one for each device and fabric; a job takes as many of its ranks as it has."""
    largest: dict[tuple[str, str, str | None], PlatformParts] = {}
    for parts in shipped_platforms():
        key = (parts.device, parts.host, parts.fabric)
        if key not in largest or parts.ranks > largest[key].ranks:
            largest[key] = parts
    choices = {parts.name: _titled(parts) for parts in largest.values()}
    if given:
        own = platform_parts(given)
        alike = largest.get((own.device, own.host, own.fabric))
        if alike is not None and own.calibration is None and ranks <= own.ranks and not given.endswith(".toml"):
            given = alike.name
        else:
            choices = {given: f"{own.name}, up to {own.ranks:,}", **choices}
    return given, tuple(choices.items())


def _titled(parts: PlatformParts) -> str:
    count, _, rest = parts.name.partition("x")
    return rest if count == "1" else f"{rest} · up to {parts.ranks:,}"


def _usual(ranks: int) -> str:
    """A platform for a job of which nobody said where it runs: the measured device, on as few nodes as hold it."""
    if ranks == 1:
        return "1xh200"
    fits = (parts for parts in shipped_platforms() if parts.ranks >= ranks and read_device(parts.device).share == 1)
    return next((parts.name for parts in fits), "8xh200-nvlink")
