"""`Situation`: what is known of a machine, and by how much whole steps were off where no more was known.

Residuals of models say how far single kernels are off. What all kernels of a kind have in common on a machine that nobody
measured (its library, its card, how its data sheet reads) does not average out over a step, and is fitted to steps that others
measured: `data/situations.toml` has it by kind of kernel, as standard deviations of the logarithm below and above a prediction,
with the sources and the number of rows. On a measured device what does not average out is what an architecture that nobody
measured calls: `data/architectures.toml` has that by family of ops, fitted to architectures whose kin were left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

import steptime
from steptime._hardware.description import ValueRange, read_toml
from steptime._ops.families import WorkFamily
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]

FILE, ARCHITECTURES = (Path(steptime.__file__).parent / "data" / name for name in ("situations.toml", "architectures.toml"))
SCHEMA_VERSION = 1
PRODUCTS, ATTENTION, OTHER = KINDS = ("products", "attention", "other")
_OF_FAMILY = {"matmul": PRODUCTS, "grouped_products": PRODUCTS, "convolution": PRODUCTS, "attention": ATTENTION}
UNSEEN = "unseen architecture"
# Kernels whose errors were measured in whole steps, or that were recorded in this very one.
_KNOWN_IN_STEPS = ("lookup", "recorded")
KNOWN, KNOWN_CALIBRATED = "known device, host not calibrated", "known device, calibrated host"
CARRIED, CARRIED_CALIBRATED = "carried device, not calibrated", "carried device, calibrated"
_ERROR = ValueRange(0.0, 2.0, "of a logarithm (0.1 is about 10 %)")


@dataclass(frozen=True, slots=True)
class KindError:
    """Standard deviations of the logarithm of what all kernels of a kind take here, over what is predicted."""

    below: float
    above: float

    def drawn(self, draws: Floats) -> Floats:
        """A factor for each draw of a standard normal."""
        result: Floats = np.exp(np.where(draws < 0, self.below, self.above) * draws)
        return result


@dataclass(frozen=True)
class Situation:
    """How much is known, what may be wrong of each kind of kernel, and how many steps of which sources say so."""

    name: str
    errors: Mapping[str, KindError] = field(default_factory=dict)
    rows: int = 0
    sources: tuple[str, ...] = ()
    by_family: bool = False  # whether errors are those of families of ops, else of kinds of kernels

    def kind(self, group: str, family: WorkFamily) -> str:
        """Whose error a group of estimates has, whose works are of a family of ops; "" for nobody's."""
        name = group.partition(" ")[0]
        if not self.by_family:
            return kind_of(name) if self.errors else ""
        return family.label if family.label in self.errors and name not in _KNOWN_IN_STEPS else ""


def kind_of(family: str) -> str:
    """Of a family of kernels, the kind whose errors go together."""
    return _OF_FAMILY.get(family, OTHER)


def situation_of(platform: Platform, calibration: Calibration) -> Situation:
    """What is known of a machine, by its platform and its calibration."""
    if not platform.device.limits.analytic:
        uncalibrated = calibration.host_error == UNCALIBRATED.host_error and calibration.device == UNCALIBRATED.device
        return replace(unseen_architecture(), name=KNOWN if uncalibrated else KNOWN_CALIBRATED)
    return situations()[CARRIED if calibration.device == UNCALIBRATED.device else CARRIED_CALIBRATED]


@cache
def situations() -> Mapping[str, Situation]:
    """The fitted ones, by name."""
    return read_situations(FILE)


@cache
def unseen_architecture() -> Situation:
    """What may be wrong of the families of ops of an architecture that nobody measured, on a device that somebody did."""
    return read_unseen(ARCHITECTURES)


def read_unseen(file: Path) -> Situation:
    """The one situation of a file of families."""
    table = read_toml(file, "architectures", SCHEMA_VERSION).get("architectures")
    kinds = table.get("kinds") if isinstance(table, dict) else None
    if not isinstance(kinds, dict) or not set(kinds) <= {family.label for family in WorkFamily}:
        raise InputError(f"{file}: expected kinds under [architectures.kinds], each a family of ops")
    return replace(_situation(f"{file}: architectures", UNSEEN, table, tuple(kinds)), by_family=True)


def read_situations(file: Path) -> Mapping[str, Situation]:
    """Situations of a file, every one complete."""
    content = read_toml(file, "situations", SCHEMA_VERSION)
    tables = content.get("situations")
    if not isinstance(tables, dict) or not {CARRIED, CARRIED_CALIBRATED} <= set(tables):
        raise InputError(f"{file}: expected tables [situations.{CARRIED!r}] and [situations.{CARRIED_CALIBRATED!r}]")
    return MappingProxyType({name: _situation(f"{file}: {name}", name, table) for name, table in tables.items()})


def _situation(where: str, name: str, table: object, names: Sequence[str] = KINDS) -> Situation:
    kinds = table.get("kinds") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(kinds, dict) or set(kinds) != set(names):
        raise InputError(f"{where}: expected kinds of {', '.join(names)}")
    rows, sources = table.get("rows"), table.get("sources")
    if not isinstance(rows, int) or not isinstance(sources, list) or not all(isinstance(each, str) for each in sources):
        raise InputError(f"{where}: expected rows, a whole number, and sources, their names")
    return Situation(name, {kind: _error(f"{where}: {kind}", kinds[kind]) for kind in names}, rows, tuple(sources))


def _error(where: str, values: object) -> KindError:
    if not isinstance(values, dict) or set(values) != {"below", "above"}:
        raise InputError(f"{where}: expected below and above")
    return KindError(_ERROR.check(f"{where}: below", values["below"]), _ERROR.check(f"{where}: above", values["above"]))


def written(fitted: Sequence[Situation], header: str) -> str:
    """The text of a file of situations."""
    lines = [*(f"# {line}" for line in header.splitlines()), f"schema_version = {SCHEMA_VERSION}"]
    for each in fitted:
        table = "architectures" if each.by_family else f'situations."{each.name}"'
        names = ", ".join(f'"{name}"' for name in each.sources)
        lines += ["", f"[{table}]", f"rows = {each.rows}", f"sources = [{names}]", "", f"[{table}.kinds]"]
        lines += [f"{kind} = {{ below = {error.below:.3f}, above = {error.above:.3f} }}" for kind, error in each.errors.items()]
    return "\n".join(lines) + "\n"
