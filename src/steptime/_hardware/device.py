"""The limits of a GPU, or of a part of one, from its data sheet: a TOML file each, every number with its source.

A measured device names its fitted models (`models`), and may name the device whose models answer what those do not know
(`carried_from`). One that was not measured names the device whose models stand in for its own (`transferred_from`). Of both,
`[transfer]` says what is known of going from one to the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import steptime
from steptime._hardware.description import Catalogue, Quantity, is_file, quantities, quantity, read_toml, subtable
from steptime.errors import InputError, UnsupportedError

SCHEMA_VERSION = 1
FOLDER = Path(steptime.__file__).parent / "data" / "devices"

# The precision a product of some dtype runs in.
PRECISIONS = ("float64", "float32", "tf32", "float16", "bfloat16", "float8", "float4")
_HALVES = ("bfloat16", "float16")
# What products of these formats need of tensor cores; PyTorch and Transformer Engine refuse them on devices without. Scales of
# blocks (MXFP8, NVFP4) came with products of four bits (NVIDIA, PTX ISA: block scaling of mma, sm_100 and later).
_NEEDED = {"fp8": "float8", "float8": "float8", "mxfp8": "float4", "nvfp4": "float4", "float4x2": "float4"}
# Of attention.
DIRECTIONS = ("forward", "backward")
# Kernels whose times are carried to other devices with errors of their own size; `other`: convolutions and lookups.
CARRIED_KINDS = ("product", "attention", "memory", "short", "other")
_REFERENCE = "h200"
_WORD = re.compile("[A-Z0-9]+")
_MOST_SHARES = 64
_LIMITS = ("sms", "memory_bytes", "bandwidth_bytes_per_s", "cache_bytes", "clock_hz")
_OPTIONAL_LIMITS = ("threads_per_sm", "compute_capability", "host_bandwidth_bytes_per_s", "power_w", "tensor_clock_hz")
_REACHED = ("start_ns", "peak", "bandwidth", "host_bandwidth", "cache_bandwidth_bytes_per_s")
DEVICES = Catalogue("device", FOLDER)
device_names = DEVICES.names


@dataclass(frozen=True, slots=True)
class TransferBasis:
    """What is known of a device that answers with another one's models."""

    basis: str  # what the two have in common and what not
    # By kind of kernel, how far off, either way, nine of ten transferred times are, the other's own errors apart.
    interval_factor: Mapping[str, Quantity]
    attention_flop_per_s: Mapping[str, Quantity]  # by direction, what fused attention reaches; none where it is the other's
    product_flop_per_s: Mapping[str, Quantity]  # by precision, what the largest products reach at the highest clock
    whole_waves: bool = False  # whether products run in whole rounds of tiles over the SMs
    start_ns: Quantity | None = None  # of the shortest kernels, where that is known and not by the clock
    energy: Quantity | None = None  # of an operation, of what it needs on the other, each at its highest clock; None: the same
    product_energy: Mapping[str, Quantity] = field(
        default_factory=dict
    )  # of those of products, by precision, where loops say so


@dataclass(frozen=True, slots=True)
class Reached:
    """What measured kernels reach of a device, as fractions of its data sheet where no unit is said."""

    start_ns: Quantity  # of the shortest kernels
    peak: Quantity  # of the largest products
    bandwidth: Quantity  # of the largest element-wise kernels
    host_bandwidth: Quantity  # of pinned copies
    cache_bandwidth_bytes_per_s: Quantity  # that warm kernels read from the last level at most
    attention_flop_per_s: Mapping[str, Mapping[str, Quantity]]  # in half precision, by kind and direction


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What lies between launches and kernels: how soon work starts after its launch, its neighbour or a wait."""

    latency_ns: Quantity  # from the end of a launch to the start of its work on an idle stream
    release_ns: Quantity  # from the end of work that a stream was told to await to the start of what waits
    return_ns: Quantity  # from the end of what a synchronisation waits for to its return
    # From the end of a work to the start of the next one of its stream that was launched long before, by the number of shares
    # of the device: ranks that share it share the front end that hands out blocks.
    spacing_ns: Mapping[int, Quantity]
    graph_spacing_ns: Quantity  # the same between kernels of one CUDA graph on a whole device

    def spacing_of(self, share: int) -> float:
        """For ranks that have one of so many shares each: as the nearest that was measured."""
        return self.spacing_ns[min(self.spacing_ns, key=lambda measured: abs(measured - share))].value

    def graph_spacing_of(self, share: int) -> float:
        """Between kernels of a CUDA graph: shares of a device slow it as they slow what is between launched ones."""
        return self.graph_spacing_ns.value * self.spacing_of(share) / self.spacing_of(1)


@dataclass(frozen=True, slots=True)
class LookupContention:
    """What a lookup takes of the memory from lookups on other shares of the GPU, as fractions of what a copy takes."""

    backward: Quantity  # of a backward pass by itself
    rows: Quantity  # of rows at random places, per even share of the bandwidth on paper that they move


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """A GPU as its data sheet has it. `share` parts of it are equal, and this is one of them."""

    name: str
    title: str
    whole: str  # the device that it is, or is a part of
    share: int
    models: str  # the fitted kernel models that answer for it, by the name of the whole device
    sms: Quantity
    memory_bytes: Quantity  # as the driver counts it
    bandwidth_bytes_per_s: Quantity
    cache_bytes: Quantity  # of the last level
    clock_hz: Quantity
    threads_per_sm: Quantity
    dispatch: Dispatch
    peak_flop_per_s: Mapping[str, Quantity]  # by precision, dense
    compute_capability: Quantity | None = None
    host_bandwidth_bytes_per_s: Quantity | None = None  # to or from the host, one way
    power_w: Quantity | None = None  # that the whole device may draw; its shares draw it together
    tensor_clock_hz: Quantity | None = None  # that its peaks on tensor cores are of, where that is not `clock_hz`
    reached: Reached | None = None  # where kernels were measured
    transfer: TransferBasis | None = None  # where `models` are another device's
    carried_from: str = ""  # where it has models of its own: whose answer what those do not know,
    carried: TransferBasis | None = None  # and what is known of going from that device to this one
    # By form of model, what its features take for granted of the device beside its limits.
    features: Mapping[str, Mapping[str, Quantity]] = field(default_factory=dict)
    contention: LookupContention | None = None  # where lookups on several shares were timed together

    @property
    def reach(self) -> Reached:
        """What kernels reach of it: as measured, or as on the reference device."""
        reached = self.reached or reference_device().reached
        assert reached is not None
        return reached

    @property
    def analytic(self) -> bool:
        """Whether its times are another device's, scaled by what is on paper of both."""
        return self.transfer is not None

    @property
    def rank_memory_bytes(self) -> int:
        """What one rank has: parts of a device share its memory."""
        return int(self.memory_bytes.value) // self.share

    def check_format(self, precision: str, where: str) -> None:
        """Refuse products in a format of few bits that tensor cores here do not have; wider ones run at the rate of others."""
        needed = _NEEDED.get(precision)
        if needed is not None and needed not in self.peak_flop_per_s:
            raise UnsupportedError(
                f"{where}: {self.name} has no tensor cores for products in {precision}; choose another precision or device"
            )

    def rated(self, precision: str) -> str:
        """At whose rate products in this precision run: its own or, where the device has none, what libraries go by instead."""
        packed = precision == "float4x2"
        instead = ("float4", "float8", *_HALVES) if packed else _HALVES if precision == "float8" else ()
        return next((one for one in (precision, *instead) if one in self.peak_flop_per_s), "float32")

    def roofline_ns(self, flop: float, nbytes: float, precision: str) -> float:
        """The longer of computing and moving on this part, at what large kernels reach of its limits."""
        peak = self.peak_flop_per_s[self.rated(precision)].value * self.reach.peak.value
        bandwidth = self.bandwidth_bytes_per_s.value * self.reach.bandwidth.value
        return 1e9 * self.share * max(flop / peak, nbytes / bandwidth)


def read_device(name: str | Path) -> DeviceLimits:
    """A shipped device by its name, or one of the user's by the path of its TOML file."""
    file = DEVICES.file(name)
    return _shipped(file) if file.parent == FOLDER else _with_cap(_read(file))


def _with_cap(limits: DeviceLimits) -> DeviceLimits:
    """A user's device on paper that says no cap has that of the shipped one whose words are in its name, if there is one."""
    alike = device_named(limits.name) if limits.power_w is None and limits.transfer is not None else None
    if alike is None or alike.power_w is None or limits.transfer is None:
        return limits
    cap = Quantity(alike.power_w.value, f"as {alike.name}, for the file says none; {alike.power_w.source}")
    if alike.transfer is None or limits.transfer.energy is not None:
        return replace(limits, power_w=cap)
    known = alike.transfer
    transfer = replace(limits.transfer, energy=known.energy, product_energy=known.product_energy)
    return replace(limits, power_w=cap, transfer=transfer)


@cache
def device_named(text: str) -> DeviceLimits | None:
    """The whole shipped device that a driver calls so (`NVIDIA A100-SXM4-40GB`), by the words of its name; the most decide."""
    words = set(_WORD.findall(text.upper()))
    named = [name for name in device_names() if set(_WORD.findall(name.upper())) <= words]
    return read_device(max(named, key=len)) if named else None


def _read(file: Path) -> DeviceLimits:
    content = read_toml(file, "device", SCHEMA_VERSION)
    return _share(file, content) if "part_of" in content else _limits(file, content)


_shipped = cache(_read)  # files of the package stay as they are


@cache
def reference_device() -> DeviceLimits:
    """The device that is meant where none is named: the one whose models come with the package."""
    return read_device(_REFERENCE)


def _share(file: Path, content: Mapping[str, Any]) -> DeviceLimits:
    """So much of a whole device; rates and sizes stay the whole's, for its shares have them together."""
    name, share = content["part_of"], content.get("share")
    if not isinstance(share, int) or isinstance(share, bool) or not 1 <= share <= _MOST_SHARES:
        raise InputError(f"{file}: share is {share!r}, expected how many equal parts the device is divided into")
    plain = isinstance(name, str) and "\0" not in name and name == Path(name).name != ""
    whole_file = file.with_name(f"{name}.toml") if plain else None
    if whole_file is None or not is_file(whole_file):
        raise InputError(f"{file}: part_of is {name!r}, expected the name of a device whose file lies beside it")
    whole = read_toml(whole_file, "device", SCHEMA_VERSION)
    if "part_of" in whole:
        raise InputError(f"{file}: part_of is {name!r}, which is itself a share of a device; expected a whole one")
    limits = _limits(whole_file, whole)
    if limits.analytic:
        raise InputError(f"{file}: part of {limits.name}, of which nothing was measured; parts are of measured devices only")
    return replace(limits, name=str(content.get("name", file.stem)), title=str(content.get("title", "")), share=share)


def _limits(file: Path, content: Mapping[str, Any]) -> DeviceLimits:
    limits = subtable(file, content, "limits", "a table [limits] of sms, memory_bytes and so on")
    peaks = _rates(file, limits, "peak_flop_per_s", PRECISIONS)
    if "float32" not in peaks:
        raise InputError(f"{file}: limits.peak_flop_per_s.float32 is missing")
    values = quantities(file, limits, (*_LIMITS, *(key for key in _OPTIONAL_LIMITS if key in limits)))
    if "threads_per_sm" not in values:
        values["threads_per_sm"] = reference_device().threads_per_sm
    name = str(content.get("name", file.stem))
    return DeviceLimits(
        name=name,
        title=str(content.get("title", "")),
        whole=name,
        share=1,
        models=str(content.get("transferred_from", content.get("models", file.stem))),
        transfer=_transfer(file, content, "transferred_from"),
        carried_from=str(content.get("carried_from", "")),
        carried=_transfer(file, content, "carried_from"),
        peak_flop_per_s=peaks,
        reached=_reached(file, content),
        dispatch=_dispatch(file, content),
        features=_features(file, content),
        contention=_contention(file, content),
        **values,
    )


def _rates(
    file: Path, table: Mapping[str, Any], key: str, names: Sequence[str], like: str | None = None
) -> dict[str, Quantity]:
    """Those of the named rates that a table has; `like` names the quantity that they are like, where they are no rates."""
    rates = subtable(file, {key: {}, **table}, key, f"a table of {', '.join(names)}")
    return quantities(file, rates, [name for name in names if name in rates], like)


def _transfer(file: Path, content: Mapping[str, Any], key: str) -> TransferBasis | None:
    """What is known of going from the device that a key names to this one; nothing where it names none."""
    if key not in content:
        return None
    other, basis = content[key], content.get("transfer")
    if not isinstance(other, str):
        raise InputError(f"{file}: {key} is {other!r}, expected the name of a device with models")
    if "transferred_from" in content and {"models", "carried_from"} & set(content):
        raise InputError(f"{file}: models and transferred_from; a device has models of its own or another one's, not both")
    if not isinstance(basis, Mapping) or not basis.get("basis"):
        raise InputError(f"{file}: transfer.basis is missing: what {other} and this device have in common")
    return TransferBasis(
        basis=str(basis["basis"]),
        whole_waves=bool(basis.get("whole_waves", False)),
        interval_factor=_interval_factor(file, basis),
        attention_flop_per_s=_rates(file, basis, "attention_flop_per_s", DIRECTIONS),
        product_flop_per_s=_rates(file, basis, "product_flop_per_s", PRECISIONS),
        start_ns=quantity(file, basis, "start_ns") if "start_ns" in basis else None,
        energy=quantity(file, basis, "energy") if "energy" in basis else None,
        product_energy=_rates(file, basis, "product_energy", PRECISIONS, "energy"),
    )


def _interval_factor(file: Path, basis: Mapping[str, Any]) -> dict[str, Quantity]:
    """One for all kinds of kernels, or a table of one for each."""
    table = basis.get("interval_factor")
    if not isinstance(table, Mapping) or "value" in table:
        return dict.fromkeys(CARRIED_KINDS, quantity(file, basis, "interval_factor"))
    return quantities(file, table, CARRIED_KINDS, "interval_factor")


def _reached(file: Path, content: Mapping[str, Any]) -> Reached | None:
    """What was measured of it beyond its data sheet; nothing of a device that was not measured."""
    if "reached" not in content:
        return None
    table = subtable(file, content, "reached", "a table [reached] of what kernels reach")
    kinds = subtable(file, table, "attention_flop_per_s", "a table by kind and direction", within="reached.")
    attention = {str(kind): _rates(file, kinds, kind, DIRECTIONS) for kind in kinds}
    return Reached(attention_flop_per_s=attention, **quantities(file, table, _REACHED))


def _dispatch(file: Path, content: Mapping[str, Any]) -> Dispatch:
    """Its own gaps between launches and kernels, or else those of the reference device."""
    if "dispatch" not in content:
        return reference_device().dispatch
    table = content["dispatch"]
    spacing = table.get("spacing_ns") if isinstance(table, Mapping) else None
    if not isinstance(spacing, Mapping) or "1" not in spacing or not all(share.isdecimal() for share in spacing):
        raise InputError(f"{file}: dispatch.spacing_ns is {spacing!r}, expected a table by shares of the device, 1 among them")
    by_share = quantities(file, spacing, spacing, "spacing_ns")
    return Dispatch(
        **quantities(file, table, ("latency_ns", "release_ns", "return_ns")),
        spacing_ns={int(share): value for share, value in by_share.items()},
        graph_spacing_ns=(
            quantity(file, table, "graph_spacing_ns", "spacing_ns")
            if "graph_spacing_ns" in table
            else reference_device().dispatch.graph_spacing_ns
        ),
    )


def _features(file: Path, content: Mapping[str, Any]) -> dict[str, dict[str, Quantity]]:
    tables = content.get("features", {})
    if not isinstance(tables, Mapping) or not all(isinstance(table, Mapping) for table in tables.values()):
        raise InputError(f"{file}: features is {tables!r}, expected a table for each form of model, as [features.launched]")
    return {form: quantities(file, table, table, "feature") for form, table in tables.items()}


def _contention(file: Path, content: Mapping[str, Any]) -> LookupContention | None:
    table = content.get("contention")
    return None if table is None else LookupContention(**quantities(file, table, ("backward", "rows"), "fraction"))
