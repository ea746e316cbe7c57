"""Several ranks on one GPU: a CUDA MPS daemon of our own, and what each of its clients needs in its environment."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
