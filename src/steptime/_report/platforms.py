"""Platforms, their parts and fabrics just made, every number with its source: as text and as JSON with stable keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from steptime._hardware.description import Quantity
from steptime._hardware.device import DeviceLimits, read_device
from steptime._models.collectives.message import KINDS, Messages
from steptime._models.collectives.tier import CollectiveTimes
from steptime._models.error import gmae
from steptime._models.estimate import Source
from steptime._models.host.model import HostModel
from steptime._models.lookups.fitted import LookupModels
from steptime._notices import Notices
from steptime._platforms.device import Device
from steptime._platforms.fabric import Fabric, Fitted, Origin, fitted, origins
from steptime._platforms.own_fabric import LeftOut, OwnFabric
from steptime._platforms.platform import Platform, PlatformParts
from steptime._report.json import SCHEMA_VERSION, Document
from steptime._report.layout import (
    Paragraph,
    literal,
    print_body,
    print_heading,
    print_line,
    print_notices,
    print_numbers,
    print_section,
)

_EXAMPLES_BYTES = (1 << 20, 64 << 20)
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "us"))
_BINARY = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_LIMITS = {  # what a limit is called, and its unit
    "sms": ("multiprocessors", ""),
    "memory_bytes": ("memory", "B"),
    "bandwidth_bytes_per_s": ("memory bandwidth", "B/s"),
    "cache_bytes": ("last-level cache", "B"),
    "clock_hz": ("clock", "Hz"),
    "host_bandwidth_bytes_per_s": ("link to the host", "B/s"),
    "power_w": ("power cap", "W"),
}
_RATES = {"attention_flop_per_s": "attention", "product_flop_per_s": "largest products of"}
_ERROR_HEADS = ("", "tier", "ranks", "rows", "GMAE", "MAPE", "p90", "max")
_RECIPE = ("device", "cpu", "driver", "torch", "cuda", "cudnn", "nccl", "triton")


# --- JSON ------------------------------------------------------------------------------------------------------------------


def platforms_document(shipped: Sequence[PlatformParts], without_device: Sequence[str]) -> Document:
    """What `platforms --json` writes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "platforms": [{**asdict(parts), "kernels": _kernels(parts), "collectives": _origins(parts)} for parts in shipped],
        "fabrics_without_device": list(without_device),
        "warnings": [],
    }


def platform_document(platform: Platform) -> Document:
    """What `platforms NAME --json` writes: all that the text has, and every cost of the host."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": platform.name,
        "ranks": platform.ranks,
        "device": _device_document(platform.device),
        "host": {"name": platform.parts.host, "source": _host_source(platform.host), **msgspec.to_builtins(platform.host)},
        "fabric": None if platform.fabric is None else _fabric_document(platform.fabric, platform.ranks),
        "overlap": asdict(platform.overlap),
        "warnings": [],
    }


def fabric_document(fabric: Fabric) -> Document:
    """What `platforms FABRIC --json` writes."""
    return {"schema_version": SCHEMA_VERSION, **_fabric_document(fabric, fabric.limits.ranks), "warnings": []}


def _device_document(device: Device) -> Document:
    limits = device.limits
    return {
        "name": limits.name,
        "title": limits.title,
        "source": _source(limits).value,
        "transfer": None if limits.transfer is None else {"from": limits.models, **asdict(limits.transfer)},
        "share": limits.share,
        "limits": {name: asdict(item) for name, item in _limits(limits)},
        "models": {name: dict(recipe) for name, recipe in _recipes(device)},
    }


def _fabric_document(fabric: Fabric, ranks: int) -> Document:
    limits = fabric.limits
    result = origins(fabric, ranks)
    return {
        "name": limits.name,
        "title": limits.title,
        "source": fabric.source.value,
        "gpus_per_node": limits.gpus_per_node,
        "nodes": limits.nodes,
        "rails": limits.rails,
        "oversubscription": limits.oversubscription,
        "tiers": [asdict(tier) for tier in limits.tiers],
        "fitted": [asdict(item) for item in fitted(fabric)],
        "ranks": ranks,
        "collectives": {kind: origin.value for kind, origin in result.items()},
        "estimates_us": {
            kind: {_bytes(size): float(_times(fabric, kind, ranks, size).ns[0]) / 1e3 for size in _EXAMPLES_BYTES}
            for kind, origin in result.items()
            if origin is not Origin.NONE
        },
        "published": [asdict(item) for item in limits.published],
    }


def _origins(parts: PlatformParts) -> dict[str, str]:
    if parts.fabric is None:
        return {}
    return {kind: origin.value for kind, origin in origins(Fabric.load(parts.fabric), parts.ranks).items()}


# --- text ------------------------------------------------------------------------------------------------------------------


def print_platforms(console: Console, shipped: Sequence[PlatformParts], without_device: Sequence[str]) -> None:
    """A line for each."""
    print_heading(console, "platforms", "shipped with the package")
    rows = [(item.name, item.device, item.fabric or "-", _kernels(item), _usually(_origins(item))) for item in shipped]
    console.print()
    print_body(console, _table(("platform", "device", "fabric", "kernels", "wire"), rows))
    print_line(console, "Analytic", "kernels of a device that was not measured: another device's models, scaled by data sheets")
    if without_device:
        text = f"for the fabrics {', '.join(without_device)}: no device models are shipped"
        print_line(console, "No device", text, spaced=False)
    text = "steptime platforms NAME, for a platform or a fabric; other rank counts are named the same way"
    print_line(console, "More", text, spaced=False)


def print_platform(console: Console, platform: Platform) -> None:
    """Its three parts."""
    print_heading(console, "platforms", platform.name, f"{platform.ranks} rank{'s' * (platform.ranks > 1)}")
    _print_device(console, platform.device)
    _print_host(console, platform.parts.host, platform.host)
    if platform.fabric is None:
        print_section(console, "Fabric", "none: one rank exchanges nothing")
    else:
        _print_fabric(console, platform.fabric, platform.ranks)
        overlap = platform.overlap
        held = f": a collective holds {overlap.held_sms:g} of {overlap.sms:g} SMs" if overlap.known else ""
        print_line(console, "Kernels beside collectives", f"{overlap.source}{held}")


def print_fabric(console: Console, fabric: Fabric) -> None:
    """A fabric without a platform, with all of its ranks."""
    print_heading(console, "platforms", f"fabric {fabric.limits.name}", f"{fabric.limits.ranks} ranks")
    _print_fabric(console, fabric, fabric.limits.ranks)


def _print_device(console: Console, device: Device) -> None:
    print_section(console, "Device", f"{device.limits.name}: {device.limits.title}")
    if device.limits.share > 1:
        print_body(console, Paragraph(literal(f"Numbers are of the whole device, {device.limits.share} times this part.")))
    if device.limits.transfer is not None:
        text = f"Analytic: the models of {device.limits.models}, scaled by limits; {device.limits.transfer.basis}."
        print_body(console, Paragraph(literal(text)))
    rows = [(*_limit_words(name, item.value), item.source) for name, item in _limits(device.limits)]
    rows += [(f"models of {name}", _row_words(recipe), _recipe_words(recipe)) for name, recipe in _recipes(device)]
    print_body(console, _table(("", "", "source"), rows, right=(1,)))


def _print_host(console: Console, name: str, host: HostModel) -> None:
    print_section(console, "Host", f"{name}: {host.recipe.get('cpu', 'unknown CPU')}")
    numbers = [
        ("a launch", _ns(host.launch_ns)),
        ("a call from Python", _ns(host.binding_ns)),
        ("first call in a phase", f"{host.first_call:.2f} x"),
        ("reference, CPU", _ns(host.reference_cpu_ns)),
        ("reference, launch", _ns(host.reference_launch_ns)),
        *((f"other ops: {kind}", _ns(cost.cpu_ns or cost.per_tensor_ns)) for kind, cost in sorted(host.classes.items())),
        ("ops by name", str(len(host.ops))),
        ("costs around ops", str(len(host.around))),
    ]
    print_body(console, Paragraph(literal(f"All of it: {_host_source(host)}. Every op and mechanism with its cost: --json")))
    print_body(console, _table(("at the fast speed of the host", ""), numbers, right=(1,)))


def _print_fabric(console: Console, fabric: Fabric, ranks: int) -> None:
    limits = fabric.limits
    print_section(console, "Fabric", f"{limits.name}: {limits.title}")
    nodes = f"{limits.nodes} node{'s' * (limits.nodes > 1)} of {limits.gpus_per_node} ranks"
    cards = f"{limits.rails} network card{'s' * (limits.rails > 1)}"
    network = f", {cards} each, oversubscription {limits.oversubscription:g}" if limits.nodes > 1 else ""
    analytic = "; analytic: nothing was measured, intervals are a factor of 2 or more" if limits.analytic else ""
    print_body(console, Paragraph(literal(f"{nodes}{network}{analytic}")))
    rows = []
    for tier in limits.tiers:
        text = f"{tier.name} ({tier.kind}, {tier.ranks} ranks)"
        bandwidth, latency = tier.bandwidth_bytes_per_s, tier.latency_ns
        rows.append((text, f"{_si(bandwidth.value)}B/s", bandwidth.source))
        rows.append(("", _ns(latency.value), latency.source))
        if tier.fitted is not None:
            rows.append(("", "curves", f"those of fabric {tier.fitted}"))
        if tier.oversubscription > 1:
            rows.append(("", f"1 : {tier.oversubscription:g}", "of its cards' bandwidth, as its file says"))
    print_body(console, _table(("tier, of one rank one way", "", "source"), rows, right=(1,)))
    _print_fitted(console, fitted(fabric))
    _print_collectives(console, fabric, ranks)
    for item in limits.published:
        print_line(console, "Rows", f"{item.source} ({item.license}; {item.date})", spaced=False)


def _print_fitted(console: Console, curves: Sequence[Fitted]) -> None:
    if not curves:
        return
    rows = [
        (
            item.kind,
            item.tier,
            ", ".join(map(str, item.ranks)),
            f"{_bytes(item.bytes[0])} to {_bytes(item.bytes[1])}",
            "" if item.off is None else f"{100 * item.off[0]:+.0f} to {100 * item.off[1]:+.0f} %",
        )
        for item in curves
    ]
    print_section(console, "Fitted", "error: measured / fitted, 90 % of rows")
    print_body(console, _table(("kind", "tier", "ranks", "bytes", "error"), rows))


def _print_collectives(console: Console, fabric: Fabric, ranks: int) -> None:
    rows = [
        (kind, origin.value, *(_example(fabric, kind, ranks, size, origin) for size in _EXAMPLES_BYTES))
        for kind, origin in origins(fabric, ranks).items()
    ]
    print_section(console, f"Collectives of {ranks} ranks", "by themselves, with 90 % intervals")
    print_body(console, _table(("kind", "where from", *map(_bytes, _EXAMPLES_BYTES)), rows, right=(2, 3)))


def _example(fabric: Fabric, kind: str, ranks: int, size: int, origin: Origin) -> str:
    if origin is Origin.NONE:
        return ""
    result = _times(fabric, kind, ranks, size)
    return f"{_ns(result.ns[0])} ({_ns(result.low_ns[0])} to {_ns(result.high_ns[0])})"


def _times(fabric: Fabric, kind: str, ranks: int, size: int) -> CollectiveTimes:
    return fabric.times(Messages.even(kind, [ranks], [float(size)]))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Table:
    """Only the last column may break into lines."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim", pad_edge=False)
    for index, head in enumerate(heads):
        last = index == len(heads) - 1
        table.add_column(head, justify="right" if index in right else "left", no_wrap=not last, overflow="fold")
    for row in rows:
        table.add_row(*(literal(cell) for cell in row))
    return table


# --- words -----------------------------------------------------------------------------------------------------------------


def _limits(limits: DeviceLimits) -> list[tuple[str, Quantity]]:
    named = [(name, result) for name in _LIMITS if isinstance(result := getattr(limits, name), Quantity)]
    named += [(f"peak_flop_per_s.{precision}", item) for precision, item in limits.peak_flop_per_s.items()]
    if limits.transfer is None:
        return named
    attention = limits.transfer.attention_flop_per_s.items()
    named += [(f"attention_flop_per_s.{direction}", item) for direction, item in attention]
    named += [(f"product_flop_per_s.{precision}", item) for precision, item in limits.transfer.product_flop_per_s.items()]
    named += [] if limits.transfer.energy is None else [("energy", limits.transfer.energy)]
    named += [(f"energy.{precision}", item) for precision, item in limits.transfer.product_energy.items()]
    return [*named, *((f"interval_factor.{kind}", item) for kind, item in limits.transfer.interval_factor.items())]


def _kernels(parts: PlatformParts) -> str:
    return str(_source(read_device(parts.device)).value)


def _source(limits: DeviceLimits) -> Source:
    return Source.ANALYTIC if limits.analytic else Source.FITTED


def _recipes(device: Device) -> list[tuple[str, Mapping[str, Any]]]:
    results: list[tuple[str, Mapping[str, Any]]] = [("kernels", device.models.recipe)]
    lookups = device.lookups
    if isinstance(lookups, Path) and lookups.is_file():
        lookups = LookupModels.load(lookups)
    return [*results, ("lookups", lookups.recipe)] if isinstance(lookups, LookupModels) else results


def _row_words(recipe: Mapping[str, Any]) -> str:
    rows = recipe.get("rows")
    return f"{sum(rows.values()):,} rows" if isinstance(rows, dict) and rows else ""


def _recipe_words(recipe: Mapping[str, Any]) -> str:
    """Device, versions and dates."""
    text = [f"{'' if name in ('device', 'cpu') else f'{name} '}{_listed(recipe[name])}" for name in _RECIPE if recipe.get(name)]
    measured = recipe.get("measured") or recipe.get("date")
    return ", ".join([*text, *([f"measured {_listed(measured)}"] if measured else [])])


def _host_source(host: HostModel) -> str:
    return f"{_recipe_words(host.recipe)}, by `{host.recipe.get('command', 'an unknown command')}`"


def _listed(value: Any) -> str:
    return " to ".join(dict.fromkeys(map(str, value))) if isinstance(value, list) else str(value)


def _usually(origin_of: Mapping[str, str]) -> str:
    """Where the four usual kinds come from."""
    words = ", ".join(dict.fromkeys(origin_of[kind] for kind in KINDS[:4] if kind in origin_of))
    return words.replace(f", {Origin.NONE.value}", "; some kinds unknown") or "-"


def _limit_words(name: str, value: float) -> tuple[str, str]:
    """What it is called, and how much it is."""
    kind, _, which = name.partition(".")
    if kind == "energy":
        return f"energy of an operation{f' of {which} products' * bool(which)}", f"{value:g} x"
    if kind == "interval_factor":
        return f"interval of {which}", f"{value:g} x"
    label, unit = _LIMITS.get(kind) or (f"{_RATES.get(kind, 'peak of')} {which}", "FLOP/s")
    return label, f"{_si(value)}{unit}" if unit else f"{value:g}"


def _si(value: float) -> str:
    scale, prefix = next((item for item in _SCALES if value >= item[0]), _SCALES[-1])
    return f"{value / scale:.4g} {prefix}"


def _ns(value: float) -> str:
    scale, unit = next((item for item in _TIMES if value >= item[0]), _TIMES[-1])
    return f"{value / scale:.3g} {unit}" if value < 1e3 * scale or unit == "s" else f"{value / scale:,.0f} {unit}"


def _bytes(value: float) -> str:
    scale, unit = next((item for item in _BINARY if value >= item[0] * 0.999), (1, "B"))
    return f"{value / scale:.3g} {unit}"


# --- a fabric of one's own -------------------------------------------------------------------------------------------------


def own_fabric_document(fabric: OwnFabric, file: Path) -> Document:
    """What `fabric --json` writes."""
    limits = fabric.limits
    return {
        "schema_version": SCHEMA_VERSION,
        "name": limits.name,
        "title": limits.title,
        "file": str(file),
        "source": "analytic" if limits.models is None else "fitted",
        "gpus_per_node": limits.gpus_per_node,
        "nodes": limits.nodes,
        "tiers": [asdict(tier) for tier in limits.tiers],
        "rows": fabric.rows,
        "errors": [
            {
                "kind": item.kind,
                "tier": item.tier,
                "ranks": list(item.ranks),
                "rows": len(item.errors),
                **dict(zip(("gmae", "mape", "p90", "max"), _figures(item), strict=True)),
            }
            for item in fabric.left_out
        ],
        "warnings": list(fabric.warnings),
    }


def print_own_fabric(console: Console, fabric: OwnFabric, file: Path) -> None:
    """Errors, then what to do with it."""
    limits = fabric.limits
    print_heading(console, "fabric", limits.name, limits.title)
    if limits.models is None:
        print_line(console, "Analytic", "from a data sheet: nothing was measured, intervals are a factor of 2 or more")
    elif fabric.left_out:
        print_section(console, "Errors", "of rows left out in turn, a fifth at a time; GMAE is a geometric mean")
        print_numbers(
            console,
            _ERROR_HEADS,
            [
                [
                    item.kind,
                    item.tier,
                    ", ".join(map(str, item.ranks)),
                    f"{len(item.errors):,}",
                    *(f"{100 * value:.1f} %" for value in _figures(item)),
                ]
                for item in fabric.left_out
            ],
        )
        print_line(console, "Curves", f"through all {fabric.rows:,} rows")
    else:
        print_line(console, "Errors", f"not known: {fabric.rows} rows are too few to leave any out")
    for tier in limits.tiers:
        bandwidth, latency = tier.bandwidth_bytes_per_s.value / 1e9, tier.latency_ns.value / 1e3
        text = f"{tier.name}, {tier.kind} of {tier.ranks} ranks: {bandwidth:,.4g} GB/s of a rank one way, {latency:,.3g} us"
        print_line(console, "Tier", text, spaced=False)
    print_line(console, "Written", f"{file}  (shown by: steptime platforms {file})", spaced=False)
    print_notices(console, Notices.of(fabric.warnings))


def _figures(curve: LeftOut) -> tuple[float, float, float, float]:
    """GMAE, MAPE, p90, max."""
    errors = np.abs(curve.errors)
    return gmae(errors.tolist()), float(errors.mean()), float(np.quantile(errors, 0.9)), float(errors.max())
