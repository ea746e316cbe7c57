"""Starts ranks as processes: on GPUs of their own, or on one through a CUDA MPS daemon of our own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptime.errors import InputError


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Runs an MPS daemon with folders of its own; gives the environment its clients need."""
    # A daemon that is slow to end still writes its log while the folder is removed.
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            Path(place).mkdir()
        environment = {**os.environ, **places}
        text = Path(folder) / "start.txt"
        try:
            # Into a file: a daemon that kept a pipe open would keep us waiting for its end.
            with text.open("wb") as file:
                subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True, stdout=file, stderr=file)
        except FileNotFoundError as error:
            raise InputError("nvidia-cuda-mps-control is not installed; ranks can share a GPU only through CUDA MPS") from error
        except subprocess.CalledProcessError as error:
            raise InputError(f"CUDA MPS did not start: {text.read_text(errors='replace').strip()}") from error
        try:
            yield places
        finally:
            subprocess.run(
                ["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, check=False, timeout=30,
                capture_output=True,
            )  # fmt: skip


def share(rank: int, parts: int) -> dict[str, str]:
    """Environment of one of several ranks on one GPU: its share of the SMs, and a host name of its own (for NCCL)."""
    return {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // parts),
        # NCCL refuses two ranks on one GPU of one host.
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def cores_of(rank: int, parts: int) -> list[int]:
    """The cores of one of several processes that share the machine evenly."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // parts)
    first = (rank * each) % len(cores)
    return cores[first : first + each]


# For groups that record: the recorders say what they begin and end, hundreds of times.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}
# What an interrupted rank gets to flush its rows.
_LEAVING_S = 3.0


# What a `RanksError` says happened, by which a warning that quotes it is known.
FAILED, LATE = "a rank failed", "not done after"


class RanksError(RuntimeError):
    """A worker ended badly or was ended for taking too long. Rows it had flushed are kept."""


@dataclass(frozen=True)
class Layout:
    """Where ranks live: how many, on the GPUs of this machine one each, or sharing the first, or on the CPU."""

    ranks: int
    share_gpu: bool = False
    device: str = "cuda"

    def environment(self, rank: int) -> dict[str, str]:
        """What rank number `rank` needs to know before torch is imported."""
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "STEPTIME_SHARE": str(self.ranks if self.share_gpu else 1),
            "STEPTIME_DEVICE": "cuda:0" if self.device == "cuda" else "cpu",
            "STEPTIME_CORES": ",".join(map(str, cores_of(rank, self.ranks))),
            # GPUs are counted as nvidia-smi counts them, whose words are in the recipe.
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            # A rank's own threads would fight its proxy and autograd threads for its few cores.
            "OMP_NUM_THREADS": "1",
        }
        if self.device != "cuda":
            return own
        if self.share_gpu:
            return {**own, **(share(rank, self.ranks) if self.ranks > 1 else {})}
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {**own, "CUDA_VISIBLE_DEVICES": given.split(",")[rank].strip() if given else str(rank)}


def run_ranks(
    module: str,
    layout: Layout,
    plan: Mapping[str, Any],
    *,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    daemon: Mapping[str, str] | None = None,
) -> None:
    """Runs `work(group, session, plan)` of a module on every rank; returns when all have ended well.

    `daemon` is the environment of an MPS daemon that already runs; without it one is started where ranks share a GPU.
    """
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="steptime"))) / "plan.json"
        file.write_text(json.dumps(plan), encoding="utf-8")
        places: Mapping[str, str] = daemon or {}
        if layout.share_gpu and layout.ranks > 1 and layout.device == "cuda" and not places:
            places = stack.enter_context(mps())
        port = {"MASTER_PORT": str(_free_port())}
        command = [sys.executable, "-m", "steptime._calibrate.harness.worker", module, str(file)]
        started = [
            subprocess.Popen(command, env={**os.environ, **places, **port, **layout.environment(rank), **(environment or {})})
            for rank in range(layout.ranks)
        ]
        _wait(started, f"{module.rpartition('.')[2]} on {layout.ranks} ranks", limit_s)


def _wait(started: Sequence[subprocess.Popen[bytes]], what: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    try:
        while any(process.poll() is None for process in started):
            if any(process.returncode for process in started):
                # Let the others say what they know before they are ended.
                time.sleep(1.0)
                raise RanksError(f"{what}: {FAILED}, exit codes {[process.poll() for process in started]}")
            if time.monotonic() > deadline:
                raise RanksError(f"{what}: {LATE} {limit_s:.0f} s")
            time.sleep(0.02)
    except KeyboardInterrupt:
        _ask_to_end(started)
        raise
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(process.returncode for process in started):
        raise RanksError(f"{what}: {FAILED}, exit codes {[process.returncode for process in started]}")


def _ask_to_end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Lets ranks flush their rows; one that waits in a collective will not hear."""
    for process in started:
        process.terminate()
    deadline = time.monotonic() + _LEAVING_S
    while any(process.poll() is None for process in started) and time.monotonic() < deadline:
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
