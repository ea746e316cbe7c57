"""Several processes on one GPU: CUDA MPS for the time of a `with` block, and groups of client processes."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Runs an MPS daemon with folders of its own; gives the environment its clients need."""
    with tempfile.TemporaryDirectory() as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            Path(place).mkdir()
        environment = {**os.environ, **places}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
        try:
            yield places
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, check=False, timeout=30)


def cores_of(index: int, parts: int) -> list[int]:
    """The cores of one of several processes that share the machine evenly."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // parts)
    return cores[index * each : (index + 1) * each]


def share(index: int, parts: int) -> dict[str, str]:
    """Environment of one of several ranks on one GPU: its share of the SMs, and a host name of its own (for NCCL)."""
    return {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // parts),
        "NCCL_HOSTID": f"host{index}",
        "NCCL_SOCKET_IFNAME": "lo",
    }


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
