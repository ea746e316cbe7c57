"""What the driver says of the GPUs of this machine, and whether they can be measured; without torch or a CUDA context."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from steptime._calibrate.harness.conditions import NO_GPU, Smi, gpus, nvidia_smi, strangers
from steptime._files import write_whole
from steptime._hardware.description import read_json
from steptime.errors import InputError

SCHEMA_VERSION = 1
FILE = "driver.json"
# As cuda.h numbers what cuDeviceGetAttribute is asked for (CUdevice_attribute).
_ATTRIBUTES = {
    "clock_khz": 13,
    "sms": 16,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "cache_bytes": 38,
    "threads_per_sm": 39,
    "capability_major": 75,
    "capability_minor": 76,
}
_SMI = {
    "power_limit_w": "power.limit",
    "max_clock_mhz": "clocks.max.sm",
    "pcie_generation": "pcie.link.gen.max",
    "pcie_lanes": "pcie.link.width.max",
    "utilization": "utilization.gpu",
}
_SLICE = "MIG"
# Percent: a GPU that works more than this while nobody measures is not ours alone.
_IDLE = 5.0
# Less is no card that trains anything, and the sweeps' buffers would not fit.
_LEAST_BYTES = 3e9


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU or a slice of one, as the driver describes it; 0 where it does not say."""

    name: str
    gpus: int
    memory_bytes: float
    sms: float
    clock_khz: float
    memory_clock_khz: float
    memory_bus_bits: float
    cache_bytes: float
    threads_per_sm: float
    capability_major: float
    capability_minor: float
    power_limit_w: float = 0.0
    max_clock_mhz: float = 0.0
    pcie_generation: float = 0.0
    pcie_lanes: float = 0.0
    driver: str = ""

    @property
    def slice(self) -> bool:
        """Whether it is a part of a GPU by MIG: it has an L2, memory and SMs of its own, and NCCL does not join several."""
        return _SLICE in self.name

    @property
    def clock_hz(self) -> float:
        """The highest of the SMs."""
        return max(self.clock_khz * 1e3, self.max_clock_mhz * 1e6)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Of the memory: two transfers per clock over the whole bus; 0 where the driver no longer says."""
        return 2.0 * self.memory_clock_khz * 1e3 * self.memory_bus_bits / 8

    def write(self, file: Path) -> None:
        """As JSON, which `read` reads."""
        write_whole(file, json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> GpuFacts:
        """What `write` wrote."""
        content = read_json(file, "what `steptime adopt` wrote of the driver")
        if content.get("schema_version") != SCHEMA_VERSION:
            raise InputError(f"{file}: of version {content.get('schema_version')}, this steptime reads {SCHEMA_VERSION}")
        values: dict[str, Any] = {}
        for each in fields(cls):
            value = content.get(each.name)
            wanted = str if each.type == "str" else (int, float)
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise InputError(f"{file}: {each.name} is {value!r}, expected a {'text' if wanted is str else 'number'}")
            values[each.name] = value
        return cls(**values)


Driver = Callable[[], Mapping[str, Any]]


def of_driver() -> Mapping[str, Any]:
    """Name, memory and attributes of the first GPU that CUDA shows here; empty without a driver."""
    try:
        cuda: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {}
    device, name, size, value = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return {}
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    result: dict[str, Any] = {"name": name.value.decode(errors="replace"), "memory_bytes": float(size.value)}
    for key, number in _ATTRIBUTES.items():
        failed = cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        result[key] = 0.0 if failed else float(value.value)
    return result


def facts(driver: Driver = of_driver, smi: Smi = nvidia_smi) -> GpuFacts:
    """What there is to adopt; one line where it cannot be."""
    found, told = gpus(smi), driver()
    if not found or not told:
        raise InputError(NO_GPU)
    kinds = sorted({gpu["device"] for gpu in found})
    if len(kinds) > 1:
        raise InputError(
            f"GPUs of {len(kinds)} kinds here ({', '.join(kinds)}); set CUDA_VISIBLE_DEVICES to those of one, and adopt each"
        )
    first = found[0]
    asked = _asked(first["number"], smi)
    _check_idle(first["number"], asked.pop("utilization"), strangers(smi=smi))
    slice_ = _SLICE in str(told["name"])
    result = GpuFacts(**told, **asked, gpus=1 if slice_ else len(found), driver=first.get("driver", ""))
    if result.memory_bytes < _LEAST_BYTES:
        raise InputError(f"{result.name} has {result.memory_bytes / 1e9:.1f} GB; adopting needs {_LEAST_BYTES / 1e9:.0f}")
    return result


def _asked(number: str, smi: Smi) -> dict[str, Any]:
    """What nvidia-smi knows and the driver's attributes do not; 0 where it says N/A or nothing."""
    answer = smi([f"--query-gpu={','.join(_SMI.values())}", "--format=csv,noheader,nounits", f"--id={number}"])
    cells = [cell.strip() for cell in answer.strip().split(",")]
    return {key: _number(cells[place]) if place < len(cells) else 0.0 for place, key in enumerate(_SMI)}


def _check_idle(number: str, utilization: float, others: Sequence[str]) -> None:
    """A GPU that somebody else works on would be measured with their work in every time."""
    if others and utilization > _IDLE:
        raise InputError(
            f"GPU {number} is {utilization:.0f} % busy with another process ({others[0]}); wait until it is done, or give "
            "another GPU in CUDA_VISIBLE_DEVICES"
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
