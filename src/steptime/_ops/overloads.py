"""Overloads of ops: which one a traced op is, from the kinds of its arguments, where the trace does not name it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from steptime._ops.declared import DECLARED, SHARED
from steptime._program.program import Scalar, Tensor, Value

_NAMESPACE = "aten::"
_WORD = re.compile(
    r"(?:(?P<name>\w+):)?(?P<type>[A-Za-z]+)(?P<many>\??\[\d*\])?(?P<optional>\?)?(?P<written>!)?(?:=(?P<default>.*))?"
)
# Numbers that JSON has no way of writing.
_NOT_FINITE = ("inf", "infinity", "nan")
_CONSTANTS: dict[str, Scalar] = {"None": None, "True": True, "False": False}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of an overload."""

    name: str  # empty where it is given by position
    type: str
    many: bool = False
    optional: bool = False
    written: bool = False
    required: bool = True
    default: Value = None


@dataclass(frozen=True, slots=True)
class Overload:
    """One overload: its whole name and what it takes."""

    op: str
    parameters: tuple[Parameter, ...]

    def takes(self, values: Sequence[Value]) -> bool:
        """Whether a call with these arguments, recorded in the order they are declared in, can be one of this overload."""
        missing = self.parameters[len(values) :]
        if len(values) > len(self.parameters) or any(parameter.required for parameter in missing):
            return False
        return all(_fits(value, parameter) for value, parameter in zip(values, self.parameters, strict=False))


@cache
def overloads_of(name: str) -> tuple[Overload, ...]:
    """The overloads of an op that launches device work, those with the fewest arguments first; none for any other op."""
    return _every().get(name, ())


def overload_of(name: str, values: Sequence[Value]) -> Overload | None:
    """The overload of an op that takes these arguments; None where none that is known does."""
    return next((each for each in overloads_of(name) if each.takes(values)), None)


# Ops that families declare themselves.
_declared_besides: set[str] = set()


def add_declarations(text: str) -> None:
    """Overloads beside those of ATen, in its notation; names with their namespace."""
    _declared_besides.update(text.split("\n"))
    _every.cache_clear()
    overloads_of.cache_clear()


@cache
def _every() -> dict[str, tuple[Overload, ...]]:
    result: dict[str, list[Overload]] = {}
    for line in (*DECLARED.split("\n"), *sorted(_declared_besides)):
        name, _, words = line.strip().partition(" ")
        if name:
            full = name if "::" in name else _NAMESPACE + name
            result.setdefault(full.partition(".")[0], []).append(Overload(full, _parameters(words)))
    return {name: tuple(sorted(each, key=lambda overload: len(overload.parameters))) for name, each in result.items()}


def _parameters(words: str) -> tuple[Parameter, ...]:
    for name, meaning in SHARED.items():
        words = words.replace(name, meaning)
    return tuple(_parameter(word) for word in words.split() if word != "*")


def _parameter(word: str) -> Parameter:
    parts = _WORD.fullmatch(word)
    assert parts is not None, word
    many = parts["many"] or ""
    default = parts["default"]
    return Parameter(
        name=parts["name"] or "",
        type=parts["type"],
        many=bool(many),
        optional=bool(parts["optional"]) or many.startswith("?"),
        written=bool(parts["written"]),
        required=default is None,
        default=None if default is None else _default(default, many),
    )


def _default(text: str, many: str) -> Value:
    if text == "[]":
        return ()
    item: Value = _CONSTANTS[text] if text in _CONSTANTS else _number(text)
    length = many.strip("?[]")
    return (item,) * int(length) if length and item is not None else item


def _number(text: str) -> Scalar:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _fits(value: Value, parameter: Parameter) -> bool:
    if value is None:
        # A tensor that is not defined can stand for any.
        return parameter.optional or parameter.type in ("T", "generator")
    if parameter.many:
        return isinstance(value, tuple) and all(
            _is(each, parameter.type) or (each is None and parameter.optional) for each in value
        )
    return _is(value, parameter.type)


def _is(value: Value, kind: str) -> bool:
    if kind == "T":
        return isinstance(value, Tensor)
    if kind in ("s", "device"):
        return isinstance(value, str)
    if kind == "b":
        return isinstance(value, bool)
    if kind in ("S", "f") and isinstance(value, str):
        return value.lower().strip("+-") in _NOT_FINITE
    if kind == "generator" or isinstance(value, Tensor | tuple | str) or value is None:
        return False
    # Traces write enumerations (dtypes, layouts, memory formats) as numbers.
    return kind in ("S", "f") or (isinstance(value, int) and not isinstance(value, bool))
