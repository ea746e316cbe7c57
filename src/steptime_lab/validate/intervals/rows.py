"""Steps that others measured, as a file of rows: a config, the device and fabric that are asked about, and the measured time.

The file is a JSON list of objects with `source`, `row` (its name), `measured_ms`, `device`, `ranks`, `cfg` (a Transformer's
config), `fabric` (or null: the NVLink fabric of such devices), and optionally `missing`: what the config cannot say, for which
a row is left out. Devices and fabrics are shipped names, or paths from where the file lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptime._build.config_values import read_json, shortened
from steptime._build.transformer.config import Transformer
from steptime._hardware.fabric import fabric_names
from steptime._platforms.platform import PlatformParts, usual_host
from steptime.errors import InputError, SteptimeError
from steptime_lab.validate.published.readings import Reading, reading

_EXPECTED = "a list of rows with source, row, measured_ms, device, ranks, cfg and fabric"
_LONGEST_MS = 1e9  # eleven days; no step takes that long
_MOST_ROWS = 100_000
_MOST_PARAMETERS = 3e12  # no model has more; what claims to comes from a slip of the keyboard


@dataclass(frozen=True)
class MeasuredStep:
    """One row: what was measured, and what is asked to predict it."""

    source: str
    name: str
    measured_ms: float
    config: Transformer
    device: str
    platform: PlatformParts
    group: str | None = None  # what else it is scored with

    @property
    def box(self) -> str:
        """What one calibration would serve: a source and a device."""
        return f"{self.source}, {Path(self.device).stem}"


@dataclass(frozen=True)
class MeasuredSteps:
    """The rows of a file that can be predicted, how many say that something is missing, and a line for each bad one."""

    steps: tuple[MeasuredStep, ...]
    missing: int
    refused: tuple[str, ...]


def read_rows(file: Path) -> MeasuredSteps:
    """The rows of a file; a bad one costs a line, a file without a single good one is an error."""
    content = read_json(file, _EXPECTED)
    if not isinstance(content, list) or not content or len(content) > _MOST_ROWS:
        raise InputError(f"{file}: expected {_EXPECTED}, 1 to {_MOST_ROWS:,} of them")
    steps: list[MeasuredStep] = []
    refused, missing = [], 0
    for place, row in enumerate(content):
        own = _own(row)
        if isinstance(row, dict) and row.get("missing") and own is None:
            missing += 1
            continue
        try:
            step = _step(file, place, row, own)
            if own is not None and any(_same(step, other) for other in steps):
                raise InputError(f"{file}: row {place} ({step.name[:80]}) is another reading of a row before it")
            steps.append(step)
        except SteptimeError as error:
            refused.append(str(error))
    if not steps:
        why = f"; the first: {refused[0]}" if refused else ""
        raise InputError(f"{file}: none of {len(content)} rows can be predicted ({missing} say that something is missing){why}")
    return MeasuredSteps(tuple(steps), missing, tuple(refused))


def _own(row: object) -> Reading | None:
    """What this package reads of a row itself, instead of the file's config."""
    if not isinstance(row, dict) or type(row.get("ranks")) is not int:
        return None
    source, name = row.get("source"), row.get("row")
    return reading(source, name, row["ranks"]) if isinstance(source, str) and isinstance(name, str) else None


def _same(step: MeasuredStep, other: MeasuredStep) -> bool:
    return (step.source, step.config, step.measured_ms) == (other.source, other.config, other.measured_ms)


def _step(file: Path, place: int, row: object, own: Reading | None) -> MeasuredStep:
    where = f"{file}: row {place}"
    if not isinstance(row, dict):
        raise InputError(f"{where} is no object; expected source, row, measured_ms, device, ranks, cfg and fabric")
    name = _text(row, "row", where)
    where = f"{where} ({name[:80]})"
    measured = row.get("measured_ms")
    if isinstance(measured, bool) or not isinstance(measured, int | float) or not 0 < measured < _LONGEST_MS:
        raise InputError(f"{where}: measured_ms is {shortened(measured)}; expected milliseconds above 0")
    values = row.get("cfg") if own is None else own.config
    if not isinstance(values, dict):
        raise InputError(f"{where}: cfg is {shortened(values)}; expected a Transformer's config, as in docs/configs.md")
    config = Transformer.from_dict(values, where)
    if row.get("ranks") != config.ranks:
        raise InputError(f"{where}: ranks is {shortened(row.get('ranks'))}, cfg.parallel has {config.ranks}; give them alike")
    parameters = config.layers * config.width * (4 * config.width + 2 * config.inner) + config.vocabulary * config.width
    if parameters > _MOST_PARAMETERS:
        raise InputError(f"{where}: cfg has about {parameters:.1e} parameters; expected at most {_MOST_PARAMETERS:.0e}")
    device = own.device if own is not None and own.device is not None else _part(file, row, "device", where)
    try:
        given = None if row.get("fabric") is None else _part(file, row, "fabric", where)
        given = given if own is None else own.fabric
        fabric = None if config.ranks == 1 else given or _usual_fabric(device)
        parts = PlatformParts(f"{config.ranks}x{Path(device).stem}", config.ranks, device, usual_host(device), fabric)
        parts.check()
    except SteptimeError as error:
        raise InputError(f"{where}: {error}") from None
    group = None if own is None else own.group
    return MeasuredStep(_text(row, "source", where), name, float(measured), config, device, parts, group)


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: {key} is {shortened(value)}; expected text")
    return value


def _part(file: Path, row: Mapping[str, Any], key: str, where: str) -> str:
    """A shipped name as it is, a path from where the file lies."""
    name = _text(row, key, where)
    if "\0" in name:
        raise InputError(f"{where}: {key} is {shortened(name)}; expected a shipped name or the path of a file")
    return str(file.parent / name) if name.endswith(".toml") else name


def _usual_fabric(device: str) -> str | None:
    """The NVLink of the device, or of the one that its name is a longer form of; none where there is none."""
    words = Path(device).name.removesuffix(".toml").split("-")
    names = [f"{'-'.join(words[:length])}-nvlink" for length in range(len(words), 0, -1)]
    return next((name for name in names if name in fabric_names()), None)
