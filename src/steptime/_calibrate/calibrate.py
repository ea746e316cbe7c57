"""`steptime calibrate`: what host and fabric of this machine cost now, in a minute and a half at most.

Its rows go into the sets `host` and `collectives` like any others; `calibration.json` beside them is for predictions:

schema_version   1
recipe           machine, versions, date, command of the run
ranks, share     of the group that was measured; share: how many ranks were on one GPU
host             per kind, op, call and phase: time_ns (median over ranks and bursts), spread, repeats
fabric           per collective, bytes, dtype, mode and fabric: the same
factors          host: per kind the geometric mean of its costs here over those of the shipped set, `all` over kinds;
                 null where nothing is shipped that was measured alike
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import steptime
from steptime._calibrate.harness.conditions import gpus
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.options import Options
from steptime._calibrate.harness.ranks import Layout, RanksError, run_ranks
from steptime._calibrate.harness.session import Session
from steptime._measurements.store import read, spread_of
from steptime._measurements.whole import write_whole
from steptime.errors import InputError

SCHEMA_VERSION = 1
FILE = "calibration.json"
REFERENCE = Path(steptime.__file__).parent / "data" / "hosts" / "reference"
SOURCE = "calibration"

# Kind and op of what a sample asks, most wanted first; together about a second.
REPRESENTATIVE = (
    ("op", "aten::add.Tensor"), ("op", "aten::mm.default"), ("op", "aten::view.default"), ("op", "aten::cat.default"),
    ("op_autograd", "linear"), ("backward_node", "linear"), ("optimizer_step", "adam_foreach"), ("module_call", "nested"),
    ("alloc", "empty"), ("launch", "neg_out"), ("launch_to_return", "neg_out"), ("collective_call", "all_reduce"),
)  # fmt: skip
# Seconds: of a sample, and of a whole calibration, which with its start has to stay below 90.
SAMPLE_HOST_S, SAMPLE_FABRIC_S = 2.0, 2.0
HOST_S, FABRIC_S, LIMIT_S = 20.0, 25.0, 85.0

_HOST_KEY = ("kind", "op", "call", "phase")
_FABRIC_KEY = ("collective", "bytes", "dtype", "mode", "fabric", "ranks", "share")


def sample(group: Group, session: Session) -> None:
    """A few seconds of host and fabric by the processes that are about to be timed, or just were; they have not profiled."""
    from steptime._calibrate.host.issued import common, grouped
    from steptime._calibrate.host.order import probes

    asked = probes(grouped(common(("float32",))), python=False)
    known = {(probe.kinds[0], probe.op): probe for probe in asked}
    chosen = [known[pair] for pair in REPRESENTATIVE]
    _measure(group, session, [probe for probe in chosen if group.ranks > 1 or not probe.together], SAMPLE_HOST_S, passes=5)
    _collectives(group, session, SAMPLE_FABRIC_S)


def run(session: Session, options: Options) -> None:
    """One group of ranks, its rows, and `calibration.json`."""
    layout = Layout(_ranks(options), options.share_gpu, options.device)
    try:
        run_ranks(
            "calibrate", layout, session.to_plan(small=options.small), limit_s=min(LIMIT_S, session.budget.left_s() + 5.0)
        )
    except RanksError as error:
        session.warn(f"{error}; the calibration holds what was measured before")
    share = layout.ranks if layout.share_gpu else 1
    content = calibration(session.folder, session.recipe.to_dict(), layout.ranks, share)
    if not content["host"]:
        raise InputError(f"nothing could be measured; {session.folder / FILE} is not written")
    write(session.folder / FILE, content)


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """One rank's part."""
    from steptime._calibrate.host.issued import common, grouped
    from steptime._calibrate.host.order import probes

    if plan.get("small"):
        sample(group, session)
        return
    _measure(group, session, probes(grouped(common(("float32",))), short=True, python=False), HOST_S, passes=7)
    _collectives(group, session, FABRIC_S)


def calibration(folder: Path, recipe: Mapping[str, Any], ranks: int, share: int, shipped: Path = REFERENCE) -> dict[str, Any]:
    """What `calibration.json` holds, from the rows that the run of this recipe added to a folder."""
    host = [row for row in read(folder, "host").to_pylist() if row["run"] == recipe["run"] and row["source"] == SOURCE]
    fabric = [row for row in read(folder, "collectives").to_pylist() if row["run"] == recipe["run"]]
    return {
        "schema_version": SCHEMA_VERSION,
        # As rows have it: the processes that measured knew the versions that torch brings along, their parent did not.
        "recipe": {name: row[name] for name in recipe} if (row := next(iter(host), None)) else dict(recipe),
        "ranks": ranks,
        "share": share,
        "host": summaries(host, _HOST_KEY),
        "fabric": summaries(fabric, _FABRIC_KEY),
        "factors": {"host": factors(host, _shipped_host(shipped, share))},
    }


def summaries(rows: Iterable[Mapping[str, Any]], key: Sequence[str]) -> list[dict[str, Any]]:
    """Median, spread and number of all times of rows that agree in some columns, sorted by them."""
    times: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        times[tuple(row[name] for name in key)] += row["times_ns"]
    return [
        {
            **dict(zip(key, named, strict=True)),
            "time_ns": round(float(np.median(times[named])), 1),
            "spread": round(spread_of(times[named]), 4),
            "repeats": len(times[named]),
        }
        for named in sorted(times)
    ]


def factors(mine: Iterable[Mapping[str, Any]], theirs: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Per kind, and over kinds, how many times as long the same costs take here; None where none is the same."""
    known = {_named(entry): entry["time_ns"] for entry in summaries(theirs, _HOST_KEY)}
    ratios: dict[str, list[float]] = defaultdict(list)
    for entry in summaries(mine, _HOST_KEY):
        other = known.get(_named(entry), 0.0)
        # Slopes of what costs nothing can come out below zero.
        if entry["time_ns"] > 0 and other > 0:
            ratios[entry["kind"]].append(math.log(entry["time_ns"] / other))
    means = {kind: float(np.mean(logs)) for kind, logs in sorted(ratios.items())}
    if not means:
        return None
    return {
        **{kind: round(math.exp(mean), 4) for kind, mean in means.items()},
        "all": round(math.exp(np.mean(list(means.values()))), 4),
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all; the same content gives the same bytes."""
    write_whole(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def _named(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[name] for name in _HOST_KEY)


def _shipped_host(folder: Path, share: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read(folder, "host").to_pylist()
    return [row for row in rows if row["profiler"] == "off" and row["share"] == share]


def _ranks(options: Options) -> int:
    """As many as asked for; on GPUs of their own, all of them unless fewer were asked for."""
    most = max(options.ranks)
    if most > 1 or options.share_gpu or options.device != "cuda":
        return most
    return max(1, len(gpus()))


def _measure(group: Group, session: Session, chosen: Sequence[Any], seconds: float, *, passes: int) -> None:
    from steptime._calibrate.harness.budget import Progress
    from steptime._calibrate.host.bench import Bench
    from steptime._calibrate.host.runner import Runner

    bench = Bench(group, session, bursts=1, calls=100)
    runner = Runner(bench, session, "off", seconds, passes=passes, source=SOURCE)
    runner.run(chosen, Progress("calibration, host", passes * len(chosen), session.budget, quiet=True))


def _collectives(group: Group, session: Session, seconds: float) -> None:
    from steptime._calibrate.collectives.fabrics import fabric_of
    from steptime._calibrate.collectives.sample import sample as collectives_sample

    if group.ranks > 1:
        collectives_sample(group, session, fabric_of(group.ranks, group.share, group.device_name), seconds=seconds)
