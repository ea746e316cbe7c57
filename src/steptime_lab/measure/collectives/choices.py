"""Which algorithm, protocol and channels NCCL chooses: from its debug output, in groups of their own that are not timed.

Rows do not wait for it: `measurements.choices` joins what was said onto them.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from steptime._calibrate.collectives.cases import CollectiveCase, Place
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import RanksError, mps, run_ranks
from steptime._calibrate.harness.session import Budget, Session
from steptime_lab.measure.collectives.cases import layout_of
from steptime_lab.measurements.collectives import FOLDER_NAME, Asked, Choice, choices_in, write_choices

# For send and receive, and what is made of them, NCCL says nothing.
SAID = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")

# Asking takes a few seconds, starting a group about ten; neither may take more than this, nor begin with less left.
_LIMIT_S, _STARTING_S, _LEAST_S = 15.0, 20.0, 14.0
# Waiting kernels hold SMs; so many groups (of 2, 4 and 8 ranks) leave room for each other's.
_AT_ONCE = 3

# The numbers of older NCCL, as in its nccl_common.h.
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")

_CHOICE = re.compile(
    r"Bytes -> Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)(?:.*?channel\{Lo\.\.Hi\}=\{(?P<low>\d+)\.\.(?P<high>\d+)\})?"
)
_SYMMETRIC = re.compile(r"Bytes -> Kernel (?P<kernel>\w+)(?: nchannels (?P<channels>\d+))?")


def parse(text: str) -> Choice:
    """The last choice in some lines of NCCL's debug output; an empty one where no line is known."""
    result = Choice()
    for line in text.splitlines():
        if match := _CHOICE.search(line):
            channels = int(match["high"]) - int(match["low"]) + 1 if match["high"] else None
            result = Choice(_name(match["algorithm"], _ALGORITHMS), _name(match["protocol"], _PROTOCOLS), channels)
        elif match := _SYMMETRIC.search(line):
            result = Choice("SYMMETRIC", match["kernel"].upper(), int(match["channels"]) if match["channels"] else None)
    return result


def _name(said: str, names: Sequence[str]) -> str:
    if said.isdigit():
        return names[int(said)] if int(said) < len(names) else ""
    return said.upper()


def learn(session: Session, wanted: Mapping[Place, Sequence[CollectiveCase]], device: str) -> None:
    """Asks for NCCL's choices at every place, once per folder. Nothing is timed, so that groups may run at once."""
    with ExitStack() as stack:
        # Groups that share one GPU need one daemon between them; groups with a GPU per rank follow each other.
        shared = [place for place in wanted if place.share > 1]
        daemon = stack.enter_context(mps()) if shared else None
        with ThreadPoolExecutor(max_workers=_AT_ONCE if shared else 1) as pool:
            asking = _Asking(session, device, daemon)
            progress = session.progress("NCCL's choices, places", len(wanted))
            for _ in pool.map(asking.ask, wanted.keys(), wanted.values()):
                progress.step()
            progress.close()


class _Asking:
    """Asks NCCL at one place after another, until it fails once: times are worth more than this."""

    def __init__(self, session: Session, device: str, daemon: Mapping[str, str] | None) -> None:
        self._session = session
        self._device = device
        self._daemon = daemon
        self._failed = False

    def ask(self, place: Place, cases: Sequence[CollectiveCase]) -> None:
        """Asks now, unless more than half of what is wanted is known, or time is up."""
        file = _file(self._session, place)
        asked = sorted({(case.size_bytes, case.collective) for case in cases if case.collective in SAID and case.size_bytes})
        known = {(item.size_bytes, item.collective) for item in choices_in(file)}
        if self._failed or 2 * len(known & set(asked)) >= len(asked):
            return
        if self._session.budget.left_s() < _LEAST_S:
            self._session.warn(f"no time left for NCCL's choices on {place.ranks} ranks, {place.fabric}; give more --minutes")
            return
        self._ask(place, asked, file)

    def _ask(self, place: Place, asked: Sequence[tuple[int, str]], file: Path) -> None:
        session = self._session
        with tempfile.TemporaryDirectory(prefix="nccl") as folder:
            plan = session.to_plan(
                ends_at=min(session.budget.ends_at, Budget.of_minutes((_LIMIT_S + _STARTING_S) / 60).ends_at),
                asked=asked,
                fabric=place.fabric,
                debug=folder,
                file=str(file.absolute()),
            )
            text = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": f"{folder}/nccl.%h.%p"}
            try:
                run_ranks(
                    __name__, layout_of(place, self._device), plan, limit_s=_LIMIT_S + _STARTING_S,
                    environment={**place.settings, **text}, daemon=self._daemon,
                )  # fmt: skip
            except RanksError as error:
                self._failed = True
                session.warn(f"NCCL's choices on {place.ranks} ranks, {place.fabric}: {error}")


def _file(session: Session, place: Place) -> Path:
    # The parent does without torch and so does not know NCCL's version; torch's stands for it.
    version = session.recipe.torch or "none"
    return session.folder / FOLDER_NAME / f"torch{version}-{place.ranks}x{place.share}-{place.fabric}.json"


def work(group: Group, session: Session, plan: Mapping[str, Any]) -> None:
    """Calls every collective once, smallest first, and reads what NCCL has written about it."""
    from steptime._calibrate.collectives.timing import Buffers, call_of

    cases = [CollectiveCase(str(collective), int(size)) for size, collective in plan["asked"]]
    buffers = Buffers(group, cases)
    log = Log(Path(plan["debug"]))
    nccl, fabric = session.recipe.nccl, str(plan["fabric"])
    result: dict[Asked, Choice] = {}
    ends_at = min(session.budget.ends_at, Budget.of_minutes(_LIMIT_S / 60).ends_at)
    for case in cases:
        if not group.decide(int(Budget(ends_at).left_s() > 0)):
            break
        call_of(case, group, buffers)()
        group.synchronize()
        text = parse(log.news())
        if text.algorithm:
            result[Asked(nccl, group.ranks, fabric, case.collective, case.size_bytes)] = text
    if group.rank == 0:
        write_choices(Path(plan["file"]), result, nccl=nccl, ranks=group.ranks, fabric=fabric)


class Log:
    """The debug file of this process, read as it grows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = 0

    def news(self) -> str:
        """What was written since the last call; empty where there is no such file."""
        for path in self._folder.glob(f"nccl.*.{os.getpid()}"):
            with path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
            self._read += len(text)
            return text.decode(errors="replace")
        return ""
