"""The reference of the JSON that commands print, from the schema that ships with the package."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

PAGE = """# JSON

`--json` prints one JSON object. Keys keep their presence and meaning as long as `schema_version` stays the same. These tables
are made from the JSON Schema that ships with the package; [what the answers mean](../answers.md) explains the quantities.

```python
import json
from importlib import resources

schema = json.loads(resources.files("steptime").joinpath("data/answers.schema.json").read_text())
print(sorted(schema["$defs"]))
```

"""


def page() -> str:
    """The whole page."""
    text = resources.files("steptime").joinpath("data", "answers.schema.json").read_text(encoding="utf-8")
    schema = json.loads(text)
    answers = [each["$ref"].rpartition("/")[2] for each in schema["anyOf"]]
    parts = [name for name in schema["$defs"] if name not in answers]
    return PAGE + "\n".join(_section(name, schema["$defs"][name], part=name in parts) for name in (*answers, *parts))


def _section(name: str, rule: Mapping[str, Any], *, part: bool) -> str:
    about = f"{rule['description']}\n\n" if rule.get("description") else ""
    rows = "\n".join(_rows(rule, ""))
    heading = f"## {name}\n\n{'Part of other answers. ' if part else ''}{about}".rstrip() + "\n\n"
    return f"{heading}| key | type | meaning |\n|---|---|---|\n{rows}\n" if rows else f"{heading}A {_type(rule)}.\n"


def _rows(rule: Mapping[str, Any], before: str) -> Iterator[str]:
    needed = rule.get("required", ())
    for key, value in rule.get("properties", {}).items():
        name = f"{before}{key}"
        notes = [value.get("description", "")]
        notes += ["deprecated"] * bool(value.get("deprecated")) + ["may be absent"] * (key not in needed)
        yield f"| `{name}` | {_type(value)} | {'; '.join(each for each in notes if each)} |"
        yield from _rows(_inside(value), f"{name}{'[]' if 'items' in _object(value) else ''}.")


def _object(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The alternative of a value that has keys or items, else the value."""
    kinds = [each for each in value.get("anyOf", ()) if "properties" in each or "items" in each]
    return kinds[0] if kinds else value


def _inside(value: Mapping[str, Any]) -> Mapping[str, Any]:
    found = _object(value)
    items = found.get("items")
    return _object(items) if isinstance(items, Mapping) else found


def _type(value: Mapping[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{name})"
    if "anyOf" in value:
        return " or ".join(_type(each) for each in value["anyOf"])
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    kind = value.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(_type({**value, "type": each}) for each in kind)
    if kind == "array":
        counts = {value.get("minItems"), value.get("maxItems")} - {None}
        many = f"{counts.pop()} of " if len(counts) == 1 and "minItems" in value and "maxItems" in value else ""
        return f"list of {many}{_type(value.get('items', {}))}"
    others = value.get("additionalProperties")
    if kind == "object" and isinstance(others, Mapping):
        return f"object of {_type(others)} by name"
    return str(kind)
