"""What the machine is and whether it is fit to measure on: the recipe, who else uses the GPU, how the clocks move."""

from __future__ import annotations

import ctypes
import datetime
import hashlib
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from steptime import __version__
from steptime._measurements.recipe import Recipe
from steptime.errors import InputError

NO_GPU = "no NVIDIA GPU here (nvidia-smi or CUDA_VISIBLE_DEVICES says so); measuring needs one, predicting does not"

# Beginnings of names of variables that libraries read.
_DISTURBING = (
    "NCCL_", "TORCH_NCCL_", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
# What containers say of their contents.
_HARMLESS = ("NCCL_VERSION",)

Smi = Callable[[Sequence[str]], str]


def nvidia_smi(arguments: Sequence[str]) -> str:
    """What nvidia-smi prints; empty where it is absent or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=False, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpus(smi: Smi = nvidia_smi) -> list[dict[str, str]]:
    """One entry per GPU that CUDA may use here: number, name, driver, power limit, identity."""
    keys = ("number", "device", "driver", "power_limit_w", "uuid")
    answer = smi(["--query-gpu=index,name,driver_version,power.limit,uuid", "--format=csv,noheader,nounits"])
    lines = [line for line in answer.splitlines() if line]
    results = [dict(zip(keys, (part.strip() for part in line.split(",")), strict=False)) for line in lines]
    return visible(results, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(found: Sequence[dict[str, str]], given: str | None) -> list[dict[str, str]]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; a slice of a GPU (MIG) has no entry of its own."""
    if given is None or "MIG-" in given:
        return list(found)
    chosen: list[dict[str, str]] = []
    for word in map(str.strip, given.split(",")):
        named = [gpu for gpu in found if gpu["number"] == word or ("GPU-" in word and gpu["uuid"].startswith(word))]
        if not named:
            # CUDA takes no notice of what follows an entry it does not know.
            break
        chosen.append(named[0])
    return chosen


def strangers(mine: Iterable[int] = (), smi: Smi = nvidia_smi) -> list[str]:
    """Processes on the GPU that are not ours; what they do there would be in our times."""
    answer = smi(["--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"])
    ours = {os.getpid(), *mine}
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    return [line for line in lines if line.split(",")[0].strip().isdigit() and int(line.split(",")[0]) not in ours]


def disturbances(environment: Mapping[str, str]) -> list[str]:
    """Variables that change what kernels and collectives do, of which a row would say nothing."""
    results = [name for name in sorted(environment) if name.startswith(_DISTURBING) and name not in _HARMLESS]
    return [f"{name}={environment[name]}" for name in results]


def recipe(command: Sequence[str], *, smi: Smi = nvidia_smi, need_gpu: bool = True) -> Recipe:
    """Machine, versions, date and command of this run. Neither makes a CUDA context nor imports torch, which takes seconds.

    What only torch knows is empty until a worker, which has it anyway, fills it in: `completed`.
    """
    # What is measured on the CPU must not pass for the GPU's, which may be there all the same.
    result = gpus(smi) if need_gpu else []
    if need_gpu and not result:
        raise InputError(NO_GPU)
    first: dict[str, str] = result[0] if result else {}
    boot = _first_line("/proc/sys/kernel/random/boot_id")
    now = datetime.datetime.now(datetime.UTC)
    return Recipe(
        run=f"{now:%Y%m%dT%H%M%S}-{hashlib.sha256(os.urandom(8)).hexdigest()[:4]}",
        machine=hashlib.sha256(f"{first.get('uuid', '')}{boot}".encode()).hexdigest()[:8],
        device=first.get("device", ""),
        gpus=len(result),
        driver=first.get("driver", ""),
        cuda_of_driver=_cuda_of_driver(),
        power_limit_w=_number(first.get("power_limit_w", "")),
        cpu=_cpu_name(),
        cpu_cores=len(os.sched_getaffinity(0)),
        os_kernel=".".join(platform.release().split(".")[:2]),
        python=platform.python_version(),
        date=f"{now:%Y-%m-%d}",
        command=shlex.join(command),
        steptime=__version__,
        torch=_version_of("torch"),
        cuda="",
        cudnn="",
        nccl="",
        triton=_version_of("triton"),
    )


def completed(made: Recipe) -> Recipe:
    """The recipe with the versions of what torch brings along."""
    import torch

    backends: Any = torch.backends
    cuda: Any = torch.cuda
    cudnn = backends.cudnn.version() if torch.version.cuda else ""
    nccl = ".".join(map(str, cuda.nccl.version())) if torch.version.cuda else ""
    return replace(made, torch=str(torch.__version__), cuda=torch.version.cuda or "", cudnn=str(cudnn), nccl=nccl)


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _cuda_of_driver() -> str:
    try:
        library: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _first_line(path: str) -> str:
    file = Path(path)
    return file.read_text(encoding="utf-8").splitlines()[0] if file.exists() else ""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


class Clocks:
    """Watches the SM clock from a side process while something is measured; `file` gets a sample a second."""

    # A clock that leaves this band around its median was moving (boost steps are 15 MHz of about 2,000).
    STEADY = 0.03

    def __init__(self, file: Path, gpu: str = "0", every_ms: int = 1000) -> None:
        self.file = file
        self.gpu = gpu
        self.every_ms = every_ms
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Clocks:
        query = "--query-gpu=clocks.sm,power.draw,clocks_throttle_reasons.active"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"-lms={self.every_ms}", f"--id={self.gpu}"]
        with self.file.open("wb") as target:
            try:
                self._process = subprocess.Popen(command, stdout=target, stderr=subprocess.DEVNULL)
            except FileNotFoundError:
                self._process = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def moved(self) -> str:
        """One line about clocks that did not stand still while the card worked; empty when they did."""
        samples = sorted(clock_samples_mhz(self.file.read_text(encoding="utf-8", errors="replace")))
        if len(samples) < 3:
            return ""
        low, middle, high = samples[len(samples) // 20], samples[len(samples) // 2], samples[-1 - len(samples) // 20]
        if high - low <= self.STEADY * middle:
            return ""
        return f"the SM clock moved between {low:.0f} and {high:.0f} MHz (median {middle:.0f})"


def clock_samples_mhz(text: str) -> list[float]:
    """The clocks in what `Clocks` wrote, of a working card: an idle one clocks down and says nothing about a kernel."""
    results = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        # Bit 0 of the throttle reasons is "idle".
        if len(parts) == 3 and parts[0].isdigit() and parts[2].startswith("0x") and not int(parts[2], 16) & 1:
            results.append(float(parts[0]))
    return results


class ClockReader:
    """Reads a clock file as it grows: the median since the last question, else the last sample while it is fresh."""

    # A sampler a second apart often meets a card between two kernels, and says then that it idles.
    FRESH_S = 60.0

    def __init__(self, file: Path, now: Callable[[], float] = time.monotonic) -> None:
        self.file = file
        self._now = now
        self._place = 0
        self._last: tuple[float, float] | None = None  # when, MHz

    def __call__(self) -> float | None:
        """The clock of a working card; None where it was not seen to work for a minute."""
        samples = sorted(clock_samples_mhz(self._new_text()))
        if samples:
            self._last = (self._now(), samples[len(samples) // 2])
        if self._last is None or self._now() - self._last[0] > self.FRESH_S:
            return None
        return self._last[1]

    def _new_text(self) -> str:
        """Whole lines that came since the last call."""
        if not self.file.exists():
            return ""
        with self.file.open("rb") as source:
            source.seek(self._place)
            data = source.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        return whole.decode(errors="replace")
