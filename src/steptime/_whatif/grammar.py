"""What a what-if says: `matmul * 0.5`, `kernel:NAME = 20us`, `all_reduce overlap`, `tf32 on`; docs/whatif.md has the grammar.

A change names what it is about (a `Target`) and what becomes of it, or is one of the named ones, which change what is
computed and not only how long it takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from steptime._units import NS_PER_MS, NS_PER_S, NS_PER_US
from steptime.errors import InputError, printable

SCALE, SET, REMOVE, OVERLAP, NO_OVERLAP, LEVEL, ROOFLINE = "*", "=", "remove", "overlap", "no-overlap", "level", "roofline"
WORDS = (REMOVE, NO_OVERLAP, OVERLAP, LEVEL, ROOFLINE)
TF32, BF16, OPTIMIZER, BATCH, GRAPH, PROFILER = "tf32", "bf16", "optimizer", "batch", "cuda graph", "profiler"
COMPILE = "compile"
# Named changes that take no number, by all that is written of them.
_NAMED = {
    "tf32 on": (TF32, ""),
    "bf16 on": (BF16, ""),
    "optimizer fused": (OPTIMIZER, "fused"),
    "optimizer foreach": (OPTIMIZER, "foreach"),
    "cuda graph": (GRAPH, ""),
    COMPILE: (COMPILE, ""),
    "profiler off": (PROFILER, ""),
}
# Kinds of targets that take a name after a colon.
NAMED_TARGETS = ("kernel", "op", "sync", "rank")
_NUMBER = r"\d+(?:\.\d*)?(?:[eE][-+]?\d{1,3})?|\.\d+(?:[eE][-+]?\d{1,3})?"
_CHANGE = re.compile(
    rf"(?P<target>.*?)\s*(?:(?P<scale>\*)\s*(?P<factor>{_NUMBER})|=\s*(?P<value>{_NUMBER})\s*(?P<unit>ns|us|µs|ms|s)?"
    rf"|(?<=\s)(?P<word>{'|'.join(WORDS)}))",
    re.DOTALL,
)
_UNITS = {"ns": 1, "us": NS_PER_US, "µs": NS_PER_US, "ms": NS_PER_MS, "s": NS_PER_S}
# Twelve days, as for anything else that a host or device does (thousands of them add up within 64 bits), and a factor like it.
_LONGEST_NS, _MOST = 1e15, 1e6
_LONGEST_TEXT = 2_000
FORMS = (
    "TARGET * FACTOR, TARGET = TIME (ns, us, ms, s), TARGET remove, TARGET roofline, COLLECTIVE overlap, "
    "COLLECTIVE no-overlap, rank:N level, batch = N, " + ", ".join(_NAMED)
)


@dataclass(frozen=True, slots=True)
class Target:
    """What a change is about: a kind (`matmul`, `host`, `kernel`) and, of some, a name with `*` and `?`, or a part of one."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind


@dataclass(frozen=True, slots=True)
class Change:
    """One change. `amount` is a factor, nanoseconds or a batch; `choice` which optimiser."""

    text: str
    action: str
    target: Target | None = None  # None: a named change
    amount: float = 0.0
    choice: str = ""


def samples_after(change: Change, batch: int) -> int:
    """Return the batch after a change of it."""
    return max(1, round(change.amount if change.choice == SET else change.amount * batch))


def parse_all(texts: Sequence[str]) -> list[Change]:
    """The changes that some texts name, several of one text parted by semicolons."""
    parts = [part.strip() for text in texts for part in text.split(";") if part.strip() or not text.strip()]
    return [parse(part) for part in parts]


def parse(text: str) -> Change:
    """The change that a text names."""
    words = " ".join(text[:_LONGEST_TEXT].split())
    named = _NAMED.get(words.lower())
    if named is not None:
        return Change(words, named[0], choice=named[1])
    found = _CHANGE.fullmatch(words)
    if found is None or not found["target"].strip() or len(text) > _LONGEST_TEXT:
        raise error(words, f"is not a known change; expected {FORMS}")
    target = found["target"].strip()
    if target.lower() == BATCH:
        return _batch(words, found)
    return _about(words, _target(words, target), found)


def error(text: str, message: str) -> InputError:
    """What is wrong with a what-if, in one line."""
    shown = text if len(text) <= 80 else text[:77] + "..."
    return InputError(f"--what-if {printable(shown)!r}: {message}")


def _about(words: str, target: Target, found: re.Match[str]) -> Change:
    if found["word"]:
        if (found["word"] == LEVEL) != (target.kind == "rank"):
            raise error(words, "a rank is made faster by a factor, or level with the others: rank:0 * 0.9, rank:0 level")
        return Change(words, found["word"], target)
    if found["scale"]:
        return Change(words, SCALE, target, _number(words, found["factor"], _MOST, "a factor"))
    if found["unit"] is None:
        raise error(words, "says no unit of time; expected ns, us, ms or s after the number")
    if target.kind in ("host", "sync", "rank", "launch"):
        raise error(words, f"{target.kind} is many pieces of time; give a factor or remove")
    unit_ns = _UNITS[found["unit"]]
    return Change(words, SET, target, unit_ns * _number(words, found["value"], _LONGEST_NS / unit_ns, "a time"))


def _batch(words: str, found: re.Match[str]) -> Change:
    if found["word"] or found["unit"]:
        raise error(words, "expected batch = N, as in batch = 64, or batch * FACTOR")
    if found["scale"]:
        factor = _number(words, found["factor"], _MOST, "a factor")
        if factor <= 0:
            raise error(words, "a batch has one sample or more")
        return Change(words, BATCH, amount=factor, choice=SCALE)
    size = _number(words, found["value"], _MOST * _MOST, "a batch")
    if size < 1 or size != int(size):
        raise error(words, "a batch is a whole number of 1 or more")
    return Change(words, BATCH, amount=size, choice=SET)


def _target(words: str, text: str) -> Target:
    kind, colon, name = text.partition(":")
    kind, name = kind.strip().lower().replace("-", "_").replace(" ", "_"), name.strip().strip("\"'")
    if not colon:
        return Target(kind)
    if kind not in NAMED_TARGETS or not name:
        raise error(words, f"expected {', '.join(f'{each}:NAME' for each in NAMED_TARGETS)} (a rank by its number)")
    if kind == "rank" and not (name.isascii() and name.isdecimal() and len(name) < 10):
        raise error(words, f"{name!r} is no number of a rank")
    return Target(kind, str(int(name)) if kind == "rank" else name)


def _number(words: str, text: str, most: float, what: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value > most:
        raise error(words, f"{text} is no {what.removeprefix('a ')} that can be; at most {most:g}")
    return value


def pattern(name: str) -> re.Pattern[str]:
    """What a name matches: as a whole where it has `*` or `?`, else where it is a part; upper and lower case alike."""
    if not set("*?") & set(name):
        return re.compile(re.escape(name), re.IGNORECASE)
    first, *others = ("".join("." if each == "?" else re.escape(each) for each in part) for part in name.split("*"))
    if not others:
        return re.compile(rf"\A{first}\Z", re.IGNORECASE | re.DOTALL)
    # A part is taken where it first occurs and kept there (an atomic group): trying every place of every part would not end.
    between = "".join(f"(?>.*?{part})" for part in others[:-1])
    return re.compile(rf"\A{first}{between}.*{others[-1]}\Z", re.IGNORECASE | re.DOTALL)
