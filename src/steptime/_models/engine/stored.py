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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

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


def stored(
    *, prefix: str | None = None, key: str | None = None, names: Iterable[str] | None = None, dtype: Any = None
) -> dict[str, Any]:
    """Metadata of a field that is stored under other names than its own, or narrower than it is in memory."""
    return {_HOW: _How(prefix, key, None if names is None else tuple(names), dtype)}


def pack(model: Any) -> dict[str, Array]:
    """The arrays of a fitted model by name."""
    packed = dict(_packed_fields(model, ""))
    return {name: _narrowed(array) for name, array in packed.items()} if _is_narrow(type(model)) else packed


def unpack(cls: type[T], arrays: Arrays) -> T:
    """The model that `pack` took the arrays from. Raises KeyError where one is missing."""
    values = {}
    for name, hint, how, absent in _layout(cls):
        if _is_container(hint):
            prefix = f"{name}." if how.prefix is None else how.prefix
            value = _unpacked_container(hint, arrays, prefix, name, how)
        else:
            array = arrays.get(how.key or name)
            value = MISSING if array is None else _leaf(hint, array)
        if value is MISSING:
            if absent is MISSING:
                raise KeyError(how.key or name)
            value = absent()
        values[name] = value
    return cls(**values)


def _layout(cls: Any) -> list[tuple[str, Any, _How, Any]]:
    """Name, type and storage of every field, and what makes its value where nothing is stored."""
    return _read_layout(cls)


@cache
def _read_layout(cls: Any) -> list[tuple[str, Any, _How, Any]]:
    hints = get_type_hints(cls)
    return [
        (field.name, _present(hints[field.name]), _how(field), _absent(field, hints[field.name]))
        for field in fields(cls)
        if field.init
    ]


def _how(one: Field[Any]) -> _How:
    result: _How = one.metadata.get(_HOW, _How())
    return result


def _absent(one: Field[Any], hint: Any) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory
    if one.default is not MISSING:
        return lambda: one.default
    return (lambda: None) if _present(hint) is not hint else MISSING


def _present(hint: Any) -> Any:
    """The type without `None`."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    return next(get_arg for get_arg in get_args(hint) if get_arg is not type(None))


def _is_narrow(cls: type) -> bool:
    return bool(getattr(cls, "NARROW", False))


def _is_model(hint: Any) -> bool:
    return is_dataclass(hint)


def _is_array(hint: Any) -> bool:
    return get_origin(hint) is np.ndarray or hint is np.ndarray


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a tuple's members where they are not plain numbers or texts."""
    members = tuple(get_arg for get_arg in get_args(hint) if get_arg is not Ellipsis) if get_origin(hint) is tuple else ()
    return members if members and (_is_model(members[0]) or _is_array(members[0])) else ()


def _is_container(hint: Any) -> bool:
    return _is_model(hint) or _is_mapping(hint) or bool(_members(hint))


def _packed_fields(model: Any, parent: str) -> Iterator[tuple[str, Array]]:
    for name, hint, how, _ in _layout(type(model)):
        value = getattr(model, name)
        if value is None:
            continue
        if _is_container(hint):
            prefix = parent + (f"{name}." if how.prefix is None else how.prefix)
            yield from _packed(value, hint, prefix, parent + name)
        else:
            yield parent + (how.key or name), _array(value, hint, how.dtype)


def _array(value: Any, hint: Any, dtype: Any) -> Array:
    """One array of a number, a text, an array, or several numbers or texts."""
    if get_origin(hint) in (tuple, frozenset):
        texts = get_args(hint)[0] is str
        return np.asarray(sorted(value) if isinstance(value, frozenset) else value, dtype=np.str_ if texts else dtype)
    return np.asarray(value, dtype=dtype)


def _packed(value: Any, hint: Any, prefix: str, key: str) -> Iterator[tuple[str, Array]]:
    """What is in a container; the prefix ends in what separates it from the names inside."""
    if _is_model(hint):
        packed = pack(value)
        yield from ((prefix + name, array) for name, array in packed.items())
    elif _is_mapping(hint):
        inner = get_args(hint)[1]
        for name, item in value.items():
            if _is_container(inner):
                yield from _packed(item, inner, f"{prefix}{name}.", prefix + name)
            else:
                yield prefix + name, np.asarray(item)
    else:
        members = _members(hint)
        if get_args(hint)[-1] is Ellipsis:
            yield key, np.asarray(len(value))
        for index, item in enumerate(value):
            if _is_model(members[0]):
                yield from _packed(item, members[0], f"{key}{index}.", f"{key}{index}")
            else:
                yield f"{key}{index}", item


def _unpacked_container(hint: Any, arrays: Arrays, prefix: str, key: str, how: _How) -> Any:
    """The value of a field of several arrays; MISSING where there are none."""
    if _is_model(hint):
        inside = _inside(arrays, prefix) if prefix else arrays
        return unpack(hint, inside) if inside and _any_of(hint, inside) else MISSING
    if _is_mapping(hint):
        inside = _inside(arrays, prefix) if prefix else arrays
        names = how.names or tuple(dict.fromkeys(name.partition(".")[0] for name in inside))
        return _mapping(get_args(hint)[1], inside, names)
    members = _members(hint)
    count = int(arrays[key]) if get_args(hint)[-1] is Ellipsis else len(members)
    if _is_model(members[0]):
        return tuple(unpack(members[0], _inside(arrays, f"{key}{index}.")) for index in range(count))
    return tuple(_leaf(members[0], arrays[f"{key}{index}"]) for index in range(count))


def _mapping(inner: Any, arrays: Arrays, names: Iterable[str]) -> dict[str, Any]:
    if not _is_container(inner):
        return {name: _leaf(inner, arrays[name]) for name in names if name in arrays}
    result = {name: _unpacked_container(inner, arrays, f"{name}.", name, _How()) for name in names}
    return {name: value for name, value in result.items() if value is not MISSING}


def _any_of(hint: Any, arrays: Arrays) -> bool:
    """Whether there is anything of an optional dataclass whose arrays have no prefix."""
    first, kind, how, _ = _layout(hint)[0]
    return _is_container(kind) or (how.key or first) in arrays


def _inside(arrays: Arrays, prefix: str) -> dict[str, Array]:
    start = len(prefix)
    return {name[start:]: array for name, array in arrays.items() if name.startswith(prefix)}


def _leaf(hint: Any, array: Array) -> Any:
    if _is_array(hint):
        wanted = _dtype(hint)
        return array if wanted is None else array.astype(wanted, copy=False)
    origin = get_origin(hint)
    if origin in (tuple, frozenset):
        return origin(array.tolist())
    return hint(array.item())


def _dtype(hint: Any) -> Any:
    """The element type that an array has in memory, where its type says one."""
    kind = get_args(get_args(hint)[1])[0] if get_args(hint) else None
    return kind if kind in _WIDTHS else None


def _narrowed(array: Array) -> Array:
    """In half the bytes where nothing is lost."""
    if array.dtype != np.float64:
        return array
    with np.errstate(over="ignore"):
        half = array.astype(np.float32)
    return half if np.array_equal(half, array) else array
