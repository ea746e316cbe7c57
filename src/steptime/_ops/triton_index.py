"""Index arithmetic in generated Triton sources: which elements an address reaches, as terms along axes.

Sums, products with numbers, divisions and remainders by numbers are followed; minima and maxima of an index and a number are
taken for the index. What cannot be followed is said to be indirect.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace

from steptime._ops.generated import AddressTerm


@dataclass(frozen=True, slots=True)
class Index:
    """A whole number that depends on where in the iteration space we are: a sum of terms, a constant and, if indirect, more."""

    terms: tuple[AddressTerm, ...] = ()
    constant: int = 0
    indirect: bool = False

    @property
    def axes(self) -> frozenset[str]:
        """The axes it depends on."""
        return frozenset(term.axis for term in self.terms)

    @property
    def number(self) -> int | None:
        """Its value, if that is the same everywhere."""
        return None if self.terms or self.indirect else self.constant

    @property
    def last(self) -> int:
        """The largest value of its terms, without the constant."""
        return sum((term.extent - 1) * max(term.stride, 0) for term in self.terms)

    def __add__(self, other: Index) -> Index:
        merged = {(term.axis, term.every, term.extent): term for term in self.terms}
        for term in other.terms:
            same = merged.get((term.axis, term.every, term.extent))
            merged[term.axis, term.every, term.extent] = replace(term, stride=term.stride + (same.stride if same else 0))
        terms = tuple(term for term in merged.values() if term.stride)
        return Index(terms, self.constant + other.constant, self.indirect or other.indirect)

    def times(self, factor: int) -> Index:
        """Multiplied by a number."""
        terms = tuple(replace(term, stride=term.stride * factor) for term in self.terms if factor)
        return Index(terms, self.constant * factor, self.indirect and factor != 0)

    def over(self, divisor: int) -> Index:
        """Divided by a number, towards nothing; strides that the number does not divide are rounded."""
        terms = []
        for term in self.terms:
            if abs(term.stride) >= divisor:
                terms.append(replace(term, stride=round(term.stride / divisor)))
                continue
            every = -(-divisor // max(abs(term.stride), 1))
            extent = -(-term.extent // every)
            if extent > 1:
                terms.append(AddressTerm(term.axis, term.every * every, extent, 1 if term.stride > 0 else -1))
        return Index(tuple(terms), self.constant // divisor, self.indirect)

    def modulo(self, divisor: int) -> Index:
        """The remainder; of terms that together reach beyond the divisor, those that step furthest give way."""
        terms: list[AddressTerm] = []
        reach = 1
        for term in sorted(self.terms, key=lambda term: abs(term.stride)):
            stride = term.stride % divisor if abs(term.stride) >= divisor else term.stride
            if not stride or reach >= divisor:
                continue
            extent = min(term.extent, -(-divisor // abs(stride)))
            if extent > 1:
                terms.append(replace(term, extent=extent, stride=stride))
                reach += (extent - 1) * abs(stride)
        return Index(tuple(terms), self.constant % divisor, self.indirect)


UNKNOWN = Index(indirect=True)
_NOTHING = Index()


def index_of(node: ast.expr, known: Mapping[str, Index]) -> Index:
    """The index that an expression gives, by what the names in it are."""
    if isinstance(node, ast.Constant):
        return Index(constant=node.value) if type(node.value) is int else UNKNOWN
    if isinstance(node, ast.Name):
        return known.get(node.id, UNKNOWN)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return index_of(node.operand, known).times(-1)
    if isinstance(node, ast.Call):
        return _called(node, known)
    if isinstance(node, ast.Subscript):
        return index_of(node.value, known)
    if isinstance(node, ast.BinOp):
        return _combined(node, known)
    return UNKNOWN


def _combined(node: ast.BinOp, known: Mapping[str, Index]) -> Index:
    if isinstance(node.op, ast.Add):
        chosen = _chosen(node)
        if chosen is not None:
            either = [index_of(each, known) for each in chosen]
            return next((each for each in either if each.number is None), either[0])
    left, right = index_of(node.left, known), index_of(node.right, known)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left + right.times(-1)
    if isinstance(node.op, ast.Mult):
        for one, other in ((left, right), (right, left)):
            if one.number is not None:
                return other.times(one.number)
        return UNKNOWN
    if right.number is not None and right.number > 0:
        if isinstance(node.op, ast.FloorDiv):
            return left.over(right.number)
        if isinstance(node.op, ast.Mod):
            return left.modulo(right.number)
    return UNKNOWN


def _chosen(node: ast.BinOp) -> tuple[ast.expr, ast.expr] | None:
    """The two of which the smaller or larger is meant: `a * (a <= b) + b * (b < a)`."""
    left, right = node.left, node.right
    if not (isinstance(left, ast.BinOp) and isinstance(right, ast.BinOp)):
        return None
    if isinstance(left.op, ast.Mult) and isinstance(right.op, ast.Mult) and isinstance(left.right, ast.Compare):
        return (left.left, right.left) if isinstance(right.right, ast.Compare) else None
    return None


def _called(node: ast.Call, known: Mapping[str, Index]) -> Index:
    name = called(node)
    if name in ("broadcast_to", "to"):
        of_module = (
            isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "tl"
        )
        inner = node.args[0] if of_module and node.args else node.func.value if isinstance(node.func, ast.Attribute) else None
        return index_of(inner, known) if inner is not None else UNKNOWN
    if name == "full" and len(node.args) > 1:
        return index_of(node.args[1], known)
    if name in ("program_id", "num_programs") and name in known:
        return known[name]
    if name in ("div_floor_integer", "remainder_integer") and len(node.args) == 2:
        left, right = (index_of(each, known) for each in node.args)
        if right.number is not None and right.number > 0:
            return left.over(right.number) if name == "div_floor_integer" else left.modulo(right.number)
    return UNKNOWN


def called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    func = node.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
