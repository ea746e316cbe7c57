"""From the Triton source that Inductor writes to a `GeneratedKernel`. Sources are parsed, never executed.

What is not understood makes the description say less: an address becomes indirect, a size that is not given is the power of
two that the source's hints have.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from steptime._ops.generated import (
    ATOMIC,
    AXES,
    FOREACH,
    INDEX,
    KINDS,
    LOAD,
    PLAIN,
    STORE,
    TEMPLATE,
    Access,
    AddressTerm,
    GeneratedKernel,
)
from steptime._ops.triton_index import Index, called, index_of
from steptime._units import dtype_bytes
from steptime.errors import InputError

# Triton's names of dtypes (triton/language/core.py).
_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8e4nv": "float8",
    "fp8e5": "float8",
    "fp8e4b15": "float8",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "i1": "bool",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
}
# Calls that compute nothing, or what others are given: shapes, constants, memory, masks, barriers.
_FREE = """
    load store atomic_add full zeros broadcast_to arange program_id num_programs range cdiv device_assert debug_barrier view
    reshape trans expand_dims multiple_of max_contiguous static_assert static_range constexpr float int min select_one
"""
_REDUCES = """
    sum max2 min2 any all prod xor_sum reduce welford online_softmax_reduce max_with_index min_with_index argmax argmin
"""
# One plain operation each.
_SIMPLE = """
    to where abs maximum minimum fma promote_to_tensor maximum_with_index minimum_with_index
"""
_FREE_CALLS, _REDUCING, _PLAIN_CALLS = (frozenset(names.split()) for names in (_FREE, _REDUCES, _SIMPLE))
_INDEX_NAME = re.compile(r"([xyz]|r[01]?_?)index")
_NUMEL_NAME = re.compile(r"([xyz]|r[01]?_?)numel")
_POINTER = re.compile(r"\w*ptr\d*")
_DIVIDES = (ast.FloorDiv, ast.Mod)
_AGAINST = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}

# The lowest and highest value that an index may take: a condition on it.
_Bounds = dict[Index, tuple[float, float]]


def described(source: str, sizes: Mapping[str, int] | None = None) -> GeneratedKernel:
    """What a generated kernel's source says; `sizes` are values of arguments that are no tensors (xnumel, ks0)."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"no Triton kernel: {source[:60]!r} cannot be parsed ({error})") from error
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    decorated = [node for node in functions if any(isinstance(each, ast.Call) for each in node.decorator_list)]
    if not functions:
        raise InputError(f"no Triton kernel: there is no function in {source[:60]!r}")
    function = (decorated or functions)[-1]
    about = _About.of(function)
    try:
        return _Source(function, about, dict(sizes or {})).kernel()
    except RecursionError:  # an expression nested beyond what Python walks
        return GeneratedKernel(function.name, about.kind)


@dataclass(frozen=True)
class _About:
    """What the decorator of a kernel says."""

    kind: str
    hint: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)  # by axis, next power of two
    dtypes: Mapping[str, str] = field(default_factory=dict)  # of arguments
    rows: int = 0

    @classmethod
    def of(cls, function: ast.FunctionDef) -> _About:
        """Of the first decorator with arguments."""
        call = next((each for each in function.decorator_list if isinstance(each, ast.Call)), None)
        if call is None:
            return cls(TEMPLATE)
        kind = called(call)
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        sizes = _entries(given.get("size_hints"))
        types = _entries(_entry(given.get("triton_meta"), "signature"))
        rows = _entries(given.get("inductor_meta")).get("RSPLIT_SIZE", 0)
        return cls(
            kind=kind if kind in KINDS else TEMPLATE,
            hint=getattr(given.get("reduction_hint"), "attr", ""),
            sizes={_axis(str(axis)): size for axis, size in sizes.items() if isinstance(size, int)},
            dtypes={str(name): str(value) for name, value in types.items()},
            rows=rows if isinstance(rows, int) and rows > 0 else 0,
        )


def _entries(node: ast.AST | None) -> dict[Any, Any]:
    """The plain entries of a dictionary as it is written."""
    if not isinstance(node, ast.Dict):
        return {}
    pairs = zip(node.keys, node.values, strict=True)
    return {key.value: value.value for key, value in pairs if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)}


def _entry(node: ast.AST | None, name: str) -> ast.AST | None:
    if not isinstance(node, ast.Dict):
        return None
    pairs = zip(node.keys, node.values, strict=True)
    return next((value for key, value in pairs if isinstance(key, ast.Constant) and key.value == name), None)


def _axis(name: str) -> str:
    """`r0_`, `r` and `r0` are one axis."""
    name = name.rstrip("_")
    return "r0" if name == "r" else name


class _Source:
    """Walks the statements of a kernel once."""

    def __init__(self, function: ast.FunctionDef, about: _About, sizes: dict[str, int]) -> None:
        self._function, self._about, self._sizes = function, about, sizes
        names = [each.arg for each in function.args.args]
        self._arguments = [
            (name, _DTYPES.get(about.dtypes.get(name, "*fp32").lstrip("*"), "float32"))
            for name in names
            if about.dtypes.get(name, "*" if _POINTER.fullmatch(name) else "").startswith("*")
        ]
        self._places = {name: place for place, (name, _) in enumerate(self._arguments)}
        self._accesses: list[Access] = []
        self._computed: Counter[str] = Counter()
        self._once: set[str] = set()  # what was computed of indices, which compilers do once
        self._reductions = self._loops = self._loop = self._parts = 0
        self._totals: Counter[str] = Counter()  # iterations, by axis
        self._begin(function.body)

    def _begin(self, body: Iterable[ast.stmt]) -> None:
        """Forgets what names are; takes sizes from the statements of a body."""
        self._extents: dict[str, int] = {}
        self._known: dict[str, Index] = {name: Index(constant=value) for name, value in self._sizes.items()}
        self._depends: dict[str, frozenset[str]] = {}
        self._bounds: dict[str, _Bounds] = {}
        self._once.clear()
        for statement in body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                named = _NUMEL_NAME.fullmatch(statement.targets[0].id)
                number = index_of(statement.value, self._known).number if named else None
                if named and number is not None:
                    self._extents.setdefault(_axis(named[1]), number)
        for name, value in self._sizes.items():
            if named := _NUMEL_NAME.fullmatch(name):
                self._extents.setdefault(_axis(named[1]), value)
        if self._about.kind != FOREACH:
            for axis, hint in self._about.sizes.items():
                self._extents.setdefault(axis, hint)
        self._extents = {axis: max(extent, 0) for axis, extent in self._extents.items() if axis in AXES}
        for axis, extent in self._extents.items():
            whole = Index((AddressTerm(axis, 1, extent, 1),) if extent > 1 else ())
            for spelling in (f"{axis}index", f"{axis}_index", *(("rindex",) if axis == "r0" else ())):
                self._known[spelling] = whole
            self._known[f"{axis}numel"] = self._known[f"{axis}_numel"] = Index(constant=extent)
        if rows := self._about.rows:
            blocks = -(-self._extents.get("x", 1) // rows)
            self._known["program_id"] = Index((AddressTerm("x", rows, blocks, 1),))
            self._known["num_programs"] = Index(constant=blocks)

    def kernel(self) -> GeneratedKernel:
        """The description."""
        parts = list(_branches(self._function.body)) if self._about.kind == FOREACH else []
        for part in parts:
            first = len(self._accesses)
            self._begin(part)
            self._walk(part)
            total = math.prod(self._extents.values())
            self._totals["x"] += total
            # Shares of all iterations, once these are known.
            for place in range(first, len(self._accesses)):
                self._accesses[place] = replace(self._accesses[place], share=self._accesses[place].share * total)
        if not parts:
            self._walk(self._function.body)
            self._totals.update(self._extents)
        extents = tuple((axis, self._totals[axis]) for axis in AXES if axis in self._totals)
        total = max(math.prod(extent for _, extent in extents), 1)
        shared = [replace(each, share=min(each.share / total, 1.0)) if parts else each for each in self._accesses]
        functions = tuple((name, count / total) for name, count in sorted(self._computed.items()))
        return GeneratedKernel(
            name=self._function.name,
            kind=self._about.kind,
            extents=extents,
            hint=self._about.hint,
            arguments=tuple(self._arguments),
            accesses=tuple(shared),
            functions=functions,
            reductions=self._reductions,
            parts=max(len(parts), 1),
            rows=self._about.rows,
        )

    def _walk(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.For):
                self._loops += 1
                outer, self._loop = self._loop, self._loops
                self._walk(statement.body)
                self._loop = outer
            elif isinstance(statement, ast.If):
                self._walk([*statement.body, *statement.orelse])
            elif isinstance(statement, ast.Assign):
                self._assigned(statement.targets[0], statement.value)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._assigned(statement.target, statement.value)
            elif isinstance(statement, ast.Expr):
                self._memory(statement.value, frozenset())

    def _assigned(self, target: ast.expr, value: ast.expr) -> None:
        names = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
        if not names or _INDEX_NAME.fullmatch(names[0]) or _NUMEL_NAME.fullmatch(names[0]) or names[0].endswith("mask"):
            return
        index = index_of(value, self._known)
        loaded = self._memory(value, frozenset())
        depends = loaded | index.axes | self._axes_in(value)
        reduces = any(isinstance(node, ast.Call) and called(node) in _REDUCING for node in ast.walk(value))
        if names[0][0] in "xyzr":
            self._count_index(value, index.axes)
        elif index.indirect:
            self._count(value, depends)
        for name in names:
            self._known.pop(name, None)
            self._bounds.pop(name, None)
            if not index.indirect:
                self._known[name] = index
            self._depends[name] = frozenset(axis for axis in depends if axis[0] != "r") if reduces else depends
        if bounds := self._condition(value):
            self._bounds[names[0]] = bounds

    def _axes_in(self, node: ast.expr) -> frozenset[str]:
        """The axes that what an expression names goes along."""
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        known = [self._depends.get(name) or self._known.get(name, Index()).axes for name in names]
        return frozenset().union(*known)

    def _iterations(self, axes: frozenset[str]) -> int:
        """How often something along these axes is computed: what goes along x goes along y too, but not along reductions."""
        reduced = any(axis[0] == "r" for axis in axes)
        return math.prod(extent for axis, extent in self._extents.items() if reduced or axis[0] != "r")

    def _count(self, value: ast.expr, axes: frozenset[str]) -> None:
        """Adds the functions that an expression computes."""
        often = self._iterations(axes)
        for node in self._computing(value):
            if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)):
                self._computed["div"] += often
            elif isinstance(node, (ast.BinOp, ast.Compare, ast.UnaryOp, ast.BoolOp)):
                self._computed[PLAIN] += often
            elif isinstance(node, ast.Call) and (name := called(node)) not in _FREE_CALLS:
                if name in _REDUCING:
                    self._reductions += 1
                simple = name in _REDUCING or name in _PLAIN_CALLS
                self._computed[PLAIN if simple else name.lower()] += often

    def _computing(self, node: ast.AST, depth: int = 0) -> Iterator[ast.AST]:
        """An expression's parts but for addresses, masks and shapes; what was computed before is not computed again."""
        if isinstance(node, ast.Call) and called(node) in _FREE_CALLS:
            return
        if depth and isinstance(node, (ast.BinOp, ast.Compare)):
            text = ast.dump(node)
            if text in self._once:
                return
            self._once.add(text)
        yield node
        for child in ast.iter_child_nodes(node):
            yield from self._computing(child, depth + 1)

    def _count_index(self, value: ast.expr, axes: frozenset[str]) -> None:
        divided = [node for node in ast.walk(value) if isinstance(node, ast.BinOp) and isinstance(node.op, _DIVIDES)]
        new = {ast.dump(node) for node in divided} - self._once
        if new:
            self._once |= new
            self._computed[INDEX] += self._iterations(axes) * len(new)

    def _memory(self, value: ast.expr, axes: frozenset[str]) -> frozenset[str]:
        """Adds the accesses in an expression; gives the axes that what is loaded goes along."""
        for node in ast.walk(value):
            if isinstance(node, ast.Call) and (kind := called(node)) in (LOAD, STORE, ATOMIC) and node.args:
                access = self._access(kind, node)
                if access is not None:
                    self._accesses.append(access)
                    axes |= frozenset(term.axis for term in access.terms)
                    axes |= self._axes_in(node.args[0]) if access.indirect else frozenset()
        return axes

    def _access(self, kind: str, node: ast.Call) -> Access | None:
        pointers = [each.id for each in ast.walk(node.args[0]) if isinstance(each, ast.Name) and each.id in self._places]
        if not pointers:
            return None
        place = self._places[pointers[0]]
        address = index_of(node.args[0], {**self._known, pointers[0]: Index()})
        self._count_index(node.args[0], address.axes)
        masks = node.args[1 if kind == LOAD else 2 :][:1]
        bounds = self._condition(masks[0]) if masks else {}
        share, terms = _masked(bounds, address.terms)
        item_bytes = dtype_bytes(self._arguments[place][1])
        return Access(kind, place, item_bytes, terms, address.indirect, share, self._loop, address.constant)

    def _condition(self, node: ast.expr) -> _Bounds:
        """What an expression demands of indices, where it is true."""
        if isinstance(node, ast.Name):
            return self._bounds.get(node.id, {})
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            both = dict(self._condition(node.left))
            for index, (low, high) in self._condition(node.right).items():
                lowest, highest = both.get(index, (-math.inf, math.inf))
                both[index] = (max(low, lowest), min(high, highest))
            return both
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _AGAINST:
            left, right = index_of(node.left, self._known), index_of(node.comparators[0], self._known)
            sign = _AGAINST[type(node.ops[0])]
            if right.number is None:
                left, right, sign = right, left, _FLIPPED[sign]
            if right.number is not None and left.terms and not left.indirect:
                value = right.number - left.constant
                index = replace(left, constant=0)
                limit = {"<": (-math.inf, value - 1), "<=": (-math.inf, value), ">": (value + 1, math.inf)}
                return {index: limit.get(sign, (value, math.inf))}
        return {}


def _masked(bounds: _Bounds, terms: tuple[AddressTerm, ...]) -> tuple[float, tuple[AddressTerm, ...]]:
    """The share of iterations within bounds, and the terms as far as they go there."""
    share = 1.0
    for index, (low, high) in bounds.items():
        last = index.last
        part = max(0.0, min(high, last) - max(low, 0) + 1) / (last + 1)
        share *= min(part, 1.0)
        if len(index.terms) == 1 and part < 1:
            bound = index.terms[0]
            terms = tuple(
                replace(term, extent=max(1, math.ceil(term.extent * part)))
                if (term.axis, term.every * term.extent) == (bound.axis, bound.every * bound.extent)
                else term
                for term in terms
            )
    return share, tuple(term for term in terms if term.extent > 1)


def _branches(body: Iterable[ast.stmt]) -> Iterable[list[ast.stmt]]:
    """The parts of a foreach kernel: one list of blocks each."""
    for statement in body:
        while isinstance(statement, ast.If):
            yield statement.body
            if len(statement.orelse) != 1:
                break
            statement = statement.orelse[0]  # noqa: PLW2901 - the next `elif`
