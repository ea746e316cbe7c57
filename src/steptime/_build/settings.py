"""Settings: keys of a config with other values than its file has. They change the file's values before anything is checked.

A key is dotted (`parallel.fsdp`). One of a list of tables has the table's place, its name or a star for all of them in it:
`tables[3].rows`, `tables.user.rows`, `tables[*].dim`. A part with other characters than letters, digits, `_` and `-` stands in
quotes. `None`, or nothing after the `=` of a command, takes the key away.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

from steptime._build.config_values import shortened
from steptime.errors import InputError

ANY = "*"
"""In a known key: whatever a file calls it."""

_PART = re.compile(
    r"""(?:(?P<bare>[\w*-]+)|"(?P<quoted>[^"]*)"|'(?P<single>[^']*)')(?:\[(?P<place>\d{1,6}|\*)\])?(?P<end>\.|$)"""
)
# A value that needs no quotes: a name, a path, a number with a unit.
_WORD = re.compile(r"[\w./+~@%-][\w./+~@% :-]*")
_MOST_NAMED = 3

_Step = str | int


def parsed(text: str, option: str = "--set") -> tuple[str, Any]:
    """The key and the value of `KEY=VALUE`: a TOML value, or a bare word, which is a text."""
    key, given, value = text.partition("=")
    if not given or not key.strip():
        raise InputError(f"{option} {shortened(text)}: expected KEY=VALUE, as in {option} parallel.fsdp=8")
    return key.strip(), value_of(value, f"{option} {key.strip()}")


def value_of(text: str, where: str) -> Any:
    """The value that a text says; None where it says nothing."""
    text = text.strip()
    if not text:
        return None
    if "\n" not in text:
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            pass
    if _WORD.fullmatch(text) is None:
        raise InputError(f"{where}: {shortened(text)} is no TOML value; expected a number, true, false, a name or [a, list]")
    return text


def applied(values: Mapping[str, Any], settings: Mapping[str, Any], known: Collection[str], where: str) -> dict[str, Any]:
    """The values of a file with settings in place of some; `known` are all keys that there are, as `parallel.fsdp`."""
    result = deepcopy(dict(values)) if settings else dict(values)
    for key, value in settings.items():
        path = _path(key, where)
        _check(key, path, known, where)
        for place in _places(result, path, key, where):
            _put(result, place, value, key, where)
    return result


def _path(key: str, where: str) -> list[_Step]:
    """The steps to a key: names, and places in lists, a star for all."""
    steps: list[_Step] = []
    at, more = 0, True
    while more:
        found = _PART.match(key, at)
        if found is None:
            raise InputError(f"{where}: {shortened(key)} is no key; expected names with dots between, as parallel.fsdp")
        name = next(each for each in (found["bare"], found["quoted"], found["single"]) if each is not None)
        steps.append(name)
        if found["place"] is not None:
            steps.append(ANY if found["place"] == ANY else int(found["place"]))
        at, more = found.end(), found["end"] == "."
    return steps


def _check(key: str, path: Sequence[_Step], known: Collection[str], where: str) -> None:
    """Refuses a key that no config of the kind has, with those that are nearest to it."""
    if any(_fits(path, each.split(".")) for each in known):
        return
    last = str(path[-1])
    near = [each for each in known if each.split(".")[-1] == last]
    near += [each for each in get_close_matches(key, known, n=_MOST_NAMED) if each not in near]
    near += [each for each in known if each not in near and get_close_matches(last, [each.split(".")[-1]], cutoff=0.75)]
    meant = " or ".join(_shown(each) for each in near[:_MOST_NAMED])
    tables = sorted({each.split(".")[0] for each in known})
    raise InputError(f"{where}: unknown key {key!r}; {f'did you mean {meant}?' if meant else f'expected some of {tables}'}")


def _fits(path: Sequence[_Step], known: Sequence[str]) -> bool:
    return len(path) == len(known) and all(name in (ANY, step) for step, name in zip(path, known, strict=True))


def _shown(known: str) -> str:
    """A known key as one writes it; tables of a list have places."""
    return re.sub(r"^tables\.\*", "tables[0]", known).replace(ANY, "NAME")


def _places(values: Mapping[str, Any], path: Sequence[_Step], key: str, where: str) -> list[list[_Step]]:
    """Where a key stands, once for every table that a star means."""
    first = values.get(str(path[0]))
    if len(path) == 1 or not isinstance(first, list):
        return [list(path)]
    chosen, rest = path[1], path[2:]
    if chosen == ANY:
        return [[path[0], index, *rest] for index in range(len(first))]
    if isinstance(chosen, int):
        if chosen >= len(first):
            raise InputError(f"{where}: {key!r}: there are {len(first)} {path[0]}; expected 0 to {len(first) - 1}")
        return [list(path)]
    names = [each.get("name") if isinstance(each, Mapping) else None for each in first]
    if chosen not in names:
        near = get_close_matches(chosen, [name for name in names if isinstance(name, str)], n=1)
        meant = f"did you mean {near[0]!r}?" if near else f"expected a name, a place as {path[0]}[0], or {path[0]}[*]"
        raise InputError(f"{where}: {key!r}: none of the {path[0]} is called {chosen!r}; {meant}")
    return [[path[0], names.index(chosen), *rest]]


def _put(values: dict[str, Any], path: Sequence[_Step], value: Any, key: str, where: str) -> None:
    """The value at a place; tables on the way that are not there come into being."""
    at: Any = values
    for step in path[:-1]:
        if isinstance(at, dict):
            at = at.setdefault(step, {})
        elif isinstance(at, list) and isinstance(step, int):
            at = at[step]
        else:
            at = None
    if not isinstance(at, dict):
        raise InputError(f"{where}: {key!r} is inside of something that is no table; set all of it")
    if value is None:
        at.pop(path[-1], None)
    else:
        at[path[-1]] = deepcopy(value)
