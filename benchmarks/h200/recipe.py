"""How a result was made (machine, versions, date, command), and the file it is kept in."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _gpu() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.limit", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    keys = ("device", "driver", "sm_clock_at_rest", "power_limit")
    return dict(zip(keys, (part.strip() for part in done.stdout.split(",")), strict=False))


def _cuda_of_driver() -> str:
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def recipe() -> dict[str, Any]:
    """Machine, versions, date and command of this run. Imports torch: call it in a process that measures nothing."""
    import torch

    return {
        **_gpu(),
        "cuda_of_driver": _cuda_of_driver(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "kernel": ".".join(platform.release().split(".")[:2]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python3", Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def store(path: Path, content: Any) -> None:
    """Writes JSON that reads well in a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
