"""Frozen dataclasses as named arrays and back: what a fitted model is saved as, and the same model from what was saved.

A field is one array, or several where it is a dataclass, a mapping or a tuple of those; names nest with dots:

    trees: Trees                 trees.feature, trees.threshold, ...
    trees: tuple[Trees, ...]     trees (how many), trees0.feature, trees1.feature, ...
    weights: tuple[Array, Array] weights0, weights1
    blends: dict[str, Blend]     blends.whole.trees, ...
    guess: Guess | None          nothing where it is None

Numbers and texts are arrays without an axis or of texts, so a file of them cannot run anything.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

T = TypeVar("T")

_HOW = "stored"
# Element types that are what a field says, however narrow the file has them.
_WIDTHS = (np.float64, np.float32, np.int64, np.int32)


@dataclass(frozen=True, slots=True)
class _How:
    """How a field is stored where the rule above is not followed."""

    prefix: str | None = None  # what the names of its arrays begin with; the field's name and a dot where there is none
    key: str | None = None  # the name of its one array
    names: tuple[str, ...] | None = None  # the keys that a mapping may have, where its prefix does not tell them apart
    dtype: Any = None  # narrower than in memory
    separator: str = "."  # between a mapping's keys and the names inside


class MissingArrayError(InputError, KeyError):
    """An array that a fitted model needs and its file does not have."""

    def __str__(self) -> str:
        """Say it without the quotes that a KeyError has."""
        return str(self.args[0])


class StoredMapping(dict[str, Any]):
    """Arrays or models of a fitted model by name. A missing one is an error of its file."""

    def __missing__(self, name: str) -> Any:
        """Refuse a model of which a part is missing."""
        raise MissingArrayError(f"a fitted model lacks {name!r}; its file is damaged or of another version: fit again")


def stored(
    *,
    prefix: str | None = None,
    key: str | None = None,
    names: Iterable[str] | None = None,
    dtype: Any = None,
    separator: str = ".",
) -> dict[str, Any]:
    """Metadata of a field that is stored under other names than its own, or narrower than it is in memory."""
    return {_HOW: _How(prefix, key, None if names is None else tuple(names), dtype, separator)}


def pack(model: Any) -> dict[str, Array]:
    """The arrays of a fitted model by name."""
    packed: dict[str, Array] = {}
    for name, hint, how, _ in _layout(type(model)):
        value = getattr(model, name)
        if value is not None:
            packed |= _packed(value, hint, how.key or name, f"{name}." if how.prefix is None else how.prefix, how)
    return {name: _narrowed(array) for name, array in packed.items()} if getattr(model, "NARROW", False) else packed


def unpack(cls: type[T], arrays: Arrays) -> T:
    """The model that `pack` took the arrays from. Raises KeyError where one is missing."""
    values = {}
    for name, hint, how, absent in _layout(cls):
        value = _unpacked(hint, arrays, how.key or name, f"{name}." if how.prefix is None else how.prefix, how)
        if value is MISSING:
            if absent is MISSING:
                raise KeyError(how.key or name)
            value = absent()
        values[name] = value
    return cls(**values)


def _read_layout(cls: Any) -> list[tuple[str, Any, _How, Any]]:
    """Name, type and storage of every field, and what makes its value where nothing is stored."""
    hints = get_type_hints(cls)
    return [
        (field.name, _present(hints[field.name]), field.metadata.get(_HOW, _How()), _absent(field, hints[field.name]))
        for field in fields(cls)
        if field.init
    ]


_layout: Callable[[Any], list[tuple[str, Any, _How, Any]]] = cache(_read_layout)


def _absent(field: Field[Any], hint: Any) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory
    if field.default is not MISSING:
        return lambda: field.default
    return (lambda: None) if _present(hint) is not hint else MISSING


def _present(hint: Any) -> Any:
    """The type without `None`."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    return next(member for member in get_args(hint) if member is not type(None))


def _is_model(hint: Any) -> bool:
    return is_dataclass(hint)


def _is_array(hint: Any) -> bool:
    plain = _plain(hint)
    return (get_origin(plain) or plain) is np.ndarray


def _plain(hint: Any) -> Any:
    """What an alias of a type stands for: from numpy 2.5 on, `NDArray` is one."""
    alias = getattr(get_origin(hint), "__value__", None)
    return hint if alias is None else alias[get_args(hint)]


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a tuple's members where they are not plain numbers or texts."""
    members = tuple(member for member in get_args(hint) if member is not Ellipsis) if get_origin(hint) is tuple else ()
    return members if members and (_is_model(members[0]) or _is_array(members[0])) else ()


def _packed(value: Any, hint: Any, key: str, prefix: str, how: _How) -> dict[str, Array]:
    """The arrays of a value: one of that key, or several whose names begin with the prefix or, in a tuple, with the key."""
    if _is_model(hint):
        return {prefix + name: array for name, array in pack(value).items()}
    packed: dict[str, Array] = {}
    if _is_mapping(hint):
        for name, item in value.items():
            inside = prefix + name
            packed |= _packed(item, get_args(hint)[1], inside, inside + how.separator, _How(dtype=how.dtype))
        return packed
    if members := _members(hint):
        if get_args(hint)[-1] is Ellipsis:
            packed[key] = np.asarray(len(value))
        for index, item in enumerate(value):
            packed |= _packed(item, members[0], f"{key}{index}", f"{key}{index}.", how)
        return packed
    if get_origin(hint) in (tuple, frozenset):
        texts = get_args(hint)[0] is str
        return {key: np.asarray(sorted(value) if isinstance(value, frozenset) else value, np.str_ if texts else how.dtype)}
    return {key: np.asarray(value, dtype=how.dtype)}


def _unpacked(hint: Any, arrays: Arrays, key: str, prefix: str, how: _How) -> Any:
    """The value that `_packed` took arrays from; MISSING where there are none."""
    if _is_model(hint):
        inside = _inside(arrays, prefix)
        return unpack(hint, inside) if inside and _any_of(hint, inside) else MISSING
    if _is_mapping(hint):
        inside, (_, inner) = _inside(arrays, prefix), get_args(hint)
        names = how.names or dict.fromkeys(name.partition(how.separator)[0] for name in inside)
        values = {name: _unpacked(inner, inside, name, name + how.separator, _How()) for name in names}
        return StoredMapping({name: value for name, value in values.items() if value is not MISSING})
    if members := _members(hint):
        count = int(arrays[key]) if get_args(hint)[-1] is Ellipsis else len(members)
        items = tuple(_unpacked(members[0], arrays, f"{key}{index}", f"{key}{index}.", how) for index in range(count))
        if any(item is MISSING for item in items):
            raise KeyError(key)
        return items
    return _leaf(hint, arrays[key]) if key in arrays else MISSING


def _any_of(hint: Any, arrays: Arrays) -> bool:
    """Whether there is anything of an optional dataclass whose arrays have no prefix."""
    name, kind, how, _ = _layout(hint)[0]
    return _is_model(kind) or _is_mapping(kind) or bool(_members(kind)) or (how.key or name) in arrays


def _inside(arrays: Arrays, prefix: str) -> Arrays:
    start = len(prefix)
    return {name[start:]: array for name, array in arrays.items() if name.startswith(prefix)} if prefix else arrays


def _leaf(hint: Any, array: Array) -> Any:
    if _is_array(hint):
        # The element type that an array has in memory, where its type says one.
        arguments = get_args(_plain(hint))
        wanted = get_args(arguments[1])[0] if arguments else None
        return array.astype(wanted, copy=False) if wanted in _WIDTHS else array
    origin = get_origin(hint)
    return origin(array.tolist()) if origin in (tuple, frozenset) else hint(array.item())


def _narrowed(array: Array) -> Array:
    """In half the bytes where nothing is lost."""
    if array.dtype != np.float64:
        return array
    with np.errstate(over="ignore"):
        half = array.astype(np.float32)
    return half if np.array_equal(half, array) else array
