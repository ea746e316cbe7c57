"""As much of JSON Schema as `answers.schema.json` uses, so that checking answers needs no further package."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,),
    "null": (type(None),),
}  # fmt: skip
_KNOWN = {
    "$schema", "$defs", "$ref", "title", "description", "type", "properties", "required", "additionalProperties", "items",
    "minItems", "maxItems", "anyOf", "const", "deprecated",
}  # fmt: skip


@cache
def answers_schema() -> dict[str, Any]:
    """The schema that comes with the package."""
    found = json.loads(resources.files("steptime").joinpath("data", "answers.schema.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def wrong_in(answer: Any, name: str) -> list[str]:
    """Where an answer does not keep to the definition of this name."""
    return list(_wrong(answer, answers_schema()["$defs"][name], name))


def _wrong(value: Any, rule: Mapping[str, Any], where: str) -> Iterator[str]:
    assert set(rule) <= _KNOWN, f"{where}: this checker does not know {sorted(set(rule) - _KNOWN)}"
    if "$ref" in rule:
        yield from _wrong(value, answers_schema()["$defs"][rule["$ref"].rpartition("/")[2]], where)
        return
    if "anyOf" in rule:
        tries = [list(_wrong(value, each, where)) for each in rule["anyOf"]]
        yield from () if any(not each for each in tries) else min(tries, key=len)
        return
    if "const" in rule and value != rule["const"]:
        yield f"{where} is {value!r}, expected {rule['const']!r}"
    if "type" in rule and not _is(value, rule["type"]):
        yield f"{where} is {value!r}, expected {rule['type']}"
    elif isinstance(value, dict):
        yield from _in_object(value, rule, where)
    elif isinstance(value, list):
        if not rule.get("minItems", 0) <= len(value) <= rule.get("maxItems", len(value)):
            yield f"{where} has {len(value)} items"
        for place, each in enumerate(value):
            yield from _wrong(each, rule.get("items", {}), f"{where}[{place}]")


def _in_object(value: Mapping[str, Any], rule: Mapping[str, Any], where: str) -> Iterator[str]:
    known = rule.get("properties", {})
    yield from (f"{where}: {key} is missing" for key in rule.get("required", ()) if key not in value)
    others = rule.get("additionalProperties", True)
    for key, each in value.items():
        if key in known:
            yield from _wrong(each, known[key], f"{where}.{key}")
        elif others is False:
            yield f"{where}: {key} is not in the schema"
        elif isinstance(others, Mapping):
            yield from _wrong(each, others, f"{where}.{key}")


def _is(value: Any, names: str | list[str]) -> bool:
    every = [names] if isinstance(names, str) else names
    if isinstance(value, bool):
        return "boolean" in every
    return any(isinstance(value, _TYPES[name]) for name in every)
