"""Device memory of every rank at its peak: what fills it, and how much of the device that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steptime._models.memory.lifetimes import Kind
from steptime._report.html.markup import Markup, bar, join, swatch, table, tag
from steptime._report.sizes import size_words

# As many ranks as a person compares; those that need most come first where there are more.
_RANKS_LISTED = 32
# What a process takes of its device besides what the allocator has handed out at the peak, and its name in the style sheet.
_BESIDE, _BESIDE_STYLE = "context, NCCL, spare blocks", "beside"


def memory_words(memory: Mapping[str, Any]) -> str:
    """The largest rank's peak, of what its device has; nothing where nothing is known."""
    peak, capacity = memory.get("peak_bytes"), memory.get("capacity_bytes")
    if peak is None:
        return ""
    return size_words(peak) if capacity is None else f"{size_words(peak)} of {size_words(capacity)}"


def memory_section(memory: Mapping[str, Any]) -> Markup:
    """The section, or nothing where nothing is known of ranks."""
    ranks: Sequence[Mapping[str, Any]] = sorted(
        memory.get("ranks") or (), key=lambda one: (-int(one["peak_bytes"]), int(one["rank"]))
    )
    if not ranks:
        return Markup()
    shown = sorted(ranks[:_RANKS_LISTED], key=lambda one: int(one["rank"]))
    whole = max(int(ranks[0]["peak_bytes"]), 1)
    there = [kind.value for kind in Kind if any(kind.value in one["parts"] for one in shown)]
    legend = [tag("span", swatch(f"part {_style(kind)}"), kind.replace("_", " ")) for kind in (*there, _BESIDE)]
    rows = [(str(one["rank"]), _bar(one, there, whole), *_sizes(one)) for one in shown]
    heads = ("Rank", "", "in all", "reserved", "allocated")
    text = f"of {size_words(int(memory['capacity_bytes']))} a rank"
    title = tag("h2", "Memory ", tag("small", text + ", at the peak of a step"), id="memory-title")
    listed = table("Device memory of ranks at their peak", heads, rows, words=(0, 1))
    note = f"The {len(shown)} ranks that need most, of {len(ranks)} that differ." if len(shown) < len(ranks) else ""
    parts = (title, tag("p", *legend, class_="legend"), listed, tag("p", note, class_="note") if note else Markup())
    return tag("section", join(parts), id="memory", aria_labelledby="memory-title")


def _sizes(one: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(size_words(int(one[key])) for key in ("peak_bytes", "reserved_bytes", "allocated_bytes"))


def _bar(one: Mapping[str, Any], kinds: Sequence[str], whole: int) -> Markup:
    parts = {kind: int(one["parts"].get(kind, 0)) for kind in kinds}
    parts[_BESIDE] = max(int(one["peak_bytes"]) - sum(parts.values()), 0)
    text = ", ".join(f"{kind.replace('_', ' ')} {size_words(size)}" for kind, size in parts.items() if size)
    return bar([(size / whole, f"part {_style(kind)}") for kind, size in parts.items()], f"rank {one['rank']}: {text}")


def _style(kind: str) -> str:
    return _BESIDE_STYLE if kind == _BESIDE else kind.replace("_", "-")
