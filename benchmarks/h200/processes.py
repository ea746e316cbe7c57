"""Processes that run at once, each on its own cores."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence

from steptime._calibrate.harness.ranks import cores_of


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
