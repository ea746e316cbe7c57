"""The file of an adopted device: limits that the driver says, what only data sheets know, features scaled from a known device.

Memory, SMs, caches and clocks come from the driver. Peaks come from the data sheet of a known device of that name, else from
the largest measured products, else from the nearest known device. What the features of fitted models take for granted beside
the limits is the nearest device's, each scaled by the limit that it goes with.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import steptime_lab
from steptime._hardware.description import Quantity, read_toml
from steptime._hardware.device import (
    CARRIED_KINDS,
    PRECISIONS,
    SCHEMA_VERSION,
    DeviceLimits,
    device_named,
    device_names,
    read_device,
)
from steptime._models.kernels.call import flop_of, precision_of
from steptime_lab.adopt.machine import GpuFacts
from steptime_lab.measurements.kernels import Row

_PCIE, _PCIE_VERSION = Path(steptime_lab.__file__).parent / "data" / "pcie.toml", 1
_SAYS = "what the driver says (cuDeviceGetAttribute)"

# The families that tell of peaks and of bandwidth.
PRODUCTS, MAPS = "matmul", "activation"
# Large enough that a product or a map is bound by what it is to tell.
_LARGE_FLOP, _LARGE_BYTES = 1e10, 1e8
# How far apart the memories of one product may lie, as drivers and data sheets count them: a logarithm.
_SAME_MEMORY = 0.15
# Of the fastest measured ones, which is taken: a single row may be a slip.
_QUANTILE = 0.98
# By kind of kernel, the precision whose peak its rate goes with; of all others, that of tensor cores.
_PER_PRECISION = {
    **dict.fromkeys(("ffma", "simt", "large_k", "small_n", "other", "gemv", "single", "efficient_single"), "float32"),
    **dict.fromkeys(("xmma_tf32", "tf32"), "tf32"),
}


@dataclass(frozen=True, slots=True)
class Nearest:
    """The known device that is most like the adopted one; `named` where it has the same name, so that its data sheet holds."""

    limits: DeviceLimits
    named: bool


def nearest(facts: GpuFacts) -> Nearest:
    """By name and memory; else by SMs, clock, bandwidth, cache and architecture."""
    named = None if facts.slice else device_named(facts.name)
    # A card of the same name with other memory is another product.
    if named is not None and abs(math.log(facts.memory_bytes / named.memory_bytes.value)) < _SAME_MEMORY:
        return Nearest(named, named=True)
    known = [limits for name in device_names() if (limits := read_device(name)).share == 1]
    return Nearest(named or min(known, key=lambda limits: _distance(facts, limits)), named=False)


def _distance(facts: GpuFacts, limits: DeviceLimits) -> float:
    pairs = [(facts.memory_bytes, limits.memory_bytes.value)]
    pairs += [
        (facts.sms * facts.clock_hz, limits.sms.value * limits.clock_hz.value),
        (facts.cache_bytes, limits.cache_bytes.value),
    ]
    pairs += [(facts.bandwidth_bytes_per_s, limits.bandwidth_bytes_per_s.value)]
    far = sum(math.log(here / there) ** 2 for here, there in pairs if here > 0 and there > 0)
    other = limits.compute_capability
    return far + (0.0 if other is None else (facts.capability_major - int(other.value)) ** 2)


def device_limits(facts: GpuFacts, like: Nearest, rows: Sequence[Row]) -> dict[str, Quantity]:
    """The table [limits], less its peaks."""
    known = like.limits
    lane = read_toml(_PCIE, "rates of PCIe", _PCIE_VERSION)["pcie_lane_bytes_per_s"]
    link = facts.pcie_lanes * lane.get(f"{facts.pcie_generation:.0f}", 0.0)
    found = {
        "sms": Quantity(facts.sms, _SAYS),
        "memory_bytes": Quantity(facts.memory_bytes, "what the driver says (cuDeviceTotalMem)"),
        "bandwidth_bytes_per_s": _bandwidth(facts, like, rows),
        "cache_bytes": Quantity(facts.cache_bytes, _SAYS),
        "clock_hz": Quantity(facts.clock_hz, f"{_SAYS}: the highest of the SMs"),
        "threads_per_sm": Quantity(facts.threads_per_sm, _SAYS),
        "compute_capability": Quantity(facts.capability_major + facts.capability_minor / 10, _SAYS),
        "host_bandwidth_bytes_per_s": Quantity(link, "PCIe generation and lanes by nvidia-smi, one way"),
        "power_w": Quantity(facts.power_limit_w, "the limit that nvidia-smi shows"),
    }
    stand_ins = {key: getattr(known, key) for key, value in found.items() if not value.value > 0}
    return {**found, **{key: _taken(value, known) for key, value in stand_ins.items() if value is not None}}


def _taken(value: Quantity, known: DeviceLimits) -> Quantity:
    return Quantity(value.value, f"the driver does not say; as {known.name} ({value.source})")


def _bandwidth(facts: GpuFacts, like: Nearest, rows: Sequence[Row]) -> Quantity:
    if like.named:
        return like.limits.bandwidth_bytes_per_s
    if facts.bandwidth_bytes_per_s > 0:
        return Quantity(facts.bandwidth_bytes_per_s, f"{_SAYS}: memory clock and bus")
    # Of one tensor, which is read, to another of its size, which is written.
    maps = [(row, list(row.question.call.tensors())) for row in rows if row.family == MAPS and not row.question.warm]
    moved = [(2 * tensors[0].nbytes, row.time_ns) for row, tensors in maps if len(tensors) == 1]
    rates = [1e9 * nbytes / time_ns for nbytes, time_ns in moved if nbytes > _LARGE_BYTES]
    if not rates:
        return Quantity(0.0, "")
    reached = like.limits.reach.bandwidth.value
    return Quantity(
        _high(rates) / reached, f"the fastest measured {MAPS}s, which reach {reached:g} of it on {like.limits.name}"
    )


def peaks(facts: GpuFacts, like: Nearest, rows: Sequence[Row]) -> dict[str, Quantity]:
    """Dense operations per second by precision."""
    known = like.limits
    if like.named:
        return dict(known.peak_flop_per_s)
    rates: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.family == PRODUCTS and (flop := flop_of(row.question.call)) > _LARGE_FLOP:
            rates[precision_of(row.question.call, row.question.tf32)].append(1e9 * flop / row.time_ns)
    slower = facts.sms * facts.clock_hz / (known.sms.value * known.clock_hz.value)
    result = {
        name: Quantity(value.value * slower, f"{known.name}'s by SMs and clock ({value.source})")
        for name, value in known.peak_flop_per_s.items()
    }
    reached = known.reach.peak.value
    for name, measured in rates.items():
        if name in PRECISIONS:
            text = f"the fastest of {len(measured)} measured products, which reach {reached:g} of it on {known.name}"
            result[name] = Quantity(_high(measured) / reached, text)
    return result


def _high(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[int(_QUANTILE * (len(ordered) - 1))]


def features(like: Nearest, limits: Mapping[str, Quantity], peak: Mapping[str, Quantity]) -> dict[str, dict[str, Quantity]]:
    """The nearest device's assumptions, each scaled by the limit that it goes with; of a device of this name, as they are."""
    known = like.limits
    source = known if known.features else read_device(known.models)
    if like.named and source is known:
        return {form: dict(table) for form, table in known.features.items()}
    ratios = {
        key: limits[key].value / getattr(source, key).value for key in ("sms", "clock_hz", "cache_bytes", "threads_per_sm")
    }
    ratios["bandwidth"] = limits["bandwidth_bytes_per_s"].value / source.bandwidth_bytes_per_s.value
    ratios |= {name: peak[name].value / there.value for name, there in source.peak_flop_per_s.items() if name in peak}
    return {
        form: {name: _scaled(name, value, ratios, source.name) for name, value in table.items()}
        for form, table in source.features.items()
    }


def _scaled(name: str, value: Quantity, ratios: Mapping[str, float], source: str) -> Quantity:
    ratio, by = _ratio(name, ratios)
    text = f"{source}'s ({value.source})" if ratio == 1.0 or not by else f"{source}'s by {by} ({value.source})"
    return Quantity(float(f"{value.value * ratio:.6g}"), text)


def _ratio(name: str, ratios: Mapping[str, float]) -> tuple[float, str]:
    """By which ratio of limits a feature of this name goes, and what that is called."""
    through_sms = ratios["sms"] * ratios["clock_hz"]
    if name.endswith("bytes_per_ns"):
        return (through_sms, "SMs and clock") if "cache" in name else (ratios["bandwidth"], "bandwidth")
    if name in ("l1_bytes", "l1_kept_bytes"):
        return 1.0, ""
    if name.endswith("_bytes"):
        return ratios["cache_bytes"], "cache"
    if name.endswith("_ns") and "per" not in name:
        return 1.0 / ratios["clock_hz"], "clock"
    if name == "warps_per_sm":
        return ratios["threads_per_sm"], "threads of an SM"
    kind = re.sub(r"_(flop_per_s|flop_per_ns|forward|backward)$", "", name)
    whole = ratios.get(_PER_PRECISION.get(kind, "bfloat16"), through_sms)
    if name.endswith("flop_per_s"):
        return whole, "peak"
    return (whole / ratios["sms"], "peak of an SM") if kind != name else (ratios["clock_hz"], "clock")


def interval_factors(like: Nearest) -> dict[str, Quantity]:
    """By kind of kernel, how far off what is carried over may be: as for the nearest device, or as far as for any on paper."""
    known = [like.limits.transfer] if like.limits.analytic else [read_device(name).transfer for name in device_names()]
    factors = [basis.interval_factor for basis in known if basis is not None]
    return {kind: max((factor[kind] for factor in factors), key=lambda each: each.value) for kind in CARRIED_KINDS}


def device_toml(facts: GpuFacts, name: str, rows: Sequence[Row], *, alone: bool = False) -> str:
    """The text of the file of a measured device, its models beside it; `read_device` reads it back.

    `alone`: nobody's models answer what its own do not know.
    """
    like = nearest(facts)
    limits, peak = device_limits(facts, like, rows), peaks(facts, like, rows)
    title = f"{facts.name}, {facts.memory_bytes / 1e9:.0f} GB, adopted"
    lines = [f"schema_version = {SCHEMA_VERSION}", f"name = {_text(name)}", f"title = {_text(title)}"]
    lines.append(f"models = {_text(name)}")
    assumed = {f"features.{form}": table for form, table in features(like, limits, peak).items()}
    tables = {"limits": limits, "limits.peak_flop_per_s": peak, **assumed}
    if not alone:
        basis = f"what was not measured here is that of {like.limits.models}, scaled by the limits of both"
        lines += [f"carried_from = {_text(like.limits.models)}", "", "[transfer]", f"basis = {_text(basis)}"]
        tables = {"transfer.interval_factor": interval_factors(like), **tables}
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(_line(key, value) for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Quantity) -> str:
    return f"{key} = {{ value = {value.value!r}, source = {_text(value.source)} }}"


def _text(value: str) -> str:
    """TOML's basic strings are JSON's, but for what it does not escape."""
    return json.dumps(value, ensure_ascii=False)
