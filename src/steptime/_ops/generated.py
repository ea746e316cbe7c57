"""`GeneratedKernel`: what is known of a kernel that PyTorch's compiler (Inductor) generates in Triton, and its one-line text.

A program's op that is such a kernel carries the text, so that whoever reads the program later needs neither PyTorch nor the
source. `triton_source` makes descriptions from sources, `coarse` from names and tensors where no source is at hand.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from steptime._program.program import Tensor
from steptime._units import dtype_bytes
from steptime.errors import InputError

POINTWISE, REDUCTION, PERSISTENT = "pointwise", "reduction", "persistent_reduction"
FOREACH, SPLIT_SCAN, TEMPLATE = "foreach", "split_scan", "template"
KINDS = (POINTWISE, REDUCTION, PERSISTENT, FOREACH, SPLIT_SCAN, TEMPLATE)
LOAD, STORE, ATOMIC = "load", "store", "atomic_add"
ACCESSES = (LOAD, STORE, ATOMIC)
AXES = ("x", "y", "z", "r0", "r1")
NAMES = re.compile(r"triton_\w+")
"""What generated kernels are called."""
# What the names that Inductor gives begin with, by kind (torch/_inductor/codegen/triton.py).
_NAMED = {
    "triton_poi_": POINTWISE,
    "triton_red_": REDUCTION,
    "triton_per_": PERSISTENT,
    "triton_for_": FOREACH,
    "triton_spl_": SPLIT_SCAN,
    "triton_tem_": TEMPLATE,
    "triton_mm": TEMPLATE,
}
RANDOM = ("rand", "randn", "randint64", "rand4x", "randn4x", "randint")
PLAIN, INDEX = "plain", "index"
# Operations that every multiprocessor has units of their own for, or instructions in plenty: the rest are functions.
_CHEAP = (PLAIN, INDEX)
_READ = 1 << 12
# Larger ones are no addresses: numbers of 64 bits.
_LARGEST = 1 << 63
# No element is larger, and nothing that Inductor generates computes so many functions of one kind per element.
_ITEM_BYTES, _FUNCTIONS = 16, 1e5


@dataclass(frozen=True, slots=True)
class AddressTerm:
    """A part of an address: `(index // every) % extent * stride`, in elements, of the index along an axis."""

    axis: str
    every: int
    extent: int
    stride: int


@dataclass(frozen=True, slots=True)
class Access:
    """One load, store or atomic addition in the source.

    `share` is the part of the iterations that are not masked, where the source says so by comparisons of indices (a
    concatenation, padding); `loop` the number of the loop over a reduction it is in, 0 outside of any. `indirect`: the address
    depends on loaded values as well, or is not understood.
    """

    kind: str
    argument: int
    item_bytes: int
    terms: tuple[AddressTerm, ...] = ()
    indirect: bool = False
    share: float = 1.0
    loop: int = 0
    offset: int = 0  # in elements, where all that the terms reach begins

    @property
    def elements(self) -> int:
        """Different elements that its terms address."""
        return math.prod(term.extent for term in self.terms)


@dataclass(frozen=True, slots=True)
class GeneratedKernel:
    """What one generated kernel iterates over, reads, writes and computes."""

    name: str
    kind: str = POINTWISE
    extents: tuple[tuple[str, int], ...] = ()  # by axis; of a foreach kernel, of all its parts together
    hint: str = ""  # of a reduction: INNER | OUTER | OUTER_TINY | DEFAULT
    arguments: tuple[tuple[str, str], ...] = ()  # name in the source (in_ptr0), dtype
    accesses: tuple[Access, ...] = ()
    # How often each function is computed, by name, per element: `plain` ones, `index` (divisions for addresses), exp, erf, ...
    functions: tuple[tuple[str, float], ...] = ()
    reductions: int = 0
    parts: int = 1  # of a foreach kernel: how many lists of blocks it has
    rows: int = 0  # of a reduction that sums along rows as well as columns: how many rows a block takes; else 0

    @property
    def elements(self) -> int:
        """Iterations in all."""
        return math.prod(extent for _, extent in self.extents)

    @property
    def plain(self) -> float:
        """Plain operations (sums, products, comparisons, conversions) per element."""
        return sum(count for name, count in self.functions if name == PLAIN)

    @property
    def special(self) -> float:
        """Functions (exp, tanh, division, rsqrt, ...) per element."""
        return sum(count for name, count in self.functions if name not in (*_CHEAP, *RANDOM))

    @property
    def random(self) -> float:
        """Random numbers drawn per element."""
        return sum(count for name, count in self.functions if name in RANDOM)

    def extent(self, axis: str) -> int:
        """Iterations along an axis; 1 along one that it has not."""
        return dict(self.extents).get(axis, 1)

    def text(self) -> str:
        """Compact JSON in one line; the same kernel always gives the same text."""
        content = {
            "n": self.name,
            "k": self.kind,
            "e": [list(each) for each in self.extents],
            "h": self.hint,
            "a": [list(each) for each in self.arguments],
            "m": [_plain_access(each) for each in self.accesses],
            "f": [[name, float(f"{count:.4g}")] for name, count in self.functions],
            "r": self.reductions,
            "p": self.parts,
            "s": self.rows,
        }
        return json.dumps(content, separators=(",", ":"))

    @staticmethod
    def read(text: str) -> GeneratedKernel:
        """The kernel that `text` gave. Raises InputError where the text is none."""
        return _read(text)


def kind_named(name: str) -> str:
    """The kind of a generated kernel by its name; "" where that says none."""
    return next((kind for start, kind in _NAMED.items() if name.startswith(start)), "")


def coarse(name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], kind: str = "") -> GeneratedKernel:
    """What name and tensors say of a kernel whose source is not at hand: each is read or written once, in order."""
    kind = kind or kind_named(name) or POINTWISE
    tensors = [*reads, *writes]
    sizes = [math.prod(tensor.shape) for tensor in tensors]
    most, written = max(sizes, default=1), max(sizes[len(reads) :], default=1)
    reduces = kind in (REDUCTION, PERSISTENT) and written > 0
    width = tensors[sizes.index(most)].shape[-1] if reduces and most > 1 else 1
    rows = max(1, most // max(width, 1))
    extents = (("x", rows), ("r0", width)) if reduces else (("x", most),)
    places = [*((LOAD, "in_ptr", number) for number in range(len(reads)))]
    places += [(STORE, "out_ptr", number) for number in range(len(writes))]
    accesses = tuple(
        Access(access, argument, dtype_bytes(tensor.dtype), _in_order(size, rows, width, reduces=reduces))
        for argument, ((access, _, _), tensor, size) in enumerate(zip(places, tensors, sizes, strict=True))
    )
    arguments = tuple((f"{pointer}{at}", tensor.dtype) for (_, pointer, at), tensor in zip(places, tensors, strict=True))
    functions = ((PLAIN, float(len(tensors))),)
    return GeneratedKernel(name, kind, extents, "INNER" if reduces else "", arguments, accesses, functions, int(reduces))


def _in_order(size: int, rows: int, width: int, *, reduces: bool) -> tuple[AddressTerm, ...]:
    if not reduces or size <= 1:
        return (AddressTerm("x", 1, size, 1),) if size > 1 else ()
    if size == rows:
        return (AddressTerm("x", 1, size, 1),)
    if size == width:
        return (AddressTerm("r0", 1, size, 1),)
    return (AddressTerm("r0", 1, width, 1), AddressTerm("x", 1, max(1, size // width), width))


def _plain_access(access: Access) -> list[Any]:
    terms = [[term.axis, term.every, term.extent, term.stride] for term in access.terms]
    plain: list[Any] = [ACCESSES.index(access.kind), access.argument, access.item_bytes, terms]
    rest: list[Any] = [int(access.indirect), round(access.share, 4), access.loop, access.offset]
    return plain if rest == [0, 1.0, 0, 0] else plain + rest


@lru_cache(maxsize=_READ)
def _read(text: str) -> GeneratedKernel:
    try:
        content = json.loads(text)
        kernel = GeneratedKernel(
            name=_of(str, content["n"]),
            kind=_of(str, content["k"]),
            extents=tuple((_axis(axis), _count(extent)) for axis, extent in content["e"]),
            hint=_of(str, content["h"]),
            arguments=tuple((_of(str, name), _of(str, dtype)) for name, dtype in content["a"]),
            accesses=tuple(map(_access, content["m"])),
            functions=tuple((_of(str, name), _share(count, _FUNCTIONS)) for name, count in content["f"]),
            reductions=_count(content["r"]),
            parts=_count(content["p"]),
            rows=_count(content["s"]),
        )
        if kernel.kind not in KINDS:
            raise ValueError(f"its kind is {kernel.kind!r}, not one of {', '.join(KINDS)}")
        if any(access.argument >= len(kernel.arguments) for access in kernel.accesses):
            raise ValueError("an access names an argument that it has not")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise InputError(f"not a generated kernel's description: {text[:80]!r} ({error}); capture the step again") from error
    return kernel


def _access(value: Any) -> Access:
    kind, argument, item_bytes, terms, *rest = value
    indirect, share, loop, offset = rest or (0, 1.0, 0, 0)
    return Access(
        kind=ACCESSES[_count(kind)],
        argument=_count(argument),
        item_bytes=_count(item_bytes, _ITEM_BYTES),
        terms=tuple(
            AddressTerm(_axis(axis), _count(every), _count(extent), _whole(stride)) for axis, every, extent, stride in terms
        ),
        indirect=bool(_count(indirect)),
        share=_share(share, 1),
        loop=_count(loop),
        offset=_whole(offset),
    )


def _of(kind: type[str], value: Any) -> str:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no text")
    return value


def _axis(value: Any) -> str:
    if value not in AXES:
        raise ValueError(f"there is no axis {value!r}")
    return str(value)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= _LARGEST:
        raise ValueError(f"{value!r} is no whole number of 64 bits")
    return value


def _count(value: Any, most: int = _LARGEST) -> int:
    if not 0 <= _whole(value) <= most:
        raise ValueError(f"{value!r} is out of range")
    return int(value)


def _share(value: Any, most: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no number from 0 to {most:g}")
    return float(value)
