"""`steptime calibrate --from-run`: the speed of host, device and wire from a recording, for people who cannot measure.

It writes the same file as a measured calibration, with `recorded` in place of costs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from steptime._hardware.device import device_names
from steptime._platforms.calibration import Shown, check_device, shown_device, shown_host, shown_wire
from steptime._platforms.machine_costs import SCHEMA_VERSION, MachineCosts, RecordedRun, RecordedSpeed
from steptime._platforms.platform import Platform
from steptime._program.workload import Workload
from steptime._sim.recorded.speeds import recorded_speeds
from steptime._units import NS_PER_MS
from steptime.errors import InputError

# Less of what a recording shows than this is next to nothing: predictions stay near the usual machine's.
_LITTLE = 0.25


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a machine: what the recording shows of it, and what of that is to be believed."""

    name: str
    recorded: RecordedSpeed
    believed: Shown

    def to_dict(self) -> dict[str, float]:
        """As `--json` has it."""
        return {
            "recorded": self.recorded.factor,
            "values": self.recorded.repeats,
            "applied": round(self.believed.factor, 4),
            "error": round(self.believed.error, 4),
        }

    def __str__(self) -> str:
        applied = self.believed
        text = (
            f"{self.recorded.factor:.2f} times as long as modelled; {applied.factor:.2f} applied, known to {applied.error:.0%}"
        )
        if abs(applied.log_factor) >= _LITTLE * abs(math.log(self.recorded.factor)):
            return text
        return f"{text}: a recording hardly improves on what is known of such machines"


@dataclass(frozen=True)
class CalibrationOfRun:
    """What a recording says of the machine it was made on, beside the models of a platform."""

    platform: Platform
    costs: MachineCosts

    @classmethod
    def of(cls, workload: Workload, platform: Platform, measured_ms: Sequence[float] = ()) -> CalibrationOfRun:
        """From a recorded run of a machine like the platform; `measured_ms`: its steps without a profiler."""
        check_device(workload.name or "the recording", device_of(workload) or None, platform)
        measured_ns = [time_ms * NS_PER_MS for time_ms in measured_ms]
        return cls(platform, MachineCosts((), (), recorded_speeds(workload, platform, measured_ns)))

    def parts(self) -> Iterator[Part]:
        """Host, device and kinds of collectives that the recording tells of."""
        run = self.costs.recorded or RecordedRun(self.platform.name)
        host, device = shown_host(self.costs, self.platform), shown_device(self.costs, self.platform)
        if (of_host := run.unprofiled or run.host) is not None and host is not None:
            yield Part("host", of_host, host)
        if run.device is not None and device is not None:
            yield Part("device", run.device, device)
        for kind, believed in shown_wire(self.costs, self.platform).items():
            yield Part(kind, run.wire[kind], believed)

    def content(self, device: str) -> dict[str, Any]:
        """What the file holds; `device` as the recording names it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "recipe": {"command": "steptime calibrate --from-run RECORDING", "device": device},
            "host": [],
            "fabric": [],
            "recorded": None if self.costs.recorded is None else asdict(self.costs.recorded),
        }


def device_of(workload: Workload) -> str:
    """The GPU of a recording, as its driver names it."""
    names = sorted({program.device_name for program in workload.programs if program.device_name})
    if len(names) > 1:
        raise InputError(f"{workload.name or 'the recording'}: was made on {names[0]} and {names[1]}; give ranks of one kind")
    return names[0] if names else ""


def platform_of(workload: Workload) -> str:
    """The shipped platform that a recording of one rank was made on, by the name of its GPU."""
    name, where = device_of(workload), workload.name or "the recording"
    if not any(program.recorded for program in workload.programs):
        raise InputError(f"{where}: was never recorded on a GPU; give Kineto traces of a run")
    if not name:
        raise InputError(f"{where}: does not name its GPU; name the machine with --platform")
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    known = [device for device in device_names() if set(device.split("-")) <= words]
    if not known:
        raise InputError(f"{where}: was made on {name}, of which there are no models; name the nearest machine with --platform")
    if workload.world_size > 1:
        raise InputError(f"{where}: has {workload.world_size} ranks; name the machine that joined them with --platform")
    return f"1x{max(known, key=len)}"
