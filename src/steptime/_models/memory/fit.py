"""`Fit`: whether the fullest rank has room. Nowhere else is a peak compared with what a rank may use of its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from steptime._hardware.device import DeviceLimits
from steptime._units import size_words
from steptime.errors import InputError

Answer = TypeVar("Answer")

# Peaks of about nine in ten training steps were predicted to within this share (docs/accuracy.md, "memory within 5 %").
MEMORY_ERROR = 0.05
# Parts of a peak that are named, largest first.
_PARTS_NAMED = 4
# What a process takes of its device besides what the allocator does.
_CONTEXT = "CUDA context and NCCL"


def usable_bytes(limits: DeviceLimits, memory_bytes: int | None = None, headroom: float = 0.0) -> int:
    """Return what a rank may use of its device: at most `memory_bytes`, of which a share is left free."""
    if not 0.0 <= headroom < 1.0:
        raise InputError(f"--headroom {headroom:g}: expected a share from 0 to below 1")
    checked_memory(memory_bytes)
    there = limits.rank_memory_bytes
    return int((there if memory_bytes is None else min(memory_bytes, there)) * (1.0 - headroom))


def checked_memory(memory_bytes: int | None) -> int | None:
    """Return what a rank may use, if it makes sense."""
    if memory_bytes is not None and (type(memory_bytes) is not int or memory_bytes < 1):
        raise InputError(f"--memory {memory_bytes}: expected bytes, 1 or more")
    return memory_bytes


@overload
def has_room(needed_bytes: float, limit_bytes: float) -> bool: ...
@overload
def has_room(needed_bytes: npt.NDArray[np.int64], limit_bytes: float) -> npt.NDArray[np.bool_]: ...
def has_room(needed_bytes: Any, limit_bytes: float) -> Any:
    """Return whether a limit is enough, of one peak or of many."""
    return needed_bytes <= limit_bytes


def fullest(ranks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the rank of a prediction's memory that needs most."""
    return max(ranks, key=lambda rank: int(rank["peak_bytes"]))


def first_with_margin(ranked: Sequence[Answer], tight: Callable[[Answer], bool]) -> Answer | None:
    """Return the best answer that fits with a margin, where the best of all barely fits; None where none does, or need be."""
    return next((each for each in ranked if not tight(each)), None) if ranked and tight(ranked[0]) else None


@dataclass(frozen=True, slots=True)
class Fit:
    """What the fullest rank needs of its memory."""

    rank: int | None  # None: any
    needed_bytes: int
    limit_bytes: int
    parts: Mapping[str, int] = field(default_factory=dict)  # what fills it, by kind

    @classmethod
    def of(cls, memory: Mapping[str, Any]) -> Fit | None:
        """Return that of a prediction's memory; None where nothing is known of it."""
        if memory.get("capacity_bytes") is None:
            return None
        most = fullest(memory["ranks"])
        several = len(memory["ranks"]) > 1
        parts = {**most["parts"], _CONTEXT: most["peak_bytes"] - most["reserved_bytes"]}
        return cls(most["rank"] if several else None, most["peak_bytes"], memory["capacity_bytes"], parts)

    @classmethod
    def of_ranks(cls, used_bytes: Mapping[int, int], limit_bytes: int) -> Fit:
        """Return that of ranks of which only the sums are known."""
        rank = max(used_bytes, key=used_bytes.__getitem__)
        return cls(rank, used_bytes[rank], limit_bytes)

    def within(self, limit_bytes: int) -> Fit:
        """Return the same need under another limit."""
        return replace(self, limit_bytes=limit_bytes)

    def needing(self, needed_bytes: int) -> Fit:
        """Return another need under the same limit."""
        return Fit(self.rank, needed_bytes, self.limit_bytes)

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return has_room(self.needed_bytes, self.limit_bytes)

    @property
    def tight(self) -> bool:
        """Whether there is room by less than what predicted peaks may be off by."""
        return self.fits and not has_room(self.needed_bytes * (1 + MEMORY_ERROR), self.limit_bytes)

    @property
    def short_bytes(self) -> int:
        """By how much there is no room."""
        return max(self.needed_bytes - self.limit_bytes, 0)

    @property
    def short(self) -> str:
        """The same in words."""
        return size_words(self.short_bytes)

    @property
    def words(self) -> str:
        """Fits, barely or by how much not."""
        return f"does not fit by {self.short}" if not self.fits else "barely fits" if self.tight else "fits"

    @property
    def amount(self) -> str:
        """What is needed, of what there is."""
        return f"{size_words(self.needed_bytes)} of {size_words(self.limit_bytes)}"

    @property
    def room(self) -> str:
        """How full the fullest rank is."""
        where = "the fullest rank" if self.rank is None else f"rank {self.rank}"
        error = f"{100 * MEMORY_ERROR:.0f} %"
        return f"{self.amount} on {where}" + f", and peaks are predicted to within {error}: it may not fit" * self.tight

    @property
    def filled(self) -> str:
        """What is needed, and what fills it."""
        largest = sorted(self.parts.items(), key=lambda part: -part[1])[:_PARTS_NAMED]
        parts = ", ".join(f"{kind.replace('_', ' ')} {size_words(nbytes)}" for kind, nbytes in largest)
        return f"needs {self.amount}" + (f" ({parts})" if parts else "")

    @property
    def text(self) -> str:
        """How full the fullest rank is, or what is missing and what fills it."""
        if self.fits:
            return f"{self.words}: {self.room}"
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.words}{where}: {self.filled}"


@dataclass(frozen=True)
class Remedy:
    """A change and what the fullest rank needs with it, as it was tried."""

    change: str  # in words, with the options that make it
    fit: Fit | None  # None: the job cannot be changed so
    batch: int | None = None
    ranks: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # keys of a config with other values

    @property
    def text(self) -> str:
        """The change and what the fullest rank then needs."""
        return self.change if self.fit is None else f"{self.change}: {size_words(self.fit.needed_bytes)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, by which a form can make the change."""
        return {"text": self.text, "batch": self.batch, "ranks": self.ranks, "settings": dict(self.settings)}
