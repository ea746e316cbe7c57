"""`steptime calibrate`: what host and fabric of this machine cost now, in a minute and a half at most.

Its rows go into the sets `host` and `collectives` like any others; `calibration.json` beside them is for predictions
(`steptime._platforms.machine_costs` says what it holds).
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.conditions import gpus
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import Layout, RanksError, run_ranks
from steptime._calibrate.harness.session import Session
from steptime._files import write_whole
from steptime._measurements.sets import COLLECTIVES, HOST
from steptime._measurements.store import read
from steptime._models.host.model import Burst, shipped_bursts
from steptime._platforms.calibration import HOSTS, host_factors, shown_by_costs
from steptime._platforms.machine_costs import CardCosts, MachineCosts
from steptime.errors import InputError

FILE, CARD_FILE = "calibration.json", "card.json"
SOURCE = "calibration"
# The host that ships, whose usual bursts a new machine is compared with.
_REFERENCE_HOST = "xeon-h200"

# Seconds: of a sample, and of a whole calibration, which with its start has to stay below 90. A host changes its speed within
# seconds, so that it is watched for many.
SAMPLE_HOST_S, SAMPLE_FABRIC_S = 4.0, 2.0
HOST_S, FABRIC_S, CARD_S, LIMIT_S = 32.0, 25.0, 8.0, 85.0


def sample(group: Group, session: Session) -> None:
    """A few seconds of host and fabric by the processes that are about to be timed, or just were; they have not profiled."""
    _host(group, session, SAMPLE_HOST_S)
    _collectives(group, session, SAMPLE_FABRIC_S)


def run(session: Session, options: Options) -> None:
    """One group of ranks, its rows, and `calibration.json`."""
    layout = Layout(_ranks(options), options.share_gpu, options.device)
    try:
        run_ranks(__name__, layout, session.to_plan(small=options.small), limit_s=min(LIMIT_S, session.budget.left_s() + 5.0))
    except RanksError as error:
        session.warn(f"{error}; the calibration holds what was measured before")
    share = layout.ranks if layout.share_gpu else 1
    content = calibration(session.folder, session.recipe.to_dict(), layout.ranks, share)
    if not content["host"]:
        raise InputError(f"nothing could be measured; {session.folder / FILE} is not written")
    write(session.folder / FILE, content)
    print(said(content["factors"]["applied"]), file=sys.stderr)
    if content["card"] is not None:
        print(card_words(CardCosts(**content["card"])), file=sys.stderr)


def said(applied: Mapping[str, float] | None) -> str:
    """How fast the host is, how sure that is, and what of it predictions take over."""
    if applied is None:
        return "host: nothing that it took is known of the shipped host, so that predictions cannot use it"
    shown, error, factor = (applied[key] for key in ("shown", "shown_error", "factor"))
    text = f"host: {shown:.2f} times as slow as the shipped one (known to {error:.0%}); predictions take it as {factor:.2f}"
    unsure = error >= HOSTS
    return f"{text}, near the shipped one, for machines of this kind differ by no more than it scattered" if unsure else text


def card_words(card: CardCosts) -> str:
    """What the card does, as far as its driver says."""
    text = f"card: a product of 8,192 takes {card.product_ns / 1e6:.2f} ms from rest, {card.sustained_ns / 1e6:.2f} ms for long"
    if card.clock_hz is None or card.power_w is None:
        return f"{text}; power and clock cannot be read here, so that they are as on the usual card and less sure"
    held = ", held by its cap" if (card.capped or 0.0) > 0 else ""
    return f"{text}, at {card.clock_hz / 1e6:,.0f} MHz and {card.power_w:,.0f} W{held}"


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """One rank's part."""
    if plan.get("small"):
        sample(group, session)
        return
    # Half of it before and half after the rest: what a host does changes from one minute to the next.
    _host(group, session, HOST_S / 2)
    _collectives(group, session, FABRIC_S)
    _host(group, session, HOST_S / 2)
    _card(group, session)


def _card(group: Group, session: Session) -> None:
    """The first rank's card, where it is its own; what the driver refuses costs a warning and no more."""
    if group.rank or group.share > 1 or not group.device_name.startswith("cuda"):
        return
    from steptime._calibrate.device.card import measure_card

    try:
        measure_card(session.folder / CARD_FILE, gpus()[0]["uuid"], CARD_S)
    except (RuntimeError, OSError) as error:
        session.warn(f"the card could not be measured ({' '.join(str(error).split())[:120]}); power is as on the usual card")


def calibration(folder: Path, recipe: Mapping[str, Any], ranks: int, share: int) -> dict[str, Any]:
    """What `calibration.json` holds, from the rows that the run of this recipe added to a folder."""
    host = [row for row in read(folder, HOST).to_pylist() if row["run"] == recipe["run"] and row["source"] == SOURCE]
    fabric = [row for row in read(folder, COLLECTIVES).to_pylist() if row["run"] == recipe["run"]]
    costs = replace(MachineCosts.of_rows(host, fabric), card=_read_card(folder))
    return {
        **asdict(costs),
        # As rows have it: the processes that measured knew the versions that torch brings along, their parent did not.
        "recipe": {name: row[name] for name in recipe} if (row := next(iter(host), None)) else dict(recipe),
        "ranks": ranks,
        "share": share,
        "factors": {"host": factors(costs, shipped_bursts(_REFERENCE_HOST)), "applied": _applied(costs)},
    }


def _read_card(folder: Path) -> CardCosts | None:
    file = folder / CARD_FILE
    try:
        return CardCosts(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _applied(costs: MachineCosts) -> dict[str, float] | None:
    """Over all costs what is shown beside the shipped host, and what predictions on machines with such a host make of it."""
    shown = shown_by_costs(costs.host, shipped_bursts(_REFERENCE_HOST))
    if shown is None:
        return None
    believed = shown.shrunk(HOSTS)
    numbers = {"shown": shown.factor, "shown_error": shown.error, "factor": believed.factor, "error": believed.error}
    return {name: round(value, 4) for name, value in numbers.items()}


def factors(costs: MachineCosts, usual: Mapping[str, Burst]) -> dict[str, float] | None:
    """Per kind, and over kinds, how many times as long the CPU takes here as on the usual machine; None where none is known."""
    logs: dict[str, list[float]] = defaultdict(list)
    for (kind, _), factor in host_factors(costs.host, usual).items():
        logs[kind].append(math.log(factor))
    means = {kind: float(np.mean(item)) for kind, item in sorted(logs.items())}
    if not means:
        return None
    return {
        **{kind: round(math.exp(mean), 4) for kind, mean in means.items()},
        "all": round(math.exp(np.mean(list(means.values()))), 4),
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all; the same content gives the same bytes."""
    write_whole(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def _ranks(options: Options) -> int:
    """As many as asked for; on GPUs of their own, all of them unless fewer were asked for."""
    most = max(options.ranks)
    if most > 1 or options.share_gpu or options.device != "cuda":
        return most
    return max(1, len(gpus()))


def _host(group: Group, session: Session, seconds: float) -> None:
    from steptime._calibrate.reference_steps import time_reference_steps

    time_reference_steps(group, session, seconds, SOURCE)


def _collectives(group: Group, session: Session, seconds: float) -> None:
    from steptime._calibrate.collectives.cases import fabric_of
    from steptime._calibrate.collectives.sweep import sample as collectives_sample

    if group.ranks > 1:
        collectives_sample(group, session, fabric_of(group.ranks, group.share, group.device_name), seconds=seconds)
