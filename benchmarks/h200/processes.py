"""Processes that run at once, each on its own cores: ranks of a script through the measuring harness, or plain commands."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steptime._calibrate.harness.conditions import recipe
from steptime._calibrate.harness.ranks import Layout, cores_of, run_ranks
from steptime._calibrate.harness.session import Session


def on_ranks(script: str, folder: Path, layout: Layout, *, limit_s: float, **plan: Any) -> None:
    """Runs `work(group, session, plan)` of a script (its `__file__`) on every rank; their module path has its folder."""
    file, cuda = Path(script).absolute(), layout.device == "cuda"
    session = Session.start(folder, recipe([file.stem], need_gpu=cuda), limit_s / 60)
    paths = {"PYTHONPATH": os.pathsep.join([str(file.parent), *filter(None, sys.path)])}
    run_ranks(file.stem, layout, session.to_plan(**plan), limit_s=limit_s, environment=paths)


def together(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], limit_s: float) -> None:
    """Runs the commands at once, each on its own cores; when one fails or the time is up, ends the others and raises."""
    started = [
        subprocess.Popen(command, env={**os.environ, **environment, "CORES": ",".join(map(str, cores_of(i, len(commands))))})
        for i, (command, environment) in enumerate(zip(commands, environments, strict=True))
    ]
    deadline = time.monotonic() + limit_s
    try:
        while any(process.poll() is None for process in started):
            if any(process.returncode for process in started):
                raise RuntimeError(f"a process of {len(started)} failed: {[process.returncode for process in started]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{commands[0]} ran longer than {limit_s} s")
            time.sleep(0.05)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(process.returncode for process in started):
        raise RuntimeError(f"{commands[0]}: exit codes {[process.returncode for process in started]}")


def pin() -> None:
    """Keeps this process on the cores it was given by `together`."""
    if os.environ.get("CORES"):
        os.sched_setaffinity(0, {int(core) for core in os.environ["CORES"].split(",")})
